"""Lower a graph for a GPU: the form of its constants, its fused nodes, and the rows that become E4M3."""

from collections.abc import Collection

from millrace.compile.lower_gpu.fusions import fusions_of
from millrace.compile.lower_gpu.placement import placement_of
from millrace.engine.cuda.lowered import LoweredGraph
from millrace.graph.types import Graph


def lower_for_gpu(graph: Graph, dtype: str, fp8_rows: Collection[str] = ()) -> LoweredGraph:
    """graph, dtype: as in LoweredGraph

    fp8_rows: linear layers, by name, whose 16-bit input rows are rounded to E4M3 if their weights are quantized
    """
    placement, names = placement_of(graph), frozenset(fp8_rows)
    e4m3 = frozenset(node for node in placement.coded if not names.isdisjoint(node.origin))
    return LoweredGraph(graph, dtype, e4m3, placement, fusions_of(graph, e4m3))
