"""Reference of convert: rows of activations as bfloat16 or int8 groups, and their stored bytes."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from millrace.kernels.arrays import Array
from millrace.kernels.declare import ZERO_GROUP_THRESHOLD, RowFormat
from millrace.kernels.layout import n_groups, padded_k, row_bytes, up
from millrace.kernels.matmul.pack import hadamard


@dataclass(frozen=True, slots=True)
class Quantised:
    """codes (M, K) int8, scales (M, G) float32: x, or its Hadamard transform, is about codes * scale of each group."""

    codes: NDArray[np.int8]
    scales: NDArray[np.float32]
    group: int
    hadamard: bool = False

    @property
    def hadamard_group(self) -> int:
        """Elements of the transformed groups; 0: not transformed."""
        return self.group if self.hadamard else 0

    def dequantise(self) -> NDArray[np.float64]:
        wide = np.repeat(self.scales.astype(np.float64), self.group or self.codes.shape[1], axis=1)
        return self.codes * wide[:, : self.codes.shape[1]]


def to_bf16(x: Array) -> Array:
    """Round to nearest even; the result has the type of x."""
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(x.dtype)


def to_e4m3(x: Array) -> Array:
    """Round x (M, K) to E4M3, with the scale that maps each row's largest magnitude to 448; return floats.

    No kernel here stores such rows: `reference` reproduces other engines with it
    error: |x - result| <= |x| / 16, or half of 2^-9 scales for elements that are tiny in their row
    """
    scales = np.abs(x).max(axis=1, keepdims=True).astype(np.float32) / np.float32(448)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > ZERO_GROUP_THRESHOLD)
    codes = np.clip(x.astype(np.float32) * inverse, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    y: Array = codes.astype(x.dtype) * scales.astype(x.dtype)
    return y


def to_q8(x: Array, group: int, transform: bool = False) -> Quantised:
    """x (M, K) -> int8 codes with scale amax/127 per row and group; computed in float32, as the kernels do.

    transform: multiply each group by a Hadamard matrix first (kernels/matmul/pack.py)
    error: |x - dequantise| <= scale/2 and a rounding of x * (127/amax); source: arXiv:2106.08295 section 2.2
    """
    M, K = x.shape
    size = group or K
    padded = np.zeros((M, up(K, size)), np.float32)
    padded[:, :K] = hadamard(x, size) if transform else x
    grouped = padded.reshape(M, -1, size)
    amax = np.abs(grouped).max(axis=2)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(amax > ZERO_GROUP_THRESHOLD, np.float32(127) / amax, np.float32(0)).astype(np.float32)
    codes = np.rint(grouped * inverse[:, :, None]).astype(np.int8).reshape(M, -1)[:, :K]
    scales = np.where(amax <= ZERO_GROUP_THRESHOLD, np.float32(0), amax / np.float32(127)).astype(np.float32)
    return Quantised(codes, scales, group, transform)


def pack_rows(x: Array, format: int, group: int) -> NDArray[np.uint8]:
    """Pack x (M, K) -> (M, row_bytes): the bytes that the kernel stores in this RowFormat, which is not F32."""
    M, K = x.shape
    rows = np.zeros((M, row_bytes(format, K, group)), np.uint8)
    size, stride = group or K, up(group, 8) if group else K
    quantised = None if format == RowFormat.BF16 else to_q8(x, group, format == RowFormat.HADAMARD_Q8)
    for g in range(n_groups(K, group)):
        part = slice(g * size, min((g + 1) * size, K))
        if quantised is None:
            codes = x[:, part].astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint8)
            rows[:, 2 * g * stride : 2 * g * stride + codes.shape[1]] = codes
        else:
            codes = np.ascontiguousarray(quantised.codes[:, part]).view(np.uint8)
            rows[:, g * stride : g * stride + codes.shape[1]] = codes
    if quantised is not None:
        at, groups = up(padded_k(K, group), 4), n_groups(K, group)
        rows[:, at : at + 4 * groups] = np.ascontiguousarray(quantised.scales).view(np.uint8)
        sums = np.add.reduceat(quantised.codes.astype(np.int32), np.arange(0, K, size), axis=1, dtype=np.int32)
        rows[:, at + 4 * groups : at + 8 * groups] = np.ascontiguousarray(sums).view(np.uint8)
    return rows
