"""Tiles of the product with coded weights on a GPU: which there are, and by which of them each product goes.

None of them changes what is summed in which order along a row's inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from millrace.kernels.matmul.coded import CodedRows, Matrix

MANY_ROWS = 64  # from here on arithmetic takes the time, not the reading of weights


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns of a program, its warps, and how many blocks of weights are on their way at a time."""

    rows: int
    columns: int
    warps: int
    stages: int = 3


# The first is the rule: a tensor core's least rows, or what many fill without spilling. The others have more or fewer
# programs for the multiprocessors, and more or fewer bytes on their way to each.
_FEW = (
    Tile(16, 32, 4), Tile(16, 16, 2, 4), Tile(16, 16, 4, 6), Tile(16, 32, 2, 5), Tile(16, 32, 4, 5), Tile(16, 64, 8, 6),
    Tile(16, 64, 8, 4), Tile(16, 128, 8),
)  # fmt: skip
_SOME = (Tile(16, 32, 4), Tile(32, 32, 4), Tile(32, 64, 4, 4), Tile(64, 32, 4), Tile(64, 64, 4, 4), Tile(64, 64, 8))
_MANY = (Tile(64, 64, 8), Tile(64, 128, 8), Tile(128, 64, 8))


def tiles(rows: int) -> tuple[Tile, ...]:
    """That products of so many rows may go by; the first is the rule."""
    return _FEW if rows <= 16 else _SOME if rows < MANY_ROWS else _MANY


def region_of(x: Matrix, w: CodedRows) -> str:
    """What products have in common that a time holds for, but for the number of rows."""
    return f"coded_product {len(w.codes)} x {w.width}, {_kind(w)} by {_kind(x)}"


def _kind(rows: Matrix) -> str:
    if not isinstance(rows, CodedRows):
        return _name(rows.dtype)
    codes = "int4" if rows.halves else _name(rows.codes.dtype)
    groups = f" in {rows.group}" if rows.group < rows.width else ""
    return f"{codes}{groups}{' with minimums' if rows.minimums is not None else ''}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Tiles:
    """found: by region, for at most so many rows a tile, ascending. What is not there goes by the rule."""

    found: Mapping[str, tuple[tuple[float, Tile], ...]] = field(default_factory=dict)

    def of(self, x: Matrix, w: CodedRows) -> Tile:
        n = rows_of(x)
        for most, tile in self.found.get(region_of(x, w), ()) if self.found else ():
            if n <= most:
                return tile
        return tiles(n)[0]


RULES = Tiles()


def rows_of(x: Matrix) -> int:
    return len(x.codes if isinstance(x, CodedRows) else x)
