"""The prefix cache: what is computed, what is found, and that no answer depends on it."""

import asyncio
import random
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.api.offline_generate import astream, generate
from millrace.engine.executor import ExecutorLimits, StepInputs
from millrace.runtime.kv.pages import PrefixIndex
from millrace.runtime.loop import EngineLoop
from millrace.runtime.request.sampling_params import FinishReason, SamplingParams
from millrace.runtime.service import AsyncEngine
from tests.runtime.clients import ASKED, GREEDY, PAGE, Asked, Client, answered, computed, run_all, solo, solo_answers
from tests.runtime.fakes import POISON, VOCAB, RandomBudget, expected_choice, limits, make_loop, score
from tests.support.drawn import examples

# ------------------------------------------------------------------ equal answers


@settings(max_examples=examples(30, by_night=2))
@given(
    schedule=st.lists(ASKED, min_size=2, max_size=12),
    n_pages=st.sampled_from([13, 16, 24, 64]),
    max_sequences=st.sampled_from([1, 2, 5]),
    chunks=st.integers(0, 99),
)
def test_p1_a_hit_gives_the_answer_of_a_miss(
    schedule: list[Asked], n_pages: int, max_sequences: int, chunks: int
) -> None:
    """vllm#40896, sglang#34683, lmdeploy#1719: hits change answers. Any schedule, short of pages or not."""
    of = limits(page_tokens=PAGE, n_pages=n_pages, max_sequences=max_sequences, max_context=52, max_step_tokens=16)
    loop = make_loop(of, budget=RandomBudget(16, random.Random(chunks)) if chunks else None)
    for client in solo_answers(loop, schedule):
        if client.params.prompt_logprobs is not None and FinishReason.ABORT not in client.reasons:
            scored = [p.logprob for d in client.deltas if d.index == 0 for p in d.prompt_logprobs or ()]
            assert scored == [score(client.prompt[:k], client.prompt[k]) for k in range(1, len(client.prompt))]
    stats = loop.stats()
    assert not loop._scheduler._leading
    assert stats.pages_kept == len(loop._pool.index) and stats.prefix_hits_total <= stats.prefix_queries_total


# ------------------------------------------------------------------ what is computed


def test_only_what_differs_is_computed() -> None:
    loop = make_loop(limits(page_tokens=PAGE))
    prompt = list(range(1, 32))  # 31 tokens: seven full pages and three tokens
    assert computed(loop, prompt) == 31 + 2
    assert computed(loop, prompt) == 1 + 2, "the answer has filled the last page; the last token is computed to draw"
    assert computed(loop, [*prompt[:20], 50, 51, *prompt[22:]]) == 11 + 2, "from the page on in which they differ"
    assert computed(loop, [*prompt[:22], 50, 51, *prompt[24:]]) == 9 + 2, "from the token on in which they differ"
    assert computed(loop, prompt[:20]) == 1 + 2, "of a prompt of full pages, the last token is computed"
    assert computed(loop, prompt[:3]) == 1 + 2, "a first page is found in part as any other"
    assert computed(loop, prompt[1:]) == 30 + 2, "a page is found by all before it"
    assert loop.stats().prefix_queries_total == 31 + 31 + 31 + 31 + 20 + 3 + 30
    assert loop.stats().prefix_hits_total == 30 + 20 + 22 + 19 + 2


def test_answers_are_found_as_prompts_are() -> None:
    loop = make_loop(limits(page_tokens=PAGE))
    first = answered(loop, [1, 2, 3], replace(GREEDY, max_tokens=30))
    said = [1, 2, 3, *first.outputs[0].token_ids]
    assert computed(loop, [*said, 7, 8]) == len(said) + 2 - 32 + 2, "all eight pages but the last token's"


def test_a_first_token_at_90_percent_overlap_costs_a_tenth() -> None:
    """Of 1,000 tokens in pages of 64, 896 of 900 are found: at least four times less to compute, counted."""
    loop = make_loop(limits(page_tokens=64, max_context=2048, n_pages=256, max_step_tokens=512))
    one, base = replace(GREEDY, max_tokens=1), [1 + i % 89 for i in range(900)]
    miss, hit = (computed(loop, [*base, *(tail + i % 7 for i in range(100))], one) for tail in (3, 13))
    assert (miss, hit) == (1000, 104)


def test_without_the_cache_only_siblings_share() -> None:
    loop = make_loop(limits(page_tokens=PAGE), prefix_cache=False)
    prompt = list(range(1, 32))
    assert computed(loop, prompt) == computed(loop, prompt) == 31 + 2
    assert computed(loop, prompt, replace(GREEDY, n=3)) == 31 + 2 * 3 + 3 * 2
    stats = loop.stats()
    assert stats.prefix_queries_total == stats.prefix_hits_total == 0


def test_prompts_that_are_scored_are_computed_and_found() -> None:
    loop = make_loop(limits(page_tokens=PAGE))
    prompt, scoring = list(range(1, 32)), replace(GREEDY, prompt_logprobs=0)
    answered(loop, prompt)
    assert computed(loop, prompt, scoring) == 31 + 2, "each token's log probability is wanted"
    assert computed(loop, prompt[:16], scoring) == 16 + 2
    loop = make_loop(limits(page_tokens=PAGE))
    answered(loop, prompt, scoring)
    assert computed(loop, prompt) == 1 + 2


def test_outputs_say_how_much_was_found() -> None:
    loop = make_loop(limits(page_tokens=PAGE))
    prompt = list(range(1, 32))
    assert [generate(loop, [p], GREEDY)[0].num_cached_tokens for p in (prompt, prompt, prompt[:9])] == [0, 30, 8]
    loop.start()

    async def streamed() -> list[int | None]:
        return [output.num_cached_tokens async for output in astream(loop, prompt, GREEDY)]

    assert asyncio.run(streamed()) == [30] * 3
    loop.stop()


def test_resetting_forgets_everything_unless_it_is_in_use() -> None:
    loop = make_loop(limits(page_tokens=PAGE))
    prompt = list(range(1, 32))
    Client(loop, prompt)
    loop.step()
    assert loop.reset_prefix_cache() is False
    run_all(loop)
    assert loop.stats().pages_kept > 0 and loop.reset_prefix_cache() is True and loop.stats().pages_kept == 0
    assert computed(loop, prompt) == 31 + 2


# ------------------------------------------------------------------ only what is right is found


@pytest.mark.parametrize("chunk", [4, 32])
def test_pages_of_an_answer_that_was_not_finite_are_never_found(chunk: int) -> None:
    loop = make_loop(limits(page_tokens=PAGE, max_step_tokens=chunk, max_sequences=2))
    prompt = [POISON, *range(1, 32)]
    assert answered(loop, prompt).reasons == [FinishReason.ERROR]
    assert loop.stats().pages_kept == 0 and computed(loop, prompt) == 32
    assert loop.stats().prefix_hits_total == 0


def test_pages_are_known_when_a_token_was_drawn_from_them_and_not_before() -> None:
    loop = make_loop(limits(page_tokens=PAGE, max_step_tokens=8, max_sequences=2))
    client = Client(loop, list(range(1, 32)))
    for _ in range(3):
        loop.step()
    assert len(loop._pool.index) == 0 and not client.deltas
    loop.step()
    assert len(loop._pool.index) == 7 and len(client.deltas) == 1


def test_pages_of_a_step_that_failed_are_never_found() -> None:
    def fail(step: StepInputs) -> None:
        if step.positions[-1] >= 8:
            raise RuntimeError("broken")

    loop = make_loop(limits(page_tokens=PAGE, max_step_tokens=8), before_run=fail)
    assert answered(loop, list(range(1, 32))).reasons == [FinishReason.ERROR]
    assert loop.stats().pages_kept == 0


# ------------------------------------------------------------------ two at the same time


def both(first: list[int], second: list[int], of: ExecutorLimits) -> tuple[int, EngineLoop]:
    """Tokens computed for two prompts that come together; each answer has one."""
    loop, one = make_loop(of), replace(GREEDY, max_tokens=1)
    clients = [Client(loop, prompt, one) for prompt in (first, second)]
    run_all(loop)
    for client in clients:
        assert client.outputs == solo(client.prompt, one)
    return loop.stats().step_tokens_total, loop


def test_who_begins_alike_waits_where_that_is_sooner() -> None:
    of = limits(page_tokens=PAGE, max_step_tokens=8)
    prompt = list(range(1, 32))
    assert both(prompt, prompt, of)[0] == 31 + 1, "the first ends with that step: its last page is found, too"
    assert both(prompt, [*prompt[:24], 90, 91], of)[0] == 31 + 2
    assert both(prompt, [*prompt[:4], 90, 91], of)[0] == 31 + 6, "to wait for the long one would take longer"


def test_nobody_waits_for_a_prompt_that_is_scored() -> None:
    loop, prompt = (
        make_loop(limits(page_tokens=PAGE, max_step_tokens=32, max_sequences=4, max_rows=6)),
        list(range(1, 32)),
    )
    scored = Client(loop, prompt, replace(GREEDY, prompt_logprobs=0))
    plain = Client(loop, prompt)
    for _ in range(3):
        loop.step()
    assert plain.outputs[0].token_ids and not scored.outputs[0].token_ids
    run_all(loop)
    assert plain.outputs == solo(prompt, GREEDY) and scored.outputs == solo(prompt, scored.params)


def test_who_waits_goes_on_when_the_other_fails_or_goes() -> None:
    of = limits(page_tokens=PAGE, max_step_tokens=8)
    for n_steps in range(5):
        loop, prompt = make_loop(of), list(range(1, 32))
        first, second = Client(loop, prompt), Client(loop, prompt)
        for _ in range(n_steps):
            loop.step()
        loop.cancel(first.request)
        run_all(loop)
        assert second.outputs == solo(prompt, GREEDY) and loop.stats().pages_used == 0


def test_many_that_wait_cost_little_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader's long prompt, and a queue behind it: each step asks each of them one question, not the index."""
    loop = make_loop(limits(page_tokens=PAGE, max_step_tokens=8, max_context=1024, n_pages=1024))
    prompt = [i % 90 for i in range(900)]
    clients = [Client(loop, prompt, replace(GREEDY, max_tokens=1)) for _ in range(50)]
    n_requested = []
    find = PrefixIndex.find

    def counted(index: PrefixIndex, keys: list[bytes]) -> tuple[int, ...]:
        n_requested.append(len(keys))
        return find(index, keys)

    monkeypatch.setattr(PrefixIndex, "find", counted)
    run_all(loop)
    assert all(client.reasons == [FinishReason.LENGTH] for client in clients)
    assert len(n_requested) <= 3 * len(clients)
    assert loop.stats().step_tokens_total == 900 + 49, "all but the last token is found, a page of it in part"


# ------------------------------------------------------------------ nothing leaks


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(2, 20))])
def test_p13_aborted_clients_leak_nothing(seed: int) -> None:
    """lmdeploy#1788: a stall after 100 to 300 aborts. Here 400, at any moment, of prompts that begin alike."""
    rng = random.Random(seed)
    of = limits(page_tokens=PAGE, n_pages=40, max_sequences=4, max_context=60, max_step_tokens=16)
    loop = make_loop(of)
    clients: list[Client] = []
    for _ in range(400):
        parts = tuple(rng.randrange(3) for _ in range(rng.randint(0, 5)))
        prompt = Asked(parts, rng.randint(1, 5), 1, 1, None, 0, None).prompt
        clients.append(Client(loop, prompt, SamplingParams(n=rng.choice([1, 2]), max_tokens=20, ignore_eos=True)))
        for _ in range(rng.randint(0, 3)):
            loop.step()
        loop.cancel(rng.choice(clients[-4:]).request)
    for client in clients:
        loop.cancel(client.request)
    run_all(loop)
    stats = loop.stats()
    assert stats.pages_used == 0 and stats.idle and stats.pages_kept == len(loop._pool.index) <= 40
    assert not loop._scheduler._leading and loop._pool.n_free == 40
    assert answered(loop, [1, 2, 3]).outputs == solo([1, 2, 3], GREEDY)
    assert sorted(loop._pool.reserve(40) or ()) == list(range(40)), "every page can still be had"


def test_200_clients_of_one_prompt_get_their_tokens_though_a_third_of_them_goes() -> None:
    """Through the engine's thread and the event loop: no wrong token, no page left, the prompt computed about once."""
    rng = random.Random(4)
    of = limits(page_tokens=PAGE, n_pages=200, max_sequences=16, max_context=160, max_step_tokens=64)
    loop = make_loop(of, clock=time.perf_counter)
    system = [1 + i % 89 for i in range(100)]

    async def client(engine: AsyncEngine, i: int) -> None:
        prompt = [*system, *(rng.randrange(1, VOCAB - 1) for _ in range(rng.randint(1, 12)))]
        params = replace(GREEDY, max_tokens=rng.randint(1, 20), seed=i)
        stays = rng.random() > 0.3
        await asyncio.sleep(rng.random() / 4)
        async with engine.submit([prompt], [params]) as handle:
            tokens: list[int] = []
            async for deltas in handle:
                tokens += [token for delta in deltas for token in delta.token_ids]
                if not stays and len(tokens) > i % 5:
                    break
        right = expected_choice(prompt, params, 0, of).token_ids
        assert tokens == right if stays else tokens == right[: len(tokens)]

    async def all_of_them() -> None:
        async with AsyncEngine(loop) as engine:
            await asyncio.gather(*(client(engine, i) for i in range(200)))

    asyncio.run(all_of_them())
    stats = loop.stats()
    assert not loop._scheduler._leading
    assert stats.prefix_hits_total > 0.85 * 200 * 100 and stats.step_tokens_total < 0.4 * stats.prefix_queries_total
