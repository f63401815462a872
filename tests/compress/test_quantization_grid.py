"""Grids against plain loops in float64, written from their definitions."""

import math

import numpy as np
import pytest

from millrace.compress.methods.quantization_grid import (
    GPTQMODEL_MSE,
    IMATRIX_MSE,
    LLM_COMPRESSOR_MSE,
    WHOLE_ROW,
    Grid,
    RangeConvention,
    ScaleSearch,
    fitted,
    rounded,
    runs,
    slabs,
)
from millrace.errors import CheckpointError, ConfigError

SYMMETRIC = [Grid(b, g, convention=c) for b in (4, 8) for g in (32, WHOLE_ROW) for c in RangeConvention]
GRIDS = [*SYMMETRIC, Grid(4, 32, minimums=True), Grid(4, 128, minimums=True), Grid(4, WHOLE_ROW, minimums=True)]


def weights(N: int, K: int, seed: int) -> np.ndarray:
    """With a large one, a group of zeros, and groups of one sign."""
    rng = np.random.default_rng(seed)
    w = rng.standard_t(4, (N, K)).astype(np.float32) * np.float32(0.05)
    w[0, 3], w[N // 2, :32] = 1.5, 0
    w[N - 1] = np.abs(w[N - 1])
    return w


def plain_range(values: list[float], grid: Grid, share: float) -> tuple[float, int]:
    """(scale, zero) before anything is stored."""
    low, high = min(values), max(values)
    if grid.minimums:
        low, high = min(low, 0.0) * share, max(high, 0.0) * share
        scale = (high - low) / 15
        return scale, min(max(round(-low / scale), 0), 15) if scale else 0
    amax, half = max(-low, high) * share, 1 << grid.bits - 1
    match grid.convention:
        case RangeConvention.COMPRESSED_TENSORS:
            return amax / (half - 0.5), 0
        case RangeConvention.MODEL_OPTIMIZER:
            return amax / (half - 1), 0
        case RangeConvention.GGUF:
            return (amax if -low >= high else -amax) / half, 0


def plain_value(x: float, scale: float, zero: int, grid: Grid) -> float:
    """x on the grid."""
    low, high = (0, 15) if grid.minimums else (-(1 << grid.bits - 1), (1 << grid.bits - 1) - 1)
    code = min(max(round(x / scale) + zero, low), high) if scale else zero
    return (code - zero) * scale


@pytest.mark.parametrize("grid", GRIDS, ids=repr)
@pytest.mark.parametrize("K", [32, 96, 200])
def test_rounding_is_that_of_the_definition(grid: Grid, K: int) -> None:
    w = weights(6, K, seed=K)
    found = rounded(w, grid)
    size = grid.group or K
    assert found.codes.dtype == np.int8 and found.group == size and found.bits == grid.bits
    assert found.scales.shape == (6, -(-K // size)) and (found.minimums is not None) == grid.minimums
    assert found.codes.min() >= grid.lowest and found.codes.max() <= grid.highest
    scales, values = found.group_scales(), found.dequantise()
    for n in range(6):
        for g in range(scales.shape[1]):
            group = [float(x) for x in w[n, g * size : (g + 1) * size]]
            exact, zero = plain_range(group, grid, 1)
            assert scales[n, g] == pytest.approx(exact, rel=2**-7 if grid.minimums else 2**-10)
            for k, x in enumerate(group):
                mine = plain_value(x, scales[n, g], zero, grid)  # of the scale as it is stored
                assert values[n, g * size + k] == pytest.approx(mine, abs=1e-12), (n, g, k)


@pytest.mark.parametrize("seed", range(3))
def test_a_minimum_is_an_exact_multiple_of_its_scale(seed: int) -> None:
    """What stores zeros instead of minimums loses nothing: for every zero that there is."""
    rng = np.random.default_rng(seed)
    low = -rng.uniform(0, 1, (400, 1))
    w = np.concatenate([low, rng.uniform(low, 1 + low, (400, 30)), 1 + low], axis=1).astype(np.float32) * 0.1
    found = rounded(w, Grid(4, 32, minimums=True))
    scales, minimums = found.group_scales(), found.group_minimums()
    zeros = -minimums / scales
    assert (zeros == np.rint(zeros)).all() and set(zeros.ravel()) == {float(z) for z in range(16)}


@pytest.mark.parametrize("grid", [Grid(4, 32), Grid(4, 32, minimums=True), Grid(8, 32)], ids=repr)
@pytest.mark.parametrize(
    "search", [LLM_COMPRESSOR_MSE, IMATRIX_MSE, GPTQMODEL_MSE, ScaleSearch(0.5, 20, 2.0, 99, True)], ids=repr
)
def test_a_search_finds_what_trying_everything_finds(grid: Grid, search: ScaleSearch) -> None:
    w = weights(5, 80, seed=3)
    importance = np.random.default_rng(4).uniform(0.1, 3, 80)
    found = rounded(w, grid, search, importance)
    plain = rounded(w, grid)
    values, at_first, better = found.dequantise(), plain.dequantise(), 0
    shares = [1 - i / search.steps for i in range(int(search.most * search.steps))]
    for n in range(5):
        for begin in (0, 32, 64):
            own = slice(begin, min(begin + 32, 80))
            group, factors = w[n, own].astype(float), importance[own] if search.weighted else np.ones(80)[own]
            errors = []
            for share in shares:
                scale, zero = plain_range(list(group), grid, share)
                stored = scale if grid.minimums else float(np.float16(scale))
                tried = np.array([plain_value(x, stored, zero, grid) for x in group])
                errors.append(float((np.abs(tried - group) ** search.norm * factors).sum()))
            mine = float((np.abs(values[n, own] - group) ** search.norm * factors).sum())
            # Scales beside a zero keep fewer bits: each range is tried a little beside what it should be.
            assert mine <= min(errors) * (1.1 if grid.minimums else 1.001) + 1e-12, (n, begin)
            better += mine < 0.98 * float((np.abs(at_first[n, own] - group) ** search.norm * factors).sum())
    assert better >= 3 or grid.bits == 8, "it helps some groups"


def test_a_search_that_is_patient_for_nobody_ends() -> None:
    """Integers on the grid itself: nothing is better than the first range."""
    w = np.tile(np.arange(-8, 8, dtype=np.float32), (2, 2))
    grid = Grid(4, 32, convention=RangeConvention.GGUF)
    assert (rounded(w, grid, LLM_COMPRESSOR_MSE).dequantise() == w).all()
    assert (fitted(w, grid).scales == 1).all()


def test_slabs_and_runs_cover_everything_once() -> None:
    assert [s for s in slabs(5, 1 << 18)] == [slice(n, n + 1) for n in range(5)]
    assert [(s.start, s.stop) for s in slabs(1000, 1000)] == [(0, 262), (262, 524), (524, 786), (786, 1000)]
    assert runs(576, 128) == [(slice(0, 512), slice(0, 4)), (slice(512, 576), slice(4, 5))]
    assert runs(64, 64) == [(slice(0, 64), slice(0, 1))] and runs(32, 128) == [(slice(0, 32), slice(0, 1))]
    wide, whole = weights(300, 1000, seed=1), Grid(4, 128)  # two slabs
    apart = np.concatenate([rounded(wide[:7], whole).codes, rounded(wide[7:], whole).codes])
    assert (rounded(wide, whole).codes[7:] == apart[7:]).all() and (rounded(wide, whole).codes[:7] == apart[:7]).all()


def test_bits_of_a_weight() -> None:
    assert Grid().bits_per_weight(1536) == 4.125 and Grid(minimums=True).bits_per_weight(1536) == 4.15625
    assert Grid().bits_per_weight(576) == 4 + 5 * 16 / 576 and Grid(8, WHOLE_ROW).bits_per_weight(64) == 8.25
    assert math.isclose(Grid(4, 64).bits_per_weight(576), 4.25)


@pytest.mark.parametrize(
    "asked",
    [{"bits": 3}, {"group": 48}, {"bits": 8, "minimums": True}, {"minimums": True, "convention": RangeConvention.GGUF}],
)
def test_grids_that_there_are_not(asked: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Grid(**asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad, what", [(np.nan, "not finite"), (np.inf, "not finite"), (7e5, "too large")])
def test_weights_that_have_no_scales(bad: float, what: str) -> None:
    w = weights(3, 64, seed=0)
    w[1, 40] = bad
    with pytest.raises(CheckpointError, match=what):
        rounded(w, Grid(4, 32))
    with pytest.raises(CheckpointError, match="too small"):
        rounded(np.full((2, 64), 3e-8, np.float32), Grid(4, 32))
