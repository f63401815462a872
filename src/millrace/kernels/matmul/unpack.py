"""Unpack panels into rows, exactly: the inverse of pack.py, for targets that need weights in another order.

A panel is a table of units (`_unit` has their fields), and each field is lines of 32 outputs, which become columns of
32 rows. NumPy transposes 1.5 to 2.5 10^9 elements a second, larger elements hardly slower, and half as many if their
lines are not in a core's first cache. So words are transposed, not bytes, and in blocks (docs/log.md has what was
tried).
"""

from collections.abc import Iterator
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.weights.quantized_matrix import SUPER_BLOCK, QuantisedMatrix
from millrace.kernels.arrays import Array
from millrace.kernels.declare import Scaling, WeightFormat
from millrace.kernels.layout import PANEL, matrix_bytes, n_groups, padded_k, panel_bytes, up
from millrace.kernels.matmul.pack import runs

_T = TypeVar("_T", bound=np.generic)

_BLOCK = 1 << 10  # bytes of a row transposed at a time: their lines, 32 KB, stay in the first cache
_SLAB = 1 << 20  # bytes of rows per slab: with a quarter of it, calls take 10 to 20 % more time
_WORDS = {  # of a line: type, and inputs per word
    WeightFormat.F32: (np.uint32, 1),
    WeightFormat.BF16: (np.uint32, 2),
    WeightFormat.W8: (np.uint32, 4),
    WeightFormat.W4: (np.uint32, 8),
    WeightFormat.FP8: (np.uint16, 2),
}


def unpack_floats(data: NDArray[np.uint8], format: WeightFormat, n: int, k: int) -> Array:
    """Unpack a whole matrix, one-dimensional -> (n, k) float32, or ml_dtypes.bfloat16 for BF16.

    n: rows without padding to whole panels; of a gated matrix 2 * up(n, 16), for part_halves()
    """
    floats = np.empty((up(n, PANEL), k), np.float32 if format == WeightFormat.F32 else ml_dtypes.bfloat16)
    for table, slab, inputs, _ in _tables(data, format, floats, 0, Scaling.PLAIN):
        _turn(table["words"], _by_panel(floats[slab])[:, :, inputs].view(np.uint8))
    return floats[:n]


def unpack_codes(
    data: NDArray[np.uint8], format: WeightFormat, n: int, k: int, group: int, scaling: Scaling
) -> QuantisedMatrix:
    """Unpack a whole matrix of W8, W4 or FP8 -> the codes and scales that pack_codes() packed.

    n: as for unpack_floats(), and part_codes(); group: 0 for FP8
    """
    e4m3, bits = format == WeightFormat.FP8, 4 if format == WeightFormat.W4 else 8
    zero = 0 if e4m3 or (bits == 4 and scaling % 2) else 1 << bits - 1
    codes, result = np.empty((up(n, PANEL), k), np.int8), _empty_scales(format, n, k, group, scaling)
    for table, slab, inputs, units in _tables(data, format, codes, group, scaling):
        _turn(table["words"], _by_panel(codes[slab])[:, :, inputs].view(np.uint8), zero, halves=bits == 4)
        for name, array in result.items():
            _turn_scales(table[name], _by_panel(array[slab]), units.start)
    if e4m3:
        ends = np.asarray(data).reshape(-1, panel_bytes(format, k, group))[:, -4 * PANEL :]
        result["scales"] = ends.view(np.float32).reshape(-1, 1)
    return QuantisedMatrix(codes[:n], group=group, bits=bits, e4m3=e4m3, **{name: a[:n] for name, a in result.items()})


def part_codes(q: QuantisedMatrix, n: int) -> tuple[QuantisedMatrix, QuantisedMatrix]:
    """Split the result of interleave_codes() into gate and up, n outputs each."""
    return q.map_rows(lambda rows: _half(rows, n, 0)), q.map_rows(lambda rows: _half(rows, n, 1))


def part_halves(rows: NDArray[_T], n: int) -> tuple[NDArray[_T], NDArray[_T]]:
    """Split the result of interleave_halves() into gate and up (n, K)."""
    return _half(rows, n, 0), _half(rows, n, 1)


def _half(rows: NDArray[_T], n: int, index: int) -> NDArray[_T]:
    assert len(rows) == 2 * up(n, 16), f"{len(rows)} rows for {n} of gate and {n} of up"
    return rows.reshape(-1, 2, 16, rows.shape[1])[:, index].reshape(-1, rows.shape[1])[:n]


def _unit_inputs(format: WeightFormat, group: int, scaling: Scaling) -> int:
    """Return the inputs of a unit that a panel repeats: a group, a super-block in two levels, or a word per output."""
    return SUPER_BLOCK if scaling >= Scaling.LEVELS else group or _WORDS[format][1]


def _unit(format: WeightFormat, inputs: int, group: int, scaling: Scaling) -> np.dtype[np.void]:
    """Return the fields of a unit, as in pack.py, named as in QuantisedMatrix; `inputs`: fewer at a panel's end."""
    word, size = _WORDS[format]
    lines = (padded_k(inputs, group) if group else up(inputs, size)) // size
    words: list[Any] = [("words", word, (lines, PANEL))]
    if not group:
        return np.dtype(words)
    kinds = ("scale", "minimum")[: 1 + scaling % 2]
    if scaling < Scaling.LEVELS:
        return np.dtype([*words, *((f"{kind}s", np.float16, (PANEL,)) for kind in kinds)])
    assert group % 8 == 0, f"groups of {group} in two levels, which only the last of a row may pad"
    upper: list[Any] = []
    for kind in kinds:
        upper += [(f"{kind}s", np.float16, (PANEL,)), (f"{kind}_levels", np.int8, (SUPER_BLOCK // group, PANEL))]
    return np.dtype(upper + words)


def _empty_scales(format: WeightFormat, n: int, k: int, group: int, scaling: Scaling) -> dict[str, NDArray[Any]]:
    """Allocate what units have besides words, for rows of whole panels."""
    inputs = _unit_inputs(format, group, scaling)
    unit = _unit(format, inputs, group, scaling)
    result: dict[str, NDArray[Any]] = {}
    for name in unit.names or ():
        if name != "words":
            width = n_groups(k, group if name.endswith("_levels") else inputs)
            result[name] = np.empty((up(n, PANEL), width), unit[name].base)
    return result


def _tables(
    data: NDArray[np.uint8], format: WeightFormat, rows: NDArray[Any], group: int, scaling: Scaling
) -> Iterator[tuple[NDArray[np.void], slice, slice, slice]]:
    """Yield units (P, U) of P panels at a time, with their rows, inputs and numbers: complete ones, then a shorter one.

    rows: the destination (N, K), N of whole panels
    """
    N, K = rows.shape
    assert data.nbytes == matrix_bytes(format, N, K, group, scaling), f"{data.nbytes} bytes of {format.name} {N, K}"
    panels, parts, at = np.asarray(data).reshape(-1, panel_bytes(format, K, group, scaling)), [], 0
    for inputs, units in runs(K, _unit_inputs(format, group, scaling)):
        count = units.stop - units.start
        unit = _unit(format, (inputs.stop - inputs.start) // count, group, scaling)
        parts.append((slice(at, at + count * unit.itemsize), unit, inputs, units))
        at += count * unit.itemsize
    step = max(_SLAB // (PANEL * K * rows.itemsize), 1)
    for first in range(0, len(panels), step):
        some = panels[first : first + step]
        slab = slice(first * PANEL, (first + len(some)) * PANEL)
        for place, unit, inputs, units in parts:
            yield some[:, place].view(unit), slab, inputs, units


def _by_panel(rows: NDArray[_T]) -> NDArray[_T]:
    """(N, K) -> (P, PANEL, K)"""
    return rows.reshape(-1, PANEL, rows.shape[1])


def _turn_scales(lines: NDArray[Any], rows: NDArray[Any], first: int) -> None:
    """lines (P, U, PANEL), or levels (P, U, L, PANEL) -> rows (P, PANEL, .), at unit `first` and the next U.

    A super-block has levels for groups beyond the last.
    """
    P, U = lines.shape[:2]
    lines = lines.reshape(P, -1, PANEL)  # copies levels, of which so few at a time take as long as the codes
    start = first * lines.shape[1] // U
    target = rows[:, :, start : start + lines.shape[1]]
    target[:] = lines[:, : target.shape[2]].transpose(0, 2, 1)


def _turn(words: NDArray[Any], rows: NDArray[np.uint8], zero: int = 0, *, halves: bool = False) -> None:
    """words (P, U, L, PANEL) -> rows (P, PANEL, U * used): the first `used` bytes of each unit's L words.

    zero: subtracted from each byte
    halves: a word has eight INT4 codes, each of which becomes a byte
    """
    P, U, L = words.shape[:3]
    lines = words.reshape(P, -1, PANEL)  # a copy if scales lie between: runs of four lines are slow to transpose
    word = np.dtype(np.uint64) if halves else words.dtype
    if rows.shape[2] == U * L * word.itemsize:  # nothing is padded, so blocks may have any words
        U, L = U * L, 1
    used = rows.shape[2] // U
    for units, blocks in runs(U, max(_BLOCK // (L * word.itemsize), 1)):
        count = blocks.stop - blocks.start
        size = (units.stop - units.start) // count
        turned = np.empty((P, count, PANEL, size * L), word)
        turned[:] = lines[:, units.start * L : units.stop * L].reshape(P, count, -1, PANEL).transpose(0, 1, 3, 2)
        if halves:
            _spread(turned)
        result = turned.view(np.uint8)
        if zero:
            result -= np.uint8(zero)  # in place: NumPy's copy to memory is faster than its arithmetic
        target = rows[:, :, units.start * used : units.stop * used].reshape(P, PANEL, count, size, used)
        target.transpose(0, 2, 1, 3, 4)[:] = result.reshape(P, count, PANEL, size, -1)[..., :used]


def _spread(words: NDArray[np.uint64]) -> None:
    """Spread eight INT4 codes in the low half of each word over its bytes, in place."""
    words |= words << np.uint64(28)  # the high half of byte b becomes the low half of byte b + 4
    words &= np.uint64(0x0F0F0F0F0F0F0F0F)
