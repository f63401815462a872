"""A server of this machine described by its measured steps, for simulation and in closed form.

`size verify` and `size --profile` use the same simulation.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from millrace.engine.executor import ExecutorLimits
from millrace.errors import ConfigError
from millrace.machine.cpu import machine_name
from millrace.runtime.scheduling.step_cost_model import SchedulerSettings, StepCost, StepProfile, StepTime
from millrace.runtime.scheduling.token_budget import TokenBudget
from millrace.size.answer.sizing import CLOSED_FORM_ERROR, PlanInputs
from millrace.size.load.token_lengths import Lengths, ModelCall
from millrace.size.performance.closed_form import CONCURRENCIES, closed_form
from millrace.size.performance.operating_point import FigureSource, OperatingPoint
from millrace.size.simulation.serving_model import VOCAB, Serving
from millrace.size.simulation.simulator import Simulation

AS_BUILT = "as built"  # the precision of the engine
_BATCH = 1024  # random numbers drawn at a time
_FULL = 0.95  # share of the KV-cache capacity from which it counts as full


@dataclass(frozen=True, slots=True)
class MeasuredStepTimes:
    """Step times of a server. cost: typical times; spread: equally likely factors on them

    front_s: host time per request outside steps; schedule: limits of a step
    """

    cost: StepCost
    spread: tuple[float, ...]
    front_s: float
    schedule: SchedulerSettings

    @classmethod
    def from_profile(cls, profile: StepProfile) -> "MeasuredStepTimes":
        return cls(profile.cost, profile.spread, profile.front, profile.schedule)

    def simulation(self, n_input: int, seed: int = 0, longest: int | None = None) -> Simulation:
        """Create a simulation whose token budget is already calibrated, as after a warm-up.

        n_input: tokens of a typical prompt; longest: input plus output tokens of the longest request, if known
        """
        usual, s, draw = self.cost.timed(), self.schedule, _samples(self.spread, seed).__next__
        pages = s.pages if longest is None else s.max_sequences * -(-longest // s.page_tokens) + 1
        limits = ExecutorLimits(
            max_step_tokens=s.max_step_tokens, max_sequences=s.max_sequences, max_rows=s.max_rows,
            max_context=s.max_context, page_tokens=s.page_tokens, n_pages=min(s.pages, pages), vocab_size=VOCAB,
        )  # fmt: skip
        first = min(n_input, s.max_step_tokens)
        budget = TokenBudget(
            s.max_step_tokens, s.gap_limit_s, s.chunk_low, s.stretch,
            usual((), (), 1, n_input), usual([first], [0], 0, 0) / first,
        )  # fmt: skip

        def seconds(prompts: Sequence[float], starts: Sequence[float], n: int, context: float) -> float:
            return usual(prompts, starts, n, context) * draw()

        return Simulation(
            limits, seconds, budget, prefix_cache=False, front_s=self.front_s, between=self.cost.between
        )  # fmt: skip


def _samples(values: Sequence[float], seed: int) -> Iterator[float]:
    rng = np.random.default_rng(seed)
    while True:
        for i in rng.integers(len(values), size=_BATCH).tolist():
            yield values[i]


@dataclass(frozen=True, slots=True)
class ProfiledServer:
    """A profiled server to plan with."""

    profile: StepProfile

    @property
    def device(self) -> str:
        return f"this machine ({self.profile.machine})"

    @property
    def scheduler(self) -> str:
        s = self.profile.schedule
        return (f"in-flight batching, at most {s.max_step_tokens} tokens and {s.max_sequences} sequences a step, which "
                f"prompts stretch {s.stretch:g} times or to {s.gap_limit_s * 1e3:g} ms")  # fmt: skip

    @property
    def took(self) -> StepTime:
        """Return the mean time of a step, including the host time until the next one."""
        usual, mean, cost = self.profile.cost.timed(), self.profile.mean, self.profile.cost

        def seconds(prompts: Sequence[float], starts: Sequence[float], n: int, context: float) -> float:
            return usual(prompts, starts, n, context) * mean + cost.between(len(prompts) + n)

        return seconds

    def room(self, n_tokens: float) -> int:
        """Return how many requests of n tokens fit in flight. raises ConfigError if none does"""
        s = self.profile.schedule
        if n_tokens > s.context_tokens:
            raise ConfigError(f"requests of {n_tokens:,.0f} tokens",
                              f"at most {s.context_tokens:,}, as the profiled server had",
                              "shorten them, or fit a profile of a server with more")  # fmt: skip
        return max(1, min(s.max_sequences, s.pages // int(-(-n_tokens // s.page_tokens))))

    def check(self) -> None:
        """Refuse a profile of another machine. raises ConfigError"""
        self.profile.check(self.profile.engine, machine_name())

    def points(self, call: ModelCall) -> list[OperatingPoint]:
        """Return the closed-form points of a call. raises ConfigError if a request does not fit"""
        p, lengths, room = self.profile, call.lengths, self.room(sum(call.lengths))
        seconds, points = self.took, []
        for n in CONCURRENCIES:
            rate, waits = closed_form(seconds, p.front, p.schedule.max_step_tokens, lengths, n, min(n, room))
            points.append(OperatingPoint(
                model=p.model, device=self.device, precision=AS_BUILT, tp=1, system=1, input_tokens=lengths[0],
                output_tokens=lengths[1], concurrency=n, rate=rate, mean=waits, p95=None, source=FigureSource.ANALYTIC,
            ))  # fmt: skip
        return points

    def serving(self, lengths: Lengths) -> Serving:
        """Describe the server for simulation. raises ConfigError if a request does not fit"""
        p, own, least = self.profile, MeasuredStepTimes.from_profile(self.profile), min(self.profile.spread)
        usual = p.cost.timed()
        return Serving(
            model=p.model, device=self.device, precision=AS_BUILT, tp=1, lengths=lengths, scheduler=self.scheduler,
            room=self.room(lengths.total_tokens), running=None, front_s=p.front,
            seconds=lambda prompts, starts, n, context: usual(prompts, starts, n, context) * least,
            context=p.schedule.context_tokens,
            simulation=lambda seed: own.simulation(lengths.n_input, seed, lengths.total_tokens),
            any_lengths=lambda seed: replace(own.simulation(lengths.n_input, seed), prefix_cache=True),
        )  # fmt: skip

    def grounds(self, point: OperatingPoint) -> PlanInputs:
        """Return what a point is based on."""
        p = self.profile
        provenance = f"measured steps of {p.model} (engine {p.engine:.12}) on {p.machine}, {p.n_steps:,} of {p.date}"
        full = self.room(point.input_tokens + point.output_tokens)
        is_full = full < p.schedule.max_sequences and point.concurrency > _FULL * full
        error = p.error + (CLOSED_FORM_ERROR if point.source == FigureSource.ANALYTIC else 0.0)
        return PlanInputs(error, provenance, self._shares(point, full), is_full)

    def _shares(self, point: OperatingPoint, room: int) -> Mapping[str, float]:
        """Return the shares of the server's time by activity; they add up to 1."""
        cost = self.profile.cost
        usual, n = cost.timed(), max(1, min(room, round(point.concurrency)))
        alone_s, many_s = usual((), (), 1, 0.0), usual((), (), n, 0.0)
        steps = sum(n_out - 1 for _, n_out in point.lengths) / n
        read = sum((n_out - 1) * (n_in + n_out / 2) for n_in, n_out in point.lengths)
        seconds = {
            "prefill arithmetic": sum(usual([n_in], [0], n, 0.0) - many_s for n_in, _ in point.lengths),
            "reading weights": steps * alone_s,
            "decode arithmetic": steps * (many_s - alone_s),
            "reading keys and values": cost.read * read,
            "host": steps * cost.between(n) + cost.host_sequence * len(point.lengths),
        }
        total = sum(seconds.values())
        return {name: value / total for name, value in seconds.items()}
