"""The operators as plain functions on symbolic tensors. A new one is a function like these, in any file.

Sequences are packed: T tokens in all, S sequences, of which each has `lengths` tokens in the step. H query heads, K
key/value heads, D head size, R chosen rows, N outputs.
"""

from collections.abc import Sequence
from dataclasses import fields

from millrace.checkpoint.config.routing import Routing
from millrace.checkpoint.weights.expert_names import stack_name
from millrace.graph.types import DType, Value, stack_constants
from millrace.model.tensor import Number, Tensor, elementwise

Pair = int | tuple[int, int]  # height and width; one number for both


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, precision: str = "") -> Tensor:
    """x (rows, K), weight (N, K), bias (N,) -> (rows, N) = x @ weight.T + bias.

    precision: of this matmul in every engine, such as "fp32"; "": as the engine's precisions say
    """
    inputs = (x, weight) if bias is None else (x, weight, bias)
    return x.trace.add("linear", inputs, {"bias": bias is not None} | ({"precision": precision} if precision else {}))


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logits (T, E), bias (E,) -> weights (T, A) and i32 numbers (T, A) of the experts of each row."""
    attrs = {field.name: getattr(routing, field.name) for field in fields(routing)}
    weights, experts = logits.trace.add_all("route", (logits,) if bias is None else (logits, bias), attrs)
    return weights, experts


def group_by_expert(experts: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """i32 experts (T, A) of n -> i32 row_of (T * A,), places (T, A), starts (n + 1,).

    The pairs of a row and an expert are sorted by experts: the rows of these pairs, the place of each pair among them,
    and each expert's first pair.
    """
    row_of, places, starts = experts.trace.add_all("group_by_expert", (experts,), {"experts": n})
    return row_of, places, starts


def expert_linear(x: Tensor, starts: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> Tensor:
    """x (P, K), sorted by experts, starts (E + 1,), E weights (N, K) and biases (N,) -> (P, N).

    Row p of expert e becomes x[p] @ weights[e].T + biases[e].
    """
    stacked = [_stack(tensors) for tensors in (weights, biases) if tensors]
    inputs, origin = (x, starts, *stacked), constant_name(stacked[0]).removesuffix(".weight")
    return x.trace.add("expert_linear", inputs, {"bias": bool(biases)}, origin)


def combine_experts(x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """x (P, N), i32 places (T, A), weights (T, A) -> (T, N): the sums of weights[t, a] * x[places[t, a]] over a."""
    return x.trace.add("combine_experts", (x, places, weights))


def constant_name(x: Tensor) -> str:
    assert x.value.constant, x
    return "+".join(x.value.constant.origin)


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """Return parameters of one shape, stacked, under their name with * for the number of the expert."""
    constants = [t.value.constant for t in tensors]
    assert all(constants), "only constants are stacked"
    name = stack_name(constant_name(tensors[0]))
    shape = (len(tensors), *tensors[0].shape)
    return Tensor(tensors[0].trace, Value(shape, constant=stack_constants([c for c in constants if c], name)))


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


def rope(x: Tensor, positions: Tensor, table: Tensor, *, interleaved: bool = False) -> Tensor:
    """x (T, H, D) rotated by its positions (T,); table (context, R) as rotary_table() makes it (arXiv:2104.09864).

    The first R numbers of a head rotate: d against d + R/2, or 2d against 2d + 1 if `interleaved`.
    """
    return x.trace.add("rope", (x, positions, table), {"interleaved": True} if interleaved else {})


def attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, lengths: Tensor, scale: float | None = None, *,
    window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention of q (T, H, D) over k, v (T, K, D) of its sequence so far -> (T, H, D).

    scale: D ** -0.5 by default. Each call in a model has its own cache; calls with the very same k, v and window share
    one, for layers that read another layer's cache.
    window: keys that a row attends to, its own included; 0: all
    softcap: scores become softcap * tanh(score / softcap) (arXiv:2408.00118 section 2); 0: unchanged
    sinks: (H,), scores of a further key of each head, whose value is zero (arXiv:2508.10925)
    """
    caches = q.trace.caches
    layer = caches.setdefault((k.value, v.value, window), len(caches))
    attrs: dict[str, int | float] = {"layer": layer, "scale": _scale(q, scale)}
    attrs |= ({"window": window} if window else {}) | ({"softcap": softcap} if softcap else {})
    inputs: tuple[Tensor, ...] = (q, k, v, positions, lengths)
    if sinks is not None:
        inputs, attrs = (*inputs, sinks), attrs | {"sinks": True}
    return q.trace.add("attention", inputs, attrs)


def short_conv(x: Tensor, weight: Tensor, positions: Tensor, lengths: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (T, N), weight (N, 1, taps) -> (T, N): each column convolved with its last `taps` rows (causal, depthwise).

    The rows before a sequence's first one are kept between steps: each call in a model has its own.
    """
    layer = x.trace.n_states
    x.trace.n_states += 1
    inputs = (x, weight, positions, lengths) if bias is None else (x, weight, positions, lengths, bias)
    return x.trace.add("short_conv", inputs, {"layer": layer})


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, stride: Pair = 1, padding: Pair = 0, dilation: Pair = 1,
    groups: int = 1,
) -> Tensor:  # fmt: skip
    """x (N, C, H, W), weight (O, C / groups, kh, kw), bias (O,) -> (N, O, H', W'), as torch.nn.functional.conv2d."""
    attrs = {"stride": _pair(stride), "padding": _pair(padding), "dilation": _pair(dilation), "groups": groups}
    return x.trace.add("convolution", (x, weight) if bias is None else (x, weight, bias), attrs)


def max_pool(x: Tensor, kernel: Pair, *, stride: Pair | None = None, padding: Pair = 0) -> Tensor:
    """x (N, C, H, W) -> (N, C, H', W'), as torch.nn.functional.max_pool2d. stride: by default the kernel's size"""
    return x.trace.add("max_pool", (x,), _windows(kernel, stride, padding))


def avg_pool(
    x: Tensor, kernel: Pair, *, stride: Pair | None = None, padding: Pair = 0, count_include_pad: bool = True
) -> Tensor:
    """x (N, C, H, W) -> (N, C, H', W'), as torch.nn.functional.avg_pool2d.

    stride: by default the kernel's size. count_include_pad: include padding in the mean
    """
    return x.trace.add("avg_pool", (x,), {**_windows(kernel, stride, padding), "count_include_pad": count_include_pad})


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    """x (N, C, ...), all others (C,): (x - mean) / sqrt(variance + eps) * weight + bias in each channel
    (arXiv:1502.03167), by the statistics of the training."""
    return x.trace.add("batch_norm", (x, weight, bias, mean, variance), {"eps": eps})


def _pair(value: Pair) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def _windows(kernel: Pair, stride: Pair | None, padding: Pair) -> dict[str, tuple[int, int]]:
    return {"kernel": _pair(kernel), "stride": _pair(kernel if stride is None else stride), "padding": _pair(padding)}


def full_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float | None = None, *, biases: Tensor | None = None,
    positions: int = 0,
) -> Tensor:  # fmt: skip
    """Attention of q (T, H, D) over all k, v (T, K, D) of its sequence, which is complete -> (T, H, D).

    biases: (buckets, H), added to scores by the distance of key and query (arXiv:1910.10683 section 2.1)
    positions: tokens of the longest sequence, with biases
    """
    inputs, attrs = (q, k, v, lengths), {"scale": _scale(q, scale)}
    if biases is None:
        return q.trace.add("full_attention", inputs, attrs)
    return q.trace.add("full_attention", (*inputs, biases), {**attrs, "positions": positions})


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


def cast(x: Tensor, dtype: DType | str) -> Tensor:
    """Convert x to another type. To integers: floats are truncated towards 0, integers wrap; to bool: x != 0."""
    return x.trace.add("cast", (x,), {"dtype": str(dtype)})


def softmax(x: Tensor) -> Tensor:
    """exp(x - max(x)) / sum(exp(x - max(x))) over the last dimension."""
    return x.trace.add("softmax", (x,))


def batched_matmul(x: Tensor, w: Tensor) -> Tensor:
    """x (..., M, K), w (..., K, N), or one (K, N) for all -> (..., M, N) = x @ w; both are computed values."""
    return x.trace.add("batched_matmul", (x, w))


def where(condition: Tensor, x: Tensor | Number, y: Tensor | Number) -> Tensor:
    """x if the bool condition holds, otherwise y, for each element."""
    return elementwise("where", condition, x, y)


def less(x: Tensor, y: Tensor | Number) -> Tensor:
    return elementwise("less", x, y)


def less_equal(x: Tensor, y: Tensor | Number) -> Tensor:
    return elementwise("less_equal", x, y)


def greater(x: Tensor, y: Tensor | Number) -> Tensor:
    return elementwise("less", y, x)


def greater_equal(x: Tensor, y: Tensor | Number) -> Tensor:
    return elementwise("less_equal", y, x)


def equal(x: Tensor, y: Tensor | Number) -> Tensor:
    return elementwise("equal", x, y)


def not_equal(x: Tensor, y: Tensor | Number) -> Tensor:
    return elementwise("not_equal", x, y)


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


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap): saturates at -cap and cap (arXiv:2408.00118 section 2)."""
    return tanh(x * (1.0 / cap)) * cap


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2 (arXiv:2109.08668)."""
    positive = relu(x)
    return positive * positive


def silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


def gelu(x: Tensor) -> Tensor:
    """x times the standard normal distribution function of x (arXiv:1606.08415)."""
    return 0.5 * x * (1.0 + erf(0.7071067811865476 * x))


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation (arXiv:1606.08415 section 2)."""
    return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * (x * x * x))))


ACTIVATIONS = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh, "relu": relu, "squared_relu": squared_relu}
