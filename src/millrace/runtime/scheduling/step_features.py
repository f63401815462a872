"""What a step had to compute, as few numbers: whatever tells of its time, measured or predicted, goes by these."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from millrace.runtime.step_history import Parts, StepRecord


class StepWork(NamedTuple):
    """prompts, starts: tokens of each chunk of a prompt, and how many of the same were computed before it

    rows: running answers, a token each; contexts: tokens of all of them together, those of this step included
    """

    prompts: tuple[int, ...]
    starts: tuple[int, ...]
    rows: int
    contexts: int

    @classmethod
    def of(cls, parts: Parts) -> "StepWork":
        n, start = parts["n"], parts["start"]
        prompts, rows = n > 1, n == 1
        return cls(
            tuple(n[prompts].tolist()), tuple(start[prompts].tolist()), int(rows.sum()), int((start[rows] + 1).sum())
        )


def turns_s(steps: Sequence[StepRecord]) -> list[float | None]:
    """Of each step, the time until the next one begins: computing, and what the host does between two steps.

    None where the next one has nobody of this one: then the loop may have waited for somebody to ask.
    """
    result: list[float | None] = [None] * len(steps)
    for i, (step, after) in enumerate(pairwise(steps)):
        own, next_requests = (np.unique(one.parts[["request", "choice"]]) for one in (step, after))
        if after.number == step.number + 1 and np.intersect1d(own, next_requests).size:
            result[i] = after.began_s - step.began_s
    return result
