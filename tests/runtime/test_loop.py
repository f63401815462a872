"""Whatever happens beside a request, its answer is the one it gets alone; and all pages come back."""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from millrace.api.offline_generate import Collector, CompletionOutput, new_output
from millrace.engine.executor import ExecutorLimits
from millrace.errors import RequestError
from millrace.runtime.loop import EngineLoop
from millrace.runtime.request.queue_options import DEFAULT_QUEUE_OPTIONS, QueueOptions
from millrace.runtime.request.request import Request, RequestOptions
from millrace.runtime.request.sampling_params import Delta, FinishReason, SamplingParams, TokenLogprobs
from millrace.runtime.request.structured_outputs import StructuredOutputsParams
from millrace.runtime.scheduling.admission_policy import POLICIES
from tests.runtime.fakes import (
    POISON,
    VOCAB,
    FakeClock,
    FakeTokenizer,
    RandomBudget,
    expected_choice,
    limits,
    make_loop,
    score,
)
from tests.support.drawn import SEEDS, examples


class Client:
    """Submits to a loop and collects what comes."""

    def __init__(
        self,
        loop: EngineLoop,
        prompt: Sequence[int],
        params: SamplingParams,
        queue_options: QueueOptions = DEFAULT_QUEUE_OPTIONS,
    ) -> None:
        self.deltas: list[list[Delta]] = []
        self.prompt, self.params = list(prompt), params
        asked = params.structured_outputs
        self.request: Request = loop.submit(
            prompt, params, self.deltas.append, options=RequestOptions(queue_options=queue_options),
            matchers=loop.grammars.matchers(asked, params.n) if asked else (),
        )  # fmt: skip

    @property
    def outputs(self) -> list[CompletionOutput]:
        collector = Collector(new_output(self.request), FakeTokenizer())
        for deltas in self.deltas:
            collector.add(deltas)
        return collector.output.outputs

    def scored(self, choice: int) -> list[TokenLogprobs]:
        """Of the prompt, as this choice was told: all before its first token."""
        deltas = [delta for deltas in self.deltas for delta in deltas if delta.index == choice]
        n_before = next((i for i, delta in enumerate(deltas) if delta.token_ids), len(deltas))
        assert not any(delta.prompt_logprobs for delta in deltas[n_before:])
        return [p for delta in deltas for p in delta.prompt_logprobs or ()]

    @property
    def n_finished(self) -> int:
        return sum(d.finish_reason is not None for deltas in self.deltas for d in deltas)


def run_all(loop: EngineLoop) -> None:
    while loop.step():
        pass


def alone(client: Client) -> list[CompletionOutput]:
    """The same request in a loop of its own with plenty of everything, choice by choice."""
    loop = make_loop(limits(max_context=client.request.resolved.max_tokens + len(client.prompt)))
    solo = Client(loop, client.prompt, replace(client.params, seed=client.request.resolved.seed))
    run_all(loop)
    return solo.outputs


def random_params(rng: random.Random, n_room: int) -> SamplingParams:
    return SamplingParams(
        n=rng.choice([1, 1, 1, 2, 3]),
        max_tokens=rng.choice([1, rng.randint(1, n_room), n_room]),
        min_tokens=rng.choice([0, 0, 1]),
        temperature=rng.choice([0.0, 1.0, None]),
        presence_penalty=rng.choice([0.0, 0.0, 0.5]),
        seed=rng.choice([None, -1, rng.randint(0, 2**64 - 1)]),
        stop=rng.choice([(), ("ab",), ("a", "ba\n", "é"), ("cab", "界")]),
        stop_token_ids=rng.choice([(), (5, 6, 7)]),
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice([None, None, 0, 3]),
        prompt_logprobs=rng.choice([None, None, 0, 2]),
        include_stop_str_in_output=rng.random() < 0.3,
        skip_special_tokens=rng.random() < 0.7,
        logit_bias={int(rng.randrange(VOCAB)): 5.0} if rng.random() < 0.1 else {},
    )


def perhaps_held(rng: random.Random, params: SamplingParams) -> SamplingParams:
    """One in four to a regular expression."""
    if rng.random() < 0.75:
        return params
    asked = StructuredOutputsParams(regex=rng.choice(["[a-d]+", "(ab|cd)*e", "[a-h]{30}"]))
    return replace(params, structured_outputs=asked, ignore_eos=False, min_tokens=0)


def tiny_limits(rng: random.Random) -> ExecutorLimits:
    page_tokens, n_sequences = rng.choice([1, 2, 4, 8]), rng.randint(1, 8)
    context = rng.randint(8, 60)
    return limits(
        max_rows=n_sequences + rng.randint(1, 9),
        page_tokens=page_tokens,
        max_sequences=n_sequences,
        max_step_tokens=n_sequences + rng.randint(0, 24),
        max_context=context,
        n_pages=-(-context // page_tokens) + rng.randint(0, 12),
    )


@settings(max_examples=examples(25, by_night=2))
@given(seed=SEEDS)
def test_any_schedule_gives_the_solo_answers(seed: int) -> None:
    check_any_schedule(seed, 1)


def check_any_schedule(seed: int, depth: int) -> None:
    """depth: steps under way at a time; of what answers are compared with, one"""
    rng = random.Random(seed)
    of = tiny_limits(rng)
    budget = RandomBudget(of.max_step_tokens, rng) if rng.random() < 0.7 else None
    policy, claims = rng.choice(list(POLICIES.values())), rng.random() < 0.5
    loop = make_loop(of, budget=budget, policy=policy, depth=depth)
    clients: list[Client] = []
    cancelled: set[Client] = set()
    for _ in range(80):
        if rng.random() < 0.3:
            prompt = [rng.randrange(VOCAB - 1) for _ in range(rng.randint(1, of.max_context - 1))]
            queue_options = (
                QueueOptions(priority=rng.randint(-2, 2), tenant=rng.choice("abc")) if claims else DEFAULT_QUEUE_OPTIONS
            )
            clients.append(
                Client(loop, prompt, perhaps_held(rng, random_params(rng, of.max_context - len(prompt))), queue_options)
            )
        if clients and rng.random() < 0.1:
            victim = rng.choice(clients)
            cancelled.add(victim)
            loop.cancel(victim.request)
        loop.step(defer_delivery=rng.random() < 0.7)
    run_all(loop)
    for client in clients:
        if (top := client.params.prompt_logprobs) is not None and client not in cancelled:
            likely = [score(client.prompt[:i], token) for i, token in enumerate(client.prompt)][1:]
            for choice in range(client.params.n):
                scored = client.scored(choice)
                assert [p.token_id for p in scored] == client.prompt[1:] and [p.logprob for p in scored] == likely
            assert all(len(p.top) == top for p in client.scored(0))
    stats = loop.stats()
    assert stats.pages_used == 0 and stats.running == 0 and stats.waiting == 0 and stats.idle
    for client in clients:
        assert client.n_finished == client.params.n, "every choice ends exactly once"
        for got, want in zip(client.outputs, alone(client), strict=True):
            if client in cancelled and got.finish_reason is FinishReason.ABORT:
                assert want.token_ids[: len(got.token_ids)] == got.token_ids
                assert want.text.startswith(got.text.rstrip("\ufffd")) or client.params.stop  # held text may be let go
            else:
                assert got == want


def test_the_history_tells_the_prompt_from_output_that_is_computed_again() -> None:
    """Of prompts that take more than one step, too."""
    of = limits(n_pages=12, page_tokens=2, max_context=24, max_sequences=6, max_step_tokens=6)
    loop = make_loop(of, prefix_cache=False)
    clients = [Client(loop, [i] * 7, SamplingParams(max_tokens=12, ignore_eos=True, seed=i)) for i in range(3)]
    run_all(loop)
    again, n_preempted = 0, loop.stats().preemptions_total
    for client in clients:
        parts = np.concatenate([step.parts for step in loop.history.steps])
        parts = parts[parts["request"] == client.request.order]
        for p in parts:
            assert p["n_prompt"] == len([at for at in range(p["start"], p["start"] + p["n"]) if at < 7])
        n_starts = sum(parts["start"] == 0)  # nothing is cached: each computes the prompt from its start
        assert sum(parts["n_prompt"]) == 7 * n_starts and max(parts["n"]) < 7
        assert n_starts == 1 + client.request.timings.n_preemptions and sum(parts["draws"]) == 12
        again += sum(parts["n"] - parts["n_prompt"]) - 11  # of 12 that are drawn, the last is not computed
    assert n_preempted > 0 and again > 0


def test_the_random_schedules_do_preempt() -> None:
    """The test above would prove little if its pools were never short."""
    of = limits(n_pages=12, page_tokens=2, max_context=24, max_sequences=6)
    loop = make_loop(of)
    clients = [Client(loop, [i, 1, 2], SamplingParams(max_tokens=20, ignore_eos=True, seed=i)) for i in range(6)]
    run_all(loop)
    assert loop.stats().preemptions_total > 3
    assert sum(c.request.timings.n_preemptions for c in clients) == loop.stats().preemptions_total
    for client in clients:
        assert client.outputs == alone(client)
        assert client.outputs[0].token_ids == expected_choice(client.prompt, client.params, 0, of).token_ids


@settings(max_examples=examples(10))
@given(seed=SEEDS)
def test_answers_agree_with_the_plain_model(seed: int) -> None:
    rng, of = random.Random(seed), limits()
    loop = make_loop(of, budget=RandomBudget(of.max_step_tokens, rng))
    clients = []
    for i in range(12):
        params = random_params(rng, 60)
        params = replace(params, seed=i, stop=(), min_tokens=0, presence_penalty=0.0, logprobs=None)
        params = replace(params, include_stop_str_in_output=False, skip_special_tokens=True)
        prompt = [*(rng.randrange(1, VOCAB - 1) for _ in range(rng.randint(0, 59))), 1]  # ends with a whole character
        clients.append(Client(loop, prompt, params))
    run_all(loop)
    for client in clients:
        for i, got in enumerate(client.outputs):
            assert got == expected_choice(client.prompt, client.params, i, of)


def test_choices_share_the_pages_of_their_prompt() -> None:
    loop = make_loop(limits(page_tokens=4, max_step_tokens=64))
    prompt = list(range(1, 42))  # 41 tokens: ten full pages and one token
    client = Client(loop, prompt, SamplingParams(n=5, max_tokens=3, seed=7, ignore_eos=True))
    loop.step()  # the prompt
    assert loop.stats().pages_used == 11 and loop.stats().waiting == 4
    loop.step()  # the siblings join with their last prompt token
    assert loop.stats().running == 5 and loop.stats().pages_used == 10 + 5
    run_all(loop)
    assert loop.stats().step_tokens_total == 41 + 4 * 1 + 5 * 2
    assert client.outputs == alone(client) and len({tuple(o.token_ids) for o in client.outputs}) == 5
    assert loop.stats().prompt_tokens_total == 41 and loop.stats().generation_tokens_total == 15
    assert loop.stats().pages_used == 0


def test_a_first_choice_of_one_token_leaves_its_prompt_to_the_others() -> None:
    loop = make_loop(limits(page_tokens=4, max_step_tokens=64))
    client = Client(loop, list(range(1, 42)), SamplingParams(n=3, max_tokens=1, seed=7))
    run_all(loop)
    assert loop.stats().step_tokens_total == 41 + 2
    assert [len(o.token_ids) for o in client.outputs] == [1, 1, 1] and loop.stats().pages_used == 0


@pytest.mark.parametrize("n_steps", range(8))
def test_cancelling_a_family_at_any_moment_returns_its_pages(n_steps: int) -> None:
    loop = make_loop(limits(page_tokens=4, max_step_tokens=16))
    client = Client(loop, list(range(1, 42)), SamplingParams(n=3, seed=7, ignore_eos=True))
    for _ in range(n_steps):
        loop.step()
    loop.cancel(client.request)
    run_all(loop)
    assert loop.stats().pages_used == 0 and loop.stats().finished_total[FinishReason.ABORT] == 3
    assert [o.finish_reason for o in client.outputs] == [FinishReason.ABORT] * 3
    loop.cancel(client.request)  # harmless
    assert not loop.step()


def test_one_callback_per_request_and_step() -> None:
    loop = make_loop()
    client = Client(loop, [1, 2], SamplingParams(n=3, max_tokens=4, ignore_eos=True, seed=1))
    n_steps = 0
    while loop.step():
        n_steps += 1
        assert len(client.deltas) == n_steps
    assert [len(deltas) for deltas in client.deltas] == [3, 3, 3, 3]


def test_p12_logits_that_are_not_finite_fail_only_their_request() -> None:
    loop = make_loop()
    good = Client(loop, [1, 2], SamplingParams(max_tokens=6, ignore_eos=True, seed=1))
    bad = Client(loop, [POISON, 2], SamplingParams(n=2, max_tokens=6, seed=1))
    run_all(loop)
    assert good.outputs == alone(good)
    assert [o.finish_reason for o in bad.outputs] == [FinishReason.ERROR] * 2
    assert "not finite" in (bad.outputs[0].error or "") and bad.n_finished == 2
    assert loop.stats().pages_used == 0 and loop.stats().healthy


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_p15_an_answer_as_long_as_the_context_ends_nobody_elses(prefix_cache: bool) -> None:
    """Two that fill the context each, in pages for one: the second gives way, waits, and goes on where it was."""
    of = limits(page_tokens=4, n_pages=8, max_context=32, max_sequences=2, max_rows=6)
    loop = make_loop(of, prefix_cache=prefix_cache)
    endless = SamplingParams(ignore_eos=True, seed=3, max_tokens=None)
    first, second = clients = [Client(loop, prompt, endless) for prompt in ([1, 2], [3, 4, 5])]
    n_used = 0
    while not first.n_finished:
        n_used = loop.stats().pages_used
        assert loop.step()
    n_had = len(second.outputs[0].token_ids)
    assert n_used == of.n_pages, "the first had all of them in the end"
    assert (first.request.timings.n_preemptions, second.request.timings.n_preemptions) == (0, 1)
    assert 8 < n_had < 20 and not second.n_finished, "the second was on its way, and waits"
    run_all(loop)
    for client in clients:
        assert client.outputs == alone(client) == [expected_choice(client.prompt, endless, 0, of)]
        (output,) = client.outputs
        assert output.finish_reason is FinishReason.LENGTH
        assert len(client.prompt) + len(output.token_ids) == of.max_context
    assert second.request.timings.n_preemptions == 1 and loop.stats().pages_used == 0


def test_timings_are_readings_of_the_clock_in_order() -> None:
    loop = make_loop(clock=FakeClock(0.5))
    client = Client(loop, [1, 2], SamplingParams(max_tokens=3, ignore_eos=True, seed=1))
    timings = client.request.timings
    assert timings.first_scheduled_s is None
    run_all(loop)
    readings = [timings.queued_s, timings.first_scheduled_s, timings.first_token_s, timings.last_token_s]
    assert None not in readings and timings.finished_s is not None
    assert all(a < b for a, b in zip(readings, [*readings[1:], timings.finished_s], strict=True) if a and b)
    assert timings.n_output_tokens == 3 and loop.stats().left_total == 1
    assert 0 < loop.stats().held_s_total <= timings.finished_s and loop.stats().running_s == 0


def test_logprobs_come_as_asked() -> None:
    loop = make_loop()
    clients = [Client(loop, [3], SamplingParams(max_tokens=2, seed=1, ignore_eos=True, logprobs=n)) for n in (0, 2, 5)]
    plain = Client(loop, [3], SamplingParams(max_tokens=2, seed=1, ignore_eos=True))
    run_all(loop)
    assert plain.outputs[0].logprobs is None and plain.outputs[0].cumulative_logprob is None
    for client, n in zip(clients, (0, 2, 5), strict=True):
        logprobs = client.outputs[0].logprobs
        assert logprobs is not None and [next(iter(p)) for p in logprobs] == plain.outputs[0].token_ids
        tokens = [token for deltas in client.deltas for delta in deltas for token in delta.logprobs or ()]
        assert [len(p.top) for p in tokens] == [n, n] and tokens[0].rank == 1
        for shown, token in zip(logprobs, tokens, strict=True):
            assert shown[token.token_id].logprob == token.logprob
            assert shown.keys() == {token.token_id, *(i for i, _ in token.top)}, "the chosen one and the alternatives"


def test_a_seed_is_drawn_and_told() -> None:
    loop = make_loop()
    first, second = (Client(loop, [3], SamplingParams(max_tokens=8, ignore_eos=True)) for _ in range(2))
    assert first.request.resolved.seed != second.request.resolved.seed < 2**53
    run_all(loop)
    assert first.outputs == alone(first)


def test_a_bad_request_touches_nothing() -> None:
    loop = make_loop()
    with pytest.raises(RequestError):
        Client(loop, [], SamplingParams())
    assert loop.stats().idle and not loop.step()


def test_p8_health_tells_a_stuck_step_from_idleness() -> None:
    clock = FakeClock()
    loop = make_loop(clock=clock)
    clock.now_s = 100.0
    assert loop.stats().idle and loop.stats().healthy
    Client(loop, [1], SamplingParams(n=3, max_tokens=2))
    assert loop.stats().waiting == 3
    assert not loop.stats().idle and loop.stats().last_step_s == 0, "waiting for work was no lack of progress"
    clock.now_s = 107.0
    assert loop.stats().last_step_s == 7
    loop.step()
    assert loop.stats().last_step_s == 0 and not loop.stats().idle
