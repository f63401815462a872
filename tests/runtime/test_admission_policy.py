"""Who goes first: priorities that age, fair shares of tenants, policies, and those who would not wait so long."""

import asyncio
import random
import time

import pytest

from millrace.errors import BusyError, ConfigError, RequestError
from millrace.runtime.kv.pages import PagePool
from millrace.runtime.request.queue_options import MAX_PRIORITY, QueueOptions
from millrace.runtime.request.request import RequestOptions, Sequence, Stage
from millrace.runtime.request.sampling_params import FinishReason, SamplingParams
from millrace.runtime.scheduling.admission_policy import (
    AGEING_S,
    POLICIES,
    longest_prefix,
    policy_named,
    shortest_first,
)
from millrace.runtime.scheduling.scheduler import Scheduler
from millrace.runtime.service import AsyncEngine, QueueTimeEstimator, ServiceOptions
from millrace.runtime.settings import SCHEDULES
from tests.runtime.fakes import FakeClock, limits, make_loop, new_request
from tests.runtime.test_loop import Client, run_all
from tests.runtime.test_scheduler import ran


class Crowd:
    """A scheduler with one place, whose clock stands still until it is moved."""

    def __init__(self, policy: str = "fcfs", **of: int) -> None:
        self.now_s = 0.0
        self.limits = limits(**{"max_sequences": 1, "max_step_tokens": 32, **of})
        self.sched = Scheduler(
            self.limits, PagePool(self.limits.n_pages), clock=lambda: self.now_s, policy=policy_named(policy)
        )

    def joins(self, n_prompt: int = 4, first: int = 1, n: int = 1, **queue_options: object) -> Sequence:
        said = QueueOptions(**queue_options)  # type: ignore[arg-type]
        prompt = [first] * n_prompt
        params = SamplingParams(ignore_eos=True, n=n)
        request = new_request(prompt, params, self.limits, queue_options=said, queued_s=self.now_s)
        self.sched.add(request)
        return request.choices[0]

    def asks(self, prompt: list[int]) -> Sequence:
        request = new_request(prompt, SamplingParams(ignore_eos=True), self.limits)
        self.sched.add(request)
        return request.choices[0]

    def serve(self, n_tokens: int = 1) -> Sequence:
        """Admits one, gives it so many tokens, and lets it go."""
        ran(self.sched)
        (seq,) = self.sched.running
        while seq.n_output < n_tokens:
            ran(self.sched)
        self.sched.remove(seq)
        return seq


def test_a_lower_priority_number_goes_first_and_waiting_lowers_it() -> None:
    crowd = Crowd()
    late, early = crowd.joins(priority=1), crowd.joins(priority=-1)
    plain = crowd.joins()
    assert [crowd.serve() for _ in range(3)] == [early, plain, late]
    old = crowd.joins(priority=2)
    crowd.now_s += 2 * AGEING_S
    young = crowd.joins(priority=1)
    assert crowd.serve() is old and crowd.serve() is young


def test_who_claims_the_default_claims_nothing() -> None:
    """As clients write it that say every field: the order of arrival stays plain, and costs nothing."""
    crowd = Crowd()
    crowd.joins(priority=0)
    assert crowd.sched._order.is_plain
    crowd.joins(priority=1)
    assert not crowd.sched._order.is_plain


def test_whatever_is_claimed_ageing_overtakes_it() -> None:
    """The highest number waits while lowest ones come without end: 200 of ten seconds, and it is first."""
    crowd = Crowd()
    crowd.joins(priority=-MAX_PRIORITY)
    late = crowd.joins(priority=MAX_PRIORITY)
    while crowd.now_s <= 2 * MAX_PRIORITY * AGEING_S:
        crowd.joins(priority=-MAX_PRIORITY)
        if crowd.serve() is late:
            break
        crowd.now_s += AGEING_S / 2
    assert late.stage is Stage.GONE and 0.9 * 2 * MAX_PRIORITY * AGEING_S < crowd.now_s == 2 * MAX_PRIORITY * AGEING_S


@pytest.mark.parametrize("between_s, keeps", [(0.0, "urgent"), (1.9 * AGEING_S, "urgent"), (2.1 * AGEING_S, "first")])
def test_who_has_waited_long_enough_keeps_its_pages_too(between_s: float, keeps: str) -> None:
    """Or whoever was overtaken by ageing would be the first to give way again, and again."""
    crowd = Crowd(n_pages=8, page_tokens=2, max_context=16, max_sequences=3)
    first = crowd.joins(4, first=1, priority=1)
    crowd.now_s += between_s
    urgent = crowd.joins(4, first=2, priority=-1)
    while crowd.sched.n_preemptions == 0:
        ran(crowd.sched)
    kept, gone = (first, urgent) if keeps == "first" else (urgent, first)
    assert crowd.sched.running == [kept] and crowd.sched.waiting == [gone]


def test_a_greedy_tenant_gives_every_place_that_falls_free_to_others() -> None:
    """It holds all four and has twenty more waiting: each that ends makes room for the other one."""
    crowd = Crowd(max_sequences=4)
    greedy = [crowd.joins(tenant="greedy") for _ in range(24)]
    for _ in range(30):
        ran(crowd.sched)
    assert crowd.sched.running == greedy[:4]
    for _ in range(4):
        crowd.joins(tenant="other")
    ran(crowd.sched)  # in which the greedy one has more
    for n_others in range(1, 5):
        crowd.sched.remove(crowd.sched.running[0])
        ran(crowd.sched)
        assert sum(seq.request.queue_options.tenant == "other" for seq in crowd.sched.running) == n_others


@pytest.mark.parametrize("n_places", [1, 4, 7])
def test_the_wait_is_judged_as_it_turns_out(n_places: int) -> None:
    """Within a factor of two, by the clock: with answers of one length, of many, and just grown tenfold."""
    clock, rng = FakeClock(), random.Random(n_places)

    def a_second(step: object) -> None:
        clock.now_s += 1.0

    loop, turnover = make_loop(limits(max_sequences=n_places), a_second, clock=clock), QueueTimeEstimator(n_places)
    assert turnover.wait_s(loop.stats()) == 0, "all places are free"
    for lengths, n_steps in (([8] * 40, 30), ([rng.randint(4, 12) for _ in range(60)], 20), ([80] * 3 * n_places, 65)):
        for n in lengths:
            Client(loop, [1, 2], SamplingParams(max_tokens=n, ignore_eos=True))
        for _ in range(n_steps):
            loop.step()
            turnover.wait_s(loop.stats())
        judged_s = turnover.wait_s(loop.stats())
        last = Client(loop, [1, 2], SamplingParams(max_tokens=2, ignore_eos=True))
        run_all(loop)
        turnover.wait_s(loop.stats())
        timings = last.request.timings
        assert timings.first_scheduled_s is not None
        waited_s = timings.first_scheduled_s - timings.queued_s
        assert waited_s / 2 <= judged_s <= 2 * waited_s


def test_requests_without_a_claim_keep_their_order() -> None:
    crowd = Crowd()
    waiting = [crowd.joins() for _ in range(4)]
    assert [crowd.serve() for _ in range(4)] == waiting


def test_tenants_take_turns_however_many_requests_one_has() -> None:
    crowd = Crowd()
    many = [crowd.joins(tenant="a") for _ in range(6)]
    assert crowd.serve() is many[0]
    few = [crowd.joins(tenant="b") for _ in range(2)]
    served = [crowd.serve().request.queue_options.tenant for _ in range(4)]
    assert served == ["a", "b", "a", "b"], "b begins with what a had; of two that had as much, who came first"
    assert all(seq.stage is Stage.GONE for seq in few)


def test_a_pause_saves_nothing_up() -> None:
    crowd = Crowd()
    for _ in range(5):
        crowd.joins(tenant="a")
        crowd.serve(n_tokens=8)
    crowd.joins(tenant="a")
    for _ in range(4):
        crowd.joins(tenant="new")
    crowd.joins(tenant="a")
    served = "".join(crowd.serve(n_tokens=8).request.queue_options.tenant[0] for _ in range(6))
    assert served.index("a") <= 1, "though a had much more before"


def test_policies_choose_among_the_alike() -> None:
    crowd = Crowd("shortest")
    long, short = crowd.joins(9, first=2), crowd.joins(3, first=3)
    urgent = crowd.joins(30, first=4, priority=-1)
    assert [crowd.serve() for _ in range(3)] == [urgent, short, long]
    crowd = Crowd("prefix", page_tokens=4)
    crowd.joins(13, first=2)
    crowd.serve()
    other, same = crowd.joins(13, first=3), crowd.joins(13, first=2)
    assert [crowd.serve(), crowd.serve()] == [same, other], "its pages are still there"
    assert set(POLICIES.values()) >= {shortest_first, longest_prefix}
    with pytest.raises(ConfigError, match="'shortes'"):
        policy_named("shortes")


@pytest.mark.parametrize("policy", ["shortest", "prefix"])
def test_policies_count_what_is_known(policy: str) -> None:
    """8 of 9 tokens are known, and 16 of 33: the one has its next token sooner, of the other there is more."""
    crowd = Crowd(policy, page_tokens=4, max_step_tokens=64)
    crowd.asks([2] * 20 + [3] * 20)
    crowd.serve()
    unknown, sooner, more = crowd.asks([4] * 8), crowd.asks([2] * 8 + [5]), crowd.asks([2] * 16 + [6] * 17)
    order = [sooner, unknown, more] if policy == "shortest" else [more, sooner, unknown]
    assert crowd.sched._order.ordered(crowd.sched.waiting) == order
    assert [crowd.serve() for _ in range(3)] == order


def test_the_shortest_do_not_starve_the_long() -> None:
    crowd = Crowd("shortest")
    long = crowd.joins(30)
    for _ in range(40):
        crowd.joins(2)
        crowd.now_s += 1.0
        if crowd.serve() is long:
            return
    raise AssertionError("others went first for 40 s")


def test_the_lowest_priority_gives_its_pages_back() -> None:
    crowd = Crowd(n_pages=8, page_tokens=2, max_context=16, max_sequences=3)
    first, urgent = crowd.joins(4, first=1), crowd.joins(4, first=2, priority=-1)
    while crowd.sched.n_preemptions == 0:
        ran(crowd.sched)
    assert crowd.sched.running == [urgent] and crowd.sched.waiting == [first]


@pytest.mark.parametrize(
    "wrong, field",
    [({"priority": 101}, "priority"), ({"priority": -101}, "priority"),
     ({"priority": True}, "priority"), ({"priority": 0.5}, "priority"),
     ({"queue_timeout_s": 0}, "queue_timeout_s"), ({"queue_timeout_s": 1e9}, "queue_timeout_s")],
)  # fmt: skip
def test_claims_out_of_range_are_refused(wrong: dict[str, object], field: str) -> None:
    with pytest.raises(RequestError) as refused:
        QueueOptions(**wrong)  # type: ignore[arg-type]
    assert refused.value.param == field
    assert field != "priority" or "an integer from -100, which goes first, to 100" in str(refused.value)


def test_who_has_waited_long_enough_is_ended() -> None:
    clock = FakeClock(0.5)
    loop = make_loop(limits(max_sequences=1), clock=clock)
    running = Client(loop, [1, 2], SamplingParams(max_tokens=40, ignore_eos=True))
    hasty = Client(loop, [1, 3], SamplingParams(max_tokens=4), QueueOptions(queue_timeout_s=1.0))
    patient = Client(
        loop, [1, 4], SamplingParams(max_tokens=4, ignore_eos=True), QueueOptions(queue_timeout_s=10_000.0)
    )
    run_all(loop)
    (delta,) = hasty.deltas[-1]
    assert delta.finish_reason is FinishReason.ABORT and "it waited longer than 1 s" in (delta.error or "")
    for client in (running, patient):
        assert client.deltas[-1][-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("waited_s, reason", [(1.0, FinishReason.LENGTH), (1.001, FinishReason.ABORT)])
def test_it_waits_for_as_long_as_it_says_and_no_longer(waited_s: float, reason: FinishReason) -> None:
    clock = FakeClock()
    loop = make_loop(limits(max_sequences=1), clock=clock)
    running = Client(loop, [1, 2], SamplingParams(max_tokens=4, ignore_eos=True))
    loop.step()
    waits = Client(loop, [1, 3], SamplingParams(max_tokens=2, n=2, ignore_eos=True), QueueOptions(queue_timeout_s=1.0))
    loop.step()
    clock.now_s += waited_s
    run_all(loop)
    reasons = [delta.finish_reason for deltas in waits.deltas for delta in deltas if delta.finish_reason]
    assert reasons == [reason] * 2, "each choice once"
    assert running.deltas[-1][-1].finish_reason is FinishReason.LENGTH


def test_who_has_begun_is_not_ended_while_it_waits_again() -> None:
    """`queue_timeout_s` is of the first step: what a preempted answer has is not thrown away."""
    clock = FakeClock()
    loop = make_loop(limits(n_pages=8, page_tokens=2, max_context=16, max_sequences=3), clock=clock)
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    first = Client(loop, [2, 2, 2, 2], params, QueueOptions(priority=1, queue_timeout_s=1.0))
    urgent = Client(loop, [3, 3, 3, 3], params, QueueOptions(priority=-1))
    while loop.stats().preemptions_total == 0:
        loop.step()
    assert loop._scheduler.waiting == first.request.choices and first.request.timings.first_scheduled_s == 0
    clock.now_s += 100.0
    run_all(loop)
    assert [client.deltas[-1][-1].finish_reason for client in (first, urgent)] == [FinishReason.LENGTH] * 2


def test_who_would_wait_too_long_is_told_at_once() -> None:
    async def main() -> None:
        def slow(step: object) -> None:
            time.sleep(0.005)

        async with AsyncEngine(make_loop(limits(max_sequences=1), slow, clock=time.perf_counter)) as engine:
            params = SamplingParams(max_tokens=8, ignore_eos=True)
            async for _ in engine.submit([[1, 2]], [params]):  # from which the time of a request is known
                pass
            handles = [engine.submit([[1, 2]], [params]) for _ in range(6)]
            await asyncio.sleep(0.02)
            with pytest.raises(BusyError, match="it would wait some") as refused:
                engine.submit(
                    [[1, 2]], [params], options=RequestOptions(queue_options=QueueOptions(queue_timeout_s=0.01))
                )
            assert refused.value.retry_after_s >= 1
            handles.append(
                engine.submit(
                    [[1, 2]], [params], options=RequestOptions(queue_options=QueueOptions(queue_timeout_s=60))
                )
            )
            for handle in handles:
                async for _ in handle:
                    pass

    asyncio.run(main())


def test_one_tenant_may_fill_half_of_the_queue() -> None:
    async def main() -> None:
        def slow(step: object) -> None:
            time.sleep(0.002)

        options = ServiceOptions(max_queued=8)
        async with AsyncEngine(make_loop(limits(max_sequences=1), slow, clock=time.perf_counter), options) as engine:
            params = SamplingParams(max_tokens=12, ignore_eos=True)
            flood, other = (RequestOptions(queue_options=QueueOptions(tenant=name)) for name in ("a", "b"))
            handles = []
            with pytest.raises(BusyError, match="of this API key are waiting"):
                for _ in range(20):
                    handles.append(engine.submit([[1, 2]], [params], options=flood))
            assert 4 <= len(handles) <= 6
            handles += [engine.submit([[1, 3]], [params], options=other) for _ in range(2)]
            for handle in handles:
                async for _ in handle:
                    pass

    asyncio.run(main())


def test_every_policy_has_a_name_for_the_command_line() -> None:
    assert tuple(POLICIES) == SCHEDULES
