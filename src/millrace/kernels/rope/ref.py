"""Reference of rope (arXiv:2104.09864), which rotates the two halves of a head."""

import numpy as np

from millrace.kernels.arrays import Array, IntArray


def rope(x: Array, positions: IntArray, table: Array) -> Array:
    """x (T, H, D), positions (T,), table (context, D): D/2 cosines, then D/2 sines -> (T, H, D)."""
    half = x.shape[-1] // 2
    cosine, sine = np.split(table[positions][:, None, :], 2, axis=-1)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1)
