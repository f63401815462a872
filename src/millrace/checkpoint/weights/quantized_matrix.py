"""Quantized matrices of checkpoints and engines: low-bit codes, and the scales that convert them to weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

SUPER_BLOCK = 256  # inputs that share the outer one of two levels of scales
Array = NDArray[Any]
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)  # FP8 with 3 mantissa bits: up to 448, no infinity, two NaN codes


@dataclass(frozen=True, slots=True)
class QuantisedFormat:
    """The format of a quantized matrix: codes of `bits` bits, one scale per output and `group` inputs.

    minimums: codes are unsigned, and each group has a minimum that is added
    two_levels: scales and minimums are small integers, times a float16 per output and SUPER_BLOCK inputs
    e4m3: the codes are 8-bit floats, with one float scale per output; group is then 0
    """

    bits: int
    group: int  # one group per row: its length, rounded up to the multiple of 4 that kernels need
    minimums: bool = False
    two_levels: bool = False
    e4m3: bool = False

    @property
    def symmetric(self) -> bool:
        """Whether codes are signed, with one float16 scale per group: the format that this package quantizes to."""
        return not (self.minimums or self.two_levels)


FP8 = QuantisedFormat(8, 0, e4m3=True)


def joined_format(formats: Sequence[QuantisedFormat | None]) -> QuantisedFormat | None:
    """Return the format of matrices that become one, with the widest codes; None for a mixture."""
    widest = max((f.bits for f in formats if f), default=0)
    kinds = {f and replace(f, bits=widest) for f in formats}
    return kinds.pop() if len(kinds) == 1 else None


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """A matrix w (N, K) = codes * the group's scale + the group's minimum, exactly.

    codes: (N, K) int8 in -2^(bits-1) .. 2^(bits-1)-1; in 0 .. 2^bits-1 for fewer than 8 bits with minimums
    scales, minimums: (N, G) float16; with two levels (N, K / SUPER_BLOCK) float16, which are multiplied by a group's
        scale_levels and minimum_levels, (N, G) int8
    e4m3: codes are the bytes of the floats, scales (N, 1) float32
    """

    codes: NDArray[np.int8]
    scales: NDArray[np.float16] | NDArray[np.float32]
    group: int
    bits: int
    minimums: NDArray[np.float16] | None = None
    scale_levels: NDArray[np.int8] | None = None
    minimum_levels: NDArray[np.int8] | None = None
    e4m3: bool = False

    @property
    def format(self) -> QuantisedFormat:
        levels = self.scale_levels is not None
        return QuantisedFormat(self.bits, self.group, self.minimums is not None, levels, self.e4m3)

    @property
    def floats(self) -> list[Array]:
        """Return the arrays stored as floats, which may contain infinities or NaN; not the codes of E4M3."""
        return [self.scales] if self.minimums is None else [self.scales, self.minimums]

    def group_scales(self) -> NDArray[np.float64]:
        """Return each group's scale, (N, G)."""
        return self._of_groups(self.scales, self.scale_levels)

    def group_minimums(self) -> NDArray[np.float64]:
        """Return each group's minimum, (N, G); zeros if there are none."""
        if self.minimums is None:
            return np.zeros_like(self.group_scales())
        return self._of_groups(self.minimums, self.minimum_levels)

    def values(self) -> Array:
        """Return the codes as numbers, before scaling, (N, K)."""
        return self.codes.view(E4M3).astype(np.float64) if self.e4m3 else self.codes

    def dequantise(self) -> NDArray[np.float64]:
        if self.e4m3:
            return self.values() * self.scales.astype(np.float64)
        return self.codes * self._wide(self.group_scales()) + self._wide(self.group_minimums())

    def map_rows(self, change: Callable[[Array], Array]) -> "QuantisedMatrix":
        """Apply the same change of rows to all arrays."""
        arrays: dict[str, Any] = {name: change(array) for name, array in self._arrays().items()}
        return replace(self, **arrays)

    def _arrays(self) -> dict[str, Array]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}

    def _of_groups(self, values: Array, levels: NDArray[np.int8] | None) -> NDArray[np.float64]:
        wide = values.astype(np.float64)
        if levels is None:
            return wide
        return np.repeat(wide, SUPER_BLOCK // self.group, axis=1)[:, : levels.shape[1]] * levels

    def _wide(self, of_groups: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.repeat(of_groups, self.group, axis=1)[:, : self.codes.shape[1]]


def combined(parts: Sequence[QuantisedMatrix], combine: Callable[[list[Array]], Array]) -> QuantisedMatrix:
    """Combine matrices of one format to one; `combine` maps the rows of their arrays to its rows."""
    first = parts[0]
    assert all(p.format == first.format for p in parts), [p.format for p in parts]
    arrays = [p._arrays() for p in parts]
    rows: dict[str, Any] = {name: combine([a[name] for a in arrays]) for name in arrays[0]}
    return replace(first, **rows)
