"""What a legal graph is, checked after tracing and after every pass."""

from millrace.errors import GraphError
from millrace.graph.ops import OPS, storage_of
from millrace.graph.types import Graph, Node, Value


def verify(graph: Graph, after: str) -> Graph:
    """Gives the graph back, or raises GraphError naming the pass and the node."""
    known: set[Value] = {graph.tokens}
    for node in graph.nodes:
        for value in node.inputs:
            if value not in known and not value.constant:
                raise _error(after, node, "it reads a value that nothing before it computes")
        if node.output in known:
            raise _error(after, node, "its output is assigned twice")
        _check_node(node, after)
        known.add(node.output)
    if graph.output not in known:
        raise GraphError(
            f"after {after}: the output is computed by no node", "an output", "return a tensor from forward()"
        )
    return graph


def _check_node(node: Node, after: str) -> None:
    op = OPS.get(node.op)
    if op is None:
        raise _error(after, node, "no such operator")
    if not op.inputs[0] <= len(node.inputs) <= op.inputs[1]:
        raise _error(after, node, f"{len(node.inputs)} inputs, expected {op.inputs[0]} to {op.inputs[1]}")
    unknown = set(node.attrs) - op.attrs
    if unknown:
        raise _error(after, node, f"unknown attributes {sorted(unknown)}")
    shape = op.shape(node.inputs, node.attrs)
    if shape != node.output.shape or storage_of(node.op, node.attrs) != node.output.storage:
        raise _error(after, node, f"its output is said to be {node.output}, the operator gives {list(shape)}")


def _error(after: str, node: Node, what: str) -> GraphError:
    place = "/".join(node.origin) or "?"
    return GraphError(
        f"after {after}: {node.op} of {place}: {what}", "a legal graph (graph/ops.py)", "report this, or mend the pass"
    )
