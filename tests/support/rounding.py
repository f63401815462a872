"""How far rounding may move a product of matrices: from the steps in which weights and activations are rounded."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
FIVE_SIGMA = 5.0
UNIFORM = 12**-0.5  # the standard deviation of an error that lies anywhere within one step


def product_deviation(x: Floats, w: Floats, precision: str, group: int, before: Floats | float = 0.0) -> Floats:
    """x (M, K), w (N, K) -> (M, N): standard deviations of x @ w.T in this numerics class, its errors independent.

    before: of x itself
    """
    of_x = np.square(_activation_step(x, precision, group) * UNIFORM) + np.square(before)
    of_w = np.square(_weight_deviation(w, precision, group))
    deviation: Floats = np.sqrt(np.square(x) @ of_w.T + of_x @ (np.square(w) + of_w).T)
    return deviation


def _activation_step(x: Floats, precision: str, group: int) -> Floats:
    """Of int8: amax / 127 of each row and group; of bfloat16 two units of 2^-9 at most."""
    if precision == "fp32":
        return np.zeros_like(x)
    if precision == "bf16":
        return np.abs(x) * 2.0**-8
    return _by_group(np.abs(x), group, 1 / 127)


def _weight_deviation(w: Floats, precision: str, group: int) -> Floats:
    """Codes of b bits reach from -2^(b-1) at the largest magnitude to 2^(b-1) - 1: what lies beyond is cut off."""
    if precision in ("fp32", "bf16"):
        return _activation_step(w, precision, group) * UNIFORM
    codes = 2.0 ** (int(precision[1]) - 1)
    step = _by_group(np.abs(w), group, 1 / codes)
    most, least = _by_group(w, group, 1.0), _by_group(-w, group, 1.0)
    cut = np.where((most > least) == (w > 0), 0, np.maximum(np.abs(w) - (codes - 1) * step, 0))
    deviation: Floats = np.hypot(step * UNIFORM, cut)
    return deviation


def _by_group(x: Floats, group: int, share: float) -> Floats:
    """A share of the largest of each row and group, for each of its elements."""
    found = np.empty_like(x)
    for at in range(0, x.shape[1], group):
        part = slice(at, at + group)
        found[:, part] = x[:, part].max(axis=1, keepdims=True) * share
    return found
