"""Lower a graph for a GPU: the form of its constants, its fused nodes, and the rows that become E4M3."""

from collections.abc import Collection

from millrace.engine.cuda.lowered import Fusions, LoweredGraph, Placement
from millrace.graph.types import Graph, Node, Value
from millrace.kernels.matmul.coded import AS_E4M3, RowQuantization, coding_of
from millrace.kernels.matmul.op import PRODUCTS, is_silu_mul, matrices_of, precision_of
from millrace.kernels.row_storage import storage_of


def lower_for_gpu(graph: Graph, dtype: str, fp8_rows: Collection[str] = ()) -> LoweredGraph:
    """graph, dtype: as in LoweredGraph

    fp8_rows: linear layers, by name, whose 16-bit input rows are rounded to E4M3 if their weights are quantized
    """
    placement, names = placement_of(graph), frozenset(fp8_rows)
    e4m3 = frozenset(node for node in placement.coded if not names.isdisjoint(node.origin))
    return LoweredGraph(graph, dtype, e4m3, placement, fusions_of(graph, e4m3))


def placement_of(graph: Graph) -> Placement:
    """Return the placement: codes for quantized matmuls; their tables and biases in the engine's type."""
    producers = graph.producers()
    coded = {n: producers.get(n.inputs[0]) for n in graph.nodes if n.op in PRODUCTS and precision_of(n).coded}
    narrow = {w for n in graph.nodes if n.op in PRODUCTS and n not in coded for w in matrices_of(n)}
    narrow |= {n.inputs[1] for n in graph.nodes if n.op == "embedding"}
    narrow |= {n.inputs[2] for n in graph.nodes if n.op == "linear" and n.attrs.get("bias")}
    alone = {w for n in coded for w in matrices_of(n)} - narrow  # read as codes only
    shared = [value for value in graph.constants() if value not in alone]
    return Placement(coded, tuple(v for v in shared if v in narrow), tuple(v for v in shared if v not in narrow))


def fusions_of(graph: Graph, e4m3: Collection[Node]) -> Fusions:
    """Return which operations between matmuls become one kernel, by the readers of each value.

    e4m3: matmuls whose input rows are rounded to E4M3
    """
    readers = graph.consumers()
    outputs = {port.value for port in graph.outputs}

    def wants(node: Node, value: Value) -> RowQuantization | None:
        if node.op in PRODUCTS:
            return AS_E4M3 if node in e4m3 and value == node.inputs[0] else None
        if node.op != "convert":
            return None
        return coding_of(storage_of(node)) or row_quantization(node.output)

    def row_quantization(value: Value) -> RowQuantization | None:
        """Return the row format in which all readers of a value take it; None if they differ."""
        result = {wants(node, value) for node in readers.get(value, [])}
        return result.pop() if len(result) == 1 and value not in outputs else None

    norms = {
        n: reader
        for n in graph.nodes
        if n.op == "linear" and n.attrs.get("residual")
        for reader in readers.get(n.output, [])
        if reader.op == "rms_norm" and reader.inputs[0] == n.output
    }
    normalized = {n.output for n in norms.values()} | {n.output for n in graph.nodes if is_silu_mul(n)}
    return Fusions(norms, {value: coding for value in normalized if (coding := row_quantization(value)) is not None})
