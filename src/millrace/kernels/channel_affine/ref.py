"""Reference of batch_norm."""

import numpy as np

from millrace.kernels.arrays import Array


def scale_and_shift(weight: Array, bias: Array, mean: Array, variance: Array, eps: float) -> tuple[Array, Array]:
    """Return scale and shift (C,), in float64: batch normalization in evaluation mode (arXiv:1502.03167)."""
    scale: Array = weight.astype(np.float64) / np.sqrt(variance.astype(np.float64) + eps)
    return scale, bias - mean * scale
