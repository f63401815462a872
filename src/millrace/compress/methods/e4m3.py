"""FP8 weights: E4M3 with one scale per output, or one per matrix.

The product of a code (4 significant bits) and a scale of 4 bits has 8 bits, which bfloat16 can represent, so scales are
rounded up to 4 bits. Then 16-bit floats represent these weights exactly, here and in other implementations; at least
8/9 of a row's range is used, and floating-point codes are as fine there as at its end.

The choice of a scale within an octave still matters: it determines how close codes are to the row's most important
weights. With statistics of the inputs, the best of the octave's eight short scales is used.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from millrace.compress.methods.quantization_grid import Array, slabs
from millrace.kernels.matmul.pack import finite

E4M3, BF16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)
LARGEST = 448.0
_MANTISSA = 4


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """w (N, K) = codes * scales. codes: (N, K) E4M3; scales: (N, 1) bfloat16, all equal for one scale per matrix"""

    codes: Array
    scales: Array

    def dequantise(self) -> NDArray[np.float64]:
        return self.codes.astype(np.float64) * self.scales.astype(np.float64)


def rounded_e4m3(w: Array, *, one_scale: bool = False) -> Fp8Matrix:
    """Round w (N, K) to nearest, half to even. raises CheckpointError if it is not finite

    error: |w - dequantise| <= |w| / 16, or scale * 2^-10 for values that are tiny compared with their row, or with w
    """
    codes, largest = np.empty(w.shape, E4M3), np.empty((len(w), 1), np.float32)
    for rows in slabs(*w.shape):
        largest[rows] = np.abs(finite(w[rows], np.dtype(np.float32))).max(axis=1, keepdims=True)
    scales = _scales(np.broadcast_to(largest.max(), largest.shape) if one_scale else largest)
    for rows in slabs(*w.shape):
        x = w[rows].astype(np.float32)
        codes[rows] = (x / scales[rows].astype(np.float32)).astype(E4M3)
    return Fp8Matrix(codes, scales)


def scales_for(w: Array, energy: Array) -> NDArray[np.float32]:
    """Return the scales (N, 1) with the least output error, within an octave from the smallest that fits the row.

    w: (N, K); energy: mean square of each input, (K,)
    """
    result = np.empty((len(w), 1), np.float32)
    for rows in slabs(*w.shape):
        x = finite(w[rows], np.dtype(np.float32))
        least = _scales(np.abs(x).max(axis=1, keepdims=True)).astype(np.float32)
        lost = np.full((len(x), 1), np.inf, np.float32)
        for _ in range(1 << (_MANTISSA - 1)):
            loss = np.square(x - rounded_to(x, least)[1]) @ energy.astype(np.float32)[:, None]
            result[rows] = np.where(loss < lost, least, result[rows])
            lost = np.minimum(loss, lost)
            least = _short(np.nextafter(least, np.float32(np.inf)).astype(np.float64))
    return result


def rounded_to(w: NDArray[np.float32], scales: NDArray[np.float32]) -> tuple[Array, NDArray[np.float32]]:
    """Return the nearest codes, saturated at the largest, and their values. scales: broadcast to w"""
    codes = np.clip(w / scales, -LARGEST, LARGEST).astype(E4M3)
    return codes, codes.astype(np.float32) * scales


def _scales(amax: NDArray[np.float32]) -> Array:
    short = _short(amax.astype(np.float64) / LARGEST)
    return np.where(amax > 0, np.maximum(short, np.float32(2.0**-126)), np.float32(1)).astype(BF16)


def _short(scale: NDArray[np.float64]) -> NDArray[np.float32]:
    """Round up to 4 significant bits."""
    mantissa, exponent = np.frexp(scale)
    short: NDArray[np.float32] = np.ldexp(np.ceil(np.ldexp(mantissa, _MANTISSA)), exponent - _MANTISSA).astype(
        np.float32
    )
    return short
