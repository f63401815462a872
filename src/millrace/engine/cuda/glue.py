"""What lies between two products and is one kernel there: found once in a graph, by who reads what."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from millrace.engine.cuda.placement import PRODUCTS
from millrace.graph.trees import Tree, as_tree
from millrace.graph.types import Graph, Node, Value
from millrace.kernels.declare import RowFormat
from millrace.kernels.matmul.coded import AS_E4M3, Coding
from millrace.kernels.storage import Storage, storage_of

SILU_MUL: Tree = ("mul", ("mul", 0, ("sigmoid", 0)), 1)


@dataclass(frozen=True, slots=True)
class Glue:
    """norms: of products that are added to the residual stream, the norm that reads the sum

    coded: what only products read that take rows of 8 bits, all alike, and as what: made so at once, conversions have
    nothing left to do
    """

    norms: Mapping[Node, Node]
    coded: Mapping[Value, Coding]


def glue_of(graph: Graph, takes_e4m3: Callable[[Node], bool]) -> Glue:
    """takes_e4m3: whether a product does"""
    readers = graph.consumers()
    outputs = {port.value for port in graph.outputs}

    def wants(node: Node, value: Value) -> Coding | None:
        if node.op in PRODUCTS:
            return AS_E4M3 if takes_e4m3(node) and value == node.inputs[0] else None
        if node.op != "convert":
            return None
        return coding_of(storage_of(node)) or wanted(node.output)

    def wanted(value: Value) -> Coding | None:
        """By all that read it, at least one."""
        found = {wants(node, value) for node in readers.get(value, [])}
        return found.pop() if len(found) == 1 and value not in outputs else None

    norms = {
        n: reader
        for n in graph.nodes
        if n.op == "linear" and n.attrs.get("residual")
        for reader in readers.get(n.output, [])
        if reader.op == "rms_norm" and reader.inputs[0] == n.output
    }
    made = {n.output for n in norms.values()} | {n.output for n in graph.nodes if is_silu_mul(n)}
    return Glue(norms, {value: coding for value in made if (coding := wanted(value)) is not None})


def coding_of(storage: Storage) -> Coding | None:
    """Of INT8 rows that a conversion makes; None: it gives 16 bits, of which products may still make E4M3."""
    if storage.format == RowFormat.BF16:
        return None
    return Coding(e4m3=False, group=storage.group, transform=storage.hadamard)


def is_silu_mul(node: Node) -> bool:
    return node.op == "gated_linear" and as_tree(node.attrs["tree"]) == SILU_MUL
