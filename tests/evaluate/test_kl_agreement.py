"""How far a model is from a reference, beside llama-perplexity's formulas written out."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.resolve_model import BUNDLED
from millrace.engine.native.executor import NativeExecutor
from millrace.errors import ConfigError
from millrace.evaluate.divergence import Tokens, log_probabilities
from millrace.evaluate.kl_agreement import AgreementReport, agreement, check_window, compare
from millrace.evaluate.resumable_results import ResultsInputs, ResumableResults
from millrace.evaluate.text_windows import windows
from tests.support.engines import build

TEXT = "The wheel turned, and Lily the dog was very happy. " * 40
ABOUT = ResultsInputs("m", "engine", "w4a8", "kl", "text")


@pytest.fixture(scope="module")
def executors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NativeExecutor]]:
    folder = tmp_path_factory.mktemp("engines")
    made = [build(BUNDLED / "tiny", folder / p, p, group=32).executor(n_pages=2, threads=1) for p in ("w4a8", "fp32")]
    yield made
    for executor in made:
        executor.close()


def test_the_figures_are_those_of_llama_perplexity() -> None:
    draw = np.random.default_rng(5)
    n = 1001
    reference = draw.gamma(2, 1, n)
    loss, kl, same = reference + draw.normal(0.01, 0.1, n), draw.gamma(0.5, 0.02, n), draw.random(n) < 0.97
    got = agreement(Tokens(loss, reference, kl, same))

    def error(values: np.ndarray) -> float:
        mean = values.sum() / n
        return float(np.sqrt(((values * values).sum() / n - mean * mean) / (n - 1)))

    ratio = np.exp((loss.sum() - reference.sum()) / n)
    covariance = ((loss * reference).sum() / n - loss.sum() * reference.sum() / n / n) / (n - 1)
    error_of_ratio = np.sqrt(error(loss) ** 2 + error(reference) ** 2 - 2 * covariance)
    assert got.ratio == pytest.approx((ratio, ratio * error_of_ratio), rel=1e-9)
    assert got.perplexity == pytest.approx((np.exp(loss.mean()), np.exp(loss.mean()) * error(loss)))
    assert got.divergence == pytest.approx((kl.sum() / n, error(kl)))
    ordered = sorted(kl)
    assert got.at == pytest.approx({0.5: ordered[500], 0.99: ordered[990], 1.0: ordered[1000]})
    p = same.sum() / n
    assert got.same == pytest.approx((p, np.sqrt(p * (1 - p) / (n - 1))))
    change = np.exp(-loss) - np.exp(-reference)
    rms = np.sqrt((change * change).sum() / n)
    assert got.rms_change == pytest.approx((rms, error(change * change) / (2 * rms)))
    assert got.change == pytest.approx((change.sum() / n, error(change)))


def test_equal_models_differ_by_nothing() -> None:
    values = np.array([1.0, 2.0, 3.0])
    got = agreement(Tokens(values, values, np.zeros(3), np.ones(3, np.bool_)))
    assert (got.ratio, got.same, got.rms_change) == ((1, 0), (1, 0), (0, 0)) and set(got.at.values()) == {0.0}


def test_windows_are_read_by_both_and_only_once(executors: list[NativeExecutor], tmp_path: Path) -> None:
    model, reference = executors
    text = windows(Checkpoint.open(BUNDLED / "tiny").tokenizer, TEXT, 96)
    expected = []
    for ids in text.ids:
        q, p = (log_probabilities(e, ids, text.first).astype(np.float64) for e in (model, reference))
        at = np.arange(len(p)), ids[text.first + 1 :]
        expected.append((-q[at], -p[at], (np.exp(p) * (p - q)).sum(1), q.argmax(1) == p.argmax(1)))
    loss, reference_loss, kl, same = (np.concatenate(column) for column in zip(*expected, strict=True))
    path, seen = tmp_path / "kept", list[int]()
    for limit in (1, None, None):
        with closing(ResumableResults(path, ABOUT, AgreementReport)) as kept:
            seen.append(len(kept.records))
            got = compare(model, reference, text, limit, kept, lambda *_: None)
    assert seen == [0, 1, len(text.ids)] and len(text.ids) >= 4
    assert np.allclose(got.loss, loss, atol=1e-8) and np.allclose(got.reference_loss, reference_loss, atol=1e-8)
    assert np.allclose(got.divergence, kl, atol=1e-8) and (got.same == same).all() and kl.mean() > 1e-3


@pytest.mark.parametrize(("vocab_size", "fitting"), [(151_936, 3_534), (32_000, 16_778), (2**28, 4), (2**26, 10)])
def test_a_window_that_memory_holds(vocab_size: int, fitting: int) -> None:
    """The scored half, by two models, in float32."""
    assert len(range(fitting)[fitting // 2 + 1 :]) * vocab_size * 2 * 4 <= 2 << 30
    check_window(fitting, vocab_size)
    with pytest.raises(
        ConfigError, match=f"a window of {fitting + 1:,} tokens .*\\n.*: {fitting:,} tokens\\n.*--window {fitting}"
    ):
        check_window(fitting + 1, vocab_size)
