"""Reference of normalise."""

import numpy as np

from millrace.kernels.arrays import Array


def normalise(x: Array, eps: float) -> Array:
    """x (M, N) -> x / max(|x|, eps), row by row, in the precision of x."""
    result: Array = x / np.maximum(np.sqrt(np.square(x).sum(axis=-1, keepdims=True)), x.dtype.type(eps))
    return result
