"""The asyncio face with a real event loop and a real engine thread."""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from millrace.api.offline_generate import Collector, CompletionOutput, RequestOutput
from millrace.engine.executor import ExecutorLimits, StepInputs
from millrace.errors import BusyError, ConfigError, RequestError
from millrace.runtime import service
from millrace.runtime.request.sampling_params import FinishReason, SamplingParams
from millrace.runtime.service import AsyncEngine, RequestHandle, ServiceOptions
from tests.runtime.fakes import VOCAB, FakeTokenizer, expected_choice, limits, make_loop

pytestmark = pytest.mark.timeout(240)  # a stream that never ends is what these tests look for
TIGHT = limits(n_pages=60, page_tokens=4, max_sequences=8, max_step_tokens=24)  # 240 tokens for 8 sequences: preemption


def a_millisecond(step: StepInputs) -> None:
    """As an executor that computes: others get their turn before an answer is finished."""
    time.sleep(0.001)


def in_asyncio(
    body: Callable[[AsyncEngine], Coroutine[Any, Any, None]],
    options: ServiceOptions | None = None,
    before_run: Callable[[StepInputs], None] | None = None,
    of: ExecutorLimits = TIGHT,
) -> AsyncEngine:
    """Run `body` with an engine; afterwards nothing may be left in it."""

    async def main() -> AsyncEngine:
        async with AsyncEngine(make_loop(of, before_run, clock=time.perf_counter), options) as engine:
            await body(engine)
        return engine

    engine = asyncio.run(main())
    stats = engine.stats()
    assert stats.idle and stats.pages_used == 0 and stats.running == stats.waiting == 0
    return engine


async def whole(handle: RequestHandle, n: int = 1) -> list[CompletionOutput]:
    choices = [CompletionOutput(index=i, text="", token_ids=[]) for i in range(n)]
    output = RequestOutput(handle.request_id, None, [], choices, finished=False, seed=0)
    collector = Collector(output, FakeTokenizer())
    async for deltas in handle:
        assert deltas
        collector.add(deltas)
    assert collector.output.finished
    return collector.output.outputs


def long(seed: int = 1, max_tokens: int = 60) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=seed)


@pytest.mark.parametrize("seed", range(3))
def test_64_streams_of_which_a_third_go_away(seed: int) -> None:
    rng = random.Random(seed)

    async def client(engine: AsyncEngine, i: int, leaves_after: int | None, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        prompt = [rng.randrange(1, VOCAB - 1) for _ in range(rng.randint(1, 50))] + [1]
        params = SamplingParams(max_tokens=rng.randint(20, 60), seed=i, ignore_eos=True, n=rng.choice([1, 1, 2]))
        async with engine.submit([prompt], [params]) as handle:
            if leaves_after is None:
                want = [expected_choice(prompt, params, c, TIGHT) for c in range(params.n)]
                assert await whole(handle, params.n) == want
                return
            n_seen = 0
            async for deltas in handle:
                n_seen += sum(len(d.token_ids) for d in deltas)
                if n_seen >= leaves_after:
                    return

    async def body(engine: AsyncEngine) -> None:
        leaving = set(rng.sample(range(64), 21))
        await asyncio.gather(
            *(client(engine, i, rng.randint(0, 30) if i in leaving else None, rng.random() * 0.1) for i in range(64))
        )

    engine = in_asyncio(body, before_run=a_millisecond)
    finished = engine.stats().finished_total
    assert finished[FinishReason.LENGTH] >= 43 and finished[FinishReason.ABORT] > 0
    assert finished[FinishReason.ERROR] == 0 and engine.stats().preemptions_total > 0


def test_a_slow_reader_is_dropped_and_others_are_not() -> None:
    async def body(engine: AsyncEngine) -> None:
        slow, quick = engine.submit([[1, 2]], [long(1, 100)]), engine.submit([[1, 2]], [long(2, 100)])
        answer = await whole(quick)
        assert len(answer[0].token_ids) == 100
        while not slow.finished:
            await asyncio.sleep(0.001)
        deltas = [d async for batch in slow for d in batch]
        assert [d.finish_reason for d in deltas] == [FinishReason.ABORT]
        assert "the reader fell " in (deltas[0].error or "") and not deltas[0].token_ids

    engine = in_asyncio(body, ServiceOptions(max_undelivered_tokens=40), a_millisecond)
    assert engine.stats().finished_total[FinishReason.ABORT] == 1


def test_a_reader_that_waits_is_not_slow_whatever_comes_at_once() -> None:
    async def body(engine: AsyncEngine) -> None:
        reader = asyncio.create_task(whole(engine.submit([[1, 2]], [long(1, 100)])))
        await asyncio.sleep(0)
        while engine.stats().generation_tokens_total < 100:
            time.sleep(0.001)  # this thread is held up, the engine is not
        (answer,) = await reader
        assert answer.finish_reason is FinishReason.LENGTH and len(answer.token_ids) == 100

    in_asyncio(body, ServiceOptions(max_undelivered_tokens=40))


def test_a_full_queue_says_when_to_come_back() -> None:
    gate = threading.Event()

    async def body(engine: AsyncEngine) -> None:
        handles = [engine.submit([[1, 2]], [long(i, 5)]) for i in range(TIGHT.max_sequences + 3)]
        with pytest.raises(BusyError, match="sequences are waiting") as error:
            engine.submit([[1, 2]], [long()])
        assert 1.0 <= error.value.retry_after_s <= 60.0
        gate.set()
        for handle in handles:
            assert len((await whole(handle))[0].token_ids) == 5
        await whole(engine.submit([[1, 2]], [long(1, 5)]))  # there is room again

    try:
        in_asyncio(body, ServiceOptions(max_queued=3), before_run=lambda step: assert_(gate.wait(10)))
    finally:
        gate.set()


def assert_(condition: bool) -> None:
    assert condition


def test_free_places_take_more_than_the_queue_holds() -> None:
    async def body(engine: AsyncEngine) -> None:
        handles = [engine.submit([[1]], [long(i, 3)]) for i in range(TIGHT.max_sequences)]
        for handle in handles:
            await whole(handle)

    in_asyncio(body, ServiceOptions(max_queued=1))


def test_closing_aborts_what_is_left_and_refuses_the_rest() -> None:
    handles: list[RequestHandle] = []

    async def body(engine: AsyncEngine) -> None:
        handles.append(engine.submit([[1, 2]], [long(1, 120)]))
        await engine.close()
        with pytest.raises(BusyError, match="shutting down"):
            engine.submit([[1]], [long()])

    in_asyncio(body, before_run=lambda step: time.sleep(0.01))
    assert handles[0].finished and handles[0]._buffer[-1].finish_reason is FinishReason.ABORT


def test_cancel_ends_the_iteration_and_is_harmless_twice() -> None:
    async def body(engine: AsyncEngine) -> None:
        handle = engine.submit([[1, 2]], [long(1, 120)], request_id="mine")
        first = await anext(handle)
        handle.cancel()
        handle.cancel()
        deltas = first + [d async for batch in handle for d in batch]
        assert deltas[-1].finish_reason is FinishReason.ABORT and sum(d.finish_reason is not None for d in deltas) == 1
        handle.cancel()
        assert handle.request_id == "mine" and handle.n_prompt == 2
        (request,) = handle.requests
        assert request.resolved.max_tokens == 120 and request.timings.first_token_s is not None

    in_asyncio(body, before_run=a_millisecond)


def test_the_same_id_twice_is_two_requests() -> None:
    async def body(engine: AsyncEngine) -> None:
        one, two = (engine.submit([[1, 2]], [long(i)], request_id="same") for i in (1, 2))
        one.cancel()
        assert len((await whole(two))[0].token_ids) == 60

    in_asyncio(body)


def test_bad_input_is_refused_at_once() -> None:
    async def body(engine: AsyncEngine) -> None:
        with pytest.raises(RequestError, match="has 2 tokens and max_tokens of 500"):
            engine.submit([[1, 2]], [long(1, 500)])
        with pytest.raises(RequestError, match="no tokens"):
            engine.submit([[]], [long()])

    in_asyncio(body)


def test_one_hand_over_per_step_at_most() -> None:
    n_calls = 0

    async def body(engine: AsyncEngine) -> None:
        aio = asyncio.get_running_loop()
        real = aio.call_soon_threadsafe

        def counted(*args: Any, **kwargs: Any) -> asyncio.Handle:
            nonlocal n_calls
            n_calls += threading.current_thread().name == "millrace-engine"
            return real(*args, **kwargs)

        with patch.object(aio, "call_soon_threadsafe", counted):
            await asyncio.gather(*(whole(engine.submit([[1]], [long(i, 30)])) for i in range(8)))

    engine = in_asyncio(body)
    assert 0 < n_calls <= engine.stats().steps_total


def test_a_dead_engine_is_busy_for_ever_and_says_so() -> None:
    def broken(step: StepInputs) -> None:
        raise RuntimeError("no")

    async def body(engine: AsyncEngine) -> None:
        for _ in range(3):
            (answer,) = await whole(engine.submit([[1]], [long()]))
            assert answer.finish_reason is FinishReason.ERROR and answer.error
        with pytest.raises(BusyError, match="the engine has stopped"):
            engine.submit([[1]], [long()])

    engine = in_asyncio(body, before_run=broken)
    assert not engine.stats().healthy


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="max_queued is 0"):
        ServiceOptions(max_queued=0)


def test_a_reader_that_was_slow_gets_its_backlog_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one block it would hold up everybody's streams while it is encoded."""
    monkeypatch.setattr(service, "MAX_TOKENS_PER_READ", 8)

    async def main(engine: AsyncEngine) -> None:
        handle = engine.submit([[1, 2]], [long(max_tokens=60)])
        while not handle.finished:
            await asyncio.sleep(0.001)
        pieces = [deltas async for deltas in handle]
        assert [len(p) for p in pieces] == [8] * 7 + [4]
        assert [t for p in pieces for d in p for t in d.token_ids] == expected_choice(
            [1, 2], long(max_tokens=60), 0, TIGHT
        ).token_ids

    in_asyncio(main)


# ------------------------------------------------------------------ an engine that has all cores


@pytest.mark.parametrize("on_all_cores", [True, False])
def test_an_engine_on_all_cores_lets_a_step_be_told_before_the_next(on_all_cores: bool) -> None:
    """Its reader has every token while the engine still waits; with cores to spare it computes on meanwhile."""
    began: list[int] = []  # tokens that were read when each step began
    n_read = 0

    def step(_: StepInputs) -> None:
        began.append(n_read)

    async def body(engine: AsyncEngine) -> None:
        nonlocal n_read
        async with engine.submit([[1, 2]], [long(max_tokens=40)]) as handle:
            async for deltas in handle:
                n_read += sum(len(d.token_ids) for d in deltas)

    with patch.object(service, "DELIVERY_WAIT_S", 5.0):
        in_asyncio(body, before_run=step, of=replace(TIGHT, on_all_cores=on_all_cores))
    assert n_read == len(began) == 40
    assert (began == list(range(40))) or not on_all_cores


def test_an_event_loop_that_is_busy_is_not_waited_for_long() -> None:
    async def body(engine: AsyncEngine) -> None:
        async with engine.submit([[1, 2]], [long(max_tokens=40)]) as handle:
            time.sleep(0.5)  # nobody reads
            assert handle.requests[0].timings.n_output_tokens == 40
            await whole(handle)

    in_asyncio(body, of=replace(TIGHT, on_all_cores=True))


def test_who_rests_while_it_computes_is_told_of_every_step_also_of_one_that_fails() -> None:
    told: list[bool] = []
    during: list[bool] = []

    def step(_: StepInputs) -> None:
        during.append(told[-1])
        if len(during) == 3:
            raise RuntimeError("no")

    async def main() -> None:
        for on_all_cores in (False, True):
            limits = replace(TIGHT, on_all_cores=on_all_cores)
            engine = AsyncEngine(make_loop(limits, step, clock=time.perf_counter))
            if not on_all_cores:
                told.append(True)
            engine.start(told.append)
            async with engine.submit([[1, 2]], [long(max_tokens=4)]) as handle:
                async for _ in handle:
                    pass
            await engine.close()
            if not on_all_cores:
                assert told == [True], "it has cores to spare"
                told.clear()

    asyncio.run(main())
    assert during and all(during)
    assert told == [True, False] * (len(told) // 2) and len(told) >= 8
