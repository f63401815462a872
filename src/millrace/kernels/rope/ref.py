"""Reference of rope (arXiv:2104.09864), which rotates pairs of the first numbers of a head."""

import numpy as np

from millrace.kernels.arrays import Array, IntArray


def rope(x: Array, positions: IntArray, table: Array, *, interleaved: bool = False) -> Array:
    """x (T, H, D), positions (T,), table (context, R): R/2 cosines, then R/2 sines -> (T, H, D).

    Pairs are d and d + R/2, or 2d and 2d + 1 if `interleaved`; from R on a head stays as it is.
    """
    width = table.shape[1]
    cosine, sine = np.split(table[positions][:, None, :], 2, axis=-1)
    y, pairs = x.copy(), (slice(0, width, 2), slice(1, width, 2))
    first, second = pairs if interleaved else (slice(0, width // 2), slice(width // 2, width))
    a, b = x[..., first], x[..., second]
    y[..., first], y[..., second] = a * cosine - b * sine, b * cosine + a * sine
    return y
