"""What the runtime itself costs per step: no part of a step's time that a user should notice."""

import time
from dataclasses import dataclass

import numpy as np

from millrace.engine.executor import Executor, ExecutorLimits, StepInputs, StepOutputs
from millrace.runtime.loop import EngineLoop
from millrace.runtime.request.sampling_params import SamplingParams
from tests.runtime.fakes import FakeTokenizer

N_SEQUENCES = 16
LIMIT_S = 1e-3  # measured: 0.1 ms; the rest is for machines that are slow, or busy with something else


@dataclass
class NoExecutor(Executor):
    """Draws "a" for everyone and computes nothing."""

    limits: ExecutorLimits

    def launch(self, step: StepInputs) -> None:
        self.n_rows = len(step.sampling)

    def wait(self) -> StepOutputs:
        R = self.n_rows
        ones, none = np.ones(R, dtype=np.int32), np.empty((R, 0), dtype=np.int32)
        return StepOutputs(ones, np.zeros(R, dtype=np.float32), ones, none, none.astype(np.float32))

    def close(self) -> None:
        pass


def step_times_s(n_steps: int) -> list[float]:
    of = ExecutorLimits(
        max_step_tokens=512,
        max_sequences=N_SEQUENCES,
        max_rows=N_SEQUENCES,
        max_context=4096,
        page_tokens=16,
        n_pages=8192,
        vocab_size=97,
    )
    loop = EngineLoop(NoExecutor(of), FakeTokenizer())
    for i in range(N_SEQUENCES):
        loop.submit([1] * 1000, SamplingParams(max_tokens=3000, ignore_eos=True, seed=i), lambda deltas: None)
    while loop.stats().running < N_SEQUENCES or loop.stats().generation_tokens_total < 20 * N_SEQUENCES:
        loop.step()
    times_s = []
    for _ in range(n_steps):
        start_s = time.perf_counter()
        loop.step()
        times_s.append(time.perf_counter() - start_s)
    return times_s


def test_a_step_of_16_answers_costs_little() -> None:
    times_s = sorted(step_times_s(300))
    assert times_s[len(times_s) // 4] < LIMIT_S, f"quartile {times_s[len(times_s) // 4] * 1e6:.0f} us"
