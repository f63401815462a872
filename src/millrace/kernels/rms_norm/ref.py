"""Reference of rms_norm (arXiv:1910.07467)."""

import numpy as np

from millrace.kernels.arrays import Array


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x (..., N), weight (N,) -> x / sqrt(mean(x^2) + eps) * weight, in the precision of x."""
    mean = np.mean(np.square(x), axis=-1, keepdims=True)
    result: Array = x * (1 / np.sqrt(mean + x.dtype.type(eps))) * weight
    return result
