"""Reference of a two-step head: the choice of logits that are computed again, and their values."""

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.weights.quantized_matrix import QuantisedMatrix
from millrace.kernels.arrays import Array
from millrace.kernels.convert.ref import Quantised
from millrace.kernels.matmul.ref import matmul_q8


def largest(y: Array, count: int) -> NDArray[np.bool_]:
    """Mark the `count` largest elements of each row of y (M, N) -> (M, N); among equals the lower ids."""
    order = np.argsort(-y, axis=1, kind="stable")[:, :count]
    candidates = np.zeros(y.shape, np.bool_)
    np.put_along_axis(candidates, order, True, axis=1)
    return candidates


def rescore(y: Array, x: Quantised, w: QuantisedMatrix, count: int) -> NDArray[np.float64]:
    """Replace the `count` largest logits of each row of y (M, N) by those of the 8-bit product x @ w.T."""
    return np.where(largest(y, count), matmul_q8(x, w), y.astype(np.float64))
