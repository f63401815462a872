"""Moved scales change nothing; AWQ, SmoothQuant and clips against loops in float64, written from their definitions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.build import BuildOptions, plan_engine, write_engine
from millrace.compile.precision import precision_map
from millrace.compile.source import Source
from millrace.compress.calibration.statistics import InputStatistics
from millrace.compress.measure.reconstruction_error import CLIPS, clipped, output_error, relative_error
from millrace.compress.methods.awq_smoothquant import (
    WEIGHT,
    Awq,
    ScalingSite,
    SmoothQuant,
    awq_factors,
    fold,
    scaled_weights,
    sites,
    smooth_factors,
)
from millrace.compress.methods.quantization_grid import Grid, fitted, with_scales
from millrace.engine.artifact.engine import Engine
from millrace.errors import ConfigError
from millrace.evaluate.divergence import log_probabilities
from millrace.model.module import Weights
from tests.support.checkpoints import random_checkpoint

Floats = np.ndarray[Any, np.dtype[Any]]


def inputs(K: int, seed: int) -> tuple[Floats, InputStatistics]:
    """Rows of which a few inputs stand out, and their statistics."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((5 * K, K)) @ (np.eye(K) + 0.5 * rng.standard_normal((K, K)) / np.sqrt(K))
    x *= rng.lognormal(0, 1, K)
    gram, size = (x.T @ x / len(x)).astype(np.float32), np.abs(x)
    found = InputStatistics(("a",), gram, size.max(axis=0).astype(np.float32), size.mean(axis=0).astype(np.float32))
    return x, found


def test_the_error_is_that_of_the_outputs() -> None:
    x, found = inputs(40, seed=1)
    rng = np.random.default_rng(2)
    w, off = rng.standard_normal((9, 40)), 0.1 * rng.standard_normal((9, 40))
    lost, whole = np.square(x @ off.T).sum(axis=1).mean(), np.square(x @ w.T).sum(axis=1).mean()
    assert output_error(off, found.gram) == pytest.approx(lost, rel=1e-4)
    assert relative_error(w, w + off, found.gram) == pytest.approx(lost / whole, rel=1e-4)
    assert relative_error(np.zeros((2, 40)), np.zeros((2, 40)), found.gram) == 0


def of_ranges(w: Floats, grid: Grid) -> Floats:
    """(C, N, K): w on the grid of each range that a clip tries; in float64, from the definition."""
    found = []
    for share in (1.0, *CLIPS):
        for sign in (1,) if grid.minimums else (1, -1):
            made = np.empty(w.shape)
            for n, row in enumerate(w.astype(float)):
                for at in (slice(g, g + grid.group) for g in range(0, w.shape[1], grid.group)):
                    if grid.minimums:
                        made[n, at] = with_scales(
                            w[n : n + 1, at], fitted(w[n : n + 1, at], grid, share=share), grid
                        ).dequantise()
                    else:
                        step = sign * float(np.float16(np.abs(row[at]).max() * share / 7.5))
                        made[n, at] = np.clip(np.rint(row[at] / step), -8, 7) * step
            found.append(made)
    return np.stack(found)


@pytest.mark.parametrize("grid", [Grid(4, 32), Grid(4, 32, minimums=True)], ids=repr)
def test_a_clip_is_the_best_of_its_groups_own_outputs(grid: Grid) -> None:
    """72 inputs: the last group is short."""
    x, found = inputs(72, seed=3)
    w = np.random.default_rng(4).standard_t(3, (6, 72)).astype(np.float32)
    scales = clipped(w, found.gram, grid)
    chosen, helped, turned = with_scales(w, scales, grid).dequantise(), 0, int((scales.scales < 0).sum())
    tried = of_ranges(w, grid)
    for n in range(6):
        for g in range(3):
            own = slice(32 * g, min(32 * g + 32, 72))
            losses = [float(np.square(x[:, own] @ (t[n, own] - w[n, own])).mean()) for t in tried]
            mine = float(np.square(x[:, own] @ (chosen[n, own] - w[n, own])).mean())
            assert mine <= min(losses) * (1 + 1e-3) + 1e-9
            helped += mine < 0.99 * losses[0]
    assert helped >= 5 and (grid.minimums or 3 <= turned <= 15), "some groups reach further above zero"


@pytest.mark.parametrize("grid", [Grid(4, 32), Grid(4, 32, minimums=True)], ids=repr)
def test_a_clip_of_whole_outputs_cannot_be_bettered_in_one_group(grid: Grid) -> None:
    """Beside what the other groups of its row lose, and it loses less than clips that do not know of one another."""
    x, found = inputs(72, seed=3)
    w = np.random.default_rng(4).standard_t(3, (6, 72)).astype(np.float32)
    alone, whole = (
        with_scales(w, clipped(w, found.gram, grid, per_row=one), grid).dequantise() for one in (False, True)
    )

    def lost(n: int, values: Floats) -> float:
        return float(np.square(x @ (values - w[n].astype(float))).mean())

    tried, less = of_ranges(w, grid), 0
    for n in range(6):
        mine = lost(n, whole[n])
        assert mine <= lost(n, alone[n]) * (1 + 1e-4)
        less += mine < 0.98 * lost(n, alone[n])
        for own in (slice(g, min(g + 32, 72)) for g in range(0, 72, 32)):
            for one in tried[:, n]:
                beside = whole[n].astype(float)
                beside[own] = one[own]
                assert mine <= lost(n, beside) * (1 + 1e-3), (n, own)
    assert less >= 2


def families() -> list[tuple[str, float]]:
    return [("llama", 0.0), ("qwen2", 0.0), ("qwen3", 0.0), ("gemma", 1.0)]


@pytest.mark.parametrize(("family", "offset"), families())
def test_moving_scales_changes_no_answer(family: str, offset: float, tmp_path: Path) -> None:
    """At every site at once: norms with and without an offset, biases, heads that share a value head."""
    checkpoint = Checkpoint.open(random_checkpoint(tmp_path / "c", family, seed=4))
    source, rng = Source.from_checkpoint(checkpoint), np.random.default_rng(5)
    arrays = {n: np.asarray(source.weights.load(n), np.float32) for n in source.weights.shapes}
    done = 0
    for layer in range(checkpoint.decoder.n_layers):
        for site in sites(source.weights.shapes, f"model.layers.{layer}", checkpoint.decoder.head_dim):
            K = source.weights.shapes[site.linears[0] + WEIGHT][1]
            rows = site.base(np.ones(K))
            factors = site.spread(rng.lognormal(0, 1, len(rows))).astype(np.float32)
            made = fold(arrays, site, factors, offset if site.is_norm else 0.0)
            # A norm's new weight is what bfloat16 holds: of weight - 1, where that is close to -1, fewer digits.
            assert made.factors == pytest.approx(factors, rel=(0.05 if offset else 2**-7) if site.is_norm else 1e-6)
            done += 1
    assert done == 4 * checkpoint.decoder.n_layers
    changed = replace(source, weights=Weights(source.weights.shapes, arrays.__getitem__), stored={})
    ids, answers = rng.integers(3, source.vocab_size, 60).astype(np.int32), []
    for number, asked in enumerate((source, changed)):
        plan = plan_engine(asked, BuildOptions(precision=precision_map("fp32")))
        write_engine(asked, plan, tmp_path / str(number), name="test")
        executor = Engine.open(tmp_path / str(number)).executor(n_pages=2)
        answers.append(log_probabilities(executor, ids, 0))
        executor.close()
    assert np.abs(answers[0] - answers[1]).max() < 2e-4 and np.abs(answers[0]).max() > 1


def to_nearest(w: Floats) -> Floats:
    """Symmetric, 4 bits in groups of 32: steps of the group's largest over 7.5, as float16 holds them; in float64."""
    found = np.zeros_like(w)
    for n in range(len(w)):
        for g in range(0, w.shape[1], 32):
            step = float(np.float16(np.abs(w[n, g : g + 32]).max() / 7.5))
            found[n, g : g + 32] = np.clip(np.rint(w[n, g : g + 32] / step), -8, 7) * step
    return found


def awq_tried(weights: list[Floats], x: Floats, how: tuple[bool, int, int]) -> list[tuple[float, Floats]]:
    """What each of AWQ's 20 ratios loses, and its scales; first no scales. how: duo, shared, head"""
    duo, shared, head = how
    stacked, K = np.concatenate(weights).astype(np.float64), x.shape[1]
    groups = np.abs(stacked).reshape(len(stacked), -1, 32)
    importance = (groups / groups.max(axis=2, keepdims=True)).reshape(len(stacked), K).mean(axis=0)
    run = shared * head
    alike = [[j for j in range(K) if j // run == k // run and (j - k) % head == 0] for k in range(K)]
    mean = np.array([np.abs(x)[:, same].mean() for same in alike])
    relative = np.array([importance[same].mean() for same in alike])

    def lost(s: Floats) -> float:
        """Of each layer's own output the share that is off: none decides alone."""
        whole = (np.square(x @ w.astype(np.float64).T).sum() for w in weights)
        off = (np.square(x @ (to_nearest(w.astype(np.float64) * s) / s - w).T).sum() for w in weights)
        return float(sum(o / of for o, of in zip(off, whole, strict=True)))

    tried = [(lost(np.ones(K)), np.ones(K))]
    for ratio in (i / 20 for i in range(20)):
        s = mean**ratio / (relative ** (1 - ratio) if duo else 1)
        s /= np.sqrt(s.max() * s.min())
        tried.append((lost(s), s))
    return tried


@pytest.mark.parametrize("seed", [6, 7, 8])
@pytest.mark.parametrize("duo", [True, False])
@pytest.mark.parametrize(("shared", "head"), [(1, 1), (2, 8)])
def test_awqs_scales_are_the_best_of_its_grid(duo: bool, shared: int, head: int, seed: int) -> None:
    """Of two layers one gives 400 times the energy of the other, whose loss counts as much."""
    x, found = inputs(64, seed)
    rng = np.random.default_rng(seed + 1)
    weights = [rng.standard_t(4, (N, 64)).astype(np.float32) * np.float32(size) for N, size in ((5, 20), (7, 1))]
    site = ScalingSite(("a", "b"), "n", shared == 1, shared, head)
    tried = awq_tried(weights, x, (duo, shared, head))
    least, best = min(tried, key=lambda pair: pair[0])
    factors = awq_factors(weights, site, found, Grid(4, 32), Awq(duo=duo))
    assert factors is not None and least < tried[0][0] and factors == pytest.approx(best, rel=1e-3)


def test_awq_has_no_scales_where_none_are_better() -> None:
    _, found = inputs(64, seed=6)
    site = ScalingSite(("a",), "n", True)
    assert awq_factors([np.zeros((3, 64), np.float32)], site, found, Grid(4, 32)) is None


def test_smoothquants_scales_are_those_of_the_paper() -> None:
    x, found = inputs(32, seed=9)
    weights = [np.random.default_rng(seed).standard_normal((4, 32)).astype(np.float32) for seed in (1, 2)]
    found.amax[5] = 0  # an input that is never there
    for alpha in (0.0, 0.5, 1.0):
        factors = smooth_factors(weights, ScalingSite(("a", "b"), "n", True), found, SmoothQuant(alpha, (0.2, 9)))
        for j in range(32):
            amax, largest = np.abs(x[:, j]).max(), max(np.abs(w[:, j]).max() for w in weights)
            exact = 1.0 if j == 5 else min(max(amax**alpha / largest ** (1 - alpha), 0.2), 9)
            assert factors[j] == pytest.approx(exact, rel=1e-4)
    shared = smooth_factors(weights, ScalingSite(("a", "b"), "v", False, 2, 4), found, SmoothQuant())
    assert (shared.reshape(4, 2, 4)[:, 0] == shared.reshape(4, 2, 4)[:, 1]).all()


@pytest.mark.parametrize(("shared", "head"), [(1, 1), (2, 4)])
def test_by_mean_squares_no_scales_lose_less_of_what_tokens_are_rounded_by(shared: int, head: int) -> None:
    """Rounding on a token's scale loses the energy of x / s times that of s w: a sum over inputs times a sum."""
    x, found = inputs(32, seed=11)
    rng = np.random.default_rng(12)
    weights = [rng.standard_t(4, (N, 32)).astype(np.float32) * size for N, size in ((5, 1), (3, 20))]
    site = ScalingSite(("a", "b"), "n", shared == 1, shared, head)

    def lost(s: Floats) -> float:
        noise = np.square(x / s).sum(axis=1).mean()
        shares = [np.square(w * s).sum() / np.square(x @ w.T).sum(axis=1).mean() for w in weights]
        return float(noise * sum(shares))

    factors = smooth_factors(weights, site, found, SmoothQuant(rms=True)).astype(np.float64)
    rows = site.base(factors)
    assert factors == pytest.approx(site.spread(rows)), "the same for all inputs that are one row of the source"
    assert rows.max() * rows.min() == pytest.approx(1, rel=1e-3), "around 1"
    largest = smooth_factors(weights, site, found, SmoothQuant())
    least = lost(factors)
    assert least < 0.95 * lost(largest) and least < 0.7 * lost(np.ones(32))
    for row in range(len(rows)):
        for by in (0.8, 1.25):
            beside = rows.copy()
            beside[row] *= by
            assert least < lost(site.spread(beside)), (row, by)


def test_inputs_and_weights_that_are_nothing_have_no_scale() -> None:
    _, found = inputs(8, seed=13)
    found.gram[3], found.gram[:, 3] = 0, 0
    w = np.random.default_rng(14).standard_normal((4, 8)).astype(np.float32)
    w[:, 5] = 0
    for weights in ([w], [w, np.zeros_like(w)]):
        factors = smooth_factors(weights, ScalingSite(("a",), "n", True), found, SmoothQuant(rms=True))
        assert np.isfinite(factors).all() and (factors > 0).all() and factors[3] == factors[5] == 1
    nothing = smooth_factors([np.zeros_like(w)], ScalingSite(("a",), "n", True), found, SmoothQuant(rms=True))
    assert (nothing == 1).all()


def test_statistics_of_what_became_smaller() -> None:
    x, found = inputs(24, seed=10)
    factors = np.random.default_rng(3).lognormal(0, 1, 24).astype(np.float32)
    y, ours = x / factors, scaled_weights(found, factors)
    assert ours.gram == pytest.approx(y.T @ y / len(y), rel=1e-3, abs=1e-4)
    assert ours.amax == pytest.approx(np.abs(y).max(axis=0), rel=1e-4)
    assert ours.mean == pytest.approx(np.abs(y).mean(axis=0), rel=1e-4)


def test_settings_that_there_are_not() -> None:
    for wrong in (lambda: Awq(()), lambda: Awq((1.5,)), lambda: SmoothQuant(-0.1)):
        with pytest.raises(ConfigError):
            wrong()
