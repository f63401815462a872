"""Tiles of the quantized matmul on a GPU, and the choice of a tile for each matmul.

The choice does not change the order of sums along a row's inputs, except for tiles of one row and of eight.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from millrace.kernels.matmul.coded import E4M3, Matrix, QuantizedRows

PREFETCH = 1024  # bytes of each row of codes that a program prefetches while previous kernels still run
EIGHT = 8  # columns of a tensor core's product
MANY_ROWS = 64  # from here on arithmetic dominates, not reading weights


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns of a program, its warps, and the blocks of weights in flight.

    Tiles of one row and of eight belong to the kernels of cuda_few.py, which hold their inputs themselves. One row has
    one stage
    """

    rows: int
    columns: int
    warps: int
    stages: int = 3


ONE_OF_E4M3 = (Tile(1, 4, 4, 1), Tile(1, 8, 4, 1), Tile(1, 2, 4, 1), Tile(1, 4, 2, 1))
EIGHT_OF_WORDS = (Tile(8, 16, 8, 2), Tile(8, 16, 4, 2), Tile(8, 16, 8, 1), Tile(8, 32, 4, 1))
# The first is the default rule: a tensor core's least rows, or what many rows fill without spilling. The others have
# more or fewer programs per multiprocessor, and more or fewer bytes in flight.
_FEW = (
    Tile(16, 32, 4, 5), Tile(16, 32, 4, 9), Tile(16, 32, 4), Tile(16, 32, 2, 5), Tile(16, 64, 8, 6), Tile(16, 64, 8, 4),
)  # fmt: skip
_SOME = (Tile(16, 32, 4), Tile(32, 32, 4), Tile(32, 64, 4, 4), Tile(64, 32, 4), Tile(64, 64, 4, 4), Tile(64, 64, 8))
_MANY = (Tile(64, 64, 8), Tile(64, 128, 8), Tile(128, 64, 8))


def tiles(rows: int) -> tuple[Tile, ...]:
    """Return the tiles for matmuls of `rows` rows; the first that takes them is the default rule."""
    if rows <= EIGHT:
        return (*(ONE_OF_E4M3 if rows == 1 else ()), *EIGHT_OF_WORDS, *_FEW)
    return _FEW if rows <= 16 else _SOME if rows < MANY_ROWS else _MANY


def takes(tile: Tile, x: Matrix, w: QuantizedRows) -> bool:
    """Return whether a tile's kernel takes such rows and weights.

    `one_row` takes E4M3 with a scale per row; `few_rows_of_words` takes 16-bit floats, with INT4 or INT8 in whole
    words.
    """
    if tile.rows > EIGHT:
        return True
    if tile.rows == EIGHT:
        few = isinstance(x, torch.Tensor) and x.itemsize == 2 and 0 < len(x) <= EIGHT
        return few and (w.width % 8 == 0 if w.halves else w.codes.dtype == torch.int8 and w.width % 4 == 0)
    per_channel = w.codes.dtype == E4M3 and w.group >= w.width
    return per_channel and isinstance(x, QuantizedRows) and x.codes.dtype == E4M3 and len(x.codes) == 1


def region_of(x: Matrix, w: QuantizedRows) -> str:
    """Return the name of the region: matmuls that differ in nothing but rows, and share timings."""
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
    """result: per region, tiles by their largest row count, ascending; without an entry the default rule applies"""

    result: Mapping[str, tuple[tuple[float, Tile | None], ...]] = field(default_factory=dict)

    def select_tile(self, x: Matrix, w: QuantizedRows) -> Tile:
        n = rows_of(x)
        for most, tile in self.result.get(region_of(x, w), ()) if self.result else ():
            if n <= most:  # except a tile for one row when there are none
                return tile if tile and takes(tile, x, w) else rule(x, w)
        return rule(x, w)


def rule(x: Matrix, w: QuantizedRows) -> Tile:
    first, *rest = tiles(rows_of(x))
    return first if takes(first, x, w) else next(tile for tile in rest if takes(tile, x, w))


RULES = Tiles()


def rows_of(x: Matrix) -> int:
    return int((x.codes if isinstance(x, QuantizedRows) else x).shape[0])
