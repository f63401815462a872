"""Likelihoods of endings beside those of one sequence at a time, whatever shares steps and pages."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from millrace.compile.resolve_model import BUNDLED
from millrace.engine.native.executor import NativeExecutor
from millrace.errors import RequestError
from millrace.evaluate.divergence import LogProbs, log_probabilities
from millrace.evaluate.likelihood import LikelihoodQuestion, likelihoods
from tests.support.checkpoints import random_checkpoint
from tests.support.engines import build


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeExecutor]:
    engine = build(BUNDLED / "tiny", tmp_path_factory.mktemp("e") / "e", "w4a8")  # the fastest
    with closing(engine.executor(n_pages=24, threads=1)) as found:
        yield found


Known = dict[tuple[int, ...], LogProbs]


def alone(executor: NativeExecutor, context: list[int], ending: list[int], known: Known) -> tuple[float, bool]:
    """known: by what is read, which is all but the last token: one run for all endings of a token"""
    ids = np.array([*context, *ending], np.int32)
    read = tuple(ids[:-1].tolist())
    if read not in known:
        known[read] = log_probabilities(executor, ids, len(context) - 1).astype(np.float64)
    rows = known[read]
    return float(rows[np.arange(len(ending)), ending].sum()), rows.argmax(axis=1).tolist() == ending


@pytest.mark.parametrize("shared", [0, 63, *(pytest.param(n, marks=pytest.mark.nightly) for n in (64, 130, 200))])
def test_equal_those_of_each_alone(executor: NativeExecutor, shared: int) -> None:
    draw = np.random.default_rng(shared)
    begin = draw.integers(3, executor.limits.vocab_size, shared).tolist()
    asked = []
    for _ in range(40):
        context = begin + draw.integers(3, executor.limits.vocab_size, draw.integers(1, 90)).tolist()
        lengths = draw.choice([1, 1, 1, 2, 5], 4)
        asked.append(
            LikelihoodQuestion(context, [draw.integers(3, executor.limits.vocab_size, n).tolist() for n in lengths])
        )
    found = dict(likelihoods(executor, asked))
    assert sorted(found) == list(range(40))
    known: Known = {}
    for i, one in enumerate(asked):
        for ending, got in zip(one.endings, found[i], strict=True):
            logprob, greedy = alone(executor, list(one.context), list(ending), known)
            assert got.logprob == pytest.approx(logprob, abs=1e-4) and got.greedy == greedy


@pytest.mark.parametrize("family", ["gemma2", "lfm2"])
def test_windows_and_states(family: str, tmp_path: Path) -> None:
    """Contexts that begin alike, sequences that go on in the next step, more of them than a step has."""
    draw = np.random.default_rng(7)
    path = random_checkpoint(tmp_path / "c", family, seed=2)
    engine = build(path, tmp_path / "e", "fp32", max_step_tokens=64)
    with closing(engine.executor(n_pages=24, threads=1)) as executor:
        begin = draw.integers(3, 1003, 140).tolist()
        asked = [
            LikelihoodQuestion(begin + draw.integers(3, 1003, 20).tolist(), draw.integers(3, 1003, (4, 3)).tolist())
            for _ in range(4)
        ]
        found = dict(likelihoods(executor, asked))
        known: Known = {}
        for i, one in enumerate(asked):
            for ending, got in zip(one.endings, found[i], strict=True):
                logprob, _ = alone(executor, list(one.context), list(ending), known)
                assert got.logprob == pytest.approx(logprob, abs=1e-4)


def test_the_likeliest_ending_is_greedy(executor: NativeExecutor) -> None:
    context = [5, 6, 7]
    best = int(log_probabilities(executor, np.array([*context, 3], np.int32), 2)[0].argmax())
    ((_, (one, other)),) = likelihoods(executor, [LikelihoodQuestion(context, [[best], [(best + 1) % 512]])])
    assert one.greedy and not other.greedy and one.logprob > other.logprob


def test_a_text_longer_than_a_step_and_one_as_long_as_the_context(executor: NativeExecutor) -> None:
    limits = executor.limits
    room = min(limits.max_context, limits.n_pages * limits.page_tokens)
    context = (np.arange(room) % 300 + 3).tolist()
    ((_, (got,)),) = likelihoods(executor, [LikelihoodQuestion(context, [[9]])])
    rows = log_probabilities(executor, np.array([*context[-1:]] * 2, np.int32), 0)  # another one: they must differ
    assert np.isfinite(got.logprob) and got.logprob != pytest.approx(float(rows[0, 9]))
    with pytest.raises(RequestError, match=f"a text of {room + 1} tokens"):
        list(likelihoods(executor, [LikelihoodQuestion([*context, 4], [[9]])]))


@pytest.mark.parametrize(
    ("context", "ending", "said"),
    [([], [1], "is empty"), ([1], [], "is empty"), ([1], [10**6], "go from 1 to 1000000"), ([-1], [1], "go from -1")],
)
def test_what_cannot_be_read(executor: NativeExecutor, context: list[int], ending: list[int], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        list(likelihoods(executor, [LikelihoodQuestion(context, [ending])]))


def test_nothing_asked(executor: NativeExecutor) -> None:
    assert list(likelihoods(executor, [])) == []
