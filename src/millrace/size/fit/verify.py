"""Verification of predictions: loads on a server of this machine, compared with simulations of the same requests.

Step times are fitted only to probes: small closed loops before the first load, between loads and after the last.
Because the memory bandwidth of a machine varies over seconds, loads are run in several rounds, and each part is
predicted with the pace of the adjacent probes. The simulation gets the times and lengths of the requests, and predicts
their latencies with the server's scheduler and limits.
"""

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from millrace.bench.analysis.metrics import itl_ms, last_s, latency_ms, ttft_ms
from millrace.bench.client.client import Client
from millrace.bench.client.request_record import BenchRecord
from millrace.bench.load.prompt_text import PromptWords
from millrace.bench.run.plan import BenchPlan, calibrate_words, drive, make_plan
from millrace.bench.run.run import Run, TurnRecord
from millrace.bench.settings import InputSettings, LoadSettings, SessionSettings, TargetSettings
from millrace.errors import ConfigError, MachineError
from millrace.runtime.scheduling.step_cost_model import SchedulerSettings, StepProfile
from millrace.size.fit.steps import (
    MAX_BYTES,
    PATH,
    MeasuredSteps,
    StepRow,
    errors,
    fit_steps,
    pace,
    read_steps,
    spread,
)
from millrace.size.performance.roofline_cost import Floats
from millrace.size.question.settings import VerifySettings
from millrace.size.simulation.measured_steps import MeasuredStepTimes
from millrace.size.simulation.simulator import SimulationResult
from millrace.size.simulation.virtual_clock import Arrival

MEDIAN, P90 = 0.10, 0.25  # allowed median and 90th percentile of the judged errors
_TTFT_UP_TO, _UP_TO = 0.8, 0.95  # shares of capacity up to which TTFT, and other figures, are judged
_SIMULATED = 5  # simulations of a load, with different step-time noise
_ROUNDS = 4  # of the closed loop that determines the capacity
_TIMEOUT_S = 30.0
_FEWEST = 8  # requests of a load in a round
Begins = Callable[[Run], None]


@dataclass(frozen=True, slots=True)
class Figure:
    """A predicted and measured figure. name: "ttft", "itl", "e2e" (seconds) or "throughput" (requests/s)

    of: "mean" or "p95"; judged: counts for the verdict
    """

    name: str
    of: str
    predicted: float
    measured: float
    judged: bool

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True)
class VerifiedLoad:
    """A load. share: of the predicted capacity; rate: offered requests/s; paces: of the adjacent probes in each
    round"""

    share: float
    rate: float
    n: int
    paces: tuple[float, ...]
    figures: tuple[Figure, ...]


@dataclass(frozen=True, slots=True)
class Verified:
    """Result of a verification. capacity: simulated requests/s at full batch; median, p90: of the judged errors"""

    isa: str
    capacity: float
    profile: StepProfile
    loads: tuple[VerifiedLoad, ...]

    @property
    def judged(self) -> Floats:
        return np.array([abs(f.error) for load in self.loads for f in load.figures if f.judged])

    @property
    def median(self) -> float:
        return float(np.median(self.judged))

    @property
    def p90(self) -> float:
        return float(np.quantile(self.judged, 0.9))

    @property
    def medians(self) -> dict[str, float]:
        """Return the median error of each kind of figure; throughput is nearly trivial below capacity."""
        by_name: dict[str, list[float]] = {}
        for f in (f for load in self.loads for f in load.figures if f.judged):
            by_name.setdefault(f.name, []).append(abs(f.error))
        return {name: float(np.median(errors)) for name, errors in by_name.items()}

    @property
    def holds(self) -> bool:
        return self.median <= MEDIAN and self.p90 <= P90


async def verify(url: str, settings: VerifySettings, model: str = "", begins: Begins = lambda run: None) -> Verified:
    """Verify predictions for a server without other clients. raises ConfigError, MachineError if it does not answer"""
    shares, one = settings.shares, _plan(url, model, settings, 0, concurrency=1, request_count=1).target
    async with Client(one) as client:
        about = await _steps(client, model, 0)
    schedule = about.schedule
    async with Client(replace(one, model=about.model)) as client:
        server = _Server(client, settings, url, about, begins)
        if settings.isl + settings.osl > schedule.max_context:
            raise ConfigError(f"requests of {settings.isl + settings.osl} tokens", f"at most {schedule.max_context}",
                              "lower --isl or --osl")  # fmt: skip
        alone = await server.probe(1)
        probes = [alone.steps + (await server.probe(schedule.max_sequences)).steps + (await server.probe(3)).steps]
        capacity = _capacity(Times.fit(probes[0], probes[0], alone, schedule).own, settings)
        driven = list[tuple[float, Sequence[TurnRecord]]]()
        for share in shares * settings.rounds:
            driven.append((share, await server.load(share * capacity)))
            probes.append((await server.probe(3)).steps)
    all_steps = [step for probe in probes for step in probe]
    parts: dict[float, list[LoadPart]] = {share: [] for share in shares}
    for (share, records), (before, after) in zip(driven, pairwise(probes), strict=True):
        local_times = Times.fit(all_steps, [*before, *after], alone, schedule)
        parts[share].append(LoadPart(records, local_times.pace, local_times.runs(_arrivals(records))))
    loads = [
        VerifiedLoad(share, share * capacity, sum(len(p.records) for p in some), tuple(p.pace for p in some),
             figures(share, some))
        for share, some in parts.items()
    ]  # fmt: skip
    times = Times.fit(all_steps, all_steps, alone, schedule)
    profile = StepProfile(
        about.model, about.engine, about.machine, datetime.date.today().isoformat(), len(all_steps),
        float(np.median(np.abs(errors(times.own.cost, all_steps)))), times.own.front_s, times.own.spread,
        times.own.cost, schedule,
    )  # fmt: skip
    return Verified(about.isa, capacity, profile, tuple(loads))


@dataclass(frozen=True, slots=True)
class Probe:
    """Requests of a probe, and the steps that the server ran for them."""

    records: Sequence[TurnRecord]
    steps: list[StepRow]


@dataclass(frozen=True, slots=True)
class Times:
    """Step times for a simulation. own: typical times at the local pace, with their spread"""

    own: MeasuredStepTimes
    pace: float

    @classmethod
    def fit(
        cls, steps: Sequence[StepRow], near: Sequence[StepRow], alone: Probe, schedule: SchedulerSettings
    ) -> "Times":
        """Fit to all `steps`, at the pace of the `near` ones. alone: probe with one request at a time"""
        cost = fit_steps(steps)
        slower, alike = pace(cost, near), MeasuredStepTimes(cost.scaled(pace(cost, alone.steps)), (1.0,), 0.0, schedule)
        prediction = cls(alike, 1.0).runs(_arrivals(alone.records), 1)[0]
        waited = [ttft_ms(record.answer) or 0.0 for record in _in_order(alone.records)]
        front_s = max(0.0, float(np.median(np.array(waited) / 1e3 - prediction.values("ttft_s"))))
        return cls(MeasuredStepTimes(cost.scaled(slower), spread(cost, near), front_s, schedule), slower)

    def runs(self, arrivals: Sequence[Arrival], n: int = _SIMULATED) -> list[SimulationResult]:
        """Simulate the same requests n times with different step-time noise."""
        n_input = round(float(np.mean([arrival.n_input for arrival in arrivals])))
        return [self.own.simulation(n_input, seed).run(arrivals) for seed in range(n)]


@dataclass(frozen=True, slots=True)
class LoadPart:
    """One round of a load, with its simulations."""

    records: Sequence[TurnRecord]
    pace: float
    simulated: Sequence[SimulationResult]


class _Server:
    """The server under test. about: its description before the first load"""

    def __init__(
        self, client: Client, settings: VerifySettings, url: str, about: MeasuredSteps, begins: Begins
    ) -> None:
        self._client, self._settings, self._url, self.about, self._begins = client, settings, url, about, begins
        self._n_runs, self._last = 0, max((step.step for step in about.steps), default=0)
        self._words: PromptWords | None = None

    async def steps(self) -> list[StepRow]:
        """Return the steps since the last call."""
        steps = (await _steps(self._client, self.about.model, self._last)).steps
        self._last = max([self._last, *(step.step for step in steps)])
        return steps

    async def probe(self, concurrency: int) -> Probe:
        """Run a short closed loop, and return its requests and steps."""
        load: dict[str, float] = {"concurrency": concurrency, "duration_s": self._settings.probe_s}
        records = await self._run(load)
        return Probe(records, await self.steps())

    async def load(self, rate: float) -> Sequence[TurnRecord]:
        records = await self._run(arrivals_of(rate, self._settings.each_s))
        await self.steps()  # discard: only steps of probes are used
        return records

    async def _run(self, load: Mapping[str, float]) -> Sequence[TurnRecord]:
        """Run a load. raises MachineError if a request fails"""
        plan = _plan(self._url, self.about.model, self._settings, self._n_runs, **load)
        self._n_runs += 1
        if self._words is None:
            self._words = await calibrate_words(self._client, plan.extra)
        run = await drive(self._client, plan, plan.sessions(self._words), self._begins)
        failed = [record.answer for record in run.records if record.answer.failure is not None]
        if run.ended or failed or not run.records:
            reason = run.ended or (f"{failed[0].failure}: {failed[0].detail}" if failed else "nothing was asked")
            raise MachineError(f"{len(failed)} of {len(run.records)} requests failed ({reason})", "whole answers",
                               "look at the server's log; ask for longer: --each-s")  # fmt: skip
        return run.records


async def _steps(client: Client, model: str, after: int) -> MeasuredSteps:
    """Fetch the server's steps after a step number. raises MachineError, ConfigError"""
    answer = await client.get(f"{PATH}?after={after}", _TIMEOUT_S, MAX_BYTES)
    if answer.failure is not None:
        raise MachineError(f"the server's {PATH}: {answer.failure} ({answer.detail})",
                           "millrace serve of this release", "check URL and key")  # fmt: skip
    return read_steps(answer.text, model)


def _plan(url: str, model: str, settings: VerifySettings, n: int, **load: float) -> BenchPlan:
    """Create a bench plan. n: number of earlier runs, so that no prompt repeats"""
    target = TargetSettings(model=model, endpoint="completions", ignore_eos=True, per_chunk_usage=True,
                          header=settings.header)  # fmt: skip
    load_settings = LoadSettings(random_seed=settings.random_seed * 1000 + n, **load)  # type: ignore[arg-type]
    return make_plan(url, target, load_settings, InputSettings(isl=settings.isl, osl=settings.osl), SessionSettings())


def arrivals_of(rate: float, each_s: float) -> dict[str, float]:
    """Return the load settings for a duration, or for a minimum number of requests at a low rate."""
    if rate * each_s < _FEWEST:
        return {"request_rate": rate, "request_count": _FEWEST}
    return {"request_rate": rate, "duration_s": each_s}


def _capacity(own: MeasuredStepTimes, settings: VerifySettings) -> float:
    """Simulate a closed loop at full batch; return requests/s without its first and last round."""
    places = own.schedule.max_sequences
    n = places * _ROUNDS
    requests = own.simulation(settings.isl).run([Arrival(0, settings.isl, settings.osl)] * n, places).requests
    counted = requests[places : n - places]
    return places / float(np.mean([request.e2e_s for request in counted]))


def _in_order(records: Iterable[TurnRecord]) -> list[TurnRecord]:
    return sorted(records, key=lambda record: record.answer.sent_s)


def _arrivals(records: Sequence[TurnRecord]) -> list[Arrival]:
    """Convert records to arrivals with the same times and lengths."""
    answers = [record.answer for record in _in_order(records)]
    return [Arrival(a.sent_s - answers[0].sent_s, max(1, a.n_prompt or 1), max(1, a.n_output)) for a in answers]


_STATISTICS: dict[str, Callable[[Floats], float]] = {
    "mean": lambda values: float(values.mean()),
    "p95": lambda values: float(np.quantile(values, 0.95)),
}


def figures(share: float, parts: Sequence[LoadPart]) -> tuple[Figure, ...]:
    """Compute the figures of all parts of a load together, averaged over the simulations."""
    answers = [record.answer for part in parts for record in part.records]
    measured: Mapping[str, Sequence[float | None]] = {
        "ttft": [ttft_ms(a) for a in answers],
        "itl": [itl_ms(a) for a in answers],
        "e2e": [latency_ms(a) for a in answers],
    }
    results: list[Figure] = []
    simulations: list[tuple[SimulationResult, ...]] = list(
        zip(*(part.simulated for part in parts), strict=True)
    )  # each of all parts, with the same seed
    for name, values in measured.items():
        theirs = np.array([value / 1e3 for value in values if value is not None])
        ours = [np.concatenate([one.values(f"{name}_s") for one in some]) for some in simulations]
        judged = name != "e2e" and share <= (_TTFT_UP_TO if name == "ttft" else _UP_TO)
        for statistic, compute in _STATISTICS.items():
            results.append(Figure(name, statistic, float(np.mean([compute(v) for v in ours])), compute(theirs), judged))
    took_s = sum(_took_s([record.answer for record in part.records]) for part in parts)
    ours_s = [sum(max(outcome.last_s for outcome in one.requests) for one in some) for some in simulations]
    n = len(answers)
    return (*results, Figure("throughput", "mean", n / float(np.mean(ours_s)), n / took_s, share <= _UP_TO))


def _took_s(answers: Sequence[BenchRecord]) -> float:
    return max(last_s(a) for a in answers) - min(a.sent_s for a in answers)
