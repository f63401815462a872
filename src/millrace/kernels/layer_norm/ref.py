"""Reference of layer_norm (arXiv:1607.06450)."""

import numpy as np

from millrace.kernels.arrays import Array


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """x (..., N), weight and bias (N,) -> (x - mean) / sqrt(variance + eps) * weight + bias, in the precision of x."""
    centred = x - np.mean(x, axis=-1, keepdims=True)
    variance = np.mean(np.square(centred), axis=-1, keepdims=True)
    result: Array = centred / np.sqrt(variance + x.dtype.type(eps)) * weight + bias
    return result
