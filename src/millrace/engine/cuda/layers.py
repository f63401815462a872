"""What a language model's layers keep between steps and take as inputs, read from its graph."""

from millrace.engine.cuda.attention_partition import AttentionKind
from millrace.graph.types import Graph, Node, find
from millrace.kernels.attention.op import window_of
from millrace.kernels.operators import static_dim

ATTENTION = ("attention", "rope_attention")
STATE = "short_conv"  # the operator that keeps a state per sequence


def attention_kinds(graph: Graph) -> tuple[AttentionKind, ...]:
    """Return the kinds of attention, each once, in order."""
    return tuple(sorted({kind_of(n) for n in graph.nodes if n.op in ATTENTION}))


def kind_of(node: Node) -> AttentionKind:
    """Return the kind of an attention node."""
    queries, kv_heads = (static_dim(x, 1) for x in node.inputs[:2])
    return AttentionKind(queries // kv_heads, kv_heads, window_of(node))


def state_shape(node: Node) -> tuple[int, int]:
    """Return the state of a convolution: kept rows per sequence, and their width."""
    return static_dim(node.inputs[1], 2) - 1, node.output.width


def embedding_width(graph: Graph) -> int:
    """Return the width of embedding rows that replace token embeddings; 0 if the model takes none."""
    return next((n.output.width for n in graph.nodes if n.op == "embedding"), 0)


def n_adapters(graph: Graph) -> int:
    """Return the number of adapters besides 0 (none): the rows that all tables have."""
    adapters = find(graph.inputs, "adapters")
    rows = [static_dim(n.inputs[1], 0) for n in graph.nodes if n.op == "embedding" and n.inputs[0] == adapters]
    return min(rows, default=1) - 1


def head_bytes(graph: Graph, element: int) -> int:
    """Return the bytes of the widest head's computed keys or values."""
    return max((static_dim(x, 2) * element for n in graph.nodes if n.op in ATTENTION for x in n.inputs[1:3]), default=0)
