"""FP8 weights: E4M3 with one scale for each output, or one for all.

A product of a code (4 bits of mantissa) and a scale of 4 bits has 8, which is what bfloat16 holds: scales are rounded
up to so many. Then 16-bit floats are these weights exactly, here and wherever else they are computed so; the range of
a row is used to 8/9 at least, and codes of floats are as fine there as at its end.

Within an octave it still matters which scale a row has: the codes next to its heaviest weights lie closer to some than
to others. With what is known of the inputs the best of the octave's eight short scales is taken.
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
    """w (N, K) = codes * scales. codes (N, K) E4M3, scales (N, 1) bfloat16, all the same where there is one"""

    codes: Array
    scales: Array

    def dequantise(self) -> NDArray[np.float64]:
        return self.codes.astype(np.float64) * self.scales.astype(np.float64)


def rounded_e4m3(w: Array, *, one_scale: bool = False) -> Fp8Matrix:
    """w (N, K) to the nearest, half to even. raises CheckpointError for what is not finite

    error: |w - dequantise| <= |w| / 16, or half a scale's 2^-9 for what is tiny beside its row, or beside all of w
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
    """(N, 1): of an octave of scales from the smallest that holds a row on, the one that loses the least of its output.

    w (N, K); energy (K,): mean square of each input
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
    """The nearest codes, the largest for what is beyond it; and what they stand for. scales broadcast to w"""
    codes = np.clip(w / scales, -LARGEST, LARGEST).astype(E4M3)
    return codes, codes.astype(np.float32) * scales


def _scales(amax: NDArray[np.float32]) -> Array:
    short = _short(amax.astype(np.float64) / LARGEST)
    return np.where(amax > 0, np.maximum(short, np.float32(2.0**-126)), np.float32(1)).astype(BF16)


def _short(scale: NDArray[np.float64]) -> NDArray[np.float32]:
    """Rounded up to a mantissa of 4 bits."""
    mantissa, exponent = np.frexp(scale)
    short: NDArray[np.float32] = np.ldexp(np.ceil(np.ldexp(mantissa, _MANTISSA)), exponent - _MANTISSA).astype(
        np.float32
    )
    return short
