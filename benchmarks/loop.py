"""What the engine loop itself costs, for which a GPU's steps leave little time: schedules, arrays of a batch, texts.

    python -m benchmarks.loop

An executor that computes nothing gives every row the same token. Answers are all of one length and nobody reads them;
as a GPU's, its steps overlap. Writes results/loop-TIME-COMMIT.json. Needs an otherwise idle machine.
"""

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np

from benchmarks.record import count, provenance, write_result
from benchmarks.words import Words
from millrace.checkpoint.config.generation_config import GenerationDefaults
from millrace.engine.executor import Executor, ExecutorLimits, StepInputs, StepOutputs
from millrace.runtime.loop import EngineLoop
from millrace.runtime.request.sampling_params import SamplingParams
from millrace.runtime.scheduling.token_budget import TokenBudget

ANSWERS = 1, 16, 64, 512  # at a time
PROMPT, ROUNDS = 128, 7
TOKENS = 1 << 16  # of all answers of a round
VOCABULARY, STEP_TOKENS, PAGE_TOKENS = 32000, 8192, 64


class Idle(Executor):
    depth = 2

    def __init__(self, n_answers: int, context: int) -> None:
        self.limits = ExecutorLimits(
            max_step_tokens=STEP_TOKENS, max_sequences=n_answers, max_rows=n_answers, max_context=context,
            page_tokens=PAGE_TOKENS, n_pages=n_answers * -(-context // PAGE_TOKENS), vocab_size=VOCABULARY,
        )  # fmt: skip
        self._launched: list[int] = []

    def launch(self, step: StepInputs) -> None:
        self._launched.append(len(step.sampling))

    def wait(self) -> StepOutputs:
        n = self._launched.pop(0)
        ones, none = np.ones(n, np.int32), np.empty((n, 0), np.int32)
        return StepOutputs(ones, np.zeros(n, np.float32), ones, none, none.astype(np.float32))

    def close(self) -> None:
        pass


def token_s(n_answers: int, n_tokens: int) -> float:
    """Of one token of `n_answers` answers of `n_tokens` tokens each."""
    executor = Idle(n_answers, PROMPT + n_tokens)
    budget = TokenBudget.unhurried(STEP_TOKENS)
    loop = EngineLoop(executor, Words(VOCABULARY), GenerationDefaults(), budget=budget, prefix_cache=False)
    params = SamplingParams(max_tokens=n_tokens, ignore_eos=True, temperature=0)
    for _ in range(n_answers):
        loop.submit([1] * PROMPT, params, lambda deltas: None)
    started = time.perf_counter()
    while loop.step():
        pass
    return (time.perf_counter() - started) / loop.stats().generation_tokens_total


def measured(rounds: int, answers: tuple[int, ...] = ANSWERS, tokens: int = TOKENS) -> dict[str, Any]:
    """The kinds of a round take turns."""
    samples: dict[str, list[float]] = {str(n): [] for n in answers}
    for _ in range(rounds):
        for n in answers:
            samples[str(n)].append(token_s(n, max(2, tokens // n // (16 if n == 1 else 1))))
    return {"token_s": {n: statistics.median(s) for n, s in samples.items()}, "samples": samples, "prompt": PROMPT}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loop", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=count, default=ROUNDS, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print the result instead of a summary")
    args = parser.parse_args()
    result = {**provenance("benchmarks.loop"), **measured(args.rounds)}
    path = write_result("loop", result)
    if args.json:
        print(json.dumps(result, indent=1))
        return
    for n, seconds in result["token_s"].items():
        print(f"{n:>4} answers at a time: {seconds * 1e6:6.2f} us a token, {int(n) * seconds * 1e3:6.3f} ms a step")
    print(f"written to {path.name}")


if __name__ == "__main__":
    main()
