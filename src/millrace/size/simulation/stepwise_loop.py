"""EngineLoop on a virtual clock, step by step: its executor advances the clock by the cost of each step."""

import math
from collections.abc import Callable

import numpy as np

from millrace.checkpoint.tokenizer.tokenizer import SpecialTokens, Tokenizer
from millrace.engine.executor import Executor, ExecutorLimits, IntArray, StepInputs, StepOutputs
from millrace.runtime.loop import EngineLoop
from millrace.runtime.request.sampling_params import Delta, SamplingParams
from millrace.runtime.scheduling.step_cost_model import StepTime
from millrace.runtime.scheduling.token_budget import TokenBudget
from millrace.size.simulation.virtual_clock import TOKEN, RequestOutcome, VirtualClock


class CostExecutor(Executor):
    """An executor that advances the clock by the cost of each step. n_sequences: in the last step"""

    n_sequences = 0

    def __init__(self, limits: ExecutorLimits, clock: VirtualClock, seconds: StepTime) -> None:
        self.limits, self._clock, self._seconds = limits, clock, seconds
        self._step: StepInputs | None = None

    def launch(self, step: StepInputs) -> None:
        self._step = step

    def wait(self) -> StepOutputs:
        step, self._step = self._step, None
        assert step is not None, "nothing was launched"
        n = np.diff(step.starts)
        self.n_sequences = len(n)
        ends = step.positions[step.starts[1:] - 1] + 1
        prompts = n > 1
        decoding = ends[~prompts]
        mean = float(decoding.mean()) if len(decoding) else 0.0
        self._clock.now_s += self._seconds(n[prompts].tolist(), (ends - n)[prompts].tolist(), len(decoding), mean)
        R = len(step.sampling)
        zeros = np.zeros(R, np.float32)
        none = np.empty((R, 0))
        return StepOutputs(
            np.full(R, TOKEN, np.int32), zeros, np.ones(R, np.int32), none.astype(np.int32), none.astype(np.float32)
        )

    def close(self) -> None:
        """Do nothing: the executor holds no resources."""


class _Letters(Tokenizer):
    """A tokenizer whose tokens are all the same letter; the texts are not used."""

    def __init__(self, vocab_size: int) -> None:
        specials = SpecialTokens(named={}, bos_token_id=None, eos_token_id=None, ids=frozenset())
        super().__init__(vocab_size, specials)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [TOKEN] * len(text)

    def _token_bytes(self, token_id: int) -> bytes:
        return b"a"

    _first_bytes = _token_bytes


class SteppedLoop:
    """EngineLoop with a simulated executor. ended: finished requests; after_s: host time after the last step"""

    def __init__(
        self, limits: ExecutorLimits, clock: VirtualClock, seconds: StepTime, between: Callable[[int], float],
        budget: TokenBudget | None, prefix_cache: bool,
    ) -> None:  # fmt: skip
        self._executor = executor = CostExecutor(limits, clock, seconds)
        self._clock, self._between = clock, between
        self._loop = EngineLoop(executor, _Letters(limits.vocab_size), None, clock, budget, prefix_cache)
        self.ended, self.after_s = 0, 0.0

    @property
    def steps(self) -> int:
        return self._loop.stats().steps_total

    @property
    def preemptions(self) -> int:
        return self._loop.stats().preemptions_total

    @property
    def prefix_hits(self) -> int:
        return self._loop.stats().prefix_hits_total

    def submit(self, prompt: IntArray, outcome: RequestOutcome) -> None:
        def deliver(deltas: list[Delta]) -> None:
            if math.isnan(outcome.first_s):
                outcome.first_s = self._clock.now_s
            if deltas[-1].finish_reason is not None:
                outcome.last_s = self._clock.now_s
                self.ended += 1

        self._loop.submit(
            prompt, SamplingParams(max_tokens=outcome.arrival.n_output, temperature=0, ignore_eos=True), deliver
        )

    def step(self, until_s: float) -> bool:
        """Run one step; False if there is no work."""
        if not self._loop.step():
            return False
        self.after_s = self._between(self._executor.n_sequences)
        self._clock.now_s += self.after_s
        return True
