"""Weights as integers with a float16 scale per output and group of inputs: rounded to nearest, nothing cleverer yet."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.kernels.arrays import Array
from millrace.kernels.layout import up


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """codes (N, K) int8 in -2^(bits-1) .. 2^(bits-1)-1, scales (N, G) float16: w ~ codes * scales of their group."""

    codes: NDArray[np.int8]
    scales: NDArray[np.float16]
    group: int
    bits: int

    def dequantise(self) -> NDArray[np.float64]:
        wide = np.repeat(self.scales.astype(np.float64), self.group, axis=1)
        return self.codes * wide[:, : self.codes.shape[1]]


def quantise_matrix(w: Array, bits: int, group: int) -> QuantisedMatrix:
    """w (N, K) -> codes of `bits` (4 or 8) with one scale per `group` inputs.

    The scale maps the group's element of largest magnitude to -2^(bits-1), so that the whole range of codes is used.
    error: |w - dequantise| <= scale/2, one scale where the opposite extreme is clipped, plus the scale's own rounding
    """
    N, K = w.shape
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    padded = np.zeros((N, up(K, group)), np.float32)
    padded[:, :K] = w
    grouped = padded.reshape(N, -1, group)
    top, bottom = grouped.max(axis=2), grouped.min(axis=2)
    scales = (np.where(-bottom >= top, bottom, top) / np.float32(low)).astype(np.float16)
    divisor = scales.astype(np.float32)
    inverse = np.divide(1, divisor, out=np.zeros_like(divisor), where=divisor != 0)
    codes = np.clip(np.rint(grouped * inverse[:, :, None]), low, high).astype(np.int8)
    return QuantisedMatrix(codes.reshape(N, -1)[:, :K], scales, group, bits)
