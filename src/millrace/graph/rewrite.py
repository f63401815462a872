"""Helpers of passes: make nodes, replace values, list a graph as text."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from millrace.graph.expressions import Tree, as_tree
from millrace.graph.types import Attrs, Graph, Inputs, Node, Operator, Port, Value, find

LOGITS = "logits"  # an output of this name is a ranking: only the order of its largest elements matters


def make_node(operator: Operator, inputs: Inputs, attrs: Attrs, origin: tuple[str, ...]) -> Node:
    """Make a node, with the operator's output shapes and types."""
    return Node(operator, inputs, operator.results(inputs, attrs), dict(attrs), origin)


@dataclass(frozen=True, slots=True)
class Replacement:
    """`nodes` replace a node, and `values` its outputs."""

    nodes: tuple[Node, ...]
    values: tuple[Value, ...]

    @classmethod
    def from_nodes(cls, *nodes: Node) -> "Replacement":
        """Replace the old outputs by those of the last node."""
        return cls(nodes, nodes[-1].outputs)


class GraphView:
    """The graph in the middle of a rewrite: what a rule can see of a node's neighbors."""

    def __init__(self, graph: Graph) -> None:
        self._producers: dict[Value, Node] = {}
        self._readers = {value: len(readers) for value, readers in graph.consumers().items()}
        for port in graph.outputs:
            self._readers[port.value] = self._readers.get(port.value, 0) + 1
        self._moved: dict[Value, Value] = {}

    def producer(self, value: Value) -> Node | None:
        """Return the node that computes `value` now, perhaps already rewritten; None for constants and inputs."""
        return self._producers.get(value)

    def read_once(self, value: Value) -> bool:
        """Return whether exactly one node reads it (an output of the graph counts as a reader)."""
        return self._readers.get(value, 0) == 1

    def now(self, value: Value) -> Value:
        """Return what replaces a value at this point."""
        return self._moved.get(value, value)

    def place(self, node: Node) -> None:
        for value in node.outputs:
            self._producers[value] = node

    def move(self, old: Value, new: Value) -> None:
        self._moved[old] = new
        if old in self._readers:
            self._readers[new] = self._readers[old]


def rewrite(graph: Graph, rule: Callable[[Node, GraphView], Replacement | None]) -> Graph:
    """Replace each node by the result of `rule`; None keeps it.

    The rule sees inputs already replaced. Nodes that are not read afterwards are dropped.
    """
    live = GraphView(graph)
    nodes: list[Node] = []
    for node in graph.nodes:
        inputs = tuple(live.now(v) for v in node.inputs)
        current = replace(node, inputs=inputs) if inputs != node.inputs else node
        instead = rule(current, live) or Replacement((current,), node.outputs)
        for node_made in instead.nodes:
            nodes.append(node_made)
            live.place(node_made)
        for old, new in zip(node.outputs, instead.values, strict=True):
            if new is not old:
                live.move(old, new)
    outputs = tuple(Port(p.name, live.now(p.value)) for p in graph.outputs)
    return prune(Graph(graph.inputs, outputs, tuple(nodes)))


def head_of(graph: Graph) -> Node | None:
    """Return the linear layer that makes the logits, whatever its name; they may be scaled or capped."""
    at = find(graph.outputs, LOGITS)
    if at is None:
        return None
    producers = graph.producers()
    while (node := producers.get(at)) and node.op == "elementwise":
        computed = [v for v in node.inputs if not v.constant]
        if len(computed) != 1:
            return None
        at = computed[0]
    return node if node and node.op == "linear" else None


def prune(graph: Graph) -> Graph:
    """Drop the nodes whose results are not read."""
    needed = graph.results
    remaining: list[Node] = []
    for node in reversed(graph.nodes):
        if needed.intersection(node.outputs):
            remaining.append(node)
            needed.update(node.inputs)
    return replace(graph, nodes=tuple(reversed(remaining)))


def listing(graph: Graph) -> str:
    """Return the graph as readable lines: `%3 = rms_norm(%2, input_layernorm.weight) eps=1e-05`."""
    names: dict[Value, str] = {p.value: p.name for p in graph.inputs}

    def name(value: Value) -> str:
        return "+".join(value.constant.origin) if value.constant else names[value]

    lines = []
    for node in graph.nodes:
        for value in node.outputs:
            names[value] = f"%{len(names) - len(graph.inputs)}"
        attrs = " ".join(f"{k}={v}" for k, v in node.attrs.items())
        node_made, inputs = (", ".join(map(name, values)) for values in (node.outputs, node.inputs))
        shapes = ", ".join(map(str, node.outputs))
        lines.append(f"{node_made} = {node.op}({inputs}) {attrs}  # {shapes} {'/'.join(node.origin)}".rstrip())
    return "\n".join([*lines, *(f"{p.name} = {name(p.value)}" for p in graph.outputs)])


def joined_origins(*nodes: Node) -> tuple[str, ...]:
    """Return the modules that these nodes came from, each once."""
    return tuple(dict.fromkeys(o for n in nodes for o in n.origin))


def tree_of(node: Node) -> Tree:
    """Return the expression of an element-wise node."""
    return as_tree(node.attrs["tree"])
