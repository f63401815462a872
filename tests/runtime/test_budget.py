"""The budget controller against machines with a known cost per step and per token, and a clock that follows them."""

import math
import random

import pytest

from millrace.engine.executor import StepInputs
from millrace.errors import ConfigError
from millrace.runtime.loop import EngineLoop
from millrace.runtime.request.sampling_params import SamplingParams
from millrace.runtime.scheduling.token_budget import DEFAULT_CHUNK_LOW, TokenBudget
from tests.runtime.fakes import FakeClock, FakeExecutor, FakeTokenizer, limits

GAP_S = 0.1


def learned(step_s: float, token_s: float, n_steps: int = 100, noise: float = 0.0, seed: int = 0) -> TokenBudget:
    """A budget after some steps of a machine with these costs, every third one without prefill."""
    rng, budget = random.Random(seed), TokenBudget(2048, GAP_S, stretch=math.inf)
    for i in range(n_steps):
        n = budget.prefill_tokens(4) if i % 3 else 0
        budget.observe(n, (step_s + token_s * n) * (1 + rng.uniform(-noise, noise)), 4)
    return budget


@pytest.mark.parametrize("step_s", [0.002, 0.01, 0.05])
@pytest.mark.parametrize("token_s", [1e-5, 1e-4, 5e-4])
def test_the_chunk_fills_the_gap(step_s: float, token_s: float) -> None:
    n = learned(step_s, token_s).prefill_tokens(4)
    want = max(DEFAULT_CHUNK_LOW, min((GAP_S - step_s) / token_s, 2044))
    assert abs(n - want) <= 0.02 * want + 1
    assert n == DEFAULT_CHUNK_LOW or step_s + token_s * n <= GAP_S * 1.02


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_shake_it(seed: int) -> None:
    n = learned(0.01, 2e-4, n_steps=300, noise=0.3, seed=seed).prefill_tokens(4)
    assert 0.6 * 450 < n < 1.5 * 450


def test_it_starts_careful_and_is_bounded() -> None:
    budget = TokenBudget(512, GAP_S, stretch=math.inf)
    assert budget.prefill_tokens(4) == DEFAULT_CHUNK_LOW, "nothing measured"
    assert budget.prefill_tokens(0) == 512, "nobody waits"
    budget.observe(64, 0.01)
    assert budget.prefill_tokens(4) == 508 and budget.prefill_tokens(512) == 0
    for _ in range(60):
        budget.observe(64, 10.0)
    budget.observe(0, 10.0, 4)
    assert DEFAULT_CHUNK_LOW <= budget.prefill_tokens(4) <= 10 * DEFAULT_CHUNK_LOW, "slow machines crawl, but go on"


def test_one_interrupted_step_changes_little() -> None:
    budget = learned(0.01, 2e-4)
    before = budget.prefill_tokens(4)
    budget.observe(before, 5.0)  # the process was not running
    budget.observe(budget.prefill_tokens(4), 0.01, 4)  # a plain step, to measure it
    assert budget.prefill_tokens(4) > 0.5 * before


def test_a_step_of_at_most_a_few_tokens_is_the_limit() -> None:
    assert TokenBudget(20, GAP_S, chunk_low=64).prefill_tokens(4) == 16


@pytest.mark.parametrize("gap_s", [0.0, -1.0, float("nan")])
def test_a_limit_must_be_a_time(gap_s: float) -> None:
    with pytest.raises(ConfigError):
        TokenBudget(512, gap_s)


def test_the_shortest_chunk_can_be_set() -> None:
    assert TokenBudget(512, GAP_S, chunk_low=24).prefill_tokens(4) == 24
    with pytest.raises(ConfigError):
        TokenBudget(512, GAP_S, chunk_low=0)


def test_a_running_answer_sees_no_longer_gaps_than_asked() -> None:
    """Long prompts keep coming while one answer streams: after it has learned, every step fits the gap."""
    clock = FakeClock()
    took: list[float] = []

    def cost(step: StepInputs) -> None:  # 5 ms a step, 0.4 ms a token, as if computing
        took.append(0.005 + 0.0004 * len(step.tokens))
        clock.now_s += took[-1]

    of = limits(max_context=4096, n_pages=4096, max_step_tokens=1024)
    loop = EngineLoop(
        FakeExecutor(of, cost), FakeTokenizer(), clock=clock, budget=TokenBudget(1024, GAP_S, stretch=math.inf)
    )
    loop.submit([1], SamplingParams(max_tokens=200, ignore_eos=True, seed=1), lambda deltas: None)
    for i in range(120):
        if i % 10 == 5:
            loop.submit([2 + i // 10] * 900, SamplingParams(max_tokens=1), lambda deltas: None)
        loop.step()
    assert max(took[:20]) < 2 * GAP_S and max(took[20:]) <= GAP_S * 1.1
    chunked = [t for t in took[20:] if t > 0.03]
    assert sorted(chunked)[len(chunked) // 2] > 0.8 * GAP_S, "and the gap is made use of"


@pytest.mark.parametrize("step_s, token_s", [(0.0005, 1e-5), (0.004, 5e-5), (0.02, 1e-4)])
def test_a_step_with_prefill_lasts_less_than_two_without(step_s: float, token_s: float) -> None:
    budget = TokenBudget(2048, GAP_S)
    for i in range(100):
        n = budget.prefill_tokens(1) if i % 3 else 0
        budget.observe(n, step_s + token_s * n)
    n = budget.prefill_tokens(1)
    assert 1.8 * step_s < step_s + token_s * n < 2 * step_s


@pytest.mark.parametrize("stretch", [1.0, 0.5, float("nan")])
def test_a_stretch_must_leave_room(stretch: float) -> None:
    with pytest.raises(ConfigError):
        TokenBudget(512, GAP_S, stretch=stretch)
