"""One request may fail, or one step; the loop goes on, until it cannot, and then says so."""

import time
from collections.abc import Callable

import pytest

from millrace.engine.executor import StepInputs
from millrace.errors import BusyError, EngineError
from millrace.runtime.loop import MAX_FAILURES_IN_A_ROW
from millrace.runtime.params import Delta, FinishReason, SamplingParams
from tests.runtime.fakes import limits, make_loop

pytestmark = pytest.mark.timeout(30)  # a thread that waits for ever is what these tests look for
LONG = SamplingParams(max_tokens=20, ignore_eos=True, seed=1)


def failing_at(*steps: int) -> Callable[[StepInputs], None]:
    """Raise in these runs of the executor, counted from 1."""
    n_runs = 0

    def before_run(step: StepInputs) -> None:
        nonlocal n_runs
        n_runs += 1
        if n_runs in steps:
            raise RuntimeError(f"run {n_runs} failed")

    return before_run


def test_p12_a_failed_step_fails_its_requests_and_no_others() -> None:
    loop = make_loop(limits(max_sequences=2, max_step_tokens=8), failing_at(3))
    inside: list[list[Delta]] = [[], []]
    outside: list[Delta] = []
    for deltas in inside:
        loop.submit([1, 2, 3], LONG, deltas.extend)
    loop.submit([1, 2, 3], LONG, outside.extend)  # waits: there are two places
    while loop.step():
        pass
    for deltas in inside:
        assert deltas[-1].finish_reason is FinishReason.ERROR and "run 3 failed" in (deltas[-1].error or "")
    assert outside[-1].finish_reason is FinishReason.LENGTH
    assert sum(len(d.token_ids) for d in outside) == 20
    assert loop.stats().healthy and loop.stats().pages_used == 0


def test_failures_in_a_row_end_the_loop() -> None:
    loop = make_loop(limits(max_sequences=1, max_step_tokens=8), failing_at(*range(1, 100)))
    deltas: list[Delta] = []
    for _ in range(MAX_FAILURES_IN_A_ROW + 2):  # one sequence at a time: one request fails per step
        loop.submit([1, 2, 3], LONG, deltas.extend)
    for _ in range(MAX_FAILURES_IN_A_ROW):
        assert loop.stats().healthy
        loop.step()
    stats = loop.stats()
    assert not stats.healthy and stats.pages_used == 0 and stats.idle
    assert [d.finish_reason for d in deltas] == [FinishReason.ERROR] * (MAX_FAILURES_IN_A_ROW + 2)
    with pytest.raises(BusyError, match="the engine has stopped"):
        loop.submit([1], LONG, deltas.extend)


def test_failures_with_successes_between_do_not_end_it() -> None:
    loop = make_loop(limits(max_sequences=1, max_step_tokens=8), failing_at(1, 2, 4, 5, 7, 8))
    deltas: list[Delta] = []
    for _ in range(8):
        loop.submit([1, 2, 3], SamplingParams(max_tokens=1), deltas.extend)
    while loop.step():
        pass
    reasons = [d.finish_reason for d in deltas]
    assert loop.stats().healthy and reasons.count(FinishReason.ERROR) == 6 and len(reasons) == 8


def test_the_thread_ends_in_an_orderly_way_after_failures() -> None:
    def broken(step: StepInputs) -> None:
        raise EngineError("the pages are gone", "pages", "none")

    loop = make_loop(before_run=broken)
    loop.start()
    deltas: list[Delta] = []
    n_sent = 0
    try:
        while loop.stats().healthy:
            loop.submit([1, 2, 3], LONG, deltas.extend)
            n_sent += 1
    except BusyError:
        pass
    loop.stop()
    assert not loop.stats().healthy
    assert len(deltas) == n_sent and all(d.finish_reason is FinishReason.ERROR for d in deltas)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_defect_of_ours_leaves_nobody_waiting() -> None:
    loop = make_loop(limits(max_sequences=2, max_step_tokens=8))
    received: list[list[Delta]] = [[], [], []]

    def defect(deltas: list[Delta]) -> None:
        received[0] += deltas
        if len(received[0]) >= 3:
            loop._scheduler.pool = loop._scheduler  # type: ignore[assignment]  # nothing works any more

    for deliver in (defect, received[1].extend, received[2].extend):
        loop.submit([1, 2, 3], SamplingParams(n=2, max_tokens=20, ignore_eos=True, seed=1), deliver)
    loop.start()
    while loop.stats().healthy:
        pass
    loop.stop()
    for deltas in received:
        assert [d.finish_reason for d in deltas if d.finish_reason] == [FinishReason.ERROR] * 2
        assert "defect" in (deltas[-1].error or "")


@pytest.mark.parametrize("threaded", [False, True])
def test_stop_aborts_what_is_left_and_the_loop_can_go_on(threaded: bool) -> None:
    loop = make_loop(before_run=lambda step: time.sleep(0.001))
    deltas: list[Delta] = []
    refused: list[BusyError] = []

    def deliver(more: list[Delta]) -> None:
        deltas.extend(more)
        if more[-1].finish_reason is not None:
            with pytest.raises(BusyError, match="it is being closed") as error:
                loop.submit([1], LONG, deltas.extend)
            refused.append(error.value)

    loop.submit([1, 2, 3], SamplingParams(max_tokens=120, ignore_eos=True), deliver)
    if threaded:
        loop.start()
    else:
        loop.step()
    loop.stop()
    assert deltas[-1].finish_reason is FinishReason.ABORT and loop.stats().pages_used == 0 and len(refused) == 1
    after: list[Delta] = []
    loop.submit([1, 2, 3], LONG, after.extend)
    while loop.step():
        pass
    assert after[-1].finish_reason is FinishReason.LENGTH and loop.stats().idle
