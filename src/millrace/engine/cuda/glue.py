"""What lies between two products and is one kernel there: found once in a graph, by who reads what."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from millrace.engine.cuda.placement import PRODUCTS
from millrace.graph.trees import Tree, as_tree
from millrace.graph.types import Graph, Node, Value
from millrace.kernels.declare import RowFormat
from millrace.kernels.storage import storage_of

SILU_MUL: Tree = ("mul", ("mul", 0, ("sigmoid", 0)), 1)


@dataclass(frozen=True, slots=True)
class Glue:
    """norms: of products that are added to the residual stream, the norm that reads the sum

    e4m3: what only products read that take rows of E4M3, through conversions that have nothing left to do
    """

    norms: Mapping[Node, Node]
    e4m3: frozenset[Value]


def glue_of(graph: Graph, takes_e4m3: Callable[[Node], bool]) -> Glue:
    """takes_e4m3: whether a product does"""
    readers = graph.consumers()
    outputs = {port.value for port in graph.outputs}

    def reads_e4m3(node: Node, value: Value) -> bool:
        if node.op in PRODUCTS:
            return takes_e4m3(node) and value == node.inputs[0]
        return _keeps(node) and is_for_e4m3(node.output)

    def is_for_e4m3(value: Value) -> bool:
        """All that read it do, at least one."""
        read_by = readers.get(value, [])
        return bool(read_by) and value not in outputs and all(reads_e4m3(n, value) for n in read_by)

    norms = {
        n: reader
        for n in graph.nodes
        if n.op == "linear" and n.attrs.get("residual")
        for reader in readers.get(n.output, [])
        if reader.op == "rms_norm" and reader.inputs[0] == n.output
    }
    made = {n.output for n in norms.values()} | {n.output for n in graph.nodes if is_silu_mul(n)}
    return Glue(norms, frozenset(value for value in made if is_for_e4m3(value)))


def is_silu_mul(node: Node) -> bool:
    return node.op == "gated_linear" and as_tree(node.attrs["tree"]) == SILU_MUL


def _keeps(node: Node) -> bool:
    """A conversion to 16 bits, of which E4M3 are made."""
    return node.op == "convert" and storage_of(node).format == RowFormat.BF16
