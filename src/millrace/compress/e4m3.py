"""FP8 weights: E4M3 with one scale for each output, which needs no data.

A product of a code (4 bits of mantissa) and a scale of 4 bits has 8, which is what bfloat16 holds: scales are rounded
up to so many. Then 16-bit floats are these weights exactly, here and wherever else they are computed so; the range of
a row is used to 8/9 at least, and codes of floats are as fine there as at its end.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from millrace.compress.grid import Array, slabs
from millrace.kernels.matmul.pack import finite

E4M3, BF16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)
LARGEST = 448.0
_MANTISSA = 4


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """w (N, K) = codes * scales. codes (N, K) E4M3, scales (N, 1) bfloat16"""

    codes: Array
    scales: Array

    def dequantise(self) -> NDArray[np.float64]:
        return self.codes.astype(np.float64) * self.scales.astype(np.float64)


def rounded_e4m3(w: Array) -> Fp8Matrix:
    """w (N, K) to the nearest, half to even. raises CheckpointError for what is not finite

    error: |w - dequantise| <= |w| / 16, or half a scale's 2^-9 for what is tiny beside its row
    """
    codes, scales = np.empty(w.shape, E4M3), np.empty((len(w), 1), BF16)
    for rows in slabs(*w.shape):
        x = finite(w[rows], np.dtype(np.float32))
        scales[rows] = _scales(np.abs(x).max(axis=1, keepdims=True))
        codes[rows] = (x / scales[rows].astype(np.float32)).astype(E4M3)
    return Fp8Matrix(codes, scales)


def _scales(amax: NDArray[np.float32]) -> Array:
    mantissa, exponent = np.frexp(amax.astype(np.float64) / LARGEST)
    short = np.ldexp(np.ceil(np.ldexp(mantissa, _MANTISSA)), exponent - _MANTISSA)
    return np.where(amax > 0, np.maximum(short, 2.0**-126), 1.0).astype(BF16)
