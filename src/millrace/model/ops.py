"""The operators as plain functions on symbolic tensors. A new one is a function like these, in any file.

Sequences lie packed, one behind the other: T tokens in all, S sequences of which each has its `lengths` tokens here.
H query heads, K key/value heads, D head size, R chosen rows, N outputs.
"""

from millrace.model.tensor import Tensor, elementwise


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (rows, K), weight (N, K), bias (N,) -> (rows, N) = x @ weight.T + bias."""
    inputs = (x, weight) if bias is None else (x, weight, bias)
    return x.trace.add("linear", inputs, {"bias": bias is not None})


def embedding(ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
    """ids (n,), table (V, N) -> (n, N), each row times `scale`."""
    return ids.trace.add("embedding", (ids, table), {"scale": scale})


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv:1910.07467)."""
    return x.trace.add("rms_norm", (x, weight), {"eps": eps})


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x (rows, N) -> (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias in each row (arXiv:1607.06450)."""
    return x.trace.add("layer_norm", (x, weight, bias), {"eps": eps})


def normalise(x: Tensor, eps: float = 1e-12) -> Tensor:
    """x (rows, N) -> x / max(|x|, eps) in each row: vectors of length 1."""
    return x.trace.add("normalise", (x,), {"eps": eps})


def rope(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """x (T, H, D) rotated by its positions (T,); table (context, D) as rope_table() makes it (arXiv:2104.09864)."""
    return x.trace.add("rope", (x, positions, table))


def attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, lengths: Tensor, scale: float | None = None
) -> Tensor:
    """Causal attention of q (T, H, D) over all k, v (T, K, D) of its sequence so far -> (T, H, D).

    scale: D ** -0.5 unless given. Each call of a model has its own cache.
    """
    layer = q.trace.n_caches
    q.trace.n_caches += 1
    return q.trace.add("attention", (q, k, v, positions, lengths), {"layer": layer, "scale": _scale(q, scale)})


def full_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float | None = None) -> Tensor:
    """Attention of q (T, H, D) over all k, v (T, K, D) of its sequence, which is here whole -> (T, H, D)."""
    return q.trace.add("full_attention", (q, k, v, lengths), {"scale": _scale(q, scale)})


def _scale(q: Tensor, scale: float | None) -> float:
    size = q.shape[2]
    assert isinstance(size, int)
    return float(size**-0.5) if scale is None else scale


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x (T, N), rows (R,) -> (R, N): x[rows]."""
    return x.trace.add("gather_rows", (x, rows))


def mean_rows(x: Tensor, lengths: Tensor) -> Tensor:
    """x (T, N) -> (S, N): the mean of each sequence's rows."""
    return x.trace.add("mean_rows", (x, lengths))


def exp(x: Tensor) -> Tensor:
    return elementwise("exp", x)


def sqrt(x: Tensor) -> Tensor:
    return elementwise("sqrt", x)


def tanh(x: Tensor) -> Tensor:
    return elementwise("tanh", x)


def erf(x: Tensor) -> Tensor:
    return elementwise("erf", x)


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


def gelu(x: Tensor) -> Tensor:
    """x times the standard normal distribution function of x (arXiv:1606.08415)."""
    return 0.5 * x * (1.0 + erf(0.7071067811865476 * x))


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation (arXiv:1606.08415 section 2)."""
    return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * (x * x * x))))


ACTIVATIONS = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh, "relu": relu}
