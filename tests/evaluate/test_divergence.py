"""Perplexity and divergence against transformers' log probabilities in float64, summed by hand."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.resolve_model import BUNDLED
from millrace.engine.native.executor import NativeExecutor
from millrace.errors import RequestError
from millrace.evaluate.divergence import DivergenceScore, compared, log_probabilities, log_softmax
from millrace.evaluate.text_windows import Windows, windows
from tests.support.engines import build

TEXT = "Once upon a time there was a little dog. It lived in a mill by the river, and the wheel turned all day. " * 14
LENGTH = 96


@pytest.fixture(scope="module")
def executors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, NativeExecutor]]:
    folder = tmp_path_factory.mktemp("engines")
    made = {p: build(BUNDLED / "tiny", folder / p, p, group=32).executor(n_pages=4) for p in ("fp32", "w8a8", "w4a8")}
    yield made
    for executor in made.values():
        executor.close()


@pytest.fixture(scope="module")
def text() -> Windows:
    return windows(Checkpoint.open(BUNDLED / "tiny").tokenizer, TEXT, LENGTH)


def test_a_text_is_cut_as_llama_perplexity_does(text: Windows) -> None:
    tokenizer = Checkpoint.open(BUNDLED / "tiny").tokenizer
    ids = tokenizer.encode(TEXT)
    assert (
        ids[0] == tokenizer.bos_token_id == 1 and len(text.ids) == len(ids) // LENGTH >= 3 and text.first == LENGTH // 2
    )
    for number, window in enumerate(text.ids.tolist()):
        assert window[0] == 1 and window[1:] == ids[number * LENGTH + 1 : (number + 1) * LENGTH]
    assert len(windows(tokenizer, TEXT, LENGTH, max_windows=2).ids) == 2
    assert text.n_scored == len(text.ids) * (LENGTH // 2 - 1)
    with pytest.raises(RequestError, match=r"has \d+ tokens"):
        windows(tokenizer, "too short", LENGTH)


def test_perplexity_and_divergence_are_those_of_their_definitions(
    executors: dict[str, NativeExecutor], text: Windows
) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED / "tiny", dtype=torch.float64)
    seen: list[tuple[int, int]] = []
    readers = {name: partial(log_probabilities, executor) for name, executor in executors.items()}
    found = compared(readers["fp32"], readers, [*text.ids], text.first, lambda *done: seen.append(done))
    loss, n = 0.0, 0
    for window in text.ids.tolist():
        with torch.no_grad():
            logits = model(torch.tensor([window])).logits[0].numpy()
        exact = logits - np.log(np.exp(logits - logits.max(1)[:, None]).sum(1))[:, None] - logits.max(1)[:, None]
        for position in range(text.first, len(window) - 1):
            loss, n = loss - exact[position, window[position + 1]], n + 1
    assert seen == [(i + 1, len(text.ids)) for i in range(len(text.ids))]
    ours = found["fp32"]
    assert ours.n == n == text.n_scored and ours.perplexity == pytest.approx(np.exp(loss / n), rel=1e-5)
    assert (ours.mean_kl, ours.ratio, ours.agreement) == (0, 1, 1)
    by_hand = 0.0
    for window in text.ids:
        p, q = (log_probabilities(executors[name], window, text.first).astype(np.float64) for name in ("fp32", "w4a8"))
        by_hand += float((np.exp(p) * (p - q)).sum())
    assert (
        found["w4a8"].mean_kl == pytest.approx(by_hand / n, rel=1e-9)
        and found["w4a8"].mean_kl > found["w8a8"].mean_kl > 0
    )
    assert found["w4a8"].agreement <= 1 and found["w8a8"].ratio == pytest.approx(
        found["w8a8"].perplexity / ours.perplexity
    )


def test_how_a_window_is_cut_into_steps_changes_no_bit(executors: dict[str, NativeExecutor], text: Windows) -> None:
    whole = log_probabilities(executors["w8a8"], text.ids[0], 0)
    for first in (1, 31, LENGTH - 2):
        assert (log_probabilities(executors["w8a8"], text.ids[0], first) == whole[first:]).all()


def test_log_probabilities_of_extreme_logits() -> None:
    logits = np.array([[0, 1e4, -1e4], [-1e30, -1e30, -1e30], [88.0, 89.0, 90.0]], np.float32)
    found = log_softmax(logits)
    assert np.allclose(found, [[-1e4, 0, -2e4], [-np.log(3)] * 3, [-2.4076059, -1.4076059, -0.4076059]], rtol=1e-6)


def test_a_block_at_a_time_is_the_same_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    p, q = (log_softmax(rng.standard_normal((50, 300)).astype(np.float32)) for _ in range(2))
    targets = rng.integers(0, 300, 50).astype(np.int32)
    whole, parts = DivergenceScore(), DivergenceScore()
    whole.add(q, p, targets)
    monkeypatch.setattr("millrace.evaluate.divergence.BLOCK", 700)
    parts.add(q, p, targets)
    assert len(parts.parts) == 1 and (parts.tokens.divergence == whole.tokens.divergence).all()
    assert parts.agreement == whole.agreement


def test_a_window_that_does_not_fit_says_so(executors: dict[str, NativeExecutor]) -> None:
    ids = np.ones(300, np.int32)
    with pytest.raises(RequestError, match="a window of 300 tokens"):
        log_probabilities(executors["fp32"], ids, 0)
    with pytest.raises(RequestError, match="the largest of them 5000"):
        log_probabilities(executors["fp32"], np.array([1, 5000], np.int32), 0)
