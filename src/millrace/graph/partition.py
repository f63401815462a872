"""Where a graph falls into pieces that run one after the other, with one value handed from each to the next."""

from collections.abc import Iterator
from dataclasses import dataclass

from millrace.graph.rewrite import prune
from millrace.graph.types import Graph, Port, Value

CARRIED = "carried"  # the value between two pieces: an output of the one, an input of the other


@dataclass(frozen=True, slots=True)
class _Place:
    """Behind the node of this number, `value` alone is computed and still wanted."""

    behind: int
    value: Value


def cut(graph: Graph) -> tuple[Graph, ...]:
    """The pieces, in their order; the graph itself where it has no such places.

    graph: its expressions grown (the pass fuse_elementwise), or a chain of operations would count as several readers.
    All pieces have the graph's inputs, so that they are run alike; all but the first have CARRIED besides, all but the
    last give it: a row for each of what the graph's first input counts. It is cut where two at least read what is
    carried, as the residual stream of a transformer is read: passes take up only what one alone reads, so none would
    have reached across, and the pieces compute the same bits.
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
