"""The operators as plain functions on symbolic tensors. A new one is a function like these, in any file.

T tokens in this step, H query heads, K key/value heads, D head size, N outputs.
"""

from millrace.model.tensor import Tensor, elementwise


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (rows, K), weight (N, K), bias (N,) -> (rows, N) = x @ weight.T + bias."""
    inputs = (x.value, weight.value) if bias is None else (x.value, weight.value, bias.value)
    return x.trace.add("linear", inputs, {"bias": bias is not None})


def embedding(tokens: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
    """tokens (T,), table (V, N) -> (T, N), each row times `scale`."""
    return tokens.trace.add("embedding", (tokens.value, table.value), {"scale": scale})


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv:1910.07467)."""
    return x.trace.add("rms_norm", (x.value, weight.value), {"eps": eps})


def rope(x: Tensor, table: Tensor) -> Tensor:
    """x (T, H, D) rotated by its positions; table (context, D) as rope_table() makes it (arXiv:2104.09864)."""
    return x.trace.add("rope", (x.value, table.value))


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Causal attention of q (T, H, D) over all k, v (T, K, D) of its sequence so far -> (T, H, D).

    scale: D ** -0.5 unless given. Each call of a model has its own cache.
    """
    size = q.shape[2]
    assert isinstance(size, int)
    layer = q.trace.n_caches
    q.trace.n_caches += 1
    attrs = {"layer": layer, "scale": size**-0.5 if scale is None else scale}
    return q.trace.add("attention", (q.value, k.value, v.value), attrs)


def sampled_rows(x: Tensor) -> Tensor:
    """x (T, N) -> (S, N): the rows from which a token is drawn; a head needs no others."""
    return x.trace.add("sampled_rows", (x.value,))


def exp(x: Tensor) -> Tensor:
    return elementwise("exp", x)


def sqrt(x: Tensor) -> Tensor:
    return elementwise("sqrt", x)


def tanh(x: Tensor) -> Tensor:
    return elementwise("tanh", x)


def sigmoid(x: Tensor) -> Tensor:
    return elementwise("sigmoid", x)


def maximum(x: Tensor, y: Tensor | float) -> Tensor:
    return elementwise("max", x, y)


def minimum(x: Tensor, y: Tensor | float) -> Tensor:
    return elementwise("min", x, y)


def absolute(x: Tensor) -> Tensor:
    return elementwise("abs", x)


def relu(x: Tensor) -> Tensor:
    return maximum(x, 0.0)


def silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation (arXiv:1606.08415 section 2)."""
    return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * (x * x * x))))


ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh, "relu": relu}
