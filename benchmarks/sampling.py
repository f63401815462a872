"""What share of a step of 16 sequences is sampling, by what is asked for."""

import statistics
import time
from typing import Any

import numpy as np

from millrace.engine.dummy_step import dummy_step
from millrace.engine.native.executor import NativeExecutor

ROWS, STEPS = 16, 6
ASKED: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperature": 1},
    "top_k 50": {"temperature": 1, "top_k": 50},
    "top_p 0.9": {"temperature": 1, "top_p": 0.9},
    "top_k 50, top_p 0.9, min_p 0.01": {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "5 log probabilities": {"temperature": 1, "n_top": 5},
}


def shares(executor: NativeExecutor, context: int, runs: int) -> list[dict[str, Any]]:
    """Medians over runs of six steps each. Random weights make flat logits, the worst case of top_p."""
    found = []
    for name, fields in ASKED.items():
        steps = [dummy_step([1] * ROWS, context + i, executor.limits.n_pages, seed=i) for i in range(STEPS)]
        for s in steps:
            s.sampling["seed"] = np.arange(ROWS)
            for field, value in fields.items():
                s.sampling[field] = value
        samples = [_step_and_sampling(executor, steps) for _ in range(runs)]
        step_s, sampling_s = (statistics.median(column) for column in zip(*samples, strict=True))
        found.append({"asked": name, "rows": ROWS, "step_s": step_s, "sampling_s": sampling_s, "samples_s": samples})
    return found


def _step_and_sampling(executor: NativeExecutor, steps: list[Any]) -> tuple[float, float]:
    """Seconds of one step, and of the sampling in it."""
    executor.run(steps[0])
    executor.profile(True)
    started = time.perf_counter()
    for s in steps:
        executor.run(s)
    passed = time.perf_counter() - started
    return passed / len(steps), executor.profile(False)[-1] / len(steps)
