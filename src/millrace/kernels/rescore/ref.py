"""Reference of a two-step head: which logits are computed again, and from what."""

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.weights.quantized_matrix import QuantisedMatrix
from millrace.kernels.arrays import Array
from millrace.kernels.convert.ref import Quantised
from millrace.kernels.matmul.ref import matmul_q8


def largest(y: Array, count: int) -> NDArray[np.bool_]:
    """y (M, N) -> (M, N): the `count` largest of each row; of equal ones those with lower ids."""
    order = np.argsort(-y, axis=1, kind="stable")[:, :count]
    candidates = np.zeros(y.shape, np.bool_)
    np.put_along_axis(candidates, order, True, axis=1)
    return candidates


def rescore(y: Array, x: Quantised, w: QuantisedMatrix, count: int) -> NDArray[np.float64]:
    """y (M, N) with its `count` largest logits a row taken from the 8-bit product x @ w.T instead."""
    return np.where(largest(y, count), matmul_q8(x, w), y.astype(np.float64))
