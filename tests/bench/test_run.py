"""Loads against the null server: how many at a time, when, how long, and what a run leaves behind."""

import asyncio
import gc
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest

from millrace.bench.client.client import BenchTarget, Client
from millrace.bench.client.endpoints import CHAT
from millrace.bench.client.request_record import Failure
from millrace.bench.load.arrivals import Arrivals
from millrace.bench.load.distribution import Spread
from millrace.bench.load.inputs import ConversationShape, LengthPattern, Session, Turn, synthetic
from millrace.bench.load.prompt_text import PromptWords
from millrace.bench.null_server.ledger import NullTiming
from millrace.bench.run import run as bounds
from millrace.bench.run.plan import make_plan, measure
from millrace.bench.run.run import Run, RunLoad, TurnRecord
from millrace.bench.settings import InputSettings, LoadSettings, SessionSettings, TargetSettings
from millrace.errors import ConfigError, MachineError
from tests.bench.conftest import Null

SHAPE = LengthPattern(Spread(5), Spread(4))
TIMING = NullTiming(ttft_ms="40", itl_ms="5")  # an answer of 4 tokens takes 55 ms


def driven(url: str, load: RunLoad, sessions: Any = None, then: Callable[[Run], None] = lambda run: None) -> Run:
    async def driving() -> Run:
        async with Client(BenchTarget(url, CHAT, keep_text=True)) as client:
            run = Run(client, load)
            asyncio.get_running_loop().call_soon(then, run)
            await run.drive(synthetic([SHAPE], PromptWords(), 1) if sessions is None else iter(sessions))
            return run

    return asyncio.run(driving())


def max_concurrency(records: list[TurnRecord]) -> int:
    changes = [(r.answer.sent_s, 1) for r in records] + [(r.answer.end_s, -1) for r in records]
    return int(np.cumsum([by for _, by in sorted(changes)]).max())


def test_so_many_users_at_a_time_each_waits_for_its_answer(null: Null) -> None:
    run = driven(null(TIMING).url, RunLoad(concurrency=4, n_sessions=12))
    assert len(run.records) == 12 and run.ended == "" and run.n_running == 0
    assert [r.answer.failure for r in run.records] == [None] * 12
    assert max_concurrency(run.records) == 4 and sorted(r.session for r in run.records) == list(range(12))


@pytest.mark.parametrize("late_s", [1, pytest.param(0.03, marks=pytest.mark.timing)], ids=["busy", "idle"])
def test_users_begin_within_the_ramp(null: Null, late_s: float) -> None:
    slow = NullTiming(ttft_ms="150", itl_ms="1")
    run = driven(null(slow).url, RunLoad(concurrency=4, n_sessions=4, ramp_s=0.2))
    began = sorted(r.answer.sent_s - run.started_s for r in run.records)
    due = [0, 0.05, 0.1, 0.15]  # without a ramp, at 0 all of them
    assert all(at_s <= began_s < at_s + late_s for at_s, began_s in zip(due, began, strict=True))


def test_requests_arrive_whether_or_not_there_are_answers(null: Null) -> None:
    load = RunLoad(arrivals=Arrivals(100, "constant"), duration_s=0.199)
    run = driven(null(NullTiming(ttft_ms="150", itl_ms="1")).url, load)
    due = sorted(r.answer.intended_s - run.started_s for r in run.records)
    assert due == pytest.approx([i / 100 for i in range(20)], abs=1e-6) and max_concurrency(run.records) >= 14
    assert all(r.answer.sent_s >= r.answer.intended_s for r in run.records)


@pytest.mark.parametrize("max_s", [10, pytest.param(0.1, marks=pytest.mark.timing)], ids=["busy", "idle"])
def test_waiting_for_a_place_counts_from_the_intended_time(null: Null, max_s: float) -> None:
    """Coordinated omission: 10 requests due at once, one at a time, each 55 ms: the last one's user waits 550 ms."""
    load = RunLoad(concurrency=1, arrivals=Arrivals(1e5, "constant"), n_sessions=10)
    run = driven(null(TIMING).url, load)
    waits = sorted(r.answer.chunk_s[-1] - r.answer.intended_s for r in run.records)
    takes = [r.answer.chunk_s[-1] - r.answer.sent_s for r in run.records]
    assert max_concurrency(run.records) == 1 and max(takes) < max_s
    assert sum(takes) >= 0.55 and waits[-1] > 0.9 * sum(takes) and waits[4] >= 0.275


@pytest.mark.parametrize("late_s", [10, pytest.param(1, marks=pytest.mark.timing)], ids=["busy", "idle"])
def test_a_trace_says_when(null: Null, late_s: float) -> None:
    sessions = [Session((Turn("a", 2),), at_s) for at_s in (0.0, 0.1, 0.11)]
    run = driven(null(TIMING).url, RunLoad(), sessions)
    intended_s = sorted(r.answer.intended_s - run.started_s for r in run.records)  # records are in order of their ends
    assert intended_s == pytest.approx([0, 0.1, 0.11])
    assert all(0 <= r.answer.sent_s - r.answer.intended_s < late_s for r in run.records)


def test_turns_go_on_from_the_answers(null: Null) -> None:
    """Prompts of 5 words, answers of 4: the third turn's prompt is 5 + 4 + 5 + 4 + 5 words, as the server counts."""
    sessions = list(islice(synthetic([SHAPE], PromptWords(), 1, talk=ConversationShape(Spread(3), Spread(50))), 2))
    run = driven(null(TIMING).url, RunLoad(concurrency=2), sessions)
    for session in range(2):
        turns = [r for r in run.records if r.session == session]
        assert [r.answer.n_prompt for r in turns] == [5, 14, 23] and [r.number for r in turns] == [0, 1, 2]
        for before, after in pairwise(turns):
            assert 0.04 < after.answer.intended_s - before.answer.end_s < 1


def test_some_are_cancelled_and_others_take_their_place(null: Null) -> None:
    server = null(NullTiming(ttft_ms="10", itl_ms="10"))
    load = RunLoad(concurrency=4, n_sessions=40, cancel_share=0.5, cancel_after_s=0.015, seed=1)
    run = driven(server.url, load)
    gone = [r.answer for r in run.records if r.answer.failure is not None]
    assert len(run.records) == 40 and {a.failure for a in gone} == {Failure.CANCELLED} and 10 <= len(gone) <= 30
    assert all(0.015 <= a.end_s - a.intended_s < 1 for a in gone)


def test_a_run_that_is_stopped_keeps_what_it_has(null: Null) -> None:
    """One second in, of answers that take three."""

    def stop_soon(run: Run) -> None:
        asyncio.get_running_loop().call_later(0.2, run.stop, "Ctrl-C")

    server = null(NullTiming(ttft_ms="5", itl_ms="10"))
    long = [Session((Turn("a", n),)) for n in (3, 500, 500, 500)]
    run = driven(server.url, RunLoad(concurrency=2), long, stop_soon)
    assert run.ended == "Ctrl-C" and [r.answer.failure for r in run.records] == [None] + [Failure.INTERRUPTED] * 2
    assert all(5 < len(r.answer.chunk_s) < 30 for r in run.records[1:])


def test_a_server_that_is_gone_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "FAILURES_IN_A_ROW", 7)
    run = driven("http://127.0.0.1:1", RunLoad(concurrency=2))
    assert 7 <= len(run.records) <= 8 and "7 requests in a row failed" in run.ended and "Refused" in run.ended


def test_a_mistake_in_the_middle_of_inputs_is_raised(null: Null) -> None:
    def broken() -> Any:
        yield Session((Turn("a", 1),))
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        driven(null(TIMING).url, RunLoad(concurrency=1), broken())


def settings(**given: Any) -> tuple[TargetSettings, LoadSettings, InputSettings, SessionSettings]:
    return TargetSettings(model="m"), LoadSettings(**given), InputSettings(isl=40, osl=3), SessionSettings()


def test_a_warm_up_does_not_count_and_has_texts_of_its_own(null: Null) -> None:
    server = null(NullTiming(ttft_ms="6", itl_ms="1"))
    before, begun = len(server.truth_list), list[Run]()
    plan = make_plan(server.url, *settings(concurrency=3, request_count=5, warmup_request_count=4))
    run = asyncio.run(measure(plan, begun.append))
    assert begun[1] is run and [len(r.records) for r in begun] == [4, 5]
    assert len(server.truth_list) - before == 2 + 4 + 5, "two first questions, the warm-up, the run"
    assert len({r.turn.text for one in begun for r in one.records}) == 9


def test_prompts_have_the_length_that_the_server_counts(null: Null) -> None:
    """Its template adds nothing, and a word is a token: what the first questions find out."""
    plan = make_plan(null(NullTiming(ttft_ms="6", itl_ms="1")).url, *settings(request_count=3))
    run = asyncio.run(measure(plan))
    assert [r.answer.n_prompt for r in run.records] == [40] * 3


def test_no_server_is_said_at_once() -> None:
    with pytest.raises(MachineError, match="gives no answer to a first question"):
        asyncio.run(measure(make_plan("http://127.0.0.1:1", *settings())))


def test_no_collection_of_everything_stops_a_run(null: Null) -> None:
    """Thresholds so low that there would be many; a mistake in the middle leaves them as they were, too."""
    seen: list[int] = []

    def watch(phase: str, info: dict[str, int]) -> None:
        seen.append(info["generation"] if phase == "stop" else -1)

    before, hold = gc.get_threshold(), [[] for _ in range(10_000)]  # type: ignore[var-annotated]
    gc.collect()
    gc.callbacks.append(watch)
    try:
        gc.set_threshold(20, 1, 1)
        for _ in range(20):  # a quarter of what there is has to be new: of what another thread holds back, too
            hold += [[] for _ in range(100_000 + len(gc.get_objects()) // 3)]
            if 2 in seen:
                break
        assert 2 in seen, "a pass over everything is seen as one"
        seen.clear()
        url, grown = null(TIMING).url, []  # type: ignore[var-annotated]

        def growing() -> Iterator[Session]:
            for i in range(12):
                grown.extend([] for _ in range(50_000))
                yield Session((Turn("a", 4),))
                if i == 10:
                    raise ConfigError("what", "was", "wrong")

        with pytest.raises(ConfigError):
            driven(url, RunLoad(concurrency=4), growing())
        assert 1 in seen and 2 not in seen and gc.get_threshold() == (20, 1, 1)
    finally:
        gc.callbacks.remove(watch)
        gc.set_threshold(*before)
