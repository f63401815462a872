"""What a language model's layers keep and take, by its graph."""

from millrace.engine.cuda.attention_partition import AttentionKind
from millrace.graph.types import Graph, Node, find
from millrace.kernels.attention.op import window_of
from millrace.kernels.operators import static_dim

ATTENTION = ("attention", "rope_attention")
STATE = "short_conv"  # keeps one of each sequence


def attention_kinds(graph: Graph) -> tuple[AttentionKind, ...]:
    """Of attention, each once, in order."""
    return tuple(sorted({kind_of(n) for n in graph.nodes if n.op in ATTENTION}))


def kind_of(node: Node) -> AttentionKind:
    """Of attention."""
    queries, kv_heads = (static_dim(x, 1) for x in node.inputs[:2])
    return AttentionKind(queries // kv_heads, kv_heads, window_of(node))


def state_shape(node: Node) -> tuple[int, int]:
    """Of a convolution: the rows of a sequence that it keeps, and their width."""
    return static_dim(node.inputs[1], 2) - 1, node.output.width


def embedding_width(graph: Graph) -> int:
    """Of the rows that a step may bring in place of tokens; 0: it may bring none."""
    return next((n.output.width for n in graph.nodes if n.op == "embedding"), 0)


def n_adapters(graph: Graph) -> int:
    """That a sequence may choose from beside 0, the model as it is: as many as all tables have rows for."""
    adapters = find(graph.inputs, "adapters")
    rows = [static_dim(n.inputs[1], 0) for n in graph.nodes if n.op == "embedding" and n.inputs[0] == adapters]
    return min(rows, default=1) - 1


def head_bytes(graph: Graph, element: int) -> int:
    """Of a head's keys or values as they are computed, the widest there are."""
    return max((static_dim(x, 2) * element for n in graph.nodes if n.op in ATTENTION for x in n.inputs[1:3]), default=0)
