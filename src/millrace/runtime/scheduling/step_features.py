"""The work of a step in a few numbers, from which its time is predicted."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from millrace.runtime.step_history import Parts, StepRecord


class StepWork(NamedTuple):
    """prompts, starts: tokens of each prompt chunk, and how many tokens of that prompt were computed before it

    rows: running answers, one token each; contexts: total length of their contexts, this step included
    """

    prompts: tuple[int, ...]
    starts: tuple[int, ...]
    rows: int
    contexts: int

    @classmethod
    def from_parts(cls, parts: Parts) -> "StepWork":
        n, start = parts["n"], parts["start"]
        prompts, rows = n > 1, n == 1
        return cls(
            tuple(n[prompts].tolist()), tuple(start[prompts].tolist()), int(rows.sum()), int((start[rows] + 1).sum())
        )


def step_intervals_s(steps: Sequence[StepRecord]) -> list[float | None]:
    """Return for each step the time until the next one begins: computing, and the host's work between two steps.

    None if no sequence of the step is in the next one: the loop may have been idle in between.
    """
    result: list[float | None] = [None] * len(steps)
    for i, (step, after) in enumerate(pairwise(steps)):
        own, next_requests = (np.unique(one.parts[["request", "choice"]]) for one in (step, after))
        if after.number == step.number + 1 and np.intersect1d(own, next_requests).size:
            result[i] = after.began_s - step.began_s
    return result
