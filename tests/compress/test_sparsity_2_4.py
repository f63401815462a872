"""2:4 sparsity beside float64 written from the papers, and as recipes: what is written, what it costs."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.resolve_model import BUNDLED
from millrace.compress.calibration.calibrated_methods import by_statistics, statistics_of
from millrace.compress.calibration.calibration_pass import samples
from millrace.compress.calibration.statistics import CalibrationStatistics, InputStatistics
from millrace.compress.compress import compress
from millrace.compress.compression_plan import CompressionPlan, plan_compression
from millrace.compress.methods.sparsity_2_4 import sparse, sparsegpt, wanda
from millrace.compress.recipe import parsed, to_dict
from millrace.errors import CheckpointError, ConfigError
from tests.fuzz.originals import write_checkpoint

TEXT = (BUNDLED / "calibration.txt").read_text()
F64 = NDArray[np.float64]


def drawn(seed: int, N: int = 24, K: int = 272) -> tuple[NDArray[np.float32], F64]:
    """Weights, and rows of inputs of unequal sizes that go together in part."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(900, K)) @ (np.eye(K) + 0.4 * rng.normal(size=(K, K)) / K**0.5) * rng.uniform(0.2, 3, K)
    return rng.normal(size=(N, K)).astype(np.float32), rows


def gram_of(rows: F64) -> NDArray[np.float32]:
    return (rows.T @ rows / len(rows)).astype(np.float32)


def plain_wanda(w: F64, rows: F64) -> F64:
    """Its figure 1 and section 3: |w| times the norm of the feature, in each output the least two of every four go."""
    norms = np.sqrt(np.square(rows).sum(axis=0))
    found = w.copy()
    for out in found:
        for i in range(0, len(out), 4):
            order = sorted(range(i, i + 4), key=lambda j: abs(out[j]) * norms[j])
            out[order[:2]] = 0
    return found


def plain_sparsegpt(w: F64, gram: F64, damping: float) -> F64:
    """Its algorithm 1, column by column: the mask for four columns where the first of them is reached."""
    w, K = w.copy(), len(gram)
    H = 2 * gram + damping * np.mean(np.diag(2 * gram)) * np.eye(K)
    U = np.linalg.cholesky(np.linalg.inv(H)).T  # H^-1 = U^T U
    mask = np.zeros(w.shape, bool)
    for i in range(K):
        if i % 4 == 0:
            scores = np.square(w[:, i : i + 4]) / np.square(np.diag(U)[i : i + 4])
            order = np.argsort(scores, axis=1)
            np.put_along_axis(mask[:, i : i + 4], order[:, 2:], True, axis=1)
        kept = np.where(mask[:, i], w[:, i], 0)
        error = (w[:, i] - kept) / U[i, i]
        w[:, i:] -= np.outer(error, U[i, i:])
        w[:, i] = kept
    return w


def two_of_four(w: NDArray[Any]) -> bool:
    return bool((np.count_nonzero(w.reshape(len(w), -1, 4), axis=2) == 2).all())


@pytest.mark.parametrize("seed", range(3))
def test_wanda_is_the_papers(seed: int) -> None:
    w, rows = drawn(seed)
    found = wanda(w, gram_of(rows))
    np.testing.assert_array_equal(found, plain_wanda(w.astype(np.float64), rows).astype(np.float32))
    assert two_of_four(found)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("damping", [0.01, 0.1])
def test_sparsegpt_is_the_papers(seed: int, damping: float) -> None:
    """272 columns are more than two blocks. A weight between two masks may fall to the other side in float32."""
    w, rows = drawn(seed)
    found, exact = (
        sparsegpt(w, gram_of(rows), damping),
        plain_sparsegpt(w.astype(np.float64), gram_of(rows).astype(np.float64), damping),
    )
    same = (found != 0) == (exact != 0)
    assert two_of_four(found) and same.mean() > 0.995
    whole = same.all(axis=1)
    assert whole.mean() > 0.7
    np.testing.assert_allclose(found[whole], exact[whole], atol=2e-3)


def test_knowing_more_loses_less() -> None:
    """As published: SparseGPT before Wanda on the layer's own output, and both before the least weights alone."""
    w, rows = drawn(5)
    x = InputStatistics(("x",), gram_of(rows), *np.zeros((2, w.shape[1]), np.float32))
    by_size = wanda(w, np.eye(w.shape[1], dtype=np.float32))
    exact = [np.square(rows @ (w - made).T).sum() / np.square(rows @ w.T).sum() for made in (by_size, wanda(w, x.gram))]
    found = {method: sparse(w, x, method).error for method in ("wanda", "sparsegpt")}
    assert found["wanda"] == pytest.approx(exact[1], rel=1e-3)
    assert found["sparsegpt"] < 0.9 * found["wanda"] and found["wanda"] < 0.9 * exact[0]


def test_inputs_that_are_never_there() -> None:
    """A dead column is dropped first, and costs nothing."""
    w, rows = drawn(7, K=16)
    rows[:, 5] = 0
    for made in (wanda(w, gram_of(rows)), sparsegpt(w, gram_of(rows))):
        assert two_of_four(made) or (np.count_nonzero(made.reshape(len(w), -1, 4), axis=2) <= 2).all()
        assert (made[:, 5] == 0).all() and np.isfinite(made).all()


class Small(NamedTuple):
    checkpoint: Checkpoint
    statistics: CalibrationStatistics

    def plan(self, **said: Any) -> CompressionPlan:
        return plan_compression(self.checkpoint, parsed({"version": 1, **said}, "mine"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    folder = tmp_path_factory.mktemp("small")
    checkpoint = Checkpoint.open(write_checkpoint(folder / "c"))
    text = samples(checkpoint.tokenizer, TEXT, 2, 64)
    return Small(checkpoint, statistics_of(checkpoint, text, folder / "s", lambda *_: None))


def test_a_recipe_makes_floats_with_zeros(small: Small, tmp_path: Path) -> None:
    """A checkpoint like any other, of as many bytes; heads and embeddings as they were."""
    plan = small.plan(method="sparsegpt")
    assert len(plan.sparse) == 7 and not plan.layers and plan.calibrated and "as many bytes as before" in plan.notes[-1]
    assert plan.bytes_after == plan.bytes_before and plan.bits_per_weight == 32
    made = compress(plan, tmp_path / "out", by_statistics(small.statistics))
    tensors = Checkpoint.open(tmp_path / "out").tensors
    for name, info in small.checkpoint.tensors.items():
        layer, exact = name.removesuffix(".weight"), small.checkpoint.tensors.load(name)
        if layer in plan.sparse:
            wanted = sparse(exact, small.statistics[layer], "sparsegpt")
            np.testing.assert_array_equal(tensors.load(name), wanted.weights)
            assert made.errors[layer] == wanted.error > 0 and two_of_four(tensors.load(name))
        else:
            np.testing.assert_array_equal(tensors.load(name), exact)
        assert tensors[name].dtype == info.dtype
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()


def test_beside_what_is_rounded(small: Small, tmp_path: Path) -> None:
    said = {"method": "gptq", "group": 32, "search": "clip", "layers": [{"match": "*.mlp.*", "method": "wanda"}]}
    plan = small.plan(**said)
    assert len(plan.sparse) == 3 and len(plan.layers) == 4 and set(plan.sparse) <= set(plan.ignored)
    assert parsed(to_dict(plan.recipe), "mine") == plan.recipe
    compress(plan, tmp_path / "out", by_statistics(small.statistics))
    made = Checkpoint.open(tmp_path / "out").tensors
    for layer in plan.sparse:
        assert two_of_four(made.load(f"{layer}.weight"))
    assert all(made[f"{layer}.weight"].dtype == "int4" for layer in plan.layers)


def test_what_cannot_be_sparse(small: Small, tmp_path: Path) -> None:
    odd = Checkpoint.open(write_checkpoint(tmp_path / "odd", width=64, inner=98))
    with pytest.raises(CheckpointError, match=r"down_proj has 98 inputs") as error:
        plan_compression(odd, parsed({"version": 1, "method": "wanda"}, "mine"))
    assert 'match = "*.down_proj"' in error.value.fix
    for more in ({"search": "clip"}, {"smooth": "awq"}, {"activations": 8}, {"minimums": True}):
        with pytest.raises(ConfigError, match="method is 'wanda'"):
            small.plan(method="wanda", **more)
    with pytest.raises(ConfigError, match="treats lm_head by statistics"):
        small.plan(method="wanda", layers=[{"match": "lm_head", "method": "sparsegpt"}])
