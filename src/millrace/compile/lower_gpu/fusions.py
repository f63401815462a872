"""Fusions on a GPU: which operations between matmuls become one kernel, by the readers of each value."""

from collections.abc import Collection

from millrace.engine.cuda.lowered import Fusions
from millrace.graph.types import Graph, Node, Value
from millrace.kernels.matmul.coded import AS_E4M3, RowQuantization, coding_of
from millrace.kernels.matmul.op import PRODUCTS, is_silu_mul
from millrace.kernels.row_storage import storage_of


def fusions_of(graph: Graph, e4m3: Collection[Node]) -> Fusions:
    """e4m3: matmuls whose input rows are rounded to E4M3"""
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
