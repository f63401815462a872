"""A graph is lowered for a GPU: where its constants lie, which nodes are one kernel, what becomes E4M3."""

from collections.abc import Collection

from millrace.compile.lower_gpu.fusions import fusions_of
from millrace.compile.lower_gpu.placement import placement_of
from millrace.engine.cuda.lowered import LoweredGraph
from millrace.graph.types import Graph


def lower_for_gpu(graph: Graph, dtype: str, fp8_rows: Collection[str] = ()) -> LoweredGraph:
    """graph, dtype: as of LoweredGraph

    fp8_rows: names of linear layers whose rows, if they are 16-bit floats that meet codes, become E4M3
    """
    placement, names = placement_of(graph), frozenset(fp8_rows)
    e4m3 = frozenset(node for node in placement.coded if not names.isdisjoint(node.origin))
    return LoweredGraph(graph, dtype, e4m3, placement, fusions_of(graph, e4m3))
