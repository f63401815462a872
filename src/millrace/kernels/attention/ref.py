"""Reference of attention: one sequence, all its keys and values at hand."""

import numpy as np

from millrace.kernels.arrays import Array
from millrace.kernels.convert.ref import to_bf16


def attention(q: Array, k: Array, v: Array, first: int, scale: float, *, bf16_weights: bool = False) -> Array:
    """Causal attention of the last rows of a sequence.

    q (T, H, D) at positions first, first+1, ...; k, v (first+T, K, D) from position 0; H a multiple of K -> (T, H, D)
    bf16_weights: exp(score - max) is rounded to bfloat16, as it is over bfloat16 pages (there per span of 256 keys)
    """
    T, H, D = q.shape
    K = k.shape[1]
    grouped = q.reshape(T, K, H // K, D)
    scores = np.einsum("tkgd,ukd->tkgu", grouped, k) * q.dtype.type(scale)
    future = np.arange(k.shape[0])[None, :] > first + np.arange(T)[:, None]
    scores = np.where(future[:, None, None, :], -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    if bf16_weights:
        weights = to_bf16(weights)
    weights /= weights.sum(axis=-1, keepdims=True)
    y: Array = np.einsum("tkgu,ukd->tkgd", weights, v).reshape(T, H, D)
    return y
