"""Reference of combine_experts."""

import numpy as np

from millrace.kernels.arrays import Array, IntArray


def combine_experts(x: Array, places: IntArray, weights: Array) -> Array:
    """x (P, N), places and weights (T, A) -> (T, N): the weighted sums of rows, in the precision of x."""
    y: Array = np.einsum("ta,tan->tn", weights, x[places])
    return y
