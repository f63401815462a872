"""A matrix as a checkpoint or an engine may hold it: codes of a few bits, and the scales that make weights of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

SUPER_BLOCK = 256  # inputs that share the upper one of two levels of scales
Array = NDArray[Any]
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)  # FP8 with 3 bits of mantissa: up to 448, no infinity, two codes of NaN


@dataclass(frozen=True, slots=True)
class QuantisedFormat:
    """What is known of such a matrix before it is read: codes of `bits`, one scale for each output and `group` inputs.

    minimums: codes count from 0, and each group has a minimum that is added
    two_levels: scales and minimums are small integers, times a float16 for each output and SUPER_BLOCK inputs
    e4m3: the codes are floats of 8 bits, with one float scale for each output; then group is 0
    """

    bits: int
    group: int  # of a whole row its length, rounded up to a multiple of 4, which is what kernels take
    minimums: bool = False
    two_levels: bool = False
    e4m3: bool = False

    @property
    def symmetric(self) -> bool:
        """Signed codes and one float16 scale each: what this package makes itself when it rounds."""
        return not (self.minimums or self.two_levels)


FP8 = QuantisedFormat(8, 0, e4m3=True)


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """w (N, K) = codes * scales of their group + minimums of their group, exactly.

    codes (N, K) int8 in -2^(bits-1) .. 2^(bits-1)-1; of fewer than 8 bits with minimums in 0 .. 2^bits-1
    scales (N, G) float16, minimums alike; in two levels both are (N, K / SUPER_BLOCK) float16, and those of a group
    are these times its scale_levels, its minimum_levels (N, G) int8
    e4m3: codes are the bytes of such floats, scales (N, 1) float32
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
        """What is stored as floats, and so may be infinite or no number. E4M3's codes are not among them."""
        return [self.scales] if self.minimums is None else [self.scales, self.minimums]

    def group_scales(self) -> NDArray[np.float64]:
        """(N, G)"""
        return self._of_groups(self.scales, self.scale_levels)

    def group_minimums(self) -> NDArray[np.float64]:
        """(N, G); zeros where there are none."""
        if self.minimums is None:
            return np.zeros_like(self.group_scales())
        return self._of_groups(self.minimums, self.minimum_levels)

    def values(self) -> Array:
        """What the codes stand for before they are scaled. (N, K)"""
        return self.codes.view(E4M3).astype(np.float64) if self.e4m3 else self.codes

    def dequantise(self) -> NDArray[np.float64]:
        if self.e4m3:
            return self.values() * self.scales.astype(np.float64)
        return self.codes * self._wide(self.group_scales()) + self._wide(self.group_minimums())

    def each(self, change: Callable[[Array], Array]) -> "QuantisedMatrix":
        """The same change, of rows, made to all its arrays."""
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
    """One matrix of several of one format: `combine` says how rows of theirs become rows of it."""
    first = parts[0]
    assert all(p.format == first.format for p in parts), [p.format for p in parts]
    arrays = [p._arrays() for p in parts]
    rows: dict[str, Any] = {name: combine([a[name] for a in arrays]) for name in arrays[0]}
    return replace(first, **rows)
