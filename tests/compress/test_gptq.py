"""GPTQ against the paper's own steps in float64: the inverse, its Cholesky factor, a column at a time."""

from typing import Any

import numpy as np
import pytest

from millrace.compress.methods.e4m3 import E4M3, rounded_e4m3, scales_for
from millrace.compress.methods.gptq import Gptq, gptq, gptq_e4m3
from millrace.compress.methods.quantization_grid import IMATRIX_MSE, WHOLE_ROW, Grid, rounded
from millrace.errors import ConfigError

Floats = np.ndarray[Any, np.dtype[np.float64]]


def case(N: int, K: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights and the Gram matrix of inputs that depend on each other."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((4 * K, K)) @ (np.eye(K) + 0.3 * rng.standard_normal((K, K)) / np.sqrt(K))
    x *= rng.lognormal(0, 0.7, K)
    return rng.standard_normal((N, K)).astype(np.float32), (x.T @ x / len(x)).astype(np.float32)


def loss(w: np.ndarray, values: np.ndarray, gram: np.ndarray) -> float:
    off = values - w.astype(np.float64)
    return float(np.einsum("nk,kl,nl->", off, gram.astype(np.float64), off))


def paper(w: np.ndarray, gram: np.ndarray, grid: Grid, damping: float, order: np.ndarray, static: bool) -> Floats:
    """Algorithm 1, with groups: the values that it rounds to. Dead inputs as the authors' code has them."""
    W, H = w.astype(np.float64)[:, order], gram.astype(np.float64)[np.ix_(order, order)]
    dead = np.diag(H) == 0
    W[:, dead] = 0
    H[dead, dead] = 1
    H += damping * np.diag(H).mean() * np.eye(len(H))
    U = np.linalg.cholesky(np.linalg.inv(H)).T
    K, size = W.shape[1], grid.group or W.shape[1]
    back = np.argsort(order)
    fixed = rounded(W[:, back].astype(np.float32), grid)
    scales, lows, Q = fixed.group_scales(), fixed.group_minimums(), np.zeros_like(W)
    for i in range(K):
        g = order[i] // size
        if not static and i % size == 0:
            now = rounded(W[:, i : i + size].astype(np.float32), Grid(grid.bits, WHOLE_ROW, grid.minimums))
            scales[:, g], lows[:, g] = now.group_scales()[:, 0], now.group_minimums()[:, 0]
        low, high = (0, 15) if grid.minimums else (-(1 << grid.bits - 1), (1 << grid.bits - 1) - 1)
        step = np.where(scales[:, g] == 0, 1, scales[:, g])
        Q[:, i] = np.clip(np.rint((W[:, i] - lows[:, g]) / step), low, high) * scales[:, g] + lows[:, g]
        W[:, i:] -= np.outer((W[:, i] - Q[:, i]) / U[i, i], U[i, i:])
    return Q[:, back]


@pytest.mark.parametrize("grid", [Grid(4, 32), Grid(4, 32, minimums=True), Grid(8, 128), Grid(4, WHOLE_ROW)], ids=repr)
@pytest.mark.parametrize("K", [24, 160, 200])  # within a block, behind one, groups and blocks that are not whole
@pytest.mark.parametrize("order", [True, False])
def test_it_is_the_papers_algorithm(grid: Grid, K: int, order: bool) -> None:
    w, gram = case(12, K, seed=K)
    w[3, : K // 2] = 0
    found = gptq(w, gram, grid, Gptq(0.01, order=order))
    by = np.argsort(-gram.diagonal(), kind="stable") if order else np.arange(K)
    exact = paper(w, gram, grid, 0.01, by, static=order or grid.group == WHOLE_ROW)
    values = found.matrix.dequantise()
    same = np.abs(values - exact) <= 1e-6 * np.abs(exact).max()
    # A weight that lies between two codes may go to the other one in float32, and what it loses to others behind it.
    assert found.damping == 0.01 and same.mean() > 0.99, same.mean()
    assert loss(w, values, gram) == pytest.approx(loss(w, exact, gram), rel=0.01)
    assert loss(w, values, gram) < 0.95 * loss(w, rounded(w, grid).dequantise(), gram)


def test_inputs_that_are_never_there_cost_nothing_and_stop_nothing() -> None:
    w, gram = case(8, 96, seed=1)
    gram[[5, 40]], gram[:, [5, 40]] = 0, 0
    found = gptq(w, gram, Grid(4, 32)).matrix.dequantise()
    exact = paper(w, gram, Grid(4, 32), 0.01, np.argsort(-gram.diagonal(), kind="stable"), static=True)
    assert (found[:, [5, 40]] == 0).all() and (np.abs(found - exact) < 1e-6).mean() > 0.99
    assert (gptq(w, np.zeros_like(gram), Grid(4, 32)).matrix.codes == 0).all(), "no input at all"


def test_damping_is_raised_until_there_is_a_factor() -> None:
    """Of a matrix that float32 has made indefinite, as an input does that dwarfs all others."""
    w, gram = case(4, 64, seed=2)
    gram[0, 1] = gram[1, 0] = 3 * np.sqrt(gram[0, 0] * gram[1, 1])
    assert np.linalg.eigvalsh(gram.astype(np.float64)).min() < -0.1
    found = gptq(w, gram, Grid(4, 32))
    assert found.damping > 0.01 and found.damping / 0.01 == 2 ** round(np.log2(found.damping / 0.01))
    plain = rounded(w, Grid(4, 32)).dequantise()
    assert np.abs(found.matrix.dequantise() - w).max() < 4 * np.abs(plain - w).max()


def test_scales_may_be_searched_or_given() -> None:
    w, gram = case(16, 128, seed=3)
    grid = Grid(4, 32)
    clipped = rounded(w, grid, IMATRIX_MSE, gram.diagonal())
    searched = gptq(w, gram, grid, search=IMATRIX_MSE).matrix
    assert (searched.scales == clipped.scales).all()
    assert loss(w, searched.dequantise(), gram) < loss(w, clipped.dequantise(), gram)


# ------------------------------------------------------------------ FP8


def paper_e4m3(w: np.ndarray, gram: np.ndarray, scales: np.ndarray, damping: float) -> Floats:
    """The same steps, where a column is rounded to E4M3 times a row's scale. scales (N,)"""
    order = np.argsort(-gram.diagonal(), kind="stable")
    W, H = w.astype(np.float64)[:, order], gram.astype(np.float64)[np.ix_(order, order)]
    dead = np.diag(H) == 0
    W[:, dead] = 0
    H[dead, dead] = 1
    H += damping * np.diag(H).mean() * np.eye(len(H))
    U, Q = np.linalg.cholesky(np.linalg.inv(H)).T, np.zeros_like(W)
    for i in range(W.shape[1]):
        codes = np.clip(W[:, i] / scales, -448, 448).astype(np.float32).astype(E4M3)
        Q[:, i] = codes.astype(np.float64) * scales
        W[:, i:] -= np.outer((W[:, i] - Q[:, i]) / U[i, i], U[i, i:])
    return Q[:, np.argsort(order)]


@pytest.mark.parametrize("K", [24, 160])
def test_in_fp8_it_is_the_papers_algorithm(K: int) -> None:
    """A rounding that float32 decides otherwise than float64 is one of ten thousand, and costs nothing."""
    w, gram = case(40, K, seed=K)
    w[3], gram[5], gram[:, 5] = 0, 0, 0
    made, damping = gptq_e4m3(w, gram, Gptq(0.01))
    scales, values = made.scales.astype(np.float64)[:, 0], made.dequantise()
    exact = paper_e4m3(w, gram, scales, 0.01)
    assert damping == 0.01 and (values != exact).mean() < 2e-3
    assert loss(w, values, gram) == pytest.approx(loss(w, exact, gram), rel=1e-3)
    assert loss(w, values, gram) < 0.7 * loss(w, rounded_e4m3(w).dequantise(), gram)
    assert not values[3].any() and not values[:, 5].any()


def test_its_scale_is_the_best_of_those_that_bfloat16_needs() -> None:
    """Of all scales of four bits in the octave above the smallest that holds the row, tried one by one in float64."""
    w, gram = case(30, 64, seed=2)
    energy = gram.diagonal()
    found = scales_for(w, energy).astype(np.float64)[:, 0]
    for row, mine in zip(w.astype(np.float64), found, strict=True):
        tried = {}
        for exponent in range(-20, 2):
            for mantissa in range(8, 16):
                scale = mantissa / 16 * 2.0**exponent
                if np.abs(row).max() / 448 <= scale < 2 * np.abs(row).max() / 448 * (1 + 1 / 8):
                    values = (row / scale).astype(np.float32).astype(E4M3).astype(np.float64) * scale
                    tried[scale] = float(np.square(row - values) @ energy)
        assert len(tried) >= 8 and mine in tried
        assert tried[mine] <= min(list(tried.values())[:8]) * (1 + 1e-5)


@pytest.mark.parametrize("sign", [-1.0, 0.0])
def test_what_has_no_factor_is_one_error(sign: float) -> None:
    """No inputs have such means of products: a damaged file."""
    w, gram = case(4, 8, 0)
    gram[:] = sign
    gram[0, 1] = gram[1, 0] = 1e30
    with pytest.raises(ConfigError, match="has no factor"):
        gptq(w, gram, Grid(4, WHOLE_ROW))
