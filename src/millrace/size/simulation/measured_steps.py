"""A server of this machine by its own measured steps: as simulations have it, and in closed form.

What `size verify` predicts and what `size --profile` plans with is the same simulation.
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
from millrace.size.load.token_lengths import Call, Lengths
from millrace.size.performance.closed_form import CONCURRENCIES, closed_form
from millrace.size.performance.operating_point import Point, Source
from millrace.size.simulation.serving_model import VOCAB, Serving
from millrace.size.simulation.simulator import Simulation

AS_BUILT = "as built"  # the precision: that of the engine, whatever it is
_DRAWN = 1024  # at once
_FULL = 0.95  # of what memory has room for


@dataclass(frozen=True, slots=True)
class MeasuredStepTimes:
    """cost: what steps usually take; spread: how many times as long they do, all equally likely

    front_s: of a request beside its steps; schedule: what bounds them
    """

    cost: StepCost
    spread: tuple[float, ...]
    front_s: float
    schedule: SchedulerSettings

    @classmethod
    def of(cls, profile: StepProfile) -> "MeasuredStepTimes":
        return cls(profile.cost, profile.spread, profile.front, profile.schedule)

    def simulation(self, n_input: int, seed: int = 0, longest: int | None = None) -> Simulation:
        """One such server, whose budget knows its steps already, as after a warm-up.

        n_input: tokens of a usual prompt; longest: of any request, in and out, where that is known
        """
        usual, s, draw = self.cost.timed(), self.schedule, _drawn(self.spread, seed).__next__
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


def _drawn(values: Sequence[float], seed: int) -> Iterator[float]:
    rng = np.random.default_rng(seed)
    while True:
        for i in rng.integers(len(values), size=_DRAWN).tolist():
            yield values[i]


@dataclass(frozen=True, slots=True)
class Profiled:
    """A profile to plan with."""

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
        """Of a step on average, and of the host until the next one."""
        usual, mean, cost = self.profile.cost.timed(), self.profile.mean, self.profile.cost

        def seconds(prompts: Sequence[float], starts: Sequence[float], n: int, context: float) -> float:
            return usual(prompts, starts, n, context) * mean + cost.between(len(prompts) + n)

        return seconds

    def room(self, both: float) -> int:
        """Requests of so many tokens that are in flight at most. raises ConfigError where none fits"""
        s = self.profile.schedule
        if both > s.context_tokens:
            raise ConfigError(f"requests of {both:,.0f} tokens",
                              f"at most {s.context_tokens:,}, as the profiled server had",
                              "shorten them, or fit a profile of a server with more")  # fmt: skip
        return max(1, min(s.max_sequences, s.pages // int(-(-both // s.page_tokens))))

    def check(self) -> None:
        """raises ConfigError on another machine"""
        self.profile.check(self.profile.engine, machine_name())

    def points(self, call: Call) -> list[Point]:
        """In closed form. raises ConfigError where a request does not fit"""
        p, lengths, room = self.profile, call.lengths, self.room(sum(call.lengths))
        seconds, found = self.took, []
        for n in CONCURRENCIES:
            rate, waits = closed_form(seconds, p.front, p.schedule.max_step_tokens, lengths, n, min(n, room))
            found.append(Point(
                model=p.model, device=self.device, precision=AS_BUILT, tp=1, system=1, input_tokens=lengths[0],
                output_tokens=lengths[1], concurrency=n, rate=rate, mean=waits, p95=None, source=Source.ANALYTIC,
            ))  # fmt: skip
        return found

    def serving(self, lengths: Lengths) -> Serving:
        """raises ConfigError where a request does not fit"""
        p, own, least = self.profile, MeasuredStepTimes.of(self.profile), min(self.profile.spread)
        usual = p.cost.timed()
        return Serving(
            model=p.model, device=self.device, precision=AS_BUILT, tp=1, lengths=lengths, scheduler=self.scheduler,
            room=self.room(lengths.both), running=None, front_s=p.front,
            seconds=lambda prompts, starts, n, context: usual(prompts, starts, n, context) * least,
            context=p.schedule.context_tokens,
            simulation=lambda seed: own.simulation(lengths.n_input, seed, lengths.both),
            of_any=lambda seed: replace(own.simulation(lengths.n_input, seed), prefix_cache=True),
        )  # fmt: skip

    def grounds(self, point: Point) -> PlanInputs:
        """What such a point rests on."""
        p = self.profile
        told = f"measured steps of {p.model} (engine {p.engine:.12}) on {p.machine}, {p.n_steps:,} of {p.date}"
        full = self.room(point.input_tokens + point.output_tokens)
        is_full = full < p.schedule.max_sequences and point.concurrency > _FULL * full
        error = p.error + (CLOSED_FORM_ERROR if point.source == Source.ANALYTIC else 0.0)
        return PlanInputs(error, told, self._shares(point, full), is_full)

    def _shares(self, point: Point, room: int) -> Mapping[str, float]:
        """Of the server's time, what goes where; together 1."""
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
