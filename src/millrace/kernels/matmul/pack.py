"""Packed weights: panels of 32 outputs in the order of the inner loop, the same for all instruction sets.

    F32   [N/32][K][32] float
    BF16  [N/32][K/2][32][2] bfloat16
    W8    [N/32] groups of ([K/4][32][4] uint8 = code + 128, then the scales of 32 outputs)
    FP8   [N/32] of ([K/2][32][2] bytes of E4M3, then the float scales of 32 outputs)
    W4    [N/32] groups of ([K/8][32][4] bytes, then the scales of 32 outputs); byte b of a block holds code + 8 (with
          minimums, the code) of input 8i + b in its low nibble and of 8i + 4 + b in its high one
Scales are float16; with minimums, 32 of these follow. In two levels nothing follows a group: each super-block of 256
inputs begins with 32 float16 scales, then the int8 ones of its groups [256/group][32], then minimums alike.
Weights that meet rows of HADAMARD_Q8 are transformed as these are before they are rounded: `hadamard` below.
Each group is zero-padded to a multiple of 8 inputs, N to a multiple of 32 outputs (layout.py counts the bytes).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.weights.quantized_matrix import (
    E4M3,
    FP8,
    SUPER_BLOCK,
    QuantisedFormat,
    QuantisedMatrix,
    combined,
)
from millrace.errors import CheckpointError
from millrace.graph.types import Constant
from millrace.kernels.arrays import Array
from millrace.kernels.declare import HADAMARD_BLOCK, Scaling, WeightFormat
from millrace.kernels.layout import PANEL, n_groups, padded_k, panel_bytes, up

_T = TypeVar("_T", bound=np.generic)
_R = TypeVar("_R")


class SlabTask(Protocol):
    """Runs work on each slab of a matrix, by the number of its first row: map(), or a pool's map."""

    def __call__(self, work: Callable[[int], _R], starts: Iterable[int], /) -> Iterator[_R]: ...


def finite(array: NDArray[np.generic], dtype: np.dtype[_T]) -> NDArray[_T]:
    """Convert an array. raises CheckpointError if an element is not finite, or too large for the type"""
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    if not np.isfinite(cast.astype(np.float32, copy=False)).all():  # for bfloat16 itself it takes ten times as long
        raise CheckpointError(
            f"weights that are not finite, or too large for {dtype.name}", "numbers",
            "correct them, download the checkpoint again, or choose another",
        )  # fmt: skip
    return cast


def kept_format(constant: Constant, bits: int, group: int) -> QuantisedFormat | None:
    """Return the checkpoint's format if its own codes are packed unchanged; None if weights are quantized here."""
    stored = constant.format
    return stored if stored and stored.bits <= bits and stored.group == group else None


def scaling_of(constants: Sequence[Constant], bits: int, group: int) -> Scaling:
    """Return the scaling of a matrix packed from these weights; all have one format, or are symmetric."""
    result = {scaling(kept_format(c, bits, group)) for c in constants}
    assert len(result) == 1, f"weights of {result} in one matrix"
    return result.pop()


def scaling(format: QuantisedFormat | None) -> Scaling:
    """Return the scaling of a format. None: codes that are made here"""
    return Scaling(format.minimums + 2 * format.two_levels) if format else Scaling.PLAIN


def stored_codes(constants: Sequence[Constant], bits: int, group: int) -> list[QuantisedMatrix] | None:
    """Return the weights (N, K) in the checkpoint's own codes; None if it does not have them for all."""
    stored = [c.stored(bits, group) if c.stored else None for c in constants]
    matrices = [matrix for matrix in stored if matrix]
    for matrix in matrices:
        for array in matrix.floats:
            finite(array, array.dtype)
    return matrices if len(matrices) == len(stored) else None


_LARGEST_E4M3, _MIN_SCALE = np.float32(448), np.float32(2.0**-126)  # a smaller scale would be flushed to zero
_COARSE = 0.1  # relative error of a scale; groups beyond it must be a negligible part


def rounded_codes(w: Array, bits: int, group: int, hadamard_group: int = 0) -> QuantisedMatrix:
    """w (N, K) -> codes of `bits` (4 or 8) with one scale per `group` inputs.

    The scale maps the group's element of largest magnitude to -2^(bits-1), so that the whole range of codes is used.
    hadamard_group: of transformed input rows; 0: they are not transformed
    raises CheckpointError for elements that are not finite, or so small that float16 scales would change them
    error: |w - dequantise| <= scale/2, one scale where the opposite extreme is clipped, plus the scale's own rounding
    """
    N, K = w.shape
    codes, scales, lost = np.empty((N, K), np.int8), np.empty((N, n_groups(K, group)), np.float16), 0.0
    for slab in _slabs(N, K):
        result, energy = _rounded(w[slab], bits, group, hadamard_group)
        codes[slab], scales[slab] = result.codes, result.scales
        lost += energy
    _check_lost(lost, [w], bits)
    return QuantisedMatrix(codes, scales, group, bits)


def rounded_e4m3(w: Array) -> QuantisedMatrix:
    """w (N, K) -> the nearest codes, half to even, with the scales that map each row's largest magnitude to 448.

    raises CheckpointError if an element is not finite
    error: |w - dequantise| <= |w| / 16, or half of 2^-9 scales for elements that are tiny in their row
    """
    x = finite(w, np.dtype(np.float32))
    scales = np.maximum(np.abs(x).max(axis=1, keepdims=True) / _LARGEST_E4M3, _MIN_SCALE)
    codes = np.clip(x / scales, -_LARGEST_E4M3, _LARGEST_E4M3).astype(E4M3).view(np.int8)
    return QuantisedMatrix(codes, scales, FP8.group, FP8.bits, e4m3=True)


def _rounded(w: Array, bits: int, group: int, hadamard_group: int) -> tuple[QuantisedMatrix, float]:
    """Quantize a slab; also return the energy of groups whose scales float16 does not represent."""
    N, K = w.shape
    codes, scales, lost = np.empty((N, K), np.int8), np.empty((N, n_groups(K, group)), np.float16), 0.0
    for inputs, groups in runs(K, group):
        columns = _columns(w[:, inputs], groups)
        if hadamard_group:
            _transform(columns, hadamard_group)
        result, of_groups, energy = _rounded_columns(columns, bits)
        codes[:, inputs], scales[:, groups] = _rows(result, N), of_groups.reshape(N, -1)
        lost += energy
    return QuantisedMatrix(codes, scales, group, bits), lost


def runs(K: int, group: int) -> list[tuple[slice, slice]]:
    """Return inputs and group numbers of all complete groups, and of the last one if it is shorter."""
    n_full = K // group
    result = [(slice(0, n_full * group), slice(0, n_full)), (slice(n_full * group, K), slice(n_full, n_full + 1))]
    return [(inputs, groups) for inputs, groups in result if inputs.start < inputs.stop]


def _columns(w: Array, groups: slice) -> NDArray[np.float32]:
    """Copy (N, groups * n) -> (n, N * groups): a group becomes a column, because summing whole rows is much faster."""
    grouped = w.astype(np.float32, copy=False).reshape(len(w) * (groups.stop - groups.start), -1)
    return np.array(grouped.T, order="C")


def _rows(columns: NDArray[_T], N: int) -> NDArray[_T]:
    """Undo `_columns`."""
    return np.ascontiguousarray(columns.T).reshape(N, -1)


def _rounded_columns(x: NDArray[np.float32], bits: int) -> tuple[NDArray[np.int8], NDArray[np.float16], float]:
    """x (n, C), which is overwritten -> codes (n, C), scales (C,), and the energy lost."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    top, bottom = x.max(axis=0), x.min(axis=0)
    exact = np.where(-bottom >= top, bottom, top) / np.float32(low)
    scales = finite(exact, np.dtype(np.float16))
    divisor = scales.astype(np.float32)
    coarse = np.abs(divisor - exact) > _COARSE * np.abs(exact)
    lost = _energy(x[:, coarse]) if coarse.any() else 0.0
    inverse = np.divide(1, divisor, out=np.zeros_like(divisor), where=divisor != 0)
    np.multiply(x, inverse, out=x)
    np.rint(x, out=x)
    np.clip(x, low, high, out=x)
    return x.astype(np.int8), scales, lost


def _check_lost(lost: float, matrices: Sequence[Array], bits: int) -> None:
    """Check the energy lost, which a transform preserves. raises CheckpointError if it is not negligible"""
    if lost and lost > _COARSE**2 * sum(_energy(w[slab]) for w in matrices for slab in _slabs(*w.shape)):
        raise CheckpointError(
            "weights too small for the scales of their groups, in float16",
            f"groups that reach {2 ** (bits - 1) * 1e-6:.0e} or more",
            "build with --precision bf16, or bf16 for this matrix",
        )


def _energy(w: Array) -> float:
    return float(np.square(w, dtype=np.float64).sum())


# A basis of a matmul's inputs without outliers, for rounding to eight bits. One outlier in a group determines the scale
# of all of it; a Hadamard matrix spreads it evenly. With H = H^T and H H = 1, x H times (w H)^T is x times w^T, while
# the largest element of x H is about three times its root mean square for any x. Weights are transformed once, when
# they are packed; activations when they are rounded (convert/). source: QuaRot (arXiv:2404.00456), whose rotations span
# the model's width; here each group separately


def hadamard(x: Array, group: int) -> NDArray[np.float32]:
    """x (M, K): multiply each group, in blocks of powers of two, largest first, by the Hadamard matrix of the block.

    Computed in float32, step by step like the kernels, with the same bits.
    """
    M, K = x.shape
    y = np.empty((M, K), np.float32)
    for slab in _slabs(M, K):
        for inputs, groups in runs(K, group):
            columns = _columns(x[slab, inputs], groups)
            _transform(columns, group)
            y[slab, inputs] = _rows(columns, len(y[slab]))
    return y


def _transform(columns: NDArray[np.float32], group: int) -> None:
    """Transform columns, each a group of weights, in place: in blocks of powers of two."""
    for start in range(0, len(columns), group):
        at, end = start, min(start + group, len(columns))
        while at < end:
            size = min(HADAMARD_BLOCK, 1 << (end - at).bit_length() - 1)
            _transform_block(columns[at : at + size])
            at += size


def _transform_block(x: NDArray[np.float32]) -> None:
    """Multiply x (n, C), n a power of two, by Sylvester's matrix of size n over sqrt(n), in place."""
    n, now, other = len(x), x, np.empty_like(x)
    distance = 1
    while distance < n:
        pairs, result = (a.reshape(n // (2 * distance), 2, -1) for a in (now, other))
        np.add(pairs[:, 0], pairs[:, 1], out=result[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=result[:, 1])
        now, other, distance = other, now, 2 * distance
    np.multiply(now, np.float32(1 / np.sqrt(n)), out=x)


_SLAB = 1 << 18  # weights per slab, which fit into a core's cache, and limit the temporary memory


def _starts(N: int, K: int) -> range:
    """Return the first rows of slabs of whole panels."""
    return range(0, N, max(_SLAB // K // PANEL, 1) * PANEL)


def _slabs(N: int, K: int) -> list[slice]:
    starts = _starts(N, K)
    return [slice(start, min(N, start + starts.step)) for start in starts]


def pack_matrix(
    w: Array,
    format: WeightFormat,
    group: int,
    hadamard_group: int = 0,
    *,
    up_: Array | None = None,
    run: SlabTask = map,
) -> NDArray[np.uint8]:
    """Pack w (N, K) -> bytes, one-dimensional. `group` is 0 for F32, BF16 and FP8.

    hadamard_group: of transformed input rows
    up_: (N, K); w is its gate, and rows of both are interleaved
    raises CheckpointError if an element is not finite
    """
    matrices = [w] if up_ is None else [w, up_]
    K, N = w.shape[1], len(w) if up_ is None else 2 * up(len(w), 16)
    bits = {WeightFormat.W8: 8, WeightFormat.W4: 4}.get(format)

    def packed(slab: slice) -> tuple[NDArray[np.uint8], float]:
        rows = _whole_panels(_float_rows(matrices, slab))
        if format == WeightFormat.FP8:
            return _pack_e4m3(rounded_e4m3(rows)), 0.0
        if bits is None:
            return _pack_floats(rows, format), 0.0
        codes, lost = _rounded(rows, bits, group, hadamard_group)
        return _pack_groups(codes), lost

    data, lost = _packed(packed, N, K, panel_bytes(format, K, group), run)
    if bits is not None:
        _check_lost(lost, matrices, bits)
    return data


def pack_codes(q: QuantisedMatrix, format: WeightFormat, run: SlabTask = map) -> NDArray[np.uint8]:
    """Pack codes and scales unchanged. `format`: W8 or W4, with as many bits as `q`, or FP8."""
    (N, K), pack = q.codes.shape, _pack_e4m3 if q.e4m3 else _pack_groups

    def packed(slab: slice) -> tuple[NDArray[np.uint8], float]:
        return pack(q.map_rows(lambda array: _whole_panels(array[slab]))), 0.0

    return _packed(packed, N, K, panel_bytes(format, K, q.group, scaling(q.format)), run)[0]


def _packed(
    packed: Callable[[slice], tuple[NDArray[np.uint8], float]], N: int, K: int, panel: int, run: SlabTask
) -> tuple[NDArray[np.uint8], float]:
    """Return the bytes of all slabs, each written to its place when it is done, and the sum of what they lost.

    panel: bytes of one panel
    """
    out, starts = np.empty(up(N, PANEL) // PANEL * panel, np.uint8), _starts(N, K)

    def put(start: int) -> float:
        end = min(N, start + starts.step)
        out[start // PANEL * panel : up(end, PANEL) // PANEL * panel], lost = packed(slice(start, end))
        return lost

    return out, sum(run(put, starts))


def _float_rows(matrices: Sequence[Array], slab: slice) -> NDArray[np.float32]:
    """Return a slab of one matrix, or of two interleaved ones; it begins with a panel, and so with a whole pair."""
    n = len(matrices)
    parts = [m[slab.start // n : slab.stop // n].astype(np.float32, copy=False) for m in matrices]
    return parts[0] if n == 1 else interleave_halves(*parts)


def _whole_panels(rows: NDArray[_T], panel: int = PANEL) -> NDArray[_T]:
    missing = up(rows.shape[0], panel) - rows.shape[0]
    return np.pad(rows, ((0, missing), (0, 0))) if missing else rows


def _pack_floats(w: NDArray[np.float32], format: WeightFormat) -> NDArray[np.uint8]:
    N, K = w.shape
    if format == WeightFormat.F32:
        words = finite(w, np.dtype(np.float32))
    else:
        wide = np.zeros((N, padded_k(K, 0)), ml_dtypes.bfloat16)
        wide[:, :K] = finite(w, np.dtype(ml_dtypes.bfloat16))
        words = wide.view(np.float32)  # pairs
    return np.ascontiguousarray(words.reshape(N // PANEL, PANEL, -1).transpose(0, 2, 1)).reshape(-1).view(np.uint8)


def _pack_e4m3(q: QuantisedMatrix) -> NDArray[np.uint8]:
    N, K = q.codes.shape
    wide = np.zeros((N, padded_k(K, 0)), np.int8)
    wide[:, :K] = q.codes
    pairs = wide.view(np.int16).reshape(N // PANEL, PANEL, -1).transpose(0, 2, 1)
    lines = np.ascontiguousarray(pairs).reshape(len(pairs), -1).view(np.uint8)
    scales = q.scales.astype(np.float32).reshape(N // PANEL, PANEL).view(np.uint8)
    return np.concatenate([lines, scales], axis=1).reshape(-1)


def _pack_groups(q: QuantisedMatrix) -> NDArray[np.uint8]:
    levels, lines, parts = SUPER_BLOCK // q.group, _lines(q), []
    floats = [_of_panels(array) for array in (q.scales, q.minimums) if array is not None]
    for g in range(n_groups(q.codes.shape[1], q.group)):
        if q.scale_levels is not None and g % levels == 0:
            parts += [_super_block(floats[0], q.scale_levels, g // levels, levels)]
            if q.minimum_levels is not None:
                parts += [_super_block(floats[1], q.minimum_levels, g // levels, levels)]
        parts.append(lines[g])
        if q.scale_levels is None:
            parts += [array[g] for array in floats]
    return np.concatenate(parts, axis=1).reshape(-1)


def _lines(q: QuantisedMatrix) -> list[NDArray[np.uint8]]:
    """Return the lines (N/32, bytes) of each group of codes (N, K)."""
    zero = 0 if q.bits == 4 and q.minimums is not None else 1 << q.bits - 1
    N, K = q.codes.shape
    result: list[NDArray[np.uint8]] = []
    for inputs, groups in runs(K, q.group):
        part = q.codes[:, inputs].view(np.uint8).reshape(N, groups.stop - groups.start, -1)
        codes = np.full((*part.shape[:2], up(part.shape[2], 8)), zero, np.uint8)
        np.add(part, np.uint8(zero), out=codes[:, :, : part.shape[2]])  # wraps negative codes to the intended bytes
        words = codes.view(np.uint32)  # of four inputs
        if q.bits == 4:
            words = words[:, :, ::2] | words[:, :, 1::2] << np.uint32(4)
        panels = np.ascontiguousarray(words.reshape(N // PANEL, PANEL, *words.shape[1:]).transpose(2, 0, 3, 1))
        result.extend(panels.reshape(*panels.shape[:2], -1).view(np.uint8))
    return result


def _super_block(values: NDArray[np.uint8], levels: NDArray[np.int8], block: int, n_levels: int) -> NDArray[np.uint8]:
    """Pack scales, as from `_of_panels`, and their levels (N, G) of one super-block -> (N/32, bytes).

    Groups beyond the last have zeros.
    """
    own = levels[:, block * n_levels : (block + 1) * n_levels]
    n_full = np.pad(own, ((0, 0), (0, n_levels - own.shape[1]))).reshape(-1, PANEL, n_levels)
    lower = np.ascontiguousarray(n_full.transpose(0, 2, 1)).reshape(len(n_full), -1).view(np.uint8)
    return np.concatenate([values[block], lower], axis=1)


def _of_panels(values: Array) -> NDArray[np.uint8]:
    """(N, G) -> (G, N/32, 64)"""
    N, G = values.shape
    return np.ascontiguousarray(values.T).reshape(G, N // PANEL, PANEL).view(np.uint8)


def interleave_codes(gate: QuantisedMatrix, up_: QuantisedMatrix) -> QuantisedMatrix:
    """Interleave codes as `interleave_halves`; both have one format."""
    return combined((gate, up_), lambda halves: interleave_halves(*halves))


def interleave_halves(gate: NDArray[_T], up_: NDArray[_T]) -> NDArray[_T]:
    """gate, up (N, K) -> (2 N', K): 16 rows of gate, then their 16 of up; N' = N zero-padded to a multiple of 16."""
    K = gate.shape[1]
    padded = [_whole_panels(m, 16).reshape(-1, 1, 16, K) for m in (gate, up_)]
    return np.concatenate(padded, axis=1).reshape(-1, K)
