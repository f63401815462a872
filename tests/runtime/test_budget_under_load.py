"""The prefill budget on a machine that other processes use as well: simulated steps, closed-loop users.

A busy machine multiplies a step's time, delays it by time slices, and sometimes takes the cores away for longer.
"""

import random
from collections.abc import Callable

import pytest

from millrace.engine.executor import StepInputs
from millrace.runtime.loop import EngineLoop
from millrace.runtime.request.sampling_params import Delta, SamplingParams
from millrace.runtime.scheduling.token_budget import TokenBudget
from tests.runtime.fakes import FakeClock, FakeExecutor, FakeTokenizer, limits

MAX_STEP = 512
# seconds of a step, and of each of its rows
MACHINES = {"memory-bound": (0.025, 1e-4), "avx512": (0.003, 4e-4), "avx2": (0.002, 1.4e-3), "1B": (0.05, 5e-3)}
USERS, PROMPT, ANSWER = 8, 128, 64


def step_time(
    machine: str, is_busy: Callable[[float], bool], clock: FakeClock, seed: int
) -> Callable[[StepInputs], None]:
    """Return what moves the clock by the time of a step."""
    rng, (overhead_s, row_s) = random.Random(seed), MACHINES[machine]

    def cost(step: StepInputs) -> None:
        took_s = overhead_s + row_s * len(step.tokens)
        if is_busy(clock.now_s):
            took_s *= rng.uniform(1.5, 3.0)
            took_s += 0.004 * sum(rng.random() < 0.5 for _ in range(8))
            took_s += rng.uniform(0.05, 0.3) if rng.random() < 0.03 else 0.0
        clock.now_s += took_s

    return cost


class Users:
    """Users that each send a prompt, read the whole answer, and send the next one."""

    def __init__(self, budget: TokenBudget, machine: str, is_busy: Callable[[float], bool], seed: int) -> None:
        self.clock, self.rng = FakeClock(), random.Random(seed)
        of = limits(max_context=2048, n_pages=4096, max_step_tokens=MAX_STEP, max_sequences=16)
        executor = FakeExecutor(of, step_time(machine, is_busy, self.clock, seed))
        self.loop = EngineLoop(executor, FakeTokenizer(), clock=self.clock, budget=budget)
        self.n_tokens, self.ttfts_s = 0, list[float]()

    def run(self, seconds: float) -> None:
        for _ in range(USERS):
            self.send()
        while self.clock.now_s < seconds:
            self.loop.step()

    def send(self) -> None:
        sent_s, got = self.clock.now_s, 0

        def read(deltas: list[Delta]) -> None:
            nonlocal got
            new = sum(len(delta.token_ids) for delta in deltas)
            if new and not got:
                self.ttfts_s.append(self.clock.now_s - sent_s)
            got, self.n_tokens = got + new, self.n_tokens + new
            if got == ANSWER:
                self.send()

        prompt = [self.rng.randrange(3, 30) for _ in range(PROMPT)]
        self.loop.submit(prompt, SamplingParams(max_tokens=ANSWER, ignore_eos=True, seed=1), read)

    def ttft_p95(self) -> float:
        return sorted(self.ttfts_s)[int(0.95 * len(self.ttfts_s))]


@pytest.mark.parametrize("seconds", [8, pytest.param(20, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("is_busy", [lambda s: False, lambda s: True, lambda s: int(s / 5) % 2 == 1],
                         ids=["idle", "busy", "by turns"])  # fmt: skip
def test_throughput_is_nearly_that_of_the_largest_chunk(
    machine: str, is_busy: Callable[[float], bool], seconds: float
) -> None:
    budget, largest = TokenBudget(MAX_STEP), TokenBudget.unhurried(MAX_STEP)
    ours, theirs = Users(budget, machine, is_busy, seed=3), Users(largest, machine, is_busy, seed=3)
    ours.run(seconds)
    theirs.run(seconds)
    assert ours.n_tokens >= 0.85 * theirs.n_tokens
    assert ours.ttft_p95() < 3 * theirs.ttft_p95() + 0.5


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("seed", range(3))
def test_a_wrong_estimate_does_not_last(machine: str, seed: int) -> None:
    """The budget learned that a prompt token takes 50 times what it does: within 2 s, or 50 steps, chunks are long."""
    overhead_s, row_s = MACHINES[machine]
    budget = TokenBudget(MAX_STEP, step_s=overhead_s / 10 + 50 * row_s, token_s=50 * row_s)
    right = TokenBudget(MAX_STEP, step_s=overhead_s + row_s, token_s=row_s)
    rng, now_s, n_steps = random.Random(seed), 0.0, 0
    while now_s < 2 or n_steps < 50:
        n = budget.prefill_tokens(3, 5)
        took_s = (overhead_s + row_s * (n + 3)) * rng.uniform(1.0, 2.0)
        budget.observe(n, took_s, 3)
        now_s, n_steps = now_s + took_s, n_steps + 1
    assert budget.prefill_tokens(3, 5) >= right.prefill_tokens(3, 5) / 3


@pytest.mark.parametrize("machine", MACHINES)
def test_one_prompt_stretches_no_gap_of_a_stream(machine: str) -> None:
    """Beside one long prompt after the other: what all gaps but 1 % keep to, and what the prompts get."""
    overhead_s, row_s = MACHINES[machine]
    plain_s = overhead_s + row_s / 2
    budget, rng = TokenBudget(MAX_STEP), random.Random(1)
    for _ in range(20):
        budget.observe(0, plain_s * rng.uniform(0.95, 1.05), 1)
    steps = list[tuple[int, float]]()
    for _ in range(1000):
        n = budget.prefill_tokens(1, 1)
        steps.append((n, (overhead_s + row_s * (n + 0.5)) * rng.uniform(0.95, 1.05)))
        budget.observe(*steps[-1], 1)
    gaps = sorted(took_s for _, took_s in steps[50:])
    chunks = sorted(n for n, _ in steps[50:])
    assert gaps[int(0.99 * len(gaps))] < 2.2 * max(plain_s, overhead_s + 4.5 * row_s)
    assert gaps[int(0.99 * len(gaps))] < 2 * gaps[len(gaps) // 2]
    assert chunks[len(chunks) // 2] >= min(max(4, int(0.5 * plain_s / row_s)), MAX_STEP), "prompts wait too long"


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("seed", range(3))
def test_a_wrong_estimate_beside_one_stream_does_not_last(machine: str, seed: int) -> None:
    overhead_s, row_s = MACHINES[machine]
    budget = TokenBudget(MAX_STEP, step_s=overhead_s / 10 + 50 * row_s, token_s=50 * row_s)
    budget.step_s = 1.5 * (overhead_s + row_s)  # which was measured, unlike its parts
    right = TokenBudget(MAX_STEP, step_s=overhead_s + row_s, token_s=row_s)
    rng, now_s, chunks = random.Random(seed), 0.0, list[int]()
    while now_s < 2 or len(chunks) < 50:
        chunks.append(budget.prefill_tokens(1, 1))
        took_s = (overhead_s + row_s * (chunks[-1] + 1)) * rng.uniform(1.0, 2.0)
        budget.observe(chunks[-1], took_s, 1)
        now_s += took_s
    assert sorted(chunks[-5:])[2] >= right.prefill_tokens(1, 1) / 4


def test_the_more_prompts_wait_the_longer_the_chunk() -> None:
    budget = TokenBudget(MAX_STEP, step_s=0.0205, token_s=0.0005)
    chunks = [budget.prefill_tokens(2, waiting) for waiting in (1, 2, 4, 14)]
    assert chunks == sorted(chunks) and chunks[0] < 40 < chunks[1] and chunks[-1] < MAX_STEP


def test_a_machine_slower_than_the_gap_limit_gives_prompts_a_third_of_its_time() -> None:
    budget = TokenBudget(MAX_STEP, step_s=0.3, token_s=0.01)
    n = budget.prefill_tokens(7)
    assert 0.3 <= n * 0.01 / (0.3 + n * 0.01) < 0.5
