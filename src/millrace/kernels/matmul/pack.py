"""Packed weights: panels of 32 outputs in the order of the inner loop, the same for all instruction sets.

    F32   [N/32][K][32] float
    BF16  [N/32][K/2][32][2] bfloat16
    W8    [N/32] groups of ([K/4][32][4] uint8 = code + 128, then 32 float16 scales)
    W4    [N/32] groups of ([K/8][32][4] bytes, then 32 float16 scales); byte b of a block holds code + 8 of input
          8i + b in its low nibble and of 8i + 4 + b in its high one
Each group is zero-padded to a multiple of 8 inputs, N to a multiple of 32 outputs (layout.py counts the bytes).
"""

from collections.abc import Iterator, Sequence
from typing import TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.quantised import QuantisedMatrix
from millrace.errors import CheckpointError
from millrace.graph.types import Constant
from millrace.kernels.arrays import Array
from millrace.kernels.declare import WeightFormat
from millrace.kernels.layout import PANEL, matrix_bytes, n_groups, padded_k, panel_bytes, up

_T = TypeVar("_T", bound=np.generic)


def finite(array: NDArray[np.generic], dtype: np.dtype[_T]) -> NDArray[_T]:
    """The array in another type. raises CheckpointError where something is not finite, or too large for the type"""
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    if not np.isfinite(cast).all():
        raise CheckpointError(
            f"weights that are not finite, or too large for {dtype.name}", "numbers",
            "correct them, download the checkpoint again, or choose another",
        )  # fmt: skip
    return cast


def stored_codes(constants: Sequence[Constant], bits: int, group: int) -> list[QuantisedMatrix] | None:
    """Weights (N, K) in the checkpoint's own codes, those that it does not hold so rounded; None: it holds none so."""
    held = [c.stored(bits, group) if c.stored else None for c in constants]
    for matrix in filter(None, held):
        finite(matrix.scales, matrix.scales.dtype)
    if not any(held):
        return None
    return [
        stored or quantise_matrix(c.load().astype(np.float32), bits, group)
        for stored, c in zip(held, constants, strict=True)
    ]


_COARSE = 0.1  # a scale is that far from what it should be: of such groups there may be a few, next to nothing


def quantise_matrix(w: Array, bits: int, group: int) -> QuantisedMatrix:
    """w (N, K) -> codes of `bits` (4 or 8) with one scale per `group` inputs.

    The scale maps the group's element of largest magnitude to -2^(bits-1), so that the whole range of codes is used.
    raises CheckpointError for what is not finite, or so small that scales as float16 have them would change it
    error: |w - dequantise| <= scale/2, one scale where the opposite extreme is clipped, plus the scale's own rounding
    """
    N, K = w.shape
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    padded = np.zeros((N, up(K, group)), np.float32)
    padded[:, :K] = w
    grouped = padded.reshape(N, -1, group)
    top, bottom = grouped.max(axis=2), grouped.min(axis=2)
    exact = np.where(-bottom >= top, bottom, top) / np.float32(low)
    scales = finite(exact, np.dtype(np.float16))
    divisor = scales.astype(np.float32)
    coarse = np.abs(divisor - exact) > _COARSE * np.abs(exact)
    if coarse.any() and _energy(grouped[coarse]) > _COARSE**2 * _energy(grouped):
        raise CheckpointError(
            "weights too small for the scales of their groups, in float16",
            f"groups that reach {-low * 1e-6:.0e} or more", "build with --precision bf16, or bf16 for this matrix",
        )  # fmt: skip
    inverse = np.divide(1, divisor, out=np.zeros_like(divisor), where=divisor != 0)
    codes = np.clip(np.rint(grouped * inverse[:, :, None]), low, high).astype(np.int8)
    return QuantisedMatrix(codes.reshape(N, -1)[:, :K], scales, group, bits)


def _energy(w: Array) -> float:
    return float(np.square(w, dtype=np.float64).sum())


_SLAB = 1024  # outputs packed at a time: bounds the memory that packing needs beside the result


def pack_matrix(w: Array, format: WeightFormat, group: int) -> NDArray[np.uint8]:
    """w (N, K) -> the packed bytes, one dimension. `group` is 0 for F32 and BF16.

    raises CheckpointError for what is not finite
    """
    N, K = w.shape
    return _joined((_pack_slab(s, format, group) for s in _slabs(w)), matrix_bytes(format, N, K, group))


def pack_codes(q: QuantisedMatrix, format: WeightFormat) -> NDArray[np.uint8]:
    """The packed bytes of codes and scales as they are. `format` W8 or W4, of as many bits as `q`."""
    N, K = q.codes.shape
    slabs = (_slab(q, start) for start in range(0, N, _SLAB))
    return _joined((_pack_groups(s) for s in slabs), matrix_bytes(format, N, K, q.group))


def _joined(parts: Iterator[NDArray[np.uint8]], nbytes: int) -> NDArray[np.uint8]:
    out = np.empty(nbytes, np.uint8)
    at = 0
    for part in parts:
        out[at : at + part.size] = part
        at += part.size
    return out


def _slab(q: QuantisedMatrix, start: int) -> QuantisedMatrix:
    """A run of rows, the last padded with zero rows to whole panels."""
    rows = slice(start, start + _SLAB)
    return QuantisedMatrix(_whole_panels(q.codes[rows]), _whole_panels(q.scales[rows]), q.group, q.bits)


def _slabs(w: Array) -> Iterator[Array]:
    """Runs of rows as float32, the last padded with zero rows to whole panels."""
    for start in range(0, w.shape[0], _SLAB):
        yield _whole_panels(w[start : start + _SLAB].astype(np.float32))


def _whole_panels(rows: NDArray[_T]) -> NDArray[_T]:
    missing = up(rows.shape[0], PANEL) - rows.shape[0]
    return np.pad(rows, ((0, missing), (0, 0))) if missing else rows


def _pack_slab(w: Array, format: WeightFormat, group: int) -> NDArray[np.uint8]:
    N, K = w.shape
    panels = N // PANEL
    if format == WeightFormat.F32:
        w = finite(w, np.dtype(np.float32))
        return np.ascontiguousarray(w.reshape(panels, PANEL, K).transpose(0, 2, 1)).reshape(-1).view(np.uint8)
    if format == WeightFormat.BF16:
        wide = np.zeros((N, padded_k(K, 0)), ml_dtypes.bfloat16)
        wide[:, :K] = finite(w, np.dtype(ml_dtypes.bfloat16))
        pairs = wide.view(np.uint16).reshape(panels, PANEL, -1, 2).transpose(0, 2, 1, 3)
        return np.ascontiguousarray(pairs).reshape(-1).view(np.uint8)
    return _pack_groups(quantise_matrix(w, 8 if format == WeightFormat.W8 else 4, group))


def _pack_groups(q: QuantisedMatrix) -> NDArray[np.uint8]:
    N, K = q.codes.shape
    bits, group = q.bits, q.group
    panels = N // PANEL
    out = np.empty((panels, panel_bytes(WeightFormat.W8 if bits == 8 else WeightFormat.W4, K, group)), np.uint8)
    zero_point = 1 << bits - 1
    at = 0
    for g in range(n_groups(K, group)):
        part = q.codes[:, g * group : (g + 1) * group]
        width = up(part.shape[1], 8)
        codes = np.full((N, width), zero_point, np.uint8)
        codes[:, : part.shape[1]] = (part.astype(np.int16) + zero_point).astype(np.uint8)
        if bits == 8:
            blocks: NDArray[np.uint8] = codes.reshape(panels, PANEL, width // 4, 4)
        else:
            halves = codes.reshape(panels, PANEL, width // 8, 2, 4)
            blocks = np.bitwise_or(halves[..., 0, :], np.left_shift(halves[..., 1, :], 4))
        lines = np.ascontiguousarray(blocks.transpose(0, 2, 1, 3)).reshape(panels, -1)
        scales = np.ascontiguousarray(q.scales[:, g].reshape(panels, PANEL)).view(np.uint8)
        out[:, at : at + lines.shape[1]] = lines
        at += lines.shape[1]
        out[:, at : at + scales.shape[1]] = scales
        at += scales.shape[1]
    return out.reshape(-1)


def interleave_codes(gate: QuantisedMatrix, up_: QuantisedMatrix) -> QuantisedMatrix:
    """As `interleave_halves`; both of the same bits and group."""
    codes, scales = interleave_halves(gate.codes, up_.codes), interleave_halves(gate.scales, up_.scales)
    return QuantisedMatrix(codes, scales, gate.group, gate.bits)


def interleave_halves(gate: NDArray[_T], up_: NDArray[_T]) -> NDArray[_T]:
    """gate, up (N, K) -> (2 N', K): 16 rows of gate, then their 16 of up; N' = N zero-padded to a multiple of 16."""
    N, K = gate.shape
    padded = [np.pad(m, ((0, up(N, 16) - N), (0, 0))).reshape(-1, 1, 16, K) for m in (gate, up_)]
    return np.concatenate(padded, axis=1).reshape(-1, K)
