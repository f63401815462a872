"""The loop of an encoder alone, over a network of numbers: turns, bounds, failures, and its end."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from millrace.engine.encoder_inputs import Ids
from millrace.engine.executor import ExecutionError
from millrace.errors import BusyError, EngineError, MillraceError
from millrace.runtime.encoder_loop import EncoderLimits, EncoderLoop
from tests.serve.support import until

LIMITS = EncoderLimits(
    inputs=("tokens", "lengths"), max_step_tokens=10, max_texts=3, max_context=10, vocab_size=100, width=1
)


class Network:
    """A vector is its text's first token. Steps wait for `go`, where there is one, and fail as told."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []  # the lengths of each step's texts
        self.began, self.go = threading.Semaphore(0), threading.Semaphore(10**6)
        self.failures = 0
        self.poison: int | None = None  # a first token whose every step fails

    def run(self, inputs: dict[str, Ids]) -> dict[str, NDArray[np.float32]]:
        lengths = inputs["lengths"]
        self.steps.append(lengths.tolist())
        self.began.release()
        assert self.go.acquire(timeout=20)
        if self.failures:
            self.failures -= 1
            raise ExecutionError("on purpose")
        first = inputs["tokens"][np.cumsum(lengths) - lengths]
        if self.poison in first:
            raise ExecutionError("poison")
        return {"embeddings": np.where(first == 99, np.nan, first).astype(np.float32)[:, None]}


@pytest.fixture
def network() -> Network:
    return Network()


@pytest.fixture
def loop(network: Network) -> Iterator[EncoderLoop]:
    made = EncoderLoop(network, LIMITS)  # type: ignore[arg-type]
    yield made
    made.stop()


def ids(*lengths: int, token: int = 7) -> list[Ids]:
    return [np.full(n, token, np.int32) for n in lengths]


def held(network: Network) -> None:
    network.go = threading.Semaphore(0)


def test_steps_are_full_and_bounded(network: Network, loop: EncoderLoop) -> None:
    job = loop.submit([np.array([i, *[0] * (n - 1)], np.int32) for i, n in enumerate((1, 9, 5, 2, 5, 4, 1, 1))])
    loop.start()
    assert job.future.result(9)[:, 0].tolist() == list(range(8)), "in the order of the texts"
    assert network.steps == [[9], [5, 5], [4, 2, 1], [1, 1]], "long ones first, at most 10 tokens and 3 texts a step"
    stats = loop.stats()
    assert (stats.steps_total, stats.texts_total, stats.tokens_total, stats.waiting) == (4, 8, 28, 0) and stats.idle


def test_requests_take_turns(network: Network, loop: EncoderLoop) -> None:
    many, one = loop.submit(ids(*[5] * 20)), loop.submit(ids(5, token=8))
    loop.start()
    assert one.future.result(9) == [[8]] and network.steps[0] == [5, 5] and many.n_missing <= 19
    many.future.result(9)


def test_a_request_that_nobody_waits_for_is_left_out(network: Network, loop: EncoderLoop) -> None:
    held(network)
    loop.start()
    first = loop.submit(ids(10))
    assert network.began.acquire(timeout=9)
    gone, last = loop.submit(ids(*[10] * 50)), loop.submit(ids(1))
    assert loop.stats().waiting == 51 and loop.stats().waiting_tokens == 501 and not loop.stats().idle
    assert gone.future.cancel()
    network.go.release(9)
    assert last.future.result(9).shape == (1, 1) and first.future.done()
    assert network.steps == [[10], [1]] and loop.stats().waiting == loop.stats().waiting_tokens == 0


def test_what_is_not_finite_is_its_own_requests_error(network: Network, loop: EncoderLoop) -> None:
    bad, good = loop.submit([*ids(1), *ids(2, 2, token=99)]), loop.submit(ids(1))
    loop.start()
    with pytest.raises(EngineError, match=r"vector of text [12] is not finite"):
        bad.future.result(9)
    assert good.future.result(9) == [[7]]


def test_a_step_that_fails_fails_its_requests_and_three_end_the_loop(network: Network, loop: EncoderLoop) -> None:
    network.failures = 1
    loop.start()
    with pytest.raises(EngineError, match="on purpose"):
        loop.submit(ids(3)).future.result(9)
    assert loop.submit(ids(3)).future.result(9) == [[7]] and loop.stats().healthy
    network.failures = 4  # theirs, and the one of the loop's own that it tries then
    for _ in range(3):
        with pytest.raises(MillraceError):
            loop.submit(ids(3)).future.result(9)
    with pytest.raises((BusyError, EngineError), match="on purpose"):
        loop.submit(ids(3)).future.result(9)
    assert not loop.stats().healthy


def test_p12_a_text_that_comes_again_and_again_ends_nothing(network: Network, loop: EncoderLoop) -> None:
    network.poison = 66
    loop.start()
    for _ in range(7):
        with pytest.raises(EngineError, match="poison"):
            loop.submit(ids(3, token=66)).future.result(9)
    assert loop.submit(ids(3)).future.result(9) == [[7]] and loop.stats().healthy
    assert [lengths for lengths in network.steps if lengths != [3]] == [[1], [1]], "steps of its own"


def test_p12_a_request_that_fails_its_steps_fails_alone(network: Network, loop: EncoderLoop) -> None:
    """Its other texts fail with it; a second request has texts in each of its steps, before and after."""
    network.poison = 66
    bad = loop.submit([*ids(3, 3, token=5), *ids(3, token=66)])
    others = [loop.submit(ids(*[3] * 4, token=20 + i)) for i in range(2)]
    loop.start()
    with pytest.raises(EngineError, match="poison"):
        bad.future.result(9)
    assert [other.future.result(9)[:, 0].tolist() for other in others] == [[20] * 4, [21] * 4]
    assert network.steps[:4] == [[3, 3, 3], [3], [3], [3]], "and once more, each request alone"
    stats = loop.stats()
    assert stats.healthy and stats.idle and (stats.texts_total, stats.tokens_total) == (8, 24)


def test_p12_a_step_that_fails_once_fails_nobody(network: Network, loop: EncoderLoop) -> None:
    network.failures = 1
    jobs = [loop.submit(ids(3, 3, token=i)) for i in range(4)]
    assert jobs[3].future.cancel()
    loop.start()
    assert [job.future.result(9)[:, 0].tolist() for job in jobs[:3]] == [[0, 0], [1, 1], [2, 2]]
    assert loop.stats().healthy


def test_what_is_to_be_computed_alone_is_told_of_the_end(network: Network, loop: EncoderLoop) -> None:
    held(network)
    network.failures = 1
    jobs = [loop.submit(ids(3, token=i)) for i in range(3)]
    loop.start()
    assert network.began.acquire(timeout=9)
    network.go.release()
    assert network.began.acquire(timeout=9)  # the first one alone
    stopping = threading.Thread(target=loop.stop)
    stopping.start()
    until(lambda: loop.thread.stopping)
    network.go.release()
    stopping.join()
    assert jobs[0].future.result(9) == [[0]]
    for job in jobs[1:]:
        with pytest.raises(BusyError):
            job.future.result(9)


def test_a_defect_leaves_nobody_waiting(network: Network, loop: EncoderLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(inputs: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(network, "run", broken)
    jobs = [loop.submit(ids(10)) for _ in range(3)]
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    loop.start()
    for job in jobs:
        with pytest.raises(BusyError, match="defect"):
            job.future.result(9)
    with pytest.raises(BusyError, match="defect"):
        loop.submit(ids(1))


def test_after_its_end_a_loop_takes_nothing_until_it_starts_again(network: Network, loop: EncoderLoop) -> None:
    loop.start()
    loop.stop()
    with pytest.raises(BusyError, match="being closed"):
        loop.submit(ids(1))
    loop.start()
    assert loop.submit(ids(1)).future.result(9) == [[7]]


def test_stopping_cancels_what_is_left(network: Network, loop: EncoderLoop) -> None:
    held(network)
    loop.start()
    running = loop.submit(ids(10))
    assert network.began.acquire(timeout=9)
    waiting = loop.submit(ids(10))
    stopping = threading.Thread(target=loop.stop)
    stopping.start()
    while True:  # until it is seen to be stopping
        try:
            loop.submit(ids(1)).future.cancel()
        except BusyError:
            break
    network.go.release(9)
    stopping.join(9)
    assert running.future.result(0) == [[7]]
    with pytest.raises(BusyError, match="being closed"):
        waiting.future.result(0)
    loop.start()
    assert loop.submit(ids(1)).future.result(9) == [[7]], "it may be started again"
