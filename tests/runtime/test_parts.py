"""Pages that are found in part: copied where enough is shared; the last page of who has ended is found so."""

import random
from dataclasses import replace

import numpy as np
import pytest

from millrace.engine.executor import StepInputs
from millrace.runtime.kv.pages import PageKey, PagePool, extend_keys, root_key
from millrace.runtime.request.sampling_params import FinishReason
from tests.runtime.clients import GREEDY, PAGE, Client, answered, run_all, solo
from tests.runtime.fakes import POISON, VOCAB, limits, make_loop


def test_a_page_is_copied_only_where_enough_of_it_is_shared() -> None:
    """Of 64 tokens at least 8; what was found in part is what the answer says was found."""
    of, one = limits(page_tokens=64, max_context=256, max_step_tokens=64), replace(GREEDY, max_tokens=1)
    loop, plain = make_loop(of), make_loop(of, prefix_cache=False)
    base = [1 + i % 89 for i in range(129)]
    answered(loop, base, one)
    for n_shared in (7, 8, 63):
        asked = answered(loop, [*base[: 64 + n_shared], *[90 + n_shared % 5] * 9], one)
        assert asked.request.n_cached == 64 + (n_shared if n_shared >= 8 else 0), n_shared
        assert asked.outputs == answered(plain, asked.prompt, one).outputs


def test_a_copy_needs_no_page_that_its_request_needs() -> None:
    """The pool holds one full context. Then the source goes, rather than that the request waits for ever."""
    of = limits(page_tokens=PAGE, n_pages=8, max_context=32, max_sequences=2)
    loop, base = make_loop(of), list(range(1, 30))
    answered(loop, base)
    for n_shared in (6, 7, 26, 27):
        prompt = [*base[:n_shared], *[80] * (29 - n_shared)]
        asked = answered(loop, prompt)
        assert asked.outputs == solo(prompt, GREEDY) and asked.request.n_cached == n_shared // PAGE * PAGE
        answered(loop, base)
    assert loop.stats().pages_used == 0


def test_a_page_that_is_being_copied_is_nobodys_room() -> None:
    """It was the next one to be given up: it stays until the step is through, also one that fails."""
    fails, of = [False], limits(page_tokens=PAGE, n_pages=9, max_context=32, max_sequences=3)

    def run(step: StepInputs) -> None:
        if fails[0]:
            raise RuntimeError("broken")

    loop, base = make_loop(of, run), list(range(1, 9))
    answered(loop, base, replace(GREEDY, max_tokens=1))
    answered(loop, [70] * 20, replace(GREEDY, max_tokens=1))
    (before, source) = loop._pool.index.find(loop_keys(base))[:2]
    one = replace(GREEDY, max_tokens=1)
    fails[0] = True
    assert answered(loop, [*base[:6], 60, 61, 62], one).reasons == [FinishReason.ERROR]
    assert loop._pool.index.find(loop_keys(base)) == (before, source) and loop.stats().pages_used == 0
    fails[0] = False
    copied = Client(loop, [*base[:6], 60, 61, 62], one)
    other = Client(loop, [50] * 12, one)
    run_all(loop)
    assert copied.request.n_cached == 6
    for client in (copied, other):
        assert client.outputs == solo(client.prompt, one)
    assert loop.stats().pages_evicted_total > 0 and loop.stats().pages_used == 0


def loop_keys(prompt: list[int]) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, root_key(b""), np.array(prompt, np.int32), len(prompt) // PAGE, PAGE)
    return keys


@pytest.mark.parametrize(
    ("low", "high"), [(8, 8), (10, 14), (20, 28), (40, 56), pytest.param(60, 200, marks=pytest.mark.nightly)]
)
def test_a_chat_of_20_turns_costs_its_new_tokens(low: int, high: int) -> None:
    """Each turn's prompt is all before it and some more: at most 1.3 times what is new is computed, in pages of 64."""
    loop, rng = make_loop(limits(page_tokens=64, max_context=8192, n_pages=256, max_step_tokens=512)), random.Random(1)
    history: list[int] = []
    for _ in range(20):
        said = [rng.randrange(VOCAB - 1) for _ in range(rng.randint(low, high))]
        client = answered(loop, [*history, *said], replace(GREEDY, max_tokens=rng.randint(low, high)))
        assert len(history) - 8 <= client.request.n_cached <= len(history), "all before but a beginning of a page"
        history += [*said, *client.outputs[0].token_ids]
    cost = loop.stats().step_tokens_total / len(history)
    assert cost <= 1.3, f"20 turns, {len(history)} new tokens: {cost:.3f} times that computed"
    kept = loop.stats().pages_kept
    assert kept <= -(-len(history) // 64), f"{kept} pages for a chat of {len(history)} tokens: beginnings are let go"


def test_an_answer_that_is_cut_off_is_found_as_far_as_it_was_finite() -> None:
    loop = make_loop(limits(page_tokens=64, max_context=256))
    gone = Client(loop, list(range(1, 21)), replace(GREEDY, max_tokens=40))
    for _ in range(13):
        loop.step()
    loop.cancel(gone.request)
    run_all(loop)
    said = [*gone.prompt, *gone.outputs[0].token_ids]
    assert gone.reasons == [FinishReason.ABORT] and 20 < len(said) < 60
    next_turn = answered(loop, [*said, 7, 8, 9])
    assert next_turn.request.n_cached == len(said) - 1 and next_turn.outputs == solo(next_turn.prompt, GREEDY)


def test_what_was_not_finite_is_not_found_in_part() -> None:
    loop = make_loop(limits(page_tokens=64, max_context=256, max_step_tokens=16))
    bad = answered(loop, [POISON, *range(1, 31)])
    assert bad.reasons == [FinishReason.ERROR] and loop.stats().pages_kept == 0
    fails, good = [0], list(range(1, 31))

    def run(step: StepInputs) -> None:
        fails[0] += 1
        if fails[0] == 5:
            raise RuntimeError("broken")

    loop = make_loop(limits(page_tokens=64, max_context=256, max_step_tokens=16), run)
    broken = answered(loop, good, replace(GREEDY, max_tokens=9))
    assert broken.reasons == [FinishReason.ERROR] and len(broken.outputs[0].token_ids) == 3
    assert answered(loop, [*good, *broken.outputs[0].token_ids, 5]).request.n_cached == 32, "of two steps that followed"


def test_a_preempted_answer_finds_its_last_page_again() -> None:
    of = limits(page_tokens=16, n_pages=6, max_context=96, max_sequences=2, max_step_tokens=64)
    loop = make_loop(of)
    clients = [Client(loop, [k] * 30, replace(GREEDY, max_tokens=33)) for k in (1, 2)]
    run_all(loop)
    assert loop.stats().preemptions_total > 0 and loop.stats().pages_used == 0
    for client in clients:
        assert client.outputs == solo(client.prompt, client.params)


def test_beginnings_of_a_page_are_let_go_when_nobody_owns_them() -> None:
    pool, tokens = PagePool(6), np.arange(16, dtype=np.int32)
    held = []
    for n in (4, 9, 16):
        (page,) = pool.reserve(1) or ()
        content = PageKey(root_key(), tokens[:n], 16)
        assert pool.index.is_worth_adding(content) == (n < 16)
        assert pool.publish(page, content.key, None, content) == page
        held.append(page)
        if n == 4:
            pool.release([page])
        assert (held[0] in pool.index) == (n != 9), "what comes next has all of it"
    assert held[0] == held[2] != held[1] and held[1] in pool.index, "the first was there to be had again"
    assert not pool.index.is_worth_adding(PageKey(root_key(), tokens[:9], 16)), "a full page begins so"
    assert not pool.index.is_worth_adding(PageKey(root_key(), tokens[:1], 16)), "too few to be found by"
    assert pool.index.is_worth_adding(PageKey(root_key(b"other"), tokens[:9], 16))
    pool.release(held[1:])
    assert pool.n_free == 6 and pool.reserve(6) is not None and len(pool.index) == 0


def test_a_page_that_is_not_full_does_not_go_to_the_second_tier() -> None:
    put: list[int] = []

    class Seen:
        def put(self, key: bytes, page: int) -> None:
            put.append(page)

    pool, tokens = PagePool(2, Seen()), np.arange(16, dtype=np.int32)  # type: ignore[arg-type]
    pages = pool.reserve(2) or ()
    for page, content in zip(
        pages, (PageKey(root_key(), tokens[1:], 16), PageKey(root_key(), tokens, 16)), strict=True
    ):
        pool.publish(page, content.key, None, content)
    pool.release(pages)
    assert pool.reserve(2) is not None and put == [pages[1]]
