"""Quantization grids: the codes and scales that weights are rounded to, and rounding to nearest (RTN).

N outputs, K inputs, G groups of inputs. Arithmetic is float32, in slabs of rows; codes are chosen with scales already
rounded to float16, so that they are nearest for the stored scales.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.weights.quantized_matrix import QuantisedMatrix
from millrace.errors import CheckpointError, ConfigError
from millrace.kernels.matmul.pack import finite

Array = NDArray[Any]
Floats = NDArray[np.float32]
WHOLE_ROW = 0  # a group of all inputs
GROUPS = (32, 64, 128, WHOLE_ROW)
_SLAB = 1 << 18  # weights processed at a time: they fit a core's cache, and bound the memory besides the output
_MANTISSA = 11  # significant bits of a float16, including the implicit one
_COARSE = 0.1  # relative error of a scale; only a few groups, of negligible weight, may exceed it


class RangeConvention(StrEnum):
    """How a scale is derived from the extremes of a group, named after the project that does so."""

    COMPRESSED_TENSORS = "compressed-tensors"  # the range over all codes: amax / 7.5; also GPTQ's. With minimums it
    #   includes 0; AutoAWQ's need not, which differs only if a group has a single sign, and then it clips
    MODEL_OPTIMIZER = "model-optimizer"  # amax / 7, so that -8 is hardly used; also symmetric AWQ's
    GGUF = "gguf"  # the signed extreme becomes -8 (Q4_0); also used by this package's builds


@dataclass(frozen=True, slots=True)
class Grid:
    """minimums: codes are unsigned, and each group has a minimum, an exact multiple of its scale: -zero * scale."""

    bits: int = 4
    group: int = 128
    minimums: bool = False
    convention: RangeConvention = RangeConvention.COMPRESSED_TENSORS

    def __post_init__(self) -> None:
        if self.bits not in (4, 8) or self.group not in GROUPS:
            raise ConfigError(
                f"weights of {self.bits} bits in groups of {self.group}",
                "4 or 8 bits; groups of 32, 64 or 128, or 0 for a whole row", "choose one of these",
            )  # fmt: skip
        if self.minimums and self.bits != 4:
            raise ConfigError("8 bits with minimums", "4 bits, or symmetric ones", "leave the minimums out")
        if self.minimums and self.convention != RangeConvention.COMPRESSED_TENSORS:
            raise ConfigError(
                f"scales as of {self.convention} with minimums", f"those of {RangeConvention.COMPRESSED_TENSORS}",
                "leave the minimums out, or the convention",
            )  # fmt: skip

    @property
    def lowest(self) -> int:
        return 0 if self.minimums else -(1 << self.bits - 1)

    @property
    def highest(self) -> int:
        return (1 << self.bits) - 1 if self.minimums else (1 << self.bits - 1) - 1

    def group_of(self, K: int) -> int:
        """Return the inputs per group in a row of K."""
        return self.group or K

    def bits_per_weight(self, K: int) -> float:
        """Return bits per weight including scales; a zero point has as many bits as a code."""
        groups = -(-K // self.group_of(K))
        return self.bits + groups * (16 + (self.bits if self.minimums else 0)) / K


@dataclass(frozen=True, slots=True)
class ScaleSearch:
    """Search over smaller ranges: 1, 1 - 1/steps, ... above 1 - most.

    Each group keeps the range with the least sum of |error|^norm. The search ends if `patience` ranges in a row improve
    no group of a slab.

    weighted: multiply each error by the mean square of its input, if known
    source: llm-compressor's memoryless_mse and, weighted, imatrix_mse; GPTQModel tries smaller ranges, too
    """

    most: float = 0.20
    steps: int = 100
    norm: float = 2.4
    patience: int = 5
    weighted: bool = False

    @property
    def shares(self) -> list[float]:
        return [1 - i / self.steps for i in range(1, int(self.most * self.steps))]


LLM_COMPRESSOR_MSE = ScaleSearch()
IMATRIX_MSE = ScaleSearch(weighted=True)
GPTQMODEL_MSE = ScaleSearch(most=0.80, patience=80)


@dataclass(frozen=True, slots=True)
class Scales:
    """scales: (N, G) float16; minimums: the same, if the grid has them."""

    scales: NDArray[np.float16]
    minimums: NDArray[np.float16] | None = None

    def wide(self) -> tuple[Floats, Floats]:
        """Return scales and zeros, (N, G) each, float32."""
        steps = self.scales.astype(np.float32)
        if self.minimums is None:
            return steps, np.zeros_like(steps)
        lows = self.minimums.astype(np.float32)
        return steps, np.rint(np.divide(-lows, steps, out=np.zeros_like(steps), where=steps != 0))

    def select_rows(self, rows: slice) -> "Scales":
        return Scales(self.scales[rows], None if self.minimums is None else self.minimums[rows])


def rounded(
    w: Array, grid: Grid, search: ScaleSearch | None = None, importance: Array | None = None
) -> QuantisedMatrix:
    """Round w (N, K) to the nearest codes: RTN, or RTN with MSE clipping. Arguments and errors as `fitted`.

    error: |w - dequantise| <= scale/2 for weights that are not clipped
    """
    return with_scales(w, fitted(w, grid, search, importance), grid)


def nearest(w: Array, scales: Scales, grid: Grid) -> Floats:
    """Return the values of w's nearest codes, (N, K)."""
    values = np.empty(w.shape, np.float32)
    for at, codes, steps, zeros in _coded(w, scales, grid):
        values[at] = ((codes - zeros) * steps).reshape(len(codes), -1)
    return values


def with_scales(w: Array, scales: Scales, grid: Grid) -> QuantisedMatrix:
    """Round to the nearest codes with given scales."""
    result = np.empty(w.shape, np.int8)
    for at, codes, _, _ in _coded(w, scales, grid):
        result[at] = codes.reshape(len(codes), -1)
    return matrix(result, scales, grid)


def _coded(w: Array, scales: Scales, grid: Grid) -> Iterator[tuple[tuple[slice, slice], Floats, Floats, Floats]]:
    """Yield per slab: its slices of w, nearest codes (n, G, inputs of a group), scales and zeros (n, G, 1)."""
    steps, zeros = (of_groups[:, :, None] for of_groups in scales.wide())
    for rows in slabs(*w.shape):
        for inputs, groups in runs(w.shape[1], grid.group_of(w.shape[1])):
            own = steps[rows, groups], zeros[rows, groups]
            yield (rows, inputs), codes_of(grouped(w[rows, inputs], groups), *own, grid), *own


def matrix(codes: NDArray[np.int8], scales: Scales, grid: Grid) -> QuantisedMatrix:
    return QuantisedMatrix(codes, scales.scales, grid.group_of(codes.shape[1]), grid.bits, scales.minimums)


def fitted(
    w: Array, grid: Grid, search: ScaleSearch | None = None, importance: Array | None = None, share: float = 1.0
) -> Scales:
    """Return the scales of w's groups, from their extremes or from a search for the range with the least error.

    importance: mean square of each input, (K,), for a weighted search; share: of the range
    raises CheckpointError if w is not finite, or too small for float16 scales
    """
    N, K = w.shape
    size = grid.group_of(K)
    G = -(-K // size)
    scales, minimums = np.empty((N, G), np.float16), np.empty((N, G), np.float16)
    lost = total = 0.0
    for rows in slabs(N, K):
        for inputs, groups in runs(K, size):
            x = grouped(finite(w[rows, inputs], np.dtype(np.float32)), groups)
            low, high = (extreme * np.float32(share) for extreme in _extremes(x, grid))
            result = _stored(low, high, grid)
            coarse = np.abs(result[0] - _exact(low, high, grid)) > _COARSE * np.abs(_exact(low, high, grid))
            total, lost = total + _energy(x), lost + _energy(x[coarse])
            if search is not None:
                energy = (
                    importance[None, inputs].astype(np.float32) if search.weighted and importance is not None else None
                )
                result = _searched(x, low, high, grid, search, None if energy is None else grouped(energy, groups))
            scales[rows, groups] = result[0]
            minimums[rows, groups] = -result[1] * result[0]
    if lost > _COARSE**2 * total:
        raise CheckpointError(
            "weights too small for the scales of their groups, in float16",
            f"groups that reach {grid.highest * 1e-6:.0e}", "leave this matrix as it is",
        )  # fmt: skip
    return Scales(scales, minimums if grid.minimums else None)


def slabs(N: int, K: int, max_elements: int = _SLAB) -> Iterator[slice]:
    """Yield slabs of rows to process together: at most `max_elements` weights, or one row."""
    rows = max(max_elements // K, 1)
    return (slice(start, min(N, start + rows)) for start in range(0, N, rows))


def runs(K: int, group: int) -> list[tuple[slice, slice]]:
    """Return slices of inputs and their groups: all full groups, and the last one if it is shorter."""
    n_full = K // group
    both = [(slice(0, n_full * group), slice(0, n_full)), (slice(n_full * group, K), slice(n_full, n_full + 1))]
    return [(inputs, groups) for inputs, groups in both if inputs.start < inputs.stop]


def grouped(x: Array, groups: slice) -> Array:
    """(N, K) -> (N, G, inputs of a group)"""
    return x.reshape(len(x), groups.stop - groups.start, -1)


def _extremes(x: Floats, grid: Grid) -> tuple[Floats, Floats]:
    """Return the approximate values of the lowest and the highest code, (N, G) each."""
    low, high = x.min(axis=2), x.max(axis=2)
    if grid.minimums:
        return np.minimum(low, 0), np.maximum(high, 0)
    if grid.convention == RangeConvention.GGUF:
        extreme = np.where(-low >= high, low, high)
        return extreme, extreme
    amax = np.maximum(-low, high)
    return -amax, amax


def _exact(low: Floats, high: Floats, grid: Grid) -> Floats:
    """Return the unrounded scale of a range."""
    codes = grid.highest - grid.lowest
    if grid.minimums:
        return (high - low) / np.float32(codes)
    match grid.convention:
        case RangeConvention.GGUF:
            return low / np.float32(grid.lowest)
        case RangeConvention.MODEL_OPTIMIZER:
            return high / np.float32(grid.highest)
        case _:
            return high / np.float32(codes / 2)


def _stored(low: Floats, high: Floats, grid: Grid) -> tuple[Floats, Floats]:
    """Return the scale rounded to float16, and the integer zero point, (N, G) each.

    -zero * scale is exact in float16: a scale with a zero of b bits has 11 - b significant bits (an error of up to
    0.4 % with the largest zeros, negligible with most).
    """
    exact = _exact(low, high, grid)
    if not grid.minimums:
        scales = finite(exact, np.dtype(np.float16)).astype(np.float32)
        return scales, np.zeros_like(scales)
    zeros = np.rint(np.divide(-low, exact, out=np.zeros_like(low), where=exact != 0)).clip(0, grid.highest)
    shift = (_MANTISSA - _BITS[zeros.astype(np.intp)]).astype(np.int32)
    mantissa, exponent = np.frexp(exact)
    short = np.ldexp(np.rint(np.ldexp(mantissa, shift)), exponent - shift).astype(np.float32)
    return finite(short, np.dtype(np.float16)).astype(np.float32), zeros


def _bits(zero: int) -> int:
    """Return the bits of the odd part of a zero: factors of two go into the exponent."""
    return (zero // (zero & -zero)).bit_length() if zero else 0


_BITS = np.array([_bits(zero) for zero in range(16)])


def codes_of(x: Floats, scales: Floats, zeros: Floats, grid: Grid) -> Floats:
    """Return the nearest codes, as float32; of any shape."""
    divisors: Floats = np.where(scales == 0, np.inf, scales).astype(np.float32)  # a group of zeros
    y: Floats = x / divisors
    np.rint(y, out=y)
    y += zeros
    np.clip(y, grid.lowest, grid.highest, out=y)
    return y


def _searched(
    x: Floats, low: Floats, high: Floats, grid: Grid, search: ScaleSearch, weights: Floats | None
) -> tuple[Floats, Floats]:
    """Return the same as `_stored`, for the range of least error."""
    scales, zeros = _stored(low, high, grid)
    least = _error(x, scales, zeros, grid, search.norm, weights)
    in_vain = 0
    for share in map(np.float32, search.shares):
        tried = _stored(low * share, high * share, grid)
        error = _error(x, *tried, grid, search.norm, weights)
        better = error < least
        scales, zeros = np.where(better, tried[0], scales), np.where(better, tried[1], zeros)
        least = np.where(better, error, least)
        in_vain = 0 if better.any() else in_vain + 1
        if in_vain >= search.patience:
            break
    return scales, zeros


def _error(x: Floats, scales: Floats, zeros: Floats, grid: Grid, norm: float, weights: Floats | None) -> Floats:
    """(N, G)"""
    steps, shifts = scales[:, :, None], zeros[:, :, None]
    off = codes_of(x, steps, shifts, grid)
    off -= shifts
    off *= steps
    off -= x
    power = np.square(off) if norm == 2 else np.abs(off) ** np.float32(norm)
    if weights is not None:
        power *= weights
    result: Floats = power.sum(axis=2)
    return result


def _energy(x: Array) -> float:
    return float(np.square(x, dtype=np.float64).sum())
