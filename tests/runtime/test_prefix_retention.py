"""How long prompts are kept: by priority, by pin, for a time; and for whom."""

import random
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from millrace.api.offline_generate import generate
from millrace.errors import RequestError
from millrace.runtime.kv.pages import PrefixIndex
from millrace.runtime.loop import EngineLoop
from millrace.runtime.request.prefix_cache_options import CacheOptions
from millrace.runtime.request.request import RequestOptions
from millrace.runtime.request.sampling_params import Delta, SamplingParams
from tests.runtime.fakes import POISON, FakeClock, limits, make_loop
from tests.support.drawn import SEEDS, examples

PAGE = 4
OF = limits(page_tokens=PAGE, n_pages=24, max_context=32, max_sequences=2, max_step_tokens=32)
ONE = SamplingParams(max_tokens=1, temperature=0)
PROMPT = list(range(1, 18))  # four full pages and one token


def asked(loop: EngineLoop, prompt: list[int], **cache: Any) -> int:
    """Tokens of the prompt that were known."""
    request = loop.submit(prompt, ONE, lambda deltas: None, options=RequestOptions(cache=CacheOptions(**cache)))
    while loop.step():
        pass
    return request.n_cached


def crowd(loop: EngineLoop, n: int = 8) -> None:
    """Strangers, each of four pages and one token: enough to have everything given up that is not kept."""
    for i in range(n):
        asked(loop, [40 + i, *range(60, 76)])


def test_tenants_do_not_find_each_others_prompts() -> None:
    loop = make_loop(OF)
    assert [asked(loop, PROMPT, salt=salt) for salt in ("a", "b", "", "a", "b", "")] == [0, 0, 0, 16, 16, 16]


@pytest.mark.parametrize(("priority", "found"), [(None, 0), (0, 0), (35, 0), (36, 16), (100, 16)])
def test_a_prompt_of_higher_priority_outlives_others(priority: int | None, found: int) -> None:
    loop = make_loop(OF)
    asked(loop, PROMPT, priority=priority)
    crowd(loop)
    assert asked(loop, PROMPT) == found


def test_one_of_lower_priority_goes_first() -> None:
    loop = make_loop(OF)
    asked(loop, [1, *range(60, 76)])
    asked(loop, PROMPT, priority=0)
    crowd(loop, 3)  # room for all but one page, with the last of each, of one token
    assert asked(loop, [1, *range(60, 76)]) == 16 and asked(loop, PROMPT) < 16, "though it is the younger one"


def test_an_answer_does_not_hold_a_prompt_that_is_to_go_first() -> None:
    """Its pages stand behind those of the prompt, which could not go before them."""
    loop = make_loop(OF)
    for prompt, priority in ([1, *range(60, 76)], None), (PROMPT, 0):
        cache = CacheOptions(priority=priority)
        loop.submit(
            prompt,
            replace(ONE, max_tokens=9, ignore_eos=True),
            lambda deltas: None,
            options=RequestOptions(cache=cache),
        )
        while loop.step():
            pass
    crowd(loop, 3)  # with 14 pages of two prompts and answers, five more than there is room for
    assert asked(loop, [1, *range(60, 76)]) == 16 and asked(loop, PROMPT) < 16


def test_a_priority_ends_with_its_time() -> None:
    clock = FakeClock()
    loop = make_loop(OF, clock=clock)
    asked(loop, PROMPT, priority=90, ttl_s=10)
    clock.now_s = 9.0
    crowd(loop)
    assert asked(loop, PROMPT) == 16
    clock.now_s = 10.5
    crowd(loop)
    assert asked(loop, PROMPT) == 0


def test_what_is_pinned_stays_and_counts_as_used() -> None:
    clock = FakeClock()
    loop = make_loop(OF, clock=clock)
    asked(loop, PROMPT, pin=True, ttl_s=10)
    assert loop.stats().pages_pinned == loop.stats().pages_used == 4 and loop.reset_prefix_cache() is False
    crowd(loop)
    assert asked(loop, PROMPT) == 16
    clock.now_s = 11.0
    loop.step()
    assert loop.stats().pages_pinned == loop.stats().pages_used == 0
    crowd(loop)
    assert asked(loop, PROMPT) == 0


def test_a_pin_without_a_time_lasts_an_hour_and_the_last_word_counts() -> None:
    clock = FakeClock()
    loop = make_loop(OF, clock=clock)
    asked(loop, PROMPT, pin=True)
    clock.now_s = 3599.0
    loop.step()
    assert loop.stats().pages_pinned == 4
    asked(loop, PROMPT, pin=True, ttl_s=1)
    clock.now_s = 3600.5
    loop.step()
    assert loop.stats().pages_pinned == 0


def test_a_pin_of_a_prompt_that_is_known_in_full_holds_too() -> None:
    loop = make_loop(OF)
    asked(loop, PROMPT)
    assert asked(loop, PROMPT, pin=True) == 16 and loop.stats().pages_pinned == 4


def test_an_idle_engine_ends_pins_in_time() -> None:
    loop = make_loop(OF, clock=time.perf_counter)
    loop.start()
    generate(loop, [{"prompt_token_ids": PROMPT, "cache_pin": True, "cache_ttl_s": 0.05}], ONE)
    assert loop.stats().pages_used == 4
    until_s = time.perf_counter() + 10
    while loop.stats().pages_used and time.perf_counter() < until_s:
        time.sleep(0.005)
    loop.stop()
    assert loop.stats().pages_used == 0


def test_pins_are_bounded_together() -> None:
    """24 pages, of which any request may need 8: half can be pinned. What prompts have in common counts once."""
    loop = make_loop(OF)
    assert loop._scheduler.retention.pins.max_pages == 12
    for first in (1, 2):
        asked(loop, [first, *PROMPT[1:]], pin=True)
    asked(loop, [*PROMPT, 1, 2, 3], pin=True)  # one page more than PROMPT
    with pytest.raises(RequestError) as refused:
        asked(loop, [3, *PROMPT[1:]], pin=True)
    assert refused.value.param == "cache_pin" and "4 KV pages 13 would be pinned" in str(refused.value)
    assert "at most 12" in str(refused.value) and loop.stats().idle
    asked(loop, [3, *PROMPT[1:13]], pin=True)
    assert asked(loop, PROMPT, pin=True) == 16, "what is pinned may be pinned again"


def test_what_is_promised_counts_and_is_given_back() -> None:
    loop = make_loop(OF)
    pins = loop._scheduler.retention.pins
    requests = [
        loop.submit(
            [first, *PROMPT[1:]], ONE, lambda deltas: None, options=RequestOptions(cache=CacheOptions(pin=True))
        )
        for first in (1, 2, 3)
    ]
    with pytest.raises(RequestError):
        loop.submit([4, *PROMPT[1:]], ONE, lambda deltas: None, options=RequestOptions(cache=CacheOptions(pin=True)))
    loop.cancel(requests[0])
    while loop.step():
        pass
    assert len(pins.pinned) == 8 and not pins._promised
    failed: list[Delta] = []
    loop.submit([POISON, *PROMPT[1:]], ONE, failed.extend, options=RequestOptions(cache=CacheOptions(pin=True)))
    while loop.step():
        pass
    assert failed[-1].error and len(pins.pinned) == 8 and not pins._promised


def test_no_pin_where_one_request_may_need_every_page() -> None:
    loop = make_loop(limits(page_tokens=PAGE, n_pages=8, max_context=32))
    with pytest.raises(RequestError, match="at most 0"):
        asked(loop, PROMPT, pin=True)


@pytest.mark.parametrize(
    ("options", "field", "why"),
    [
        ({"priority": 101}, "priority", "cache_priority is 101.*an integer from 0, which goes first, to 100"),
        ({"priority": -1}, "priority", "cache_priority is -1"),
        ({"priority": True}, "priority", "cache_priority is True"),
        ({"priority": 10**50}, "priority", "of type int"),
        ({"priority": 1, "ttl_s": -0.5}, "ttl_s", "cache_ttl_s is -0.5.*above 0"),
        ({"pin": True, "ttl_s": 0}, "ttl_s", "cache_ttl_s is 0"),
        ({"pin": True, "ttl_s": float("nan")}, "ttl_s", "cache_ttl_s is nan"),
        ({"pin": True, "ttl_s": 1e9}, "ttl_s", "604800, which is a week"),
        ({"ttl_s": 5}, "ttl_s", "nothing that it could end"),
        ({"pin": True, "priority": 3}, "priority", "both set"),
        ({"pin": 1}, "pin", "cache_pin is 1"),
        ({"salt": "x" * 257}, "salt", "257 characters.*at most 256.*digest"),
        ({"salt": 5}, "salt", "cache_salt is 5"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], field: str, why: str) -> None:
    with pytest.raises(RequestError, match=rf"(?s){why}") as refused:
        CacheOptions(**options)
    assert refused.value.param == f"cache_{field}"
    with pytest.raises(RequestError, match=rf"(?s){why}"):
        generate(make_loop(), [{"prompt_token_ids": [1], **{f"cache_{k}": v for k, v in options.items()}}], ONE)


def test_what_cannot_be_done_is_refused() -> None:
    with pytest.raises(RequestError, match="a prompt of 3 tokens"):
        asked(make_loop(OF), [1, 2, 3], pin=True)
    for options in ({"pin": True}, {"priority": 3}):
        with pytest.raises(RequestError, match="the prefix cache is off"):
            asked(make_loop(OF, prefix_cache=False), PROMPT, **options)
    assert asked(make_loop(OF, prefix_cache=False), PROMPT, salt="a") == 0


@settings(max_examples=examples(3, by_night=2))
@given(seed=SEEDS)
def test_pins_and_priorities_never_stall_or_leak(seed: int) -> None:
    """Random requests, some of them cancelled, on a small pool with a clock that jumps: all end, and all pages come
    back when the last pin has."""
    rng, clock = random.Random(seed), FakeClock(0.01)
    loop = make_loop(OF, clock=clock)
    ended: list[Delta] = []
    n = 0
    for _ in range(150):
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 26))]
        cache: dict[str, Any] = rng.choice(
            [{}, {"priority": rng.randint(0, 100), "ttl_s": 2}, {"pin": True, "ttl_s": rng.random() * 9}]
        )
        params = SamplingParams(n=rng.choice([1, 2]), max_tokens=rng.randint(1, 6), ignore_eos=True, seed=1)
        try:
            request = loop.submit(prompt, params, ended.extend, options=RequestOptions(cache=CacheOptions(**cache)))
        except RequestError as error:
            assert error.param == "cache_pin"
            continue
        n += params.n
        for _ in range(rng.randint(0, 4)):
            loop.step()
        if rng.random() < 0.2:
            loop.cancel(request)
        clock.now_s += rng.choice([0, 0, 1.0])
    while loop.step():
        pass
    assert sum(delta.finish_reason is not None for delta in ended) == n
    assert loop.stats().pages_used == loop.stats().pages_pinned <= 12
    clock.now_s += 10
    loop.step()
    assert loop.stats().pages_used == 0 and loop._pool.n_free == 24 and loop.reset_prefix_cache()


def test_times_that_count_no_more_do_not_pile_up() -> None:
    index = PrefixIndex()
    index.add(0, b"a", None)
    for i in range(1000):
        index.retain(0, 50, 1000.0 + i)
    assert len(index._until) <= 66
    index.expire(1998.0)
    assert index._by_page[0].priority == 50, "the last word counts"
    index.expire(1999.0)
    assert index._by_page[0].priority == 35 and index.next_end_s == float("inf")
