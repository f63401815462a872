"""Reference of attention, for one sequence with all its keys and values."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np

from millrace.kernels.arrays import Array, IntArray
from millrace.kernels.convert.ref import to_bf16
from millrace.kernels.declare import ZERO_GROUP_THRESHOLD
from millrace.kernels.matmul.pack import hadamard


class ScoreRules(NamedTuple):
    """How scores become weights, besides softmax.

    window: keys that a row attends to, its own included; 0: all before it
    softcap: scores become softcap * tanh(score / softcap); 0: unchanged
    sinks: (H,), scores of a further key of each head, whose value is zero (arXiv:2508.10925)
    distance_bias: (H, 2 C), added to the score of a key at distance d behind the row, in column d + C
    """

    window: int = 0
    softcap: float = 0.0
    sinks: Array | None = None
    distance_bias: Array | None = None


def distance_buckets(distances: IntArray, n_buckets: int, max_distance: int = 128) -> IntArray:
    """Return the bucket of each distance of a key from a row (arXiv:1910.10683 section 2.1).

    Half of them are for keys behind the row. In each half small distances have a bucket each, larger ones share them
    by their logarithm; beyond `max_distance` all are in the last one. Computed in float32, as in transformers.
    """
    half = n_buckets // 2
    n, exact = np.abs(distances), half // 2
    with np.errstate(divide="ignore"):
        logarithms = np.log(n.astype(np.float32) / np.float32(exact)) / np.float32(np.log(max_distance / exact))
    shared = exact + np.where(n == 0, 0, logarithms * np.float32(half - exact)).astype(np.int64)
    result: IntArray = np.where(distances > 0, half, 0) + np.where(n < exact, n, np.minimum(shared, half - 1))
    return result


def attention(
    q: Array, k: Array, v: Array, first: int | None, scale: float, rules: ScoreRules | None = None, *,
    bf16_weights: bool = False,
) -> Array:  # fmt: skip
    """Causal attention of the last rows of a sequence; `first` None: of all rows to all keys.

    q (T, H, D) at positions first, first+1, ...; k (first+T, K, D) and v (first+T, K, Dv) from position 0; H a multiple
    of K -> (T, H, Dv)
    bf16_weights: exp(score - max) is rounded to bfloat16, as over bfloat16 and fp8 pages (there by spans of 256)
    """
    window, softcap, sinks, distance_bias = rules or ScoreRules()
    T, H, D = q.shape
    K = k.shape[1]
    grouped = q.reshape(T, K, H // K, D)
    scores = np.einsum("tkgd,ukd->tkgu", grouped, k) * q.dtype.type(scale)
    if softcap:
        scores = np.tanh(scores / q.dtype.type(softcap)) * q.dtype.type(softcap)
    if distance_bias is not None:
        distances = np.arange(k.shape[0])[None, :] - np.arange(T)[:, None] + distance_bias.shape[1] // 2
        scores = scores + distance_bias[:, distances].reshape(K, H // K, T, -1).transpose(2, 0, 1, 3)
    if first is not None:
        ages = first + np.arange(T)[:, None] - np.arange(k.shape[0])[None, :]
        outside = (ages < 0) | (ages >= window) if window else ages < 0
        scores = np.where(outside[:, None, None, :], -np.inf, scores)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    if bf16_weights:
        weights = to_bf16(weights)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks.reshape(1, K, H // K, 1) - top)
    weights /= total
    y: Array = np.einsum("tkgu,ukd->tkgd", weights, v).reshape(T, H, v.shape[2])
    return y


def to_int8(x: Array) -> Array:
    """Round x (..., D) as int8 pages do: codes -127..127 with one scale, amax / 127, per token and head."""
    return _coded(x, 127)


def to_fp8(x: Array) -> Array:
    """Round x (..., D) as fp8 pages do: E4M3 with a scale per token and head, a power of two of at least amax / 448."""
    least = np.abs(x).max(axis=-1, keepdims=True).astype(np.float32) / np.float32(448)
    scale = np.where(
        least > ZERO_GROUP_THRESHOLD,
        np.exp2(np.ceil(np.log2(np.maximum(least, ZERO_GROUP_THRESHOLD), dtype=np.float64))),
        0,
    )
    scaled = np.divide(x, scale, out=np.zeros(x.shape), where=scale > 0).astype(np.float32)
    y: Array = (scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale).astype(x.dtype)
    return y


def to_int4(x: Array) -> Array:
    """Round values x (..., D) as int4 pages do: codes 0..15 from the minimum, with one scale, range / 15."""
    least = x.min(axis=-1, keepdims=True)
    span = x.max(axis=-1, keepdims=True) - least
    inverse = np.divide(x.dtype.type(15), span, out=np.zeros_like(span), where=span > ZERO_GROUP_THRESHOLD)
    y: Array = np.rint((x - least) * inverse) * (span / x.dtype.type(15)) + least
    return y


def to_int16(q: Array) -> Array:
    """Round queries (..., D) for quantized keys: two bytes, each at most 127, with one scale."""
    return _coded(q, 127 * 256 + 127)


def transformed(x: Array) -> Array:
    """Multiply x (..., D) by a Hadamard matrix, which spreads outliers over all channels and leaves q k^T unchanged."""
    y: Array = hadamard(x.reshape(-1, x.shape[-1]), x.shape[-1]).astype(x.dtype).reshape(x.shape)
    return y


def _coded(x: Array, max_code: int) -> Array:
    amax = np.abs(x).max(axis=-1, keepdims=True)
    inverse = np.divide(x.dtype.type(max_code), amax, out=np.zeros_like(amax), where=amax > ZERO_GROUP_THRESHOLD)
    y: Array = np.rint(x * inverse) * (amax / x.dtype.type(max_code))
    return y


class CacheRounding(NamedTuple):
    """The rounding of queries, keys and values, each (tokens, heads, size)."""

    q: Callable[[Array], Array]
    k: Callable[[Array], Array]
    v: Callable[[Array], Array]


ROUNDINGS: Mapping[str, CacheRounding] = {  # by the name of the page format in programs
    "f32": CacheRounding(*(lambda x: x,) * 3),
    "bf16": CacheRounding(to_bf16, to_bf16, to_bf16),
    "int8": CacheRounding(to_int16, to_int8, to_int8),
    "fp8": CacheRounding(lambda q: to_bf16(transformed(q)), lambda k: to_fp8(transformed(k)), to_fp8),
    "int4": CacheRounding(lambda q: to_int16(transformed(q)), lambda k: to_int4(transformed(k)), to_int4),
}
