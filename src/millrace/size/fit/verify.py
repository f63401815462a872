"""The truth loop: a server of this machine under loads, beside a simulation of them by step times fitted meanwhile.

Step times come from probes alone: small closed loops before the first load, between two and after the last. The memory
bandwidth of a machine moves from second to second, so all loads are asked in several rounds, and each part of one is
predicted with the pace of the probes beside it. The simulation is given what was asked, when and how long; what became
of it is predicted, with that server's scheduler and limits.
"""

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from millrace.bench.analysis.metrics import itl_ms, last_s, latency_ms, ttft_ms
from millrace.bench.client.client import Client
from millrace.bench.client.request_record import Answer
from millrace.bench.load.prompt_text import PromptWords
from millrace.bench.run.plan import Plan, driven_by, fitted_words, planned
from millrace.bench.run.run import Record, Run
from millrace.bench.settings import InputSettings, LoadSettings, SessionSettings, TargetSettings
from millrace.errors import ConfigError, MachineError
from millrace.runtime.scheduling.step_cost_model import SchedulerSettings, StepProfile
from millrace.size.fit.steps import (
    MOST_BYTES,
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
from millrace.size.simulation.simulator import Simulated
from millrace.size.simulation.virtual_clock import Arrival

MEDIAN, P90 = 0.10, 0.25  # errors that are judged: what the figures below are to keep
_TTFT_UP_TO, _UP_TO = 0.8, 0.95  # shares of capacity to which they are
_SIMULATED = 5  # times that a load is, with steps drawn anew
_ROUNDS = 4  # of the closed loop that tells the capacity
_TIMEOUT_S = 30.0
_FEWEST = 8  # requests of a load in a round
Begins = Callable[[Run], None]


@dataclass(frozen=True, slots=True)
class Figure:
    """name: "ttft", "itl", "e2e" (seconds) or "throughput" (requests/s); of: "mean" or "p95"; judged: it counts"""

    name: str
    of: str
    predicted: float
    measured: float
    judged: bool

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True)
class Load:
    """share: of the predicted capacity; rate: requests a second that were to come; paces: beside it, in each round"""

    share: float
    rate: float
    n: int
    paces: tuple[float, ...]
    figures: tuple[Figure, ...]


@dataclass(frozen=True, slots=True)
class Verified:
    """capacity: requests a second with every place taken, simulated. median, p90: errors of what is judged"""

    isa: str
    capacity: float
    profile: StepProfile
    loads: tuple[Load, ...]

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
        """Of each kind of figure by itself: below capacity requests/s are nearly given, and hide what the others do."""
        by_name: dict[str, list[float]] = {}
        for f in (f for load in self.loads for f in load.figures if f.judged):
            by_name.setdefault(f.name, []).append(abs(f.error))
        return {name: float(np.median(errors)) for name, errors in by_name.items()}

    @property
    def holds(self) -> bool:
        return self.median <= MEDIAN and self.p90 <= P90


async def verify(url: str, asked: VerifySettings, model: str = "", begins: Begins = lambda run: None) -> Verified:
    """The server has nobody else to answer. raises ConfigError, MachineError where it does not answer"""
    shares, one = asked.shares, _plan(url, model, asked, 0, concurrency=1, request_count=1).target
    async with Client(one) as client:
        about = await _steps(client, model, 0)
    schedule = about.schedule
    async with Client(replace(one, model=about.model)) as client:
        server = _Server(client, asked, url, about, begins)
        if asked.isl + asked.osl > schedule.max_context:
            raise ConfigError(f"requests of {asked.isl + asked.osl} tokens", f"at most {schedule.max_context}",
                              "lower --isl or --osl")  # fmt: skip
        alone = await server.probe(1)
        probes = [alone.steps + (await server.probe(schedule.max_sequences)).steps + (await server.probe(3)).steps]
        capacity = _capacity(Times.of(probes[0], probes[0], alone, schedule).own, asked)
        asked_of = list[tuple[float, Sequence[Record]]]()
        for share in shares * asked.rounds:
            asked_of.append((share, await server.load(share * capacity)))
            probes.append((await server.probe(3)).steps)
    every = [step for probe in probes for step in probe]
    parts: dict[float, list[Part]] = {share: [] for share in shares}
    for (share, records), (before, after) in zip(asked_of, pairwise(probes), strict=True):
        beside = Times.of(every, [*before, *after], alone, schedule)
        parts[share].append(Part(records, beside.pace, beside.runs(_arrivals(records))))
    loads = [
        Load(share, share * capacity, sum(len(p.records) for p in some), tuple(p.pace for p in some),
             figures(share, some))
        for share, some in parts.items()
    ]  # fmt: skip
    times = Times.of(every, every, alone, schedule)
    profile = StepProfile(
        about.model, about.engine, about.machine, datetime.date.today().isoformat(), len(every),
        float(np.median(np.abs(errors(times.own.cost, every)))), times.own.front_s, times.own.spread,
        times.own.cost, schedule,
    )  # fmt: skip
    return Verified(about.isa, capacity, profile, tuple(loads))


@dataclass(frozen=True, slots=True)
class Probe:
    """What was asked, and the steps that it took."""

    records: Sequence[Record]
    steps: list[StepRow]


@dataclass(frozen=True, slots=True)
class Times:
    """What a simulation goes by. own: usual times of steps, at the pace of some, and their spread beside that"""

    own: MeasuredStepTimes
    pace: float

    @classmethod
    def of(
        cls, every: Sequence[StepRow], near: Sequence[StepRow], alone: Probe, schedule: SchedulerSettings
    ) -> "Times":
        """every: steps that times are fitted to; near: of the same, those whose pace counts; alone: with one request"""
        cost = fit_steps(every)
        slower, alike = pace(cost, near), MeasuredStepTimes(cost.scaled(pace(cost, alone.steps)), (1.0,), 0.0, schedule)
        found = cls(alike, 1.0).runs(_arrivals(alone.records), 1)[0]
        waited = [ttft_ms(record.answer) or 0.0 for record in _in_order(alone.records)]
        front_s = max(0.0, float(np.median(np.array(waited) / 1e3 - found.of("ttft_s"))))
        return cls(MeasuredStepTimes(cost.scaled(slower), spread(cost, near), front_s, schedule), slower)

    def runs(self, arrivals: Sequence[Arrival], n: int = _SIMULATED) -> list[Simulated]:
        """The same requests, with other steps that take longer or shorter than usual."""
        n_input = round(float(np.mean([one.n_input for one in arrivals])))
        return [self.own.simulation(n_input, seed).run(arrivals) for seed in range(n)]


@dataclass(frozen=True, slots=True)
class Part:
    """A load in one round, and simulations of it."""

    records: Sequence[Record]
    pace: float
    simulated: Sequence[Simulated]


class _Server:
    """Whom all loads go to. about: what it said of itself before the first"""

    def __init__(self, client: Client, asked: VerifySettings, url: str, about: MeasuredSteps, begins: Begins) -> None:
        self._client, self._asked, self._url, self.about, self._begins = client, asked, url, about, begins
        self._n_runs, self._last = 0, max((step.step for step in about.steps), default=0)
        self._words: PromptWords | None = None

    async def steps(self) -> list[StepRow]:
        """Those since it was last asked."""
        found = (await _steps(self._client, self.about.model, self._last)).steps
        self._last = max([self._last, *(step.step for step in found)])
        return found

    async def probe(self, concurrency: int) -> Probe:
        """So many requests in flight for a while, and the steps of that while."""
        load: dict[str, float] = {"concurrency": concurrency, "duration_s": self._asked.probe_s}
        records = await self._run(load)
        return Probe(records, await self.steps())

    async def load(self, rate: float) -> Sequence[Record]:
        records = await self._run(arrivals_of(rate, self._asked.each_s))
        await self.steps()  # its steps are no probe's
        return records

    async def _run(self, load: Mapping[str, float]) -> Sequence[Record]:
        """raises MachineError where an answer is none"""
        plan = _plan(self._url, self.about.model, self._asked, self._n_runs, **load)
        self._n_runs += 1
        if self._words is None:
            self._words = await fitted_words(self._client, plan.extra)
        run = await driven_by(self._client, plan, plan.sessions(self._words), self._begins)
        failed = [record.answer for record in run.records if record.answer.failure is not None]
        if run.ended or failed or not run.records:
            why = run.ended or (f"{failed[0].failure}: {failed[0].detail}" if failed else "nothing was asked")
            raise MachineError(f"{len(failed)} of {len(run.records)} requests failed ({why})", "whole answers",
                               "look at the server's log; ask for longer: --each-s")  # fmt: skip
        return run.records


async def _steps(client: Client, model: str, after: int) -> MeasuredSteps:
    """raises MachineError, ConfigError"""
    answer = await client.get(f"{PATH}?after={after}", _TIMEOUT_S, MOST_BYTES)
    if answer.failure is not None:
        raise MachineError(f"the server's {PATH}: {answer.failure} ({answer.detail})",
                           "millrace serve of this release", "check URL and key")  # fmt: skip
    return read_steps(answer.text, model)


def _plan(url: str, model: str, asked: VerifySettings, n: int, **load: float) -> Plan:
    """n: runs before, so that no prompt comes twice"""
    whom = TargetSettings(model=model, endpoint="completions", ignore_eos=True, per_chunk_usage=True,
                          header=asked.header)  # fmt: skip
    given = LoadSettings(random_seed=asked.random_seed * 1000 + n, **load)  # type: ignore[arg-type]
    return planned(url, whom, given, InputSettings(isl=asked.isl, osl=asked.osl), SessionSettings())


def arrivals_of(rate: float, each_s: float) -> dict[str, float]:
    """For so long; of a slow server some requests, however long that takes: within seconds there may come none."""
    if rate * each_s < _FEWEST:
        return {"request_rate": rate, "request_count": _FEWEST}
    return {"request_rate": rate, "duration_s": each_s}


def _capacity(own: MeasuredStepTimes, asked: VerifySettings) -> float:
    """Of a closed loop with every place taken, without its first and last round."""
    places = own.schedule.max_sequences
    n = places * _ROUNDS
    requests = own.simulation(asked.isl).run([Arrival(0, asked.isl, asked.osl)] * n, places).requests
    counted = requests[places : n - places]
    return places / float(np.mean([one.e2e_s for one in counted]))


def _in_order(records: Iterable[Record]) -> list[Record]:
    return sorted(records, key=lambda record: record.answer.sent_s)


def _arrivals(records: Sequence[Record]) -> list[Arrival]:
    """As they were asked: when, and how long."""
    answers = [record.answer for record in _in_order(records)]
    return [Arrival(a.sent_s - answers[0].sent_s, max(1, a.n_prompt or 1), max(1, a.n_output)) for a in answers]


_STATISTICS: dict[str, Callable[[Floats], float]] = {
    "mean": lambda values: float(values.mean()),
    "p95": lambda values: float(np.quantile(values, 0.95)),
}


def figures(share: float, parts: Sequence[Part]) -> tuple[Figure, ...]:
    """Of all parts of a load together; of their simulations the means of figures count."""
    answers = [record.answer for part in parts for record in part.records]
    measured: Mapping[str, Sequence[float | None]] = {
        "ttft": [ttft_ms(a) for a in answers],
        "itl": [itl_ms(a) for a in answers],
        "e2e": [latency_ms(a) for a in answers],
    }
    found: list[Figure] = []
    drawn: list[tuple[Simulated, ...]] = list(
        zip(*(part.simulated for part in parts), strict=True)
    )  # each of all parts, with the same seed
    for name, values in measured.items():
        theirs = np.array([value / 1e3 for value in values if value is not None])
        ours = [np.concatenate([one.of(f"{name}_s") for one in some]) for some in drawn]
        judged = name != "e2e" and share <= (_TTFT_UP_TO if name == "ttft" else _UP_TO)
        for of, what in _STATISTICS.items():
            found.append(Figure(name, of, float(np.mean([what(v) for v in ours])), what(theirs), judged))
    took_s = sum(_took_s([record.answer for record in part.records]) for part in parts)
    ours_s = [sum(max(seen.last_s for seen in one.requests) for one in some) for some in drawn]
    n = len(answers)
    return (*found, Figure("throughput", "mean", n / float(np.mean(ours_s)), n / took_s, share <= _UP_TO))


def _took_s(answers: Sequence[Answer]) -> float:
    return max(last_s(a) for a in answers) - min(a.sent_s for a in answers)
