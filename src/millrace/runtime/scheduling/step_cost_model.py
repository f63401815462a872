"""A cost model of an engine's steps on a machine, fitted to measured steps.

The time of a step depends on its tokens (piecewise linear, because the kernels change with their number), on the
attention of its prompt chunks, and on the keys and values that running answers read. The host adds its time between
two steps.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from millrace.engine.artifact.tactics import write_whole
from millrace.errors import ConfigError, sanitize
from millrace.runtime.scheduling.step_features import StepWork
from millrace.runtime.step_history import StepRecord
from millrace.settings import read_bounded

_SCHEMA, _MAX_BYTES, _MAX_KNOTS, _MAX_SPREAD, _MAX_S = 2, 1 << 20, 64, 1000, 1e4
_COMPARED_STEPS = 256  # steps that `predicted_vs_measured` compares
_EXPECTED = "what `millrace size verify -o` wrote"

# Seconds of a step: tokens and starts of its prompt chunks, number of running answers, mean length of their contexts.
StepTime = Callable[[Sequence[float], Sequence[float], int, float], float]


@dataclass(frozen=True, slots=True)
class StepCost:
    """Costs in seconds. at: (tokens of a step, seconds without attention), ascending; token: each beyond the last entry

    pair: a prompt token with each token before it; read: each context token of a running answer
    host, host_sequence: between two steps, and for each sequence of the step
    """

    at: tuple[tuple[int, float], ...]
    token: float
    pair: float
    read: float
    host: float = 0.0
    host_sequence: float = 0.0

    def __post_init__(self) -> None:
        tokens, seconds = [n for n, _ in self.at], [s for _, s in self.at]
        if not 1 <= len(tokens) <= _MAX_KNOTS or tokens[0] < 1 or tokens != sorted(set(tokens)):
            raise ConfigError(f"times at {tokens!r:.80} tokens", f"1 to {_MAX_KNOTS} numbers, rising", "fit again")
        times = (*seconds, self.token, self.pair, self.read, self.host, self.host_sequence)
        if not all(0 <= s < _MAX_S for s in times) or seconds != sorted(seconds) or not seconds[0]:
            raise ConfigError("times of steps that are negative, endless or fall", "times that rise", "fit again")

    def seconds(self, prompts: Sequence[float], starts: Sequence[float], rows: int, context: float) -> float:
        """Return the seconds of a step. prompts, starts: of its chunks; rows, context: running answers, mean context"""
        return self.timed()(prompts, starts, rows, context)

    def timed(self) -> StepTime:
        """Return `seconds` as a function for many steps, with the table prepared."""
        tokens, times = [n for n, _ in self.at], [s for _, s in self.at]
        slopes = [(t - s) / (m - n) for (n, s), (m, t) in pairwise(self.at)]
        last, last_s, beyond, pair, read = tokens[-1], times[-1], self.token, self.pair, self.read

        def seconds(prompts: Sequence[float], starts: Sequence[float], rows: int, context: float) -> float:
            n = rows + sum(prompts) if prompts else rows
            if n >= last:
                took_s = last_s + (n - last) * beyond
            elif n <= tokens[0]:
                took_s = times[0]
            else:
                i = bisect_right(tokens, n) - 1
                took_s = slopes[i] * (n - tokens[i]) + times[i]
            if not prompts:
                return took_s + read * rows * context
            pairs = sum(p * (start + p / 2) for p, start in zip(prompts, starts, strict=True))
            return took_s + pair * pairs + read * rows * context

        return seconds

    def work_s(self, work: StepWork) -> float:
        return self.seconds(work.prompts, work.starts, work.rows, work.contexts / max(1, work.rows))

    def between(self, sequences: int) -> float:
        """Return the seconds that the host takes between a step with `sequences` sequences and the next."""
        return self.host + self.host_sequence * sequences

    def scaled(self, factor: float) -> "StepCost":
        """Return the costs multiplied by `factor`."""
        at = tuple((n, s * factor) for n, s in self.at)
        rest = (self.token, self.pair, self.read, self.host, self.host_sequence)
        return StepCost(at, *(s * factor for s in rest))


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """The settings that limit a server's steps: engine limits, and how long prompts may delay running answers."""

    max_step_tokens: Annotated[int, Meta(ge=1, le=1 << 20)]
    max_sequences: Annotated[int, Meta(ge=1, le=1 << 16)]
    max_rows: Annotated[int, Meta(ge=1, le=1 << 20)]
    max_context: Annotated[int, Meta(ge=2, le=1 << 24)]
    page_tokens: Annotated[int, Meta(ge=1, le=1 << 16)]
    pages: Annotated[int, Meta(ge=1, le=1 << 24)]
    gap_limit_s: Annotated[float, Meta(gt=0)]
    stretch: Annotated[float, Meta(gt=1)]
    chunk_low: Annotated[int, Meta(ge=1, le=1 << 20)]

    def __post_init__(self) -> None:
        if self.max_sequences > min(self.max_step_tokens, self.max_rows):
            raise ConfigError(
                f"{self.max_sequences} sequences in steps of {self.max_step_tokens} tokens and {self.max_rows} rows",
                "a token and a row for each", "fit again",
            )  # fmt: skip
        if not (isfinite(self.gap_limit_s) and isfinite(self.stretch)):
            raise ConfigError(f"a gap of {self.gap_limit_s:g} s, a stretch of {self.stretch:g}", "numbers", "fit again")

    @property
    def context_tokens(self) -> int:
        """Longest context of one sequence: the engine's, or what all pages hold if that is less."""
        return min(self.max_context, self.pages * self.page_tokens)


@dataclass(frozen=True, slots=True)
class StepProfile:
    """A fitted cost model and its origin.

    model, engine: its name and identity; machine: processor and cores; date: ISO; n_steps: steps used for the fit
    error: median relative error of the fit
    front: seconds of a request before its first step and after its last, in server and client
    spread: equally likely factors on `cost`, which is the typical time
    schedule: settings of the server that ran the steps
    """

    model: str
    engine: str
    machine: str
    date: str
    n_steps: int
    error: float
    front: float
    spread: tuple[float, ...]
    cost: StepCost
    schedule: SchedulerSettings

    def __post_init__(self) -> None:
        if not 1 <= len(self.spread) <= _MAX_SPREAD or not all(0 < x < _MAX_S for x in self.spread):
            raise ConfigError(f"a spread of {self.spread!r:.80}", f"1 to {_MAX_SPREAD} values above 0", "fit again")
        if not (0 <= self.error < _MAX_S and 0 <= self.front < _MAX_S):
            raise ConfigError(f"an error of {self.error:g}, {self.front:g} s", "numbers from 0", "fit again")

    @property
    def mean(self) -> float:
        """Mean of the spread."""
        return sum(self.spread) / len(self.spread)

    def check(self, engine: str, machine: str) -> None:
        """Check that the profile was fitted to this engine on this machine. raises ConfigError"""
        for what, own, expected in (("engine", self.engine, engine), ("machine", self.machine, machine)):
            if own != expected:
                raise ConfigError(f"the profile is of the {what} {own:.120}", f"{expected:.120}",
                                  "fit one here: millrace size verify MODEL -o FILE")  # fmt: skip


def write_profile(file: Path, profile: StepProfile) -> None:
    """Write a profile. raises OSError"""
    write_whole(file, (json.dumps({"schema": _SCHEMA, **asdict(profile)}, indent=1) + "\n").encode())


def read_profile(file: Path) -> StepProfile:
    """Read a profile. raises ConfigError"""
    try:
        data = read_bounded(file, _MAX_BYTES)
        profile: Any = json.loads(data) if len(data) <= _MAX_BYTES else None
        if not isinstance(profile, dict) or "schema" not in profile:
            raise ConfigError(f"{file} holds no profile", _EXPECTED, "name another file")
        if profile["schema"] != _SCHEMA:
            raise ConfigError(f"{file} is a profile of schema {sanitize(str(profile['schema'])):.20}",
                              f"schema {_SCHEMA}, which has the server's schedule", "fit again")  # fmt: skip
        names = {f.name for f in fields(StepProfile)} | {"schema"}
        if profile.keys() != names:
            what = ", ".join(sorted(map(str, profile.keys() ^ names)))
            raise ConfigError(f"{file}: {what:.120} missing or unknown", _EXPECTED, "fit again")
        result = msgspec.convert({name: profile[name] for name in names - {"schema"}}, StepProfile)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", _EXPECTED, "check the path") from None
    except (ValueError, RecursionError) as error:  # msgspec's are ValueErrors, too
        raise ConfigError(f"{file}: {sanitize(str(error))}", _EXPECTED, "fit again") from None
    return result


def predicted_vs_measured(profile: StepProfile, steps: Sequence[StepRecord]) -> tuple[float, float] | None:
    """Return the mean seconds of the last 256 steps as measured and as predicted; None before the first step."""
    last = steps[-_COMPARED_STEPS:]
    if not last:
        return None
    predicted_s = profile.mean * sum(profile.cost.work_s(StepWork.from_parts(step.parts)) for step in last)
    return sum(step.took_s for step in last) / len(last), predicted_s / len(last)
