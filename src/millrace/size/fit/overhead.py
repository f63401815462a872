"""A stack's factors from served runs, by simulation: which requests wait for which is not in any closed form.

For one schedule the time of a run is linear in the factors. So each round simulates all runs, notes how much of their
time each factor multiplies, and takes a step of least absolute relative errors of requests/s; three or four rounds do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from millrace.errors import ConfigError
from millrace.runtime.scheduling.step_cost_model import StepTime
from millrace.size.fit.device import Residual, residual
from millrace.size.load.token_lengths import Lengths
from millrace.size.performance.fitted_devices import Profile, profile
from millrace.size.performance.operating_point import Point
from millrace.size.performance.roofline_cost import Floats, Instance
from millrace.size.performance.serving_overhead import ENGINE, Stack
from millrace.size.performance.step_time import step_parts
from millrace.size.simulation.capacity import Replica
from millrace.size.simulation.serving_model import computed

# Of prefill, decode, cache, host_s: the least, the most, and what a change is measured in.
_LEAST, _MOST = np.array([0.05, 0.05, 0.05, 0.0]), np.array([50.0, 50.0, 50.0, 1e-3])
_UNITS = np.array([1.0, 1.0, 2.0, 3e-5])
_GOOD, _ROUNDS = 0.03, 30  # relative errors below that are all as good; of reweighting
_BELIEF = 0.01  # in the factors that a fit begins with: what runs hardly tell stays there


@dataclass(frozen=True, slots=True)
class Run:
    """A closed loop, as it was measured: one instance with so many requests in flight."""

    instance: Instance
    lengths: Lengths
    concurrency: int
    rate: float
    ttft_s: float | None = None
    itl_s: float | None = None


@dataclass(frozen=True, slots=True)
class Replayed:
    """A run, simulated. seconds: of its steps, what each factor multiplies, relative to all of its time"""

    run: Run
    point: Point
    seconds: Floats

    @property
    def rate_error(self) -> float:
        return self.point.rate / self.run.rate - 1

    @property
    def ttft_error(self) -> float | None:
        return None if self.run.ttft_s is None else self.point.mean.ttft_s / self.run.ttft_s - 1

    @property
    def itl_error(self) -> float | None:
        return None if self.run.itl_s is None else self.point.mean.itl_s / self.run.itl_s - 1


def replay(run: Run, stack: Stack, known: Profile | None = None) -> Replayed:
    known = known or profile(run.instance.device, run.instance.precision)
    seconds, total = _recorded(run, stack, known)
    point = Replica(computed(run.instance, known, run.lengths, stack, seconds)).closed(run.concurrency)
    spent = total[:4] / total[4]
    return Replayed(run, point, spent)


def _recorded(run: Run, stack: Stack, known: Profile) -> tuple[StepTime, Floats]:
    """Step times, and where they add up: prefill, decode, cache, sequences; and all of it."""
    parts = step_parts(run.instance, known.constants)
    total: Floats = np.zeros(5)
    (a, b, c), d = stack.factors, stack.host_s

    def seconds(prompts: Sequence[float], starts: Sequence[float], n: int, context: float) -> float:
        chunks_s, rest_s, cached_s = parts(prompts, starts, n, context)
        took_s = a * chunks_s + b * rest_s + c * cached_s + d * n
        total[0] += chunks_s
        total[1] += rest_s
        total[2] += cached_s
        total[3] += n
        total[4] += took_s
        return took_s

    return seconds, total


def fit_stack(
    runs: Sequence[Run], start: Stack, rounds: int = 4, known: Callable[[Run], Profile] | None = None
) -> Stack:
    """prefill, decode, cache and host_s of a stack with the scheduler of `start`. raises ConfigError: too few runs"""
    if len({(run.concurrency, run.lengths) for run in runs}) < 4:
        raise ConfigError(
            f"{len(runs)} served runs", "four at least that differ in requests in flight or lengths", "measure more"
        )
    stack = start
    for _ in range(rounds):
        found = [replay(run, stack, known(run) if known else None) for run in runs]
        errors = np.array([np.log1p(one.rate_error) for one in found])
        rows = np.array([one.seconds for one in found])
        stack = _stack(stack, _vector(stack) + _step(rows, errors, _vector(stack), _vector(start)))
    return stack


def _vector(stack: Stack) -> Floats:
    return np.array([*stack.factors, stack.host_s])


def _stack(stack: Stack, values: Floats) -> Stack:
    prefill, decode, cache, host_s = values.tolist()
    return replace(stack, prefill=prefill, decode=decode, cache=cache, host_s=host_s)


def _step(rows: Floats, errors: Floats, now: Floats, start: Floats) -> Floats:
    """(4,) change with rows @ change near errors; rows (N, 4). Within the bounds, the nearest first."""
    scaled = rows * _UNITS
    belief = np.eye(4) * _BELIEF * np.sqrt(len(rows))
    low, high = (_LEAST - now) / _UNITS, (_MOST - now) / _UNITS
    weights, change = np.ones(len(rows)), np.zeros(4)
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)
        system = np.vstack([scaled * root[:, None], belief])
        wanted = np.concatenate([errors * root, belief @ ((start - now) / _UNITS)])
        change = _bounded(system, wanted, low, high)
        weights = 1 / np.maximum(np.abs(errors - scaled @ change), _GOOD)
        weights /= weights.mean()
    moved: Floats = change * _UNITS
    return moved


def _bounded(system: Floats, wanted: Floats, low: Floats, high: Floats) -> Floats:
    free, x = np.ones(len(low), bool), np.zeros(len(low))
    while free.any():
        x[free] = np.linalg.lstsq(system[:, free], wanted - system[:, ~free] @ x[~free], rcond=None)[0]
        beyond = free & ((x < low) | (x > high))
        if not beyond.any():
            break
        worst = int(np.argmax(np.where(beyond, np.maximum(low - x, x - high), -np.inf)))
        x[worst], free[worst] = np.clip(x[worst], low[worst], high[worst]), False
    return x


@dataclass(frozen=True, slots=True)
class LeaveOneOutResult:
    """Errors of runs that a fit did not see, of requests/s, TTFT and ITL. what: was left out"""

    what: str
    rate: Residual
    ttft: Residual
    itl: Residual


def judged(what: str, found: Sequence[Replayed]) -> LeaveOneOutResult:
    ttft = [e for one in found if (e := one.ttft_error) is not None]
    itl = [e for one in found if (e := one.itl_error) is not None]
    return LeaveOneOutResult(what, residual([one.rate_error for one in found]), residual(ttft), residual(itl))


def leave_one_out(
    runs: Sequence[Run], start: Stack, group: Callable[[Run], str], rounds: int = 3
) -> list[LeaveOneOutResult]:
    """Each group of runs by a stack that was fitted to the others, from the engine's own times on.

    start: whose scheduler they ran with; its factors may have seen what is left out, and are not looked at
    """
    start = replace(start, prefill=ENGINE.prefill, decode=ENGINE.decode, cache=ENGINE.cache, host_s=ENGINE.host_s)
    found = []
    for name in sorted({group(run) for run in runs}):
        stack = fit_stack([run for run in runs if group(run) != name], start, rounds)
        found.append(judged(name, [replay(run, stack) for run in runs if group(run) == name]))
    return found
