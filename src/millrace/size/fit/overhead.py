"""Fits the factors of a serving stack to measured runs by simulation, because queueing has no closed form.

For a fixed schedule the time of a run is linear in the factors. Each round simulates all runs, records how much of
their time each factor multiplies, and takes a step that minimises absolute relative errors of requests/s. Three or four
rounds suffice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from millrace.errors import ConfigError
from millrace.runtime.scheduling.step_cost_model import StepTime
from millrace.size.fit.device import Residual, residual
from millrace.size.load.token_lengths import Lengths
from millrace.size.performance.fitted_devices import Profile, profile
from millrace.size.performance.operating_point import OperatingPoint
from millrace.size.performance.roofline_cost import Floats, ModelInstance
from millrace.size.performance.serving_overhead import ENGINE, Stack
from millrace.size.performance.step_time import step_parts
from millrace.size.simulation.capacity import Replica
from millrace.size.simulation.serving_model import make_serving

# For prefill, decode, cache, host_s: lower bound, upper bound, unit of change.
_MIN, _MAX = np.array([0.05, 0.05, 0.05, 0.0]), np.array([50.0, 50.0, 50.0, 1e-3])
_UNITS = np.array([1.0, 1.0, 2.0, 3e-5])
_GOOD, _ROUNDS = 0.03, 30  # relative errors below this count as equal; reweighting rounds
_BELIEF = 0.01  # weight of the initial factors


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A measured closed-loop run of one instance with `concurrency` requests in flight."""

    instance: ModelInstance
    lengths: Lengths
    concurrency: int
    rate: float
    ttft_s: float | None = None
    itl_s: float | None = None


@dataclass(frozen=True, slots=True)
class Replayed:
    """A simulated run. seconds: step time that each factor multiplies, relative to the total"""

    run: MeasuredRun
    point: OperatingPoint
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


def replay(run: MeasuredRun, stack: Stack, device_profile: Profile | None = None) -> Replayed:
    device_profile = device_profile or profile(run.instance.device, run.instance.precision)
    seconds, total = _recording_step_time(run, stack, device_profile)
    point = Replica(make_serving(run.instance, device_profile, run.lengths, stack, seconds)).run_closed(run.concurrency)
    spent = total[:4] / total[4]
    return Replayed(run, point, spent)


def _recording_step_time(run: MeasuredRun, stack: Stack, device_profile: Profile) -> tuple[StepTime, Floats]:
    """Return step times, and an array in which they accumulate: prefill, decode, cache, sequences, total."""
    parts = step_parts(run.instance, device_profile.constants)
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
    runs: Sequence[MeasuredRun],
    start: Stack,
    rounds: int = 4,
    profile_for: Callable[[MeasuredRun], Profile] | None = None,
) -> Stack:
    """Fit prefill, decode, cache and host_s of a stack with the scheduler of `start`. raises ConfigError: too few
    runs"""
    if len({(run.concurrency, run.lengths) for run in runs}) < 4:
        raise ConfigError(
            f"{len(runs)} served runs", "four at least that differ in requests in flight or lengths", "measure more"
        )
    stack = start
    for _ in range(rounds):
        replays = [replay(run, stack, profile_for(run) if profile_for else None) for run in runs]
        errors = np.array([np.log1p(one.rate_error) for one in replays])
        rows = np.array([one.seconds for one in replays])
        stack = _stack(stack, _vector(stack) + _step(rows, errors, _vector(stack), _vector(start)))
    return stack


def _vector(stack: Stack) -> Floats:
    return np.array([*stack.factors, stack.host_s])


def _stack(stack: Stack, values: Floats) -> Stack:
    prefill, decode, cache, host_s = values.tolist()
    return replace(stack, prefill=prefill, decode=decode, cache=cache, host_s=host_s)


def _step(rows: Floats, errors: Floats, now: Floats, start: Floats) -> Floats:
    """Return the (4,) change with rows @ change near errors, within the bounds; rows (N, 4)."""
    scaled = rows * _UNITS
    belief = np.eye(4) * _BELIEF * np.sqrt(len(rows))
    low, high = (_MIN - now) / _UNITS, (_MAX - now) / _UNITS
    weights, change = np.ones(len(rows)), np.zeros(4)
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)
        system = np.vstack([scaled * root[:, None], belief])
        targets = np.concatenate([errors * root, belief @ ((start - now) / _UNITS)])
        change = _solve_bounded(system, targets, low, high)
        weights = 1 / np.maximum(np.abs(errors - scaled @ change), _GOOD)
        weights /= weights.mean()
    moved: Floats = change * _UNITS
    return moved


def _solve_bounded(system: Floats, targets: Floats, low: Floats, high: Floats) -> Floats:
    free, x = np.ones(len(low), bool), np.zeros(len(low))
    while free.any():
        x[free] = np.linalg.lstsq(system[:, free], targets - system[:, ~free] @ x[~free], rcond=None)[0]
        beyond = free & ((x < low) | (x > high))
        if not beyond.any():
            break
        worst = int(np.argmax(np.where(beyond, np.maximum(low - x, x - high), -np.inf)))
        x[worst], free[worst] = np.clip(x[worst], low[worst], high[worst]), False
    return x


@dataclass(frozen=True, slots=True)
class LeaveOneOutResult:
    """Errors of requests/s, TTFT and ITL for runs outside a fit. what: the group that was left out"""

    what: str
    rate: Residual
    ttft: Residual
    itl: Residual


def summarize_errors(label: str, replays: Sequence[Replayed]) -> LeaveOneOutResult:
    ttft = [e for replay in replays if (e := replay.ttft_error) is not None]
    itl = [e for replay in replays if (e := replay.itl_error) is not None]
    return LeaveOneOutResult(label, residual([replay.rate_error for replay in replays]), residual(ttft), residual(itl))


def leave_one_out(
    runs: Sequence[MeasuredRun], start: Stack, group: Callable[[MeasuredRun], str], rounds: int = 3
) -> list[LeaveOneOutResult]:
    """Predict each group of runs with a stack fitted to the other groups, starting from the engine's own times.

    start: the stack whose scheduler is used; its factors are ignored, because they may include the left-out runs
    """
    start = replace(start, prefill=ENGINE.prefill, decode=ENGINE.decode, cache=ENGINE.cache, host_s=ENGINE.host_s)
    results = []
    for name in sorted({group(run) for run in runs}):
        stack = fit_stack([run for run in runs if group(run) != name], start, rounds)
        results.append(summarize_errors(name, [replay(run, stack) for run in runs if group(run) == name]))
    return results
