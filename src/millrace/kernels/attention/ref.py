"""Reference of attention: one sequence, all its keys and values at hand."""

import numpy as np

from millrace.kernels.arrays import Array
from millrace.kernels.convert.ref import to_bf16
from millrace.kernels.declare import NOTHING


def attention(q: Array, k: Array, v: Array, first: int | None, scale: float, *, bf16_weights: bool = False) -> Array:
    """Causal attention of the last rows of a sequence; `first` None: of all rows to all keys.

    q (T, H, D) at positions first, first+1, ...; k (first+T, K, D) and v (first+T, K, Dv) from position 0; H a multiple
    of K -> (T, H, Dv)
    bf16_weights: exp(score - max) is rounded to bfloat16, as it is over bfloat16 pages (there per span of 256 keys)
    """
    T, H, D = q.shape
    K = k.shape[1]
    grouped = q.reshape(T, K, H // K, D)
    scores = np.einsum("tkgd,ukd->tkgu", grouped, k) * q.dtype.type(scale)
    if first is not None:
        future = np.arange(k.shape[0])[None, :] > first + np.arange(T)[:, None]
        scores = np.where(future[:, None, None, :], -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    if bf16_weights:
        weights = to_bf16(weights)
    weights /= weights.sum(axis=-1, keepdims=True)
    y: Array = np.einsum("tkgu,ukd->tkgd", weights, v).reshape(T, H, v.shape[2])
    return y


def to_int8(x: Array) -> Array:
    """x (..., D) as int8 pages hold it: codes -127..127 of one scale, amax / 127, for each token and head."""
    return _coded(x, 127)


def to_int16(q: Array) -> Array:
    """Queries (..., D) as they meet int8 keys: codes of two bytes, both at most 127, of one scale."""
    return _coded(q, 127 * 256 + 127)


def _coded(x: Array, most: int) -> Array:
    amax = np.abs(x).max(axis=-1, keepdims=True)
    inverse = np.divide(x.dtype.type(most), amax, out=np.zeros_like(amax), where=amax > NOTHING)
    y: Array = np.rint(x * inverse) * (amax / x.dtype.type(most))
    return y
