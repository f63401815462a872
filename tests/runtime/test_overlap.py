"""Two steps under way at a time: tokens of the first are the second's without the host, which hears of them late."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings

from millrace.engine.executor import StepInputs
from millrace.runtime.loop import EngineLoop
from millrace.runtime.request.sampling_params import FinishReason, SamplingParams
from millrace.runtime.request.structured_outputs import StructuredOutputsParams
from tests.runtime.clients import Client, answered, run_all
from tests.runtime.fakes import VOCAB, FakeClock, FakeExecutor, RandomBudget, limits, make_loop
from tests.runtime.test_failures import failing_at
from tests.runtime.test_loop import check_any_schedule
from tests.support.drawn import SEEDS, examples, within

pytestmark = within(120)
LONG = SamplingParams(max_tokens=20, ignore_eos=True, seed=1)


def executor_of(loop: EngineLoop) -> FakeExecutor:
    assert isinstance(loop._executor, FakeExecutor)
    return loop._executor


@settings(max_examples=examples(16, by_night=2))
@given(seed=SEEDS)
def test_any_schedule_gives_the_answers_of_one_step_at_a_time(seed: int) -> None:
    """With choices, stop strings, penalties, scores, requests that are cancelled, and pages that run short."""
    check_any_schedule(seed, 2)


def test_the_next_step_is_launched_before_the_tokens_are_known() -> None:
    """Of the steps of three answers that last, all but the last launch finds another one under way."""
    under_way: list[tuple[int, int]] = []
    loop = make_loop(depth=2)
    executor = executor_of(loop)
    launch = executor.launch

    def watched(step: StepInputs) -> None:
        under_way.append((len(executor._steps), 0 if step.pending_tokens is None else len(step.pending_tokens)))
        launch(step)

    executor.launch = watched  # type: ignore[method-assign]
    clients = [Client(loop, [i, 2, 3], LONG) for i in range(3)]
    run_all(loop)
    assert under_way == [(0, 0)] + [(1, 3)] * 19, "no step more than their tokens are"
    assert [len(c.outputs[0].token_ids) for c in clients] == [20] * 3


def test_an_end_is_noticed_a_step_late() -> None:
    """What is computed behind it is dropped: pages come back, and nobody is told of it."""
    prompt = [3, 4, 5]
    whole = answered(make_loop(), prompt, LONG).outputs[0].token_ids
    stop = next(t for t in whole[3:] if t not in whole[:3])
    n = list(whole).index(stop) + 1
    params = replace(LONG, stop_token_ids=(stop,))
    loops = [make_loop(depth=depth) for depth in (1, 2)]
    found = [answered(loop, prompt, params).outputs for loop in loops]
    assert found[0] == found[1] and len(found[0][0].token_ids) == n
    assert [executor_of(loop).n_steps for loop in loops] == [n, n + 1]
    assert all(loop.stats().pages_used == 0 and loop.stats().generation_tokens_total == n for loop in loops)


@pytest.mark.parametrize("params", [
    replace(LONG, presence_penalty=0.5), replace(LONG, repetition_penalty=1.2, n=2),
])  # fmt: skip
def test_a_penalty_looks_at_a_token_that_only_the_device_knows(params: SamplingParams) -> None:
    """Nobody waits for it."""
    loop = make_loop(depth=2)
    clients = [Client(loop, [i, 2, 3], own) for i, own in enumerate((params, LONG))]
    n_alone = 0
    while loop.step():
        n_alone += not loop._in_flight
    assert n_alone == 1, "the last step has none behind it"
    for client in clients:
        assert client.outputs == answered(make_loop(), client.prompt, client.params).outputs


@pytest.mark.parametrize(("n_held", "n_free"), [(1, 3), (2, 2), (2, 0), (1, 1)])
def test_who_is_held_to_a_grammar_sits_a_step_out(n_held: int, n_free: int) -> None:
    """Where others are more: these get a token each step and wait for nobody. Else all wait for the masks."""
    loop = make_loop(depth=2)
    held = SamplingParams(max_tokens=8, seed=1, structured_outputs=StructuredOutputsParams(regex="[a-h]{20}"))
    clients = [
        Client(loop, [i, 2, 3], own) for i, own in enumerate([held] * n_held + [replace(LONG, max_tokens=16)] * n_free)
    ]
    n_under_way = 0
    while loop.step():
        n_under_way += bool(loop._in_flight)
    executor = executor_of(loop)
    if n_free > n_held:
        assert n_under_way >= 14 and executor.n_steps <= 17, "eight tokens of every other step"
    else:
        assert executor.n_steps <= 17 and n_under_way <= 16 - 8 + 1
    for client in clients:
        assert client.outputs == answered(make_loop(), client.prompt, client.params).outputs


def test_pages_that_run_short_are_taken_from_who_is_not_under_way() -> None:
    of = limits(n_pages=12, page_tokens=2, max_context=24, max_sequences=6)
    loop = make_loop(of, depth=2)
    clients = [Client(loop, [i, 1, 2], replace(LONG, seed=i)) for i in range(6)]
    run_all(loop)
    assert loop.stats().preemptions_total > 3 and loop.stats().pages_used == 0
    for client in clients:
        assert client.outputs == answered(make_loop(limits()), client.prompt, client.params).outputs


def test_a_cancelled_answer_leaves_its_step_behind() -> None:
    loop = make_loop(depth=2)
    gone, other = Client(loop, [1, 2, 3], LONG), Client(loop, [4, 5], LONG)
    for _ in range(4):
        loop.step()
    assert bool(loop._in_flight)
    loop.cancel(gone.request)
    run_all(loop)
    assert gone.reasons == [FinishReason.ABORT] and len(gone.outputs[0].token_ids) == 3
    assert other.outputs == answered(make_loop(), [4, 5], LONG).outputs and loop.stats().pages_used == 0


@settings(max_examples=examples(25))
@given(seed=SEEDS)
def test_steps_that_fail_are_computed_again(seed: int) -> None:
    """At their launch or later, any of them: those that were launched behind are taken back, and nobody's answer
    changes, also where it began on a page that was known in part."""
    rng = random.Random(seed)
    of = limits(max_sequences=4, max_step_tokens=12, page_tokens=4)
    at = rng.sample(range(1, 60), rng.randint(1, 3))
    loop = make_loop(of, failing_at(*at), budget=RandomBudget(of.max_step_tokens, rng), depth=2)
    executor_of(loop).fails_at_launch = rng.random() < 0.5
    clients: list[Client] = []
    for _ in range(6):
        prompt = [1, 2, 3, 4, 5, 6, 7, 8][: rng.randint(1, 8)] + [rng.randrange(VOCAB - 1) for _ in range(3)]
        top = rng.choice([None, None, 1])
        clients.append(Client(loop, prompt, replace(LONG, n=rng.choice([1, 2]), prompt_logprobs=top)))
        for _ in range(rng.randint(0, 6)):
            loop.step()
    run_all(loop)
    assert loop.stats().healthy and loop.stats().pages_used == 0
    ended = [c for c in clients if FinishReason.ERROR in c.reasons]
    assert len(ended) <= len(at), "a step of one request fails it"
    for client in clients:
        if client not in ended:
            assert client.outputs == answered(make_loop(of, prefix_cache=False), client.prompt, client.params).outputs


def test_a_request_that_fails_its_steps_fails_alone() -> None:
    def run(step: StepInputs) -> None:
        if 4242 in step.sampling["seed"]:
            raise RuntimeError("no step with this seed")

    loop = make_loop(limits(max_sequences=6, max_step_tokens=12), run, depth=2)
    clients = [Client(loop, [i, 5, 6], replace(LONG, seed=i, temperature=1.0)) for i in range(3)]
    for _ in range(3):
        loop.step()
    bad = Client(loop, [77, 78, 79], replace(LONG, seed=4242))
    run_all(loop)
    assert bad.reasons == [FinishReason.ERROR] and loop.stats().healthy and loop.stats().pages_used == 0
    for client in clients:
        assert client.outputs == answered(make_loop(), client.prompt, client.params).outputs


def test_a_device_that_fails_for_good_ends_everything() -> None:
    loop = make_loop(limits(max_sequences=2), failing_at(*range(5, 200)), depth=2)
    clients = [Client(loop, [i, 5, 6], LONG) for i in range(4)]
    run_all(loop)
    assert [c.reasons for c in clients] == [[FinishReason.ERROR]] * 4
    stats = loop.stats()
    assert not stats.healthy and stats.idle and stats.pages_used == 0 and not loop._in_flight


def test_stopping_waits_for_what_is_under_way() -> None:
    loop = make_loop(depth=2)
    client = Client(loop, [1, 2, 3], LONG)
    for _ in range(3):
        loop.step()
    loop.stop()
    assert client.reasons == [FinishReason.ABORT] and len(client.outputs[0].token_ids) == 3
    assert not executor_of(loop)._steps and loop.stats().pages_used == 0
    again = answered(loop, [1, 2, 3], LONG)
    assert again.outputs == answered(make_loop(), [1, 2, 3], LONG).outputs


def test_a_step_lasts_from_the_end_of_the_one_before() -> None:
    """Not from its launch, when the device had other work; the budget learns from this."""
    clock = FakeClock()

    def run(step: StepInputs) -> None:
        clock.now_s += 0.01

    loop = make_loop(before_run=run, clock=clock, depth=2)
    answered(loop, [1, 2, 3], LONG)
    assert [step.took_s for step in loop.history.steps] == pytest.approx([0.01] * 20)
    assert loop.budget.step_s == pytest.approx(0.01)
