"""Fits step times of an engine to the steps that its server ran, from `/timeline.json`."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

from millrace.errors import ConfigError, MachineError, sanitize
from millrace.runtime.scheduling.step_cost_model import SchedulerSettings, StepCost, StepTime
from millrace.size.fit.device import least_squares
from millrace.size.performance.roofline_cost import Floats

PATH = "/timeline.json"
MAX_BYTES = 64 << 20
_KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192, 16384)
_FEWEST = 50  # steps of a fit
_ROUNDS, _BELIEF = 20, 0.003  # reweighting rounds; prior weight of slopes between token counts without data
_GOOD = 0.02  # relative errors below this count as equal
_SPREAD = 40  # quantile values that represent the noise of step times
_MAX_S, _MAX_TOKENS = 1e9, 1 << 24

_Seconds = Annotated[float, Meta(ge=0, le=_MAX_S)]
_Tokens = Annotated[int, Meta(ge=0, le=_MAX_TOKENS)]


class StepRow(Struct, frozen=True):
    """A step as reported by the server, see `serve/ops/step_timeline.py`."""

    step: Annotated[int, Meta(ge=1)]
    at_s: float
    took_s: _Seconds
    turn_s: _Seconds | None
    prompts: Annotated[list[tuple[_Tokens, _Tokens]], Meta(max_length=4096)]
    rows: _Tokens
    contexts: Annotated[int, Meta(ge=0, le=1 << 40)]

    @property
    def n_tokens(self) -> int:
        return self.rows + sum(n for _, n in self.prompts)

    def predicted_s(self, seconds: StepTime) -> float:
        starts, tokens = zip(*self.prompts, strict=True) if self.prompts else ((), ())
        return seconds(tokens, starts, self.rows, self.contexts / max(1, self.rows))


class MeasuredSteps(Struct, frozen=True):
    """Steps of one model. machine: processor and cores"""

    model: str
    engine: str
    isa: str
    machine: str
    schedule: SchedulerSettings
    steps: Annotated[list[StepRow], Meta(max_length=1 << 20)]


class _List(Struct):
    data: Annotated[list[MeasuredSteps], Meta(max_length=1000)]


def read_steps(text: str, model: str = "") -> MeasuredSteps:
    """Parse a timeline. raises MachineError if it is malformed, ConfigError if the server lacks the model"""
    try:
        models = msgspec.json.decode(text, type=_List).data
    except (msgspec.DecodeError, RecursionError) as error:
        raise MachineError(f"{PATH} of the server: {sanitize(str(error))}", "millrace serve of this release",
                           "ask a server of this release") from None  # fmt: skip
    matching = [served for served in models if model in ("", served.model)]
    if len(matching) != 1:
        raise ConfigError(f"the server has {', '.join(served.model for served in models)[:200] or 'no language model'}",
                          "one language model, or its name", "name it with --model")  # fmt: skip
    return matching[0]


def fit_steps(steps: Sequence[StepRow]) -> StepCost:
    """Fit typical step times, increasing with work, by least absolute relative errors.

    raises ConfigError if there are too few steps
    """
    if len(steps) < _FEWEST:
        raise ConfigError(f"{len(steps)} steps were seen", f"{_FEWEST} at least", "ask for longer: --probe-s")
    took = np.array([step.took_s for step in steps])
    n_tokens = np.array([step.n_tokens for step in steps])
    most = int(n_tokens.max())
    knots = [k for k in _KNOTS if k < most] + [most]
    rows = _columns(steps, n_tokens, knots)
    x = _solve(rows, took, knots)
    at = tuple((k, float(s)) for k, s in zip(knots, x[0] + np.cumsum([0.0, *x[1 : len(knots)]]), strict=True))
    beyond = x[len(knots) - 1] / (knots[-1] - knots[-2]) if len(knots) > 1 else x[0]
    host, host_sequence = _between(steps)
    return StepCost(at, float(beyond), float(x[-2]), float(x[-1]), host, host_sequence)


def errors(cost: StepCost, steps: Sequence[StepRow]) -> Floats:
    """Return the relative error of each step."""
    seconds = cost.timed()
    return np.array([step.predicted_s(seconds) / step.took_s - 1 for step in steps if step.took_s > 0])


def spread(cost: StepCost, steps: Sequence[StepRow]) -> tuple[float, ...]:
    """Return equally likely factors of step times relative to their median, in rising order."""
    ratios = np.sort(_ratios(cost, steps))
    means = [float(part.mean()) for part in np.array_split(ratios / np.median(ratios), _SPREAD)]
    return tuple(means)


def pace(cost: StepCost, steps: Sequence[StepRow]) -> float:
    """Return the median ratio of measured to predicted step times."""
    return float(np.median(_ratios(cost, steps)))


def _ratios(cost: StepCost, steps: Sequence[StepRow]) -> list[float]:
    seconds = cost.timed()
    return [step.took_s / max(step.predicted_s(seconds), 1e-9) for step in steps]


def _columns(steps: Sequence[StepRow], n_tokens: Floats, knots: Sequence[int]) -> Floats:
    """Return (N, K) columns: base; share of each piece between knots; attention pairs of prompts; decode contexts."""
    pieces = [np.clip((n_tokens - a) / (b - a), 0, 1) for a, b in pairwise(knots)]
    pairs = [sum(n * (start + n / 2) for start, n in step.prompts) for step in steps]
    return np.stack([np.ones(len(steps)), *pieces, np.array(pairs), np.array([s.contexts for s in steps])], axis=1)


def _solve(columns: Floats, took: Floats, knots: Sequence[int]) -> Floats:
    """Solve the fit; a weak prior with the mean slope decides pieces without data."""
    usual_s = float(np.median(took))
    a_token_s = max(float(took.max() - took.min()) / max(1, knots[-1] - knots[0]), 1e-9)
    guess = [usual_s, *(a_token_s * (b - a) for a, b in pairwise(knots)), 1e-9, 1e-9]
    weigh = _BELIEF * math.sqrt(len(took)) / np.array(guess)
    weigh[[0, -2, -1]] = 0.0
    belief, weights, x = np.diag(weigh), np.ones(len(took)), np.array(guess)
    for _ in range(_ROUNDS):
        scale = np.sqrt(weights) / took
        x = least_squares(np.vstack([columns * scale[:, None], belief]), np.concatenate([took * scale, weigh * guess]))
        weights = _GOOD / np.maximum(np.abs(columns @ x / took - 1), _GOOD)
    solution: Floats = x
    return solution


def _between(steps: Sequence[StepRow]) -> tuple[float, float]:
    """Return the host time per step, and per sequence in it."""
    samples = [(1.0, len(s.prompts) + s.rows, s.turn_s - s.took_s) for s in steps if s.turn_s is not None]
    if not samples:
        return 0.0, 0.0
    table = np.maximum(np.array(samples), 0.0)
    usual = np.minimum(table[:, 2], 8 * max(1e-6, float(np.median(table[:, 2]))))  # clip pauses of the host
    a, b = least_squares(table[:, :2], usual)
    return float(a), float(b)
