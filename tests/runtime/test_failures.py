"""One request may fail, or one step; the loop goes on, until it cannot, and then says so."""

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest

from millrace.engine.executor import StepInputs
from millrace.errors import BusyError, EngineError
from millrace.runtime.engine_thread import MAX_CONSECUTIVE_FAILURES
from millrace.runtime.loop import EngineLoop
from millrace.runtime.request.sampling_params import Delta, FinishReason, SamplingParams
from tests.runtime.clients import Client, answered, run_all
from tests.runtime.fakes import limits, make_loop

pytestmark = pytest.mark.timeout(120)  # a thread that waits for ever is what these tests look for
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


@pytest.mark.parametrize("poisoned_at", [0, 1, 2])
@pytest.mark.parametrize("n", [1, 2])
def test_p12_a_request_that_fails_its_steps_fails_alone(poisoned_at: int, n: int) -> None:
    """Whose step fails whenever it is in it: the others of those steps get their own tokens, to the last."""
    of = limits(max_sequences=6, max_step_tokens=12, page_tokens=4)

    def run(step: StepInputs) -> None:
        if 4242 in step.sampling["seed"]:
            raise RuntimeError("no step with this seed")

    loop = make_loop(of, run)
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10]]
    params = [replace(LONG, n=n, seed=i, temperature=1.0) for i in range(3)]
    clients = [Client(loop, prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    for _ in range(poisoned_at):
        loop.step()
    bad = Client(loop, [77, 78, 79], replace(LONG, seed=4242))
    run_all(loop)
    assert bad.reasons == [FinishReason.ERROR] and "no step with this seed" in (bad.deltas[-1].error or "")
    for client in clients:
        assert client.outputs == answered(make_loop(of, prefix_cache=False), client.prompt, client.params).outputs
    assert loop.stats().healthy and loop.stats().pages_used == 0


def test_p12_a_step_that_fails_once_fails_nobody() -> None:
    """Computed again, each alone, also with a copy of a page that was known in part, and beside one who goes."""
    of = limits(max_sequences=4, max_step_tokens=12, page_tokens=4)
    for at in range(3, 12):
        loop = make_loop(of, failing_at(at))
        answered(loop, [1, 2, 3, 4, 5, 6, 7], replace(LONG, max_tokens=1))
        clients = [Client(loop, [1, 2, 3, 4, 5, 6, 50 + i], LONG) for i in range(3)]
        gone = Client(loop, [9, 9], LONG)
        while len(loop._retries) < 2 and loop.step():
            pass
        loop.cancel(gone.request)
        run_all(loop)
        for client in clients:
            assert client.outputs == answered(make_loop(of, prefix_cache=False), client.prompt, LONG).outputs
        assert gone.reasons == [FinishReason.ABORT] and loop.stats().healthy and loop.stats().pages_used == 0


def test_a_step_of_one_request_fails_it_and_nobody_who_waits() -> None:
    loop = make_loop(limits(max_sequences=2, max_step_tokens=8), failing_at(3))
    inside, outside = Client(loop, [1, 2, 3], replace(LONG, n=2)), Client(loop, [1, 2, 3], LONG)
    run_all(loop)
    assert inside.reasons == [FinishReason.ERROR] * 2 and "run 3 failed" in (inside.deltas[-1].error or "")
    assert outside.reasons == [FinishReason.LENGTH] and len(outside.outputs[0].token_ids) == 20
    assert loop.stats().healthy and loop.stats().pages_used == 0


def test_failures_in_a_row_end_the_loop() -> None:
    loop = make_loop(limits(max_sequences=1, max_step_tokens=8), failing_at(*range(1, 100)))
    deltas: list[Delta] = []
    for _ in range(MAX_CONSECUTIVE_FAILURES + 2):  # one sequence at a time: one request fails per step
        loop.submit([1, 2, 3], LONG, deltas.extend)
    for _ in range(MAX_CONSECUTIVE_FAILURES):
        assert loop.stats().healthy
        loop.step()
    stats = loop.stats()
    assert not stats.healthy and stats.pages_used == 0 and stats.idle
    assert [d.finish_reason for d in deltas] == [FinishReason.ERROR] * (MAX_CONSECUTIVE_FAILURES + 2)
    with pytest.raises(BusyError, match="the engine has stopped"):
        loop.submit([1], LONG, deltas.extend)


@pytest.mark.parametrize("n_pages_kept", [0, 2])
def test_p12_a_request_that_comes_again_and_again_ends_nothing(n_pages_kept: int) -> None:
    """As clients do that try again: nobody else is there whose steps go well, and pages are rare."""
    n_alone = 0

    def run(step: StepInputs) -> None:
        nonlocal n_alone
        n_alone += len(step.tokens) == 1 and step.tokens[0] == 0
        if 4242 in step.sampling["seed"]:
            raise RuntimeError("no step with this seed")

    loop = make_loop(limits(max_sequences=2, max_step_tokens=8, page_tokens=4, max_context=12, n_pages=3), run)
    answered(loop, [1] * 4 * n_pages_kept or [1], replace(LONG, max_tokens=1))
    for i in range(2 * MAX_CONSECUTIVE_FAILURES + 1):
        bad = Client(loop, [77, 78, 79], replace(LONG, max_tokens=5, seed=4242))
        run_all(loop)
        assert bad.reasons == [FinishReason.ERROR] and "no step with this seed" in (bad.deltas[-1].error or "")
        assert n_alone == (i + 1) // MAX_CONSECUTIVE_FAILURES, "a step of its own, where it is time to doubt"
    good = answered(loop, [5, 6], replace(LONG, max_tokens=9))
    assert good.outputs == answered(make_loop(limits(), prefix_cache=False), [5, 6], good.params).outputs
    assert loop.stats().healthy and loop.stats().pages_used == 0


def test_who_looks_after_it_hears_of_its_end_though_nobody_waits_for_an_answer() -> None:
    """The last step that fails is of a request that was cancelled while it ran."""
    dead: list[bool] = []
    loop = make_loop(before_run=failing_at(*range(1, 10)), depth=2)
    loop._after_step = lambda: dead.append(not loop.stats().healthy)
    for n in range(MAX_CONSECUTIVE_FAILURES):
        client = Client(loop, [1, 2, 3], LONG)
        loop.step()
        assert loop._in_flight and not any(dead)
        if n == MAX_CONSECUTIVE_FAILURES - 1:
            loop.cancel(client.request)
        run_all(loop)
    assert client.reasons == [FinishReason.ABORT] and dead[-1]


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


def died() -> EngineLoop:
    """Of a defect, with a step under way."""
    loop = make_loop(depth=2)

    def defect(deltas: list[Delta]) -> None:
        assert deltas[-1].finish_reason is FinishReason.ERROR, "a defect, with the first token"

    loop.submit([1, 2, 3], LONG, defect)
    loop.start()
    while loop.stats().healthy:
        pass
    loop.stop()
    return loop


def stopped() -> EngineLoop:
    """Between the requests of a step that failed, each of which was to be computed alone."""
    loop = make_loop(before_run=failing_at(2))
    clients = [Client(loop, [i, 2, 3], LONG) for i in range(3)]
    while not loop._retries:
        loop.step()
    loop.stop()
    assert [client.reasons for client in clients] == [[FinishReason.ABORT]] * 3
    return loop


@pytest.mark.parametrize("ended", [died, stopped])
def test_a_loop_that_has_ended_is_let_go(ended: Callable[[], EngineLoop], monkeypatch: pytest.MonkeyPatch) -> None:
    """With its pool, its tokenizer and its executor, though steps, chunks and requests know one another."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)  # pytest keeps tracebacks, and so what is logged
    logging.disable(logging.CRITICAL)
    gc.freeze()  # what exists is not looked at, or this takes a second
    try:
        loop = weakref.ref(ended())
        gc.collect()
        assert loop() is None
    finally:
        gc.unfreeze()
        logging.disable(logging.NOTSET)
