"""References of pooling."""

import numpy as np

from millrace.kernels.arrays import Array


def max_pool(x: Array, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]) -> Array:
    """Pool as torch.nn.functional.max_pool2d: x (N, C, H, W)."""
    result: Array = _windows(x, kernel, stride, padding, -np.inf).max(axis=(-2, -1))
    return result


def avg_pool(
    x: Array, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int], *, count_include_pad: bool
) -> Array:
    """Pool as torch.nn.functional.avg_pool2d."""
    sums = _windows(x, kernel, stride, padding, 0.0).sum(axis=(-2, -1))
    counts = _windows(np.ones_like(x), kernel, stride, padding, 1.0 if count_include_pad else 0.0).sum(axis=(-2, -1))
    result: Array = sums / counts
    return result


def _windows(
    x: Array, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int], outside: float
) -> Array:
    """Return the windows (N, C, windows down, windows across, kernel height, width)."""
    padded = np.pad(x, ((0, 0), (0, 0), (padding[0],) * 2, (padding[1],) * 2), constant_values=outside)
    return np.lib.stride_tricks.sliding_window_view(padded, kernel, (2, 3))[:, :, :: stride[0], :: stride[1]]
