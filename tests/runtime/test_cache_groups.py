"""Window caches: constant memory, pages that are found again, and no answer that depends on any of it."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.cache_specs import max_window_pages
from millrace.engine.executor import ExecutorLimits, StepInputs, WindowLimits
from millrace.errors import RequestError
from millrace.runtime.kv.cache_groups import CacheGroups, WindowTable
from millrace.runtime.kv.pages import Key
from millrace.runtime.loop import EngineLoop
from millrace.runtime.request.prefix_cache_options import CacheOptions
from millrace.runtime.request.request import RequestOptions
from millrace.runtime.request.sampling_params import FinishReason, SamplingParams
from tests.runtime.clients import ASKED, GREEDY, PAGE, Asked, Client, answered, computed, run_all, solo, solo_answers
from tests.runtime.fakes import RandomBudget, limits, make_loop
from tests.support.drawn import examples


def windowed(*windows: int, sequences: int = 5, context: int = 52, chunk: int = 16, **more: int) -> ExecutorLimits:
    """Room in each window for so many sequences. more: other limits"""
    own = tuple(WindowLimits(w, sequences * max_window_pages(w, context, chunk, PAGE)) for w in windows)
    return replace(
        limits(page_tokens=PAGE, max_sequences=5, max_context=context, max_step_tokens=chunk, **more), windows=own
    )


def assert_all_free(loop: EngineLoop) -> None:
    groups = loop._scheduler.groups
    for pool in (*groups.windows, *([] if groups.slots is None else [groups.slots])):
        assert pool.n_used == 0 == pool.n_reserved
        assert len(pool._idle) + len(pool._empty) == pool.n


# ------------------------------------------------------------------ equal answers


@settings(max_examples=examples(30, by_night=2))
@given(
    schedule=st.lists(ASKED, min_size=2, max_size=12),
    windows=st.sampled_from([(1,), (3,), (4,), (6,), (9,), (30,), (100,), (4, 11), ()]),
    n_slots=st.sampled_from([0, 0, 2, 5, 10, 30]),
    sequences=st.sampled_from([1, 2, 5]),
    n_pages=st.sampled_from([13, 16, 24, 64]),
    chunks=st.integers(0, 99),
)
def test_any_schedule_gives_the_solo_answers(
    schedule: list[Asked], windows: tuple[int, ...], n_slots: int, sequences: int, n_pages: int, chunks: int
) -> None:
    """Short of pages or not: a hit reads what its windows need, and nobody reads or writes another's page."""
    of = windowed(*windows, sequences=sequences, n_pages=n_pages, n_slots=n_slots)
    loop = make_loop(of, budget=RandomBudget(16, random.Random(chunks)) if chunks else None)
    solo_answers(loop, schedule)
    assert_all_free(loop)


def test_a_step_that_fails_is_computed_again_over_the_same_pages() -> None:
    fails = [False]

    def before_run(step: StepInputs) -> None:
        if fails[0] and len(step.starts) > 2:
            fails[0] = False
            raise RuntimeError("on purpose")

    loop = make_loop(windowed(6), before_run)
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)
    clients = [Client(loop, [7 + i] * 15, params) for i in range(3)]
    for i in range(12):
        fails[0] = i % 4 == 3
        loop.step()
    run_all(loop)
    assert [c.outputs for c in clients] == [solo(c.prompt, params) for c in clients]
    assert_all_free(loop)


# ------------------------------------------------------------------ what is kept


def test_a_long_answer_takes_no_more_pages_than_its_window() -> None:
    loop = make_loop(windowed(10, context=400, n_pages=100))
    client = Client(loop, [5] * 30, replace(GREEDY, max_tokens=300))
    (pool,), most = loop._scheduler.groups.windows, 0
    while loop._scheduler.has_work or not client.reasons:
        loop.step()
        most = max(most, pool.n_used)
    assert most == -(-(10 + 16) // PAGE) <= max_window_pages(10, 400, 16, PAGE)
    assert [output.finish_reason for output in client.outputs] == [FinishReason.LENGTH]


def test_only_what_differs_is_computed() -> None:
    loop = make_loop(windowed(6, context=128, n_pages=200))
    prompt = list(range(1, 32))  # 31 tokens: seven full pages and three tokens
    assert computed(loop, prompt) == 31 + 2
    assert computed(loop, prompt) == 1 + 2, "the answer has filled the last page; the last token is computed to draw"
    assert computed(loop, [*prompt[:20], 50, 51, *prompt[22:]]) == 11 + 2, "pages that were left are found"
    assert computed(loop, [*prompt[:22], 50, 51, *prompt[24:]]) == 9 + 2, "and copied from the token on that differs"


def test_a_hit_needs_the_pages_of_the_window_before_it_and_no_others() -> None:
    """Behind 4 of 7 pages: those of the last 6 tokens before, which lie in two pages."""
    loop = make_loop(windowed(6, context=128, n_pages=200))
    prompt = list(range(1, 30))
    answered(loop, prompt, GREEDY)
    groups, keys = loop._scheduler.groups, _keys(loop, prompt)
    assert groups.n_known(keys[:4]) == 4
    (pool,) = groups.windows
    for gone, expected in ((0, 4), (1, 4), (3, 0)):
        page = pool.find(keys[gone])
        assert page is not None
        del pool._idle[page]
        pool._forget(page)
        pool._empty.append(page)
        assert groups.n_known(keys[:4]) == expected, gone


def test_the_page_that_was_left_longest_goes_first() -> None:
    loop = make_loop(windowed(6, sequences=2, context=128, n_pages=200))
    old, new = list(range(1, 30)), list(range(31, 60))
    for prompt in (old, new):
        assert computed(loop, prompt) == len(prompt) + 2
    assert computed(loop, new) == 1 + 2
    (pool,) = loop._scheduler.groups.windows
    n_before = sum(pool.find(key) is not None for key in _keys(loop, old))
    computed(loop, [70, *range(2, 29)])
    assert sum(pool.find(key) is not None for key in _keys(loop, old)) < n_before
    assert computed(loop, new) == 1 + 2


def test_who_has_no_room_waits() -> None:
    loop = make_loop(windowed(6, sequences=2, n_pages=200))
    clients = [Client(loop, [7 + i] * 20, replace(GREEDY, max_tokens=9)) for i in range(4)]
    for _ in range(3):
        loop.step()
    assert loop.stats().running == 2 and loop.stats().waiting == 2
    run_all(loop)
    assert loop.stats().preemptions_total == 0
    assert [c.outputs for c in clients] == [solo(c.prompt, c.params) for c in clients]


def test_all_that_is_known_is_forgotten() -> None:
    loop = make_loop(windowed(6, n_pages=200))
    prompt = list(range(1, 30))
    computed(loop, prompt)
    assert loop.reset_prefix_cache() and computed(loop, prompt) == len(prompt) + 2
    assert all(pool.n_idle for pool in loop._scheduler.groups.windows)


@pytest.mark.parametrize("cache", [CacheOptions(pin=True), CacheOptions(priority=80)])
def test_prompts_are_not_kept_as_asked(cache: CacheOptions) -> None:
    """Pages of windows go by their age alone."""
    loop = make_loop(windowed(6, n_pages=200))
    with pytest.raises(RequestError, match="layers with a window or a state"):
        loop.submit([5] * 20, GREEDY, lambda deltas: None, options=RequestOptions(cache=cache))


def test_what_is_held_stays_small() -> None:
    held = WindowTable(0, 9)
    for page in range(1000):
        held.append(page)
        if page >= 5:
            assert held.pop_first() == page - 5
        assert held.array.tolist() == list(range(max(0, page - 4), page + 1))
        assert (held.first, held.end) == (max(0, page - 4), page + 1)
        assert held.page(page) == page and held.page(page + 1) is None and held.page(page - 5) is None
    assert len(held._pages) < 20


def _keys(loop: EngineLoop, prompt: list[int]) -> list[Key]:
    client = Client(loop, prompt, GREEDY)
    loop.cancel(client.request)
    keys = client.request.choices[0].page_keys(len(prompt) // PAGE, PAGE)
    run_all(loop)
    return keys


def test_a_pool_of_none() -> None:
    assert not CacheGroups(limits()) and CacheGroups(limits()).has_room(10**6)
