"""Splits a graph into pieces that run one after the other, with one value passed from each to the next."""

from collections.abc import Iterator
from dataclasses import dataclass

from millrace.graph.rewrite import prune
from millrace.graph.types import Graph, Port, Value

CARRIED = "carried"  # the value between two pieces: an output of one, an input of the other


@dataclass(frozen=True, slots=True)
class _Place:
    """A place after the node of this number, where `value` is the only computed value that is still needed."""

    behind: int
    value: Value


def cut(graph: Graph) -> tuple[Graph, ...]:
    """Return the pieces in order; the graph itself if it has no such places.

    graph: with its expressions fused (the pass fuse_elementwise), otherwise a chain of operations counts as several
    readers. All pieces have the graph's inputs, so that they are run alike; all but the first also have CARRIED, all
    but the last output it: a row per element of the graph's first input. A cut needs at least two readers of the
    carried value, like the residual stream of a transformer: passes merge only values with one reader, so none would
    have merged across the cut, and the pieces compute the same bits.
    """
    graph = prune(graph)
    pieces: list[Graph] = []
    begin: int = 0
    carried: Value | None = None
    for place in (*_places(graph), None):
        inputs = graph.inputs if carried is None else (*graph.inputs, Port(CARRIED, carried))
        outputs = graph.outputs if place is None else (Port(CARRIED, place.value),)
        end = len(graph.nodes) if place is None else place.behind + 1
        pieces.append(Graph(inputs, outputs, graph.nodes[begin:end]))
        begin, carried = end, None if place is None else place.value
    return tuple(pieces)


def _places(graph: Graph) -> Iterator[_Place]:
    readers, results = graph.consumers(), graph.results
    last = {value: number for number, node in enumerate(graph.nodes) for value in node.inputs}
    last |= dict.fromkeys(results, len(graph.nodes))
    alive: set[Value] = set()
    for number, node in enumerate(graph.nodes):
        alive = {v for v in (*alive, *node.outputs) if last.get(v, -1) > number}
        if len(alive) != 1:
            continue
        (value,) = alive
        if value not in results and len(readers[value]) > 1 and value.shape[:1] == graph.symbols[:1]:
            yield _Place(number, value)
