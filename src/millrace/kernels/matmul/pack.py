"""Packed weights: panels of 32 outputs in the order of the inner loop, the same for all instruction sets.

    F32   [N/32][K][32] float
    BF16  [N/32][K/2][32][2] bfloat16
    W8    [N/32] groups of ([K/4][32][4] uint8 = code + 128, then the scales of 32 outputs)
    W4    [N/32] groups of ([K/8][32][4] bytes, then the scales of 32 outputs); byte b of a block holds code + 8 (with
          minimums, the code) of input 8i + b in its low nibble and of 8i + 4 + b in its high one
Scales are float16; with minimums, 32 of these follow. In two levels nothing follows a group: each super-block of 256
inputs begins with 32 float16 scales, then the int8 ones of its groups [256/group][32], then minimums alike.
Weights that meet rows of HADAMARD_Q8 are transformed as these are before they are rounded: `hadamard` below.
Each group is zero-padded to a multiple of 8 inputs, N to a multiple of 32 outputs (layout.py counts the bytes).
"""

from collections.abc import Iterator, Sequence
from typing import TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.quantised import SUPER_BLOCK, QuantisedFormat, QuantisedMatrix, combined
from millrace.errors import CheckpointError
from millrace.graph.types import Constant
from millrace.kernels.arrays import Array
from millrace.kernels.declare import HADAMARD_BLOCK, Scaling, WeightFormat
from millrace.kernels.layout import PANEL, matrix_bytes, n_groups, padded_k, up

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


def kept_format(constant: Constant, bits: int, group: int) -> QuantisedFormat | None:
    """In which the checkpoint's own codes are packed as they are; None where weights are rounded to such of our own."""
    held = constant.format
    return held if held and held.bits <= bits and held.group == group else None


def scaling_of(constants: Sequence[Constant], bits: int, group: int) -> Scaling:
    """Of a packed matrix of these weights, which are of one kind unless all are symmetric."""
    found = {scaling(kept_format(c, bits, group)) for c in constants}
    assert len(found) == 1, f"weights of {found} in one matrix"
    return found.pop()


def scaling(format: QuantisedFormat | None) -> Scaling:
    """None: codes of our own"""
    return Scaling(format.minimums + 2 * format.two_levels) if format else Scaling.PLAIN


def stored_codes(constants: Sequence[Constant], bits: int, group: int) -> list[QuantisedMatrix] | None:
    """Weights (N, K) in the checkpoint's own codes; None where it does not hold all of them so."""
    held = [c.stored(bits, group) if c.stored else None for c in constants]
    kept = [matrix for matrix in held if matrix]
    for matrix in kept:
        for array in matrix.floats:
            finite(array, array.dtype)
    return kept if len(kept) == len(held) else None


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


def rounded_codes(w: Array, bits: int, group: int, blocks: int = 0) -> QuantisedMatrix:
    """As `quantise_matrix`. blocks: for rows that are transformed in groups of so many; 0: they are not"""
    return quantise_matrix(hadamard(w, blocks) if blocks else w.astype(np.float32), bits, group)


def _energy(w: Array) -> float:
    return float(np.square(w, dtype=np.float64).sum())


# Inputs of a product in another basis, in which none of them stands out, before they are rounded to eight bits. One
# outlier in a group decides the scale of all of it; a Hadamard matrix spreads it evenly. With H = H^T and H H = 1, x H
# times (w H)^T is x times w^T, while the largest element of x H is about three times its root mean square whatever x
# looks like. Weights are transformed once, when they are packed; activations where they are rounded (convert/).
# source: QuaRot (arXiv:2404.00456), whose rotations span the model's width; here each group by itself


def hadamard(x: Array, group: int) -> NDArray[np.float32]:
    """x (M, K): each group, in blocks of powers of two, the largest first, times the Hadamard matrix of its block.

    In float32, step by step as the kernels do it: the bits are theirs.
    """
    y = x.astype(np.float32)  # a copy
    for start in range(0, y.shape[1], group):
        at, end = start, min(start + group, y.shape[1])
        while at < end:
            size = min(HADAMARD_BLOCK, 1 << (end - at).bit_length() - 1)
            y[:, at : at + size] = _of_block(y[:, at : at + size])
            at += size
    return y


def _of_block(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """x (M, n), n a power of two, times Sylvester's matrix of size n over sqrt(n)."""
    n = x.shape[1]
    now = np.ascontiguousarray(x.T)  # sums of whole rows are several times as fast
    other = np.empty_like(now)
    distance = 1
    while distance < n:
        pairs, found = (a.reshape(n // (2 * distance), 2, distance, -1) for a in (now, other))
        np.add(pairs[:, 0], pairs[:, 1], out=found[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=found[:, 1])
        now, other, distance = other, now, 2 * distance
    return now.T * np.float32(1 / np.sqrt(n))


_SLAB = 1024  # outputs packed at a time: bounds the memory that packing needs beside the result


def pack_matrix(w: Array, format: WeightFormat, group: int, blocks: int = 0) -> NDArray[np.uint8]:
    """w (N, K) -> the packed bytes, one dimension. `group` is 0 for F32 and BF16.

    blocks: for rows that are transformed in groups of so many. raises CheckpointError for what is not finite
    """
    N, K = w.shape
    slabs = (hadamard(s, blocks) if blocks else s for s in _slabs(w))
    return _joined((_pack_slab(s, format, group) for s in slabs), matrix_bytes(format, N, K, group))


def pack_codes(q: QuantisedMatrix, format: WeightFormat) -> NDArray[np.uint8]:
    """The packed bytes of codes and scales as they are. `format` W8 or W4, of as many bits as `q`."""
    N, K = q.codes.shape
    slabs = (_slab(q, start) for start in range(0, N, _SLAB))
    return _joined((_pack_groups(s) for s in slabs), matrix_bytes(format, N, K, q.group, scaling(q.format)))


def _joined(parts: Iterator[NDArray[np.uint8]], nbytes: int) -> NDArray[np.uint8]:
    out = np.empty(nbytes, np.uint8)
    at = 0
    for part in parts:
        out[at : at + part.size] = part
        at += part.size
    return out


def _slab(q: QuantisedMatrix, start: int) -> QuantisedMatrix:
    """A run of rows, the last padded with zero rows to whole panels."""
    return q.each(lambda array: _whole_panels(array[start : start + _SLAB]))


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
    parts, levels = [], SUPER_BLOCK // q.group
    for g in range(n_groups(q.codes.shape[1], q.group)):
        if q.scale_levels is not None and g % levels == 0:
            parts += [_super_block(q.scales, q.scale_levels, g // levels, levels)]
            if q.minimums is not None and q.minimum_levels is not None:
                parts += [_super_block(q.minimums, q.minimum_levels, g // levels, levels)]
        parts.append(_lines(q, g))
        if q.scale_levels is None:
            parts += [_of_panels(array[:, g]) for array in (q.scales, q.minimums) if array is not None]
    return np.concatenate(parts, axis=1).reshape(-1)


def _lines(q: QuantisedMatrix, g: int) -> NDArray[np.uint8]:
    """Codes of one group -> (N/32, bytes)"""
    zero = 0 if q.bits == 4 and q.minimums is not None else 1 << q.bits - 1
    part = q.codes[:, g * q.group : (g + 1) * q.group]
    N, width = len(part), up(part.shape[1], 8)
    codes = np.full((N, width), zero, np.uint8)
    codes[:, : part.shape[1]] = (part.astype(np.int16) + zero).astype(np.uint8)
    if q.bits == 8:
        blocks: NDArray[np.uint8] = codes.reshape(-1, PANEL, width // 4, 4)
    else:
        halves = codes.reshape(-1, PANEL, width // 8, 2, 4)
        blocks = np.bitwise_or(halves[..., 0, :], np.left_shift(halves[..., 1, :], 4))
    return np.ascontiguousarray(blocks.transpose(0, 2, 1, 3)).reshape(N // PANEL, -1)


def _super_block(values: Array, levels: NDArray[np.int8], block: int, n_levels: int) -> NDArray[np.uint8]:
    """Scales (N, S) and their levels (N, G) of one super-block -> (N/32, bytes); groups beyond the last have zeros."""
    own = levels[:, block * n_levels : (block + 1) * n_levels]
    whole = np.pad(own, ((0, 0), (0, n_levels - own.shape[1]))).reshape(-1, PANEL, n_levels)
    lower = np.ascontiguousarray(whole.transpose(0, 2, 1)).reshape(len(whole), -1).view(np.uint8)
    return np.concatenate([_of_panels(values[:, block]), lower], axis=1)


def _of_panels(column: Array) -> NDArray[np.uint8]:
    """(N,) -> (N/32, 64)"""
    return np.ascontiguousarray(column.reshape(-1, PANEL)).view(np.uint8)


def interleave_codes(gate: QuantisedMatrix, up_: QuantisedMatrix) -> QuantisedMatrix:
    """As `interleave_halves`; both of one format."""
    return combined((gate, up_), lambda halves: interleave_halves(*halves))


def interleave_halves(gate: NDArray[_T], up_: NDArray[_T]) -> NDArray[_T]:
    """gate, up (N, K) -> (2 N', K): 16 rows of gate, then their 16 of up; N' = N zero-padded to a multiple of 16."""
    N, K = gate.shape
    padded = [np.pad(m, ((0, up(N, 16) - N), (0, 0))).reshape(-1, 1, 16, K) for m in (gate, up_)]
    return np.concatenate(padded, axis=1).reshape(-1, K)
