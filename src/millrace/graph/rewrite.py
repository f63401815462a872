"""Helpers of the passes: making nodes, replacing values, listing a graph as text."""

from collections.abc import Callable, Mapping

from millrace.graph.ops import OPS, storage_of
from millrace.graph.types import Graph, Node, Value


def make_node(op: str, inputs: tuple[Value, ...], attrs: Mapping[str, object], origin: tuple[str, ...]) -> Node:
    """A node whose output has the shape and storage that the operator gives."""
    return Node(op, inputs, Value(OPS[op].shape(inputs, attrs), storage_of(op, attrs)), dict(attrs), origin)


Replacement = list[Node] | None


class Live:
    """The graph as it stands in the middle of a rewrite: what a rule may ask of its neighbours."""

    def __init__(self, graph: Graph) -> None:
        self._producers: dict[Value, Node] = {}
        self._readers = {value: len(readers) for value, readers in graph.consumers().items()}
        self._readers[graph.output] = self._readers.get(graph.output, 0) + 1
        self.moved: dict[Value, Value] = {}

    def producer(self, value: Value) -> Node | None:
        """The node that computes `value` now, itself perhaps already rewritten; None for constants and the tokens."""
        return self._producers.get(value)

    def read_once(self, value: Value) -> bool:
        """Whether one node alone reads it (the graph's output counts as a reader)."""
        return self._readers.get(value, 0) == 1

    def place(self, node: Node) -> None:
        self._producers[node.output] = node

    def move(self, old: Value, new: Value) -> None:
        self.moved[old] = new
        if old in self._readers:
            self._readers[new] = self._readers[old]


def rewrite(graph: Graph, rule: Callable[[Node, Live], Replacement]) -> Graph:
    """Replaces each node for which `rule` gives a list by that list, whose last node takes its place.

    The rule sees inputs already replaced. Nodes that nobody reads afterwards are dropped.
    """
    live = Live(graph)
    nodes: list[Node] = []
    for node in graph.nodes:
        inputs = tuple(live.moved.get(v, v) for v in node.inputs)
        current = Node(node.op, inputs, node.output, node.attrs, node.origin) if inputs != node.inputs else node
        replacement = rule(current, live)
        for made in [current] if replacement is None else replacement:
            nodes.append(made)
            live.place(made)
        if replacement:
            live.move(node.output, replacement[-1].output)
    return prune(Graph(graph.tokens, tuple(nodes), live.moved.get(graph.output, graph.output)))


def head_of(graph: Graph) -> Node | None:
    """The linear layer that gives the logits, whatever the model calls it; scaled or capped, they are still its."""
    producers, at = graph.producers(), graph.output
    while (node := producers.get(at)) and node.op == "elementwise":
        computed = [v for v in node.inputs if not v.constant]
        if len(computed) != 1:
            return None
        at = computed[0]
    return node if node and node.op == "linear" else None


def prune(graph: Graph) -> Graph:
    """Drops the nodes whose results nobody reads."""
    needed = {graph.output}
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if node.output in needed:
            kept.append(node)
            needed.update(node.inputs)
    return Graph(graph.tokens, tuple(reversed(kept)), graph.output)


def listing(graph: Graph) -> str:
    """The graph as lines that a person can read: `%3 = rms_norm(%2, input_layernorm.weight) eps=1e-05`."""
    names: dict[Value, str] = {graph.tokens: "tokens"}

    def name(value: Value) -> str:
        if value.constant:
            return "+".join(value.constant.origin)
        return names[value]

    lines = []
    for i, node in enumerate(graph.nodes):
        names[node.output] = f"%{i}"
        attrs = " ".join(f"{k}={v}" for k, v in node.attrs.items())
        inputs = ", ".join(name(v) for v in node.inputs)
        lines.append(f"%{i} = {node.op}({inputs}) {attrs}  # {node.output} {'/'.join(node.origin)}".rstrip())
    return "\n".join([*lines, f"return {name(graph.output)}"])
