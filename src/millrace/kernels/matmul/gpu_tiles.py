"""Tiles of the product with coded weights on a GPU: which there are, and by which of them each product goes.

None of them changes what is summed in which order along a row's inputs, but for those of one row and of eight.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from millrace.kernels.matmul.coded import E4M3, Matrix, QuantizedRows

PREFETCH = 1024  # bytes of each row of codes that a program asks for while kernels before it still run
EIGHT = 8  # columns of a tensor core's product
MANY_ROWS = 64  # from here on arithmetic takes the time, not the reading of weights


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns of a program, its warps, and how many blocks of weights are on their way at a time.

    Of one row and of eight: of cuda_few.py's kernels, which hold their inputs themselves. One row has one stage
    """

    rows: int
    columns: int
    warps: int
    stages: int = 3


ONE_OF_E4M3 = (Tile(1, 4, 4, 1), Tile(1, 8, 4, 1), Tile(1, 2, 4, 1), Tile(1, 4, 2, 1))
EIGHT_OF_WORDS = (Tile(8, 16, 8, 2), Tile(8, 16, 4, 2), Tile(8, 16, 8, 1), Tile(8, 32, 4, 1))
# The first is the rule: a tensor core's least rows, or what many fill without spilling. The others have more or fewer
# programs for the multiprocessors, and more or fewer bytes on their way to each.
_FEW = (
    Tile(16, 32, 4, 5), Tile(16, 32, 4, 9), Tile(16, 32, 4), Tile(16, 32, 2, 5), Tile(16, 64, 8, 6), Tile(16, 64, 8, 4),
)  # fmt: skip
_SOME = (Tile(16, 32, 4), Tile(32, 32, 4), Tile(32, 64, 4, 4), Tile(64, 32, 4), Tile(64, 64, 4, 4), Tile(64, 64, 8))
_MANY = (Tile(64, 64, 8), Tile(64, 128, 8), Tile(128, 64, 8))


def tiles(rows: int) -> tuple[Tile, ...]:
    """That products of so many rows may go by; the first that takes them is the rule."""
    if rows <= EIGHT:
        return (*(ONE_OF_E4M3 if rows == 1 else ()), *EIGHT_OF_WORDS, *_FEW)
    return _FEW if rows <= 16 else _SOME if rows < MANY_ROWS else _MANY


def takes(tile: Tile, x: Matrix, w: QuantizedRows) -> bool:
    """Whether a tile is of a kernel for such rows and weights.

    `one_row` is for E4M3, a scale for each row; `few_rows_of_words` for 16-bit floats, halves or int8 of whole words.
    """
    if tile.rows > EIGHT:
        return True
    if tile.rows == EIGHT:
        few = isinstance(x, torch.Tensor) and x.itemsize == 2 and 0 < len(x) <= EIGHT
        return few and (w.width % 8 == 0 if w.halves else w.codes.dtype == torch.int8 and w.width % 4 == 0)
    per_channel = w.codes.dtype == E4M3 and w.group >= w.width
    return per_channel and isinstance(x, QuantizedRows) and x.codes.dtype == E4M3 and len(x.codes) == 1


def region_of(x: Matrix, w: QuantizedRows) -> str:
    """What products have in common that a time holds for, but for the number of rows."""
    return f"coded_product {len(w.codes)} x {w.width}, {_kind(w)} by {_kind(x)}"


def _kind(rows: Matrix) -> str:
    if not isinstance(rows, QuantizedRows):
        return _name(rows.dtype)
    codes = "int4" if rows.halves else _name(rows.codes.dtype)
    groups = f" in {rows.group}" if rows.group < rows.width else ""
    return f"{codes}{groups}{' with minimums' if rows.minimums is not None else ''}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Tiles:
    """found: by region, for at most so many rows a tile, ascending; None, or what is not there: it goes by the rule."""

    result: Mapping[str, tuple[tuple[float, Tile | None], ...]] = field(default_factory=dict)

    def of(self, x: Matrix, w: QuantizedRows) -> Tile:
        n = rows_of(x)
        for most, tile in self.result.get(region_of(x, w), ()) if self.result else ():
            if n <= most:  # of no rows at all: not one that is for one row
                return tile if tile and takes(tile, x, w) else rule(x, w)
        return rule(x, w)


def rule(x: Matrix, w: QuantizedRows) -> Tile:
    first, *rest = tiles(rows_of(x))
    return first if takes(first, x, w) else next(tile for tile in rest if takes(tile, x, w))


RULES = Tiles()


def rows_of(x: Matrix) -> int:
    return int((x.codes if isinstance(x, QuantizedRows) else x).shape[0])
