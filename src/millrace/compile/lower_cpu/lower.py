"""Lower a graph to a program: each node becomes the calls that its operator emits, values become places."""

from collections.abc import Mapping

from millrace.compile.lower_cpu.program import Bounds, Program
from millrace.compile.lower_cpu.program_builder import ProgramBuilder
from millrace.engine.cache_specs import KvFormat
from millrace.graph.types import Graph, Symbol
from millrace.kernels.operators import runnable


def lower(
    graph: Graph, bounds: Mapping[Symbol, Bounds], kv_format: KvFormat, table: str, *, tiles: bool = False
) -> Program:
    """Lower the graph. Arguments as in ProgramBuilder. raises GraphError for a graph that cannot be a program"""
    placement, read = ProgramBuilder(graph, bounds, kv_format, table, tiles), {*graph.consumers(), *graph.results}
    for port in graph.inputs:
        if port.value in read:
            placement.new(port.value, port.name)
    for node in graph.nodes:
        runnable(node).lower(node, placement)
    return placement.program()
