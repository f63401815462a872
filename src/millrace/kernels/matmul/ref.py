"""Reference of matmul in each numerics class. float64 sums, rounded once at the end."""

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.weights.quantized_matrix import QuantisedMatrix
from millrace.kernels.arrays import Array
from millrace.kernels.convert.ref import Quantised, to_bf16, to_e4m3


def matmul(x: Array, w: Array) -> Array:
    """Multiply x (M, K), w (N, K) -> (M, N) = x @ w.T, in the precision of x."""
    return x @ w.T.astype(x.dtype)


def matmul_bf16(x: Array, w: Array) -> Array:
    """Round both operands to bfloat16, and sum in the precision of x."""
    return to_bf16(x) @ to_bf16(w.astype(x.dtype)).T


def matmul_q8(x: Quantised, w: QuantisedMatrix) -> NDArray[np.float64]:
    """Multiply x (M, K) of int8 groups and w (N, K), whose groups are the same or unions of these.

    Per group of x: an exact integer dot product times both scales, plus the sum of x's codes times its scale and w's
    minimum
    """
    assert w.group % x.group == 0
    K, size = x.codes.shape[1], x.group
    y = np.zeros((x.codes.shape[0], w.codes.shape[0]))
    scales, minimums = w.group_scales(), w.group_minimums()
    for g, start in enumerate(range(0, K, size)):
        part = slice(start, start + size)
        codes = x.codes[:, part].astype(np.int64)
        dots, sums = codes @ w.codes[:, part].astype(np.int64).T, codes.sum(axis=1, keepdims=True)
        own = start // w.group
        y += x.scales[:, g, None].astype(np.float64) * (dots * scales[:, own] + sums * minimums[:, own])
    return y


def matmul_a16(x: Array, w: QuantisedMatrix) -> NDArray[np.float64]:
    """Round x to bfloat16; weights are exactly their codes and scales: integers with their groups', or E4M3."""
    return to_bf16(x).astype(np.float64) @ w.dequantise().T


def matmul_e4m3(x: Array, w: QuantisedMatrix) -> NDArray[np.float64]:
    """Round x to E4M3 by rows, too: as engines with FP8 arithmetic do, and no kernel here."""
    return to_e4m3(to_bf16(x)).astype(np.float64) @ w.dequantise().T
