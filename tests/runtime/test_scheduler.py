"""The scheduler alone, without executor or tokenizer: order, budgets, pages, preemption."""

import pytest

from millrace.engine.executor import ExecutorLimits
from millrace.errors import ConfigError
from millrace.runtime.kv.pages import PagePool
from millrace.runtime.request.request import Sequence, Stage
from millrace.runtime.request.sampling_params import SamplingParams
from millrace.runtime.scheduling.scheduler import Scheduler
from millrace.runtime.scheduling.step import Step
from millrace.runtime.scheduling.token_budget import TokenBudget
from tests.runtime.fakes import limits, new_request


def scheduler(of: ExecutorLimits) -> Scheduler:
    return Scheduler(of, PagePool(of.n_pages), clock=lambda: 0.0)


def queued(sched: Scheduler, n_prompt: int, n: int = 1, scored: int | None = None) -> list[Sequence]:
    """Each begins with a token of its own, so that no two share anything."""
    prompt = [2 + sched._n_arrived % 90, *[1] * (n_prompt - 1)]
    request = new_request(prompt, SamplingParams(n=n, ignore_eos=True, prompt_logprobs=scored), sched.limits)
    sched.add(request)
    return request.choices


def ran(sched: Scheduler) -> Step:
    """Schedule a step, compute it, draw a token where one is due."""
    step = sched.schedule()
    sched.commit(step, 0.001)
    for chunk in step.chunks:
        if chunk.draws:
            sched.publish_verified(chunk.sequence)
            chunk.sequence.tokens.append(1)
    return step


def shape(step: Step) -> list[tuple[int, int]]:
    return [(chunk.start, chunk.n) for chunk in step.chunks]


def test_a_prompt_in_chunks_then_decoding() -> None:
    sched = scheduler(limits(max_step_tokens=8))
    queued(sched, 20)
    assert [shape(ran(sched)) for _ in range(5)] == [[(0, 8)], [(8, 8)], [(16, 4)], [(20, 1)], [(21, 1)]]


def test_decodes_first_then_the_oldest_prompt_then_the_queue() -> None:
    sched = scheduler(limits(max_step_tokens=8))
    (first,) = queued(sched, 3)
    ran(sched)
    (second,), (third,) = queued(sched, 9), queued(sched, 9)
    step = ran(sched)
    assert [(c.sequence, c.n) for c in step.chunks] == [(first, 1), (second, 7)]
    assert (step.n_tokens, step.n_prefill) == (8, 7)
    step = ran(sched)
    assert {c.sequence: c.n for c in step.chunks} == {first: 1, second: 2, third: 5}


def test_places_are_given_first_come_first_served() -> None:
    sched = scheduler(limits(max_sequences=2, max_step_tokens=8))
    (a,), (b,), (c,) = queued(sched, 2), queued(sched, 2), queued(sched, 1)
    ran(sched)
    assert sched.running == [a, b] and sched.waiting == [c]
    sched.remove(a)
    ran(sched)
    assert sched.running == [b, c] and a.stage is Stage.GONE


def test_the_head_of_the_queue_is_not_overtaken_for_want_of_pages() -> None:
    sched = scheduler(limits(n_pages=12, page_tokens=4, max_step_tokens=64))
    queued(sched, 30)
    ran(sched)
    (big,), (small,) = queued(sched, 30), queued(sched, 1)
    ran(sched)
    assert sched.waiting == [big, small]


def test_pages_are_reserved_with_the_known_tokens_and_grow_one_by_one() -> None:
    sched = scheduler(limits(page_tokens=4, max_step_tokens=8))
    (seq,) = queued(sched, 16)
    used = []
    for _ in range(7):
        ran(sched)
        used.append((seq.n_computed, sched.pool.n_used))
    assert used == [(8, 4), (16, 4), (17, 5), (18, 5), (19, 5), (20, 5), (21, 6)]
    sched.remove(seq)
    assert sched.pool.n_used == 0


def test_the_youngest_gives_way_and_comes_back_with_its_tokens() -> None:
    sched = scheduler(limits(n_pages=8, page_tokens=2, max_context=16, max_step_tokens=32))
    (old,), (young,), (later,) = queued(sched, 4), queued(sched, 4), queued(sched, 4)
    while sched.running != [old]:  # the youngest goes first, then the other
        ran(sched)
    assert sched.waiting == [young, later], "who was there before is there before"
    assert young.stage is Stage.WAITING and young.n_computed == 0 and len(young.pages) == 0 and young.n_output > 0
    assert young.request.timings.n_preemptions == 1
    sched.remove(old)
    assert shape(ran(sched))[0] == (6, young.n_tokens - 1 - 6), "what was overwritten meanwhile is computed again"


def test_a_page_is_left_for_each_running_answer() -> None:
    sched = scheduler(limits(n_pages=6, page_tokens=4, max_context=24, max_step_tokens=32))
    (first,) = queued(sched, 4)
    ran(sched)
    (second,) = queued(sched, 16)
    ran(sched)
    assert sched.pool.n_free == 4, "enough for the second, but then the first could not go on for long"
    assert sched.running == [first] and sched.waiting == [second]


def test_kept_prompts_give_way_before_anybody_is_preempted() -> None:
    sched = scheduler(limits(n_pages=10, page_tokens=2, max_context=20, max_sequences=1, max_step_tokens=32))
    first, second, third = queued(sched, 9, n=3)
    ran(sched)
    assert sched.waiting == [second, third]
    sched.remove(first)
    assert sched.pool.n_used == 0 and len(sched.pool.index) == 5, "kept, but free, the last of one token"
    (stranger,) = queued(sched, 1)
    sched.waiting.sort(key=lambda s: s is not stranger)  # as if it had come first
    while stranger.n_tokens < 20:
        ran(sched)
        assert sched.n_preemptions == 0
    assert sched.pool.index.find(first.keys) == (), "all ten were needed"
    sched.remove(stranger)
    assert shape(ran(sched)) == [(0, 9)], "nothing to share: computed again"
    for seq in (second, third):
        sched.remove(seq)
    assert sched.pool.n_used == 0 and not sched.has_work


def test_others_pass_while_siblings_wait_for_their_prompt() -> None:
    sched = scheduler(limits(page_tokens=4, max_step_tokens=16))
    first, second = queued(sched, 24, n=2)
    (other,) = queued(sched, 3)
    ran(sched)
    assert sched.running == [first]
    ran(sched)
    assert sched.running == [first, other] and sched.waiting == [second]
    step = ran(sched)
    assert sched.running == [first, other, second] and shape(step)[-1] == (23, 1)
    assert sched.pool.n_used == 6 + 1 + 1, "the prompt's pages, of which the second has computed the last again"


def test_a_scored_prompt_goes_as_far_as_there_are_rows() -> None:
    sched = scheduler(limits(max_sequences=2, max_rows=6, page_tokens=4, max_step_tokens=32))
    (seq,) = queued(sched, 11, scored=0)
    rows = []
    while seq.n_output < 2:
        (chunk,) = ran(sched).chunks
        rows.append((chunk.start, chunk.n, chunk.n_scored, chunk.draws))
    assert rows == [(0, 4, 4, False), (4, 4, 4, False), (8, 3, 2, True), (11, 1, 0, True)]


def test_scored_prompts_share_the_rows_and_the_oldest_goes_on() -> None:
    sched = scheduler(limits(max_sequences=8, max_rows=16, max_step_tokens=64, max_context=128))
    (long,) = queued(sched, 100, scored=0)
    while long.n_computed < long.n_prompt:
        queued(sched, 9, scored=0)  # shorter ones come without end
        before = long.n_computed
        step = ran(sched)
        assert long.n_computed > before and step.n_scored == sum(c.n_scored for c in step.chunks) <= 8
        for seq in [s for s in sched.running if s is not long and s.n_output]:
            sched.remove(seq)


def test_choices_wait_until_their_prompt_is_scored() -> None:
    sched = scheduler(limits(max_sequences=4, max_rows=8, page_tokens=4, max_step_tokens=32))
    first, second = queued(sched, 10, n=2, scored=1)
    assert shape(ran(sched)) == [(0, 4)] and shape(ran(sched)) == [(4, 4)] and second.stage is Stage.WAITING
    ran(sched)
    assert shape(ran(sched)) == [(10, 1), (8, 2)], "both full pages are shared"
    assert first.request.n_scored == 10


def test_limits_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="a step of 4 tokens for 8 sequences"):
        scheduler(limits(max_step_tokens=4))


def test_a_short_prompt_does_not_wait_for_all_of_a_long_one() -> None:
    """Neither one that comes later nor one that was begun: half of each step's room goes to them."""
    sched = scheduler(limits(max_step_tokens=64, max_context=1024, n_pages=1000))
    (long,) = queued(sched, 900)
    ran(sched)
    (later,), (last,) = queued(sched, 40), queued(sched, 10)
    for _ in range(3):
        ran(sched)
    assert later.n_left <= 1 and last.n_left <= 1, "both drew their first token"
    assert long.n_left > 600, "the long one is far from done"
    steps = 0
    while long.n_left > 1:
        queued(sched, 30)  # short ones keep coming
        ran(sched)
        steps += 1
        assert steps < 60, "and it goes on all the same"


def test_a_given_budget_is_used() -> None:
    of = limits(max_step_tokens=512, max_context=512)
    sched = Scheduler(of, PagePool(of.n_pages), clock=lambda: 0.0, budget=TokenBudget(512, 1e-9, chunk_low=64))
    queued(sched, 3)
    ran(sched)
    queued(sched, 300)
    assert ran(sched).n_prefill == 64
