"""Stored integers as the engine keeps them: which format holds codes, scales and zero points exactly.

    w (N, K) = (code - zero) * scale

Zero points become minimums if float16 holds -zero * scale; otherwise they are subtracted from the codes, which then
need a bit more.
"""

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.weights.quantized_matrix import QuantisedFormat, QuantisedMatrix

Codes = NDArray[np.int8]  # signed: from -2^(bits-1)
Scales = NDArray[np.float64]
_ENGINE_BITS = 4  # the fewest


def group_size(group: int | None, n_columns: int) -> int:
    """Return the inputs per scale; for whole rows (None) their length rounded up to a multiple of 4, as kernels
    require."""
    return group or -(-n_columns // 4) * 4


def integer_format(bits: int, group: int, scales: Scales, zeros: Codes | None) -> QuantisedFormat | None:
    """Return the format that is exact; None if there is none. scales, zeros: (N, G); zeros: None if all are 0"""
    with np.errstate(over="ignore"):
        narrow = scales.astype(np.float16)
    if not np.array_equal(narrow.astype(np.float64), scales):
        return None
    if zeros is None or bits < _ENGINE_BITS:  # code - zero of at most 3 bits is -7 .. 7
        return QuantisedFormat(max(bits, _ENGINE_BITS), group)
    if _minimums(narrow, zeros + np.int8(8) if bits == 4 else zeros)[1]:
        return QuantisedFormat(bits, group, minimums=True)
    return QuantisedFormat(5, group) if bits == 4 else None  # code - zero is -15 .. 15


def integer_matrix(
    codes: Codes, scales: Scales, zeros: Codes | None, stored_format: QuantisedFormat, bits: int
) -> QuantisedMatrix:
    """Return the matrix in the format of `integer_format`. bits: of the engine's codes"""
    narrow = scales.astype(np.float16)
    if zeros is None:
        return QuantisedMatrix(codes, narrow, stored_format.group, bits)
    if not stored_format.minimums:
        wide = np.repeat(zeros, stored_format.group, axis=1)[:, : codes.shape[1]]
        return QuantisedMatrix(codes - wide, narrow, stored_format.group, bits)
    if stored_format.bits == 4:  # unsigned codes
        codes, zeros = codes + np.int8(8), zeros + np.int8(8)
    return QuantisedMatrix(codes, narrow, stored_format.group, bits, _minimums(narrow, zeros)[0])


def integer_floats(codes: Codes, scales: Scales, zeros: Codes | None, group: int) -> NDArray[np.float64]:
    """Return rows of weights."""
    n_columns = codes.shape[1]
    wide = codes.astype(np.float64)
    if zeros is not None:
        wide -= np.repeat(zeros, group, axis=1)[:, :n_columns]
    return wide * np.repeat(scales, group, axis=1)[:, :n_columns]


def _minimums(scales: NDArray[np.float16], zeros: Codes) -> tuple[NDArray[np.float16], bool]:
    """Return -zero * scale, and whether float16 holds all of them exactly."""
    exact = -zeros.astype(np.float64) * scales.astype(np.float64)
    with np.errstate(over="ignore"):
        result = exact.astype(np.float16)
    return result, bool((result.astype(np.float64) == exact).all())
