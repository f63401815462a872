"""The truth loop: a server of this machine under loads, beside a simulation of them by step times fitted meanwhile.

Step times come from probes alone: small closed loops before the first load, between two and after the last, since the
memory bandwidth of a machine moves. Each load is predicted with the pace of the probes beside it. The simulation is
given what was asked, when and how long; what became of it is predicted, with that server's scheduler and limits.
"""

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from millrace.bench.client import Client
from millrace.bench.metrics import itl_ms, last_s, latency_ms, ttft_ms
from millrace.bench.plan import Plan, driven_by, fitted_words, planned
from millrace.bench.run import Record, Run
from millrace.bench.settings import InputSettings, LoadSettings, SessionSettings, TargetSettings
from millrace.bench.words import Words
from millrace.engine.executor import ExecutorLimits
from millrace.errors import ConfigError, MachineError
from millrace.runtime.batch import TokenBudget
from millrace.runtime.step_cost import StepCost, StepProfile
from millrace.settings import Settings, setting
from millrace.size.cost import Floats
from millrace.size.simulator import Simulated, Simulation
from millrace.size.stepfit import MOST_BYTES, PATH, Ran, Schedule, StepRow, errors, fit_steps, pace, read_steps
from millrace.size.virtual import Arrival

MEDIAN, P90 = 0.10, 0.25  # errors that are judged: what the figures below are to keep
_TTFT_UP_TO, _UP_TO = 0.8, 0.95  # shares of capacity to which they are
_ROUNDS = 4  # of the closed loop that tells the capacity
_VOCAB = 1 << 15
_TIMEOUT_S = 30.0
Begins = Callable[[Run], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySettings(Settings):
    """What is asked of the server."""

    isl: int = setting(128, "tokens of a prompt", low=1, high=1 << 20)
    osl: int = setting(64, "tokens of an answer", low=2, high=1 << 20)
    loads: str = setting("0.2,0.4,0.6,0.8,0.95", "shares of the predicted capacity", metavar="SHARE,...")
    each_s: float = setting(20.0, "seconds of each load", low=0.1, high=86_400)
    probe_s: float = setting(4.0, "seconds of each probe between two loads; before the first three", low=0.1, high=3600)
    header: tuple[str, ...] = setting((), "header of each request", metavar="NAME:VALUE")
    random_seed: int = setting(0, "of texts and arrivals", low=0, high=2**62)

    @property
    def shares(self) -> tuple[float, ...]:
        """raises ConfigError"""
        try:
            found = tuple(float(part) for part in self.loads.split(","))
        except ValueError:
            found = ()
        if not 1 <= len(found) <= 20 or not all(0.01 <= share <= 1.5 for share in found):
            raise ConfigError(f'--loads is "{self.loads:.80}"', "1 to 20 shares of 0.01 to 1.5", "write 0.2,0.5,0.8")
        return found


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
    """share: of the predicted capacity; rate: requests a second that were to come; pace: of the probes beside it"""

    share: float
    rate: float
    n: int
    pace: float
    figures: tuple[Figure, ...]


@dataclass(frozen=True, slots=True)
class Verified:
    """capacity: requests a second with every place taken, simulated. median, p90: errors of what is judged"""

    model: str
    precision: str
    isa: str
    capacity: float
    profile: StepProfile
    schedule: Schedule
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
        cost = fit_steps(probes[0])
        front_s = _front_s(cost, schedule, alone.records)
        capacity = _capacity(simulation(cost, schedule, asked.isl, front_s), asked, schedule.max_sequences)
        ran: list[tuple[float, Sequence[Record]]] = []
        for share in shares:
            ran.append((share, await server.load(share * capacity)))
            probes.append((await server.probe(3)).steps)
    every = [step for probe in probes for step in probe]
    cost = fit_steps(every)
    front_s = _front_s(cost.scaled(pace(cost, probes[0])), schedule, alone.records)
    loads = tuple(
        _beside(share, capacity, records, cost, [*before, *after], schedule, front_s)
        for (share, records), (before, after) in zip(ran, pairwise(probes), strict=True)
    )
    profile = StepProfile(
        about.engine, about.machine, datetime.date.today().isoformat(), len(every),
        float(np.median(np.abs(errors(cost, every)))), front_s, cost,
    )  # fmt: skip
    return Verified(about.model, about.precision, about.isa, capacity, profile, schedule, loads)


def simulation(cost: StepCost, schedule: Schedule, n_input: int, front_s: float) -> Simulation:
    """One such server, whose budget knows its steps already, as after a warm-up."""
    s = schedule
    limits = ExecutorLimits(
        max_step_tokens=s.max_step_tokens, max_sequences=s.max_sequences, max_rows=s.max_rows,
        max_context=s.max_context, page_tokens=s.page_tokens, n_pages=s.pages, vocab_size=_VOCAB,
    )  # fmt: skip
    first = min(n_input, s.max_step_tokens)
    budget = TokenBudget(
        s.max_step_tokens, s.gap_limit_s, s.chunk_low, s.stretch,
        cost.seconds((), (), 1, n_input), cost.seconds([first], [0], 0, 0) / first,
    )  # fmt: skip
    return Simulation(limits, cost.seconds, budget, prefix_cache=False, front_s=front_s, between=cost.between)


@dataclass(frozen=True, slots=True)
class _Probe:
    records: Sequence[Record]
    steps: list[StepRow]


class _Server:
    """Whom all loads go to. about: what it said of itself before the first"""

    def __init__(self, client: Client, asked: VerifySettings, url: str, about: Ran, begins: Begins) -> None:
        self._client, self._asked, self._url, self.about, self._begins = client, asked, url, about, begins
        self._n_runs, self._last = 0, max((step.step for step in about.steps), default=0)
        self._words: Words | None = None

    async def steps(self) -> list[StepRow]:
        """Those since it was last asked."""
        found = (await _steps(self._client, self.about.model, self._last)).steps
        self._last = max([self._last, *(step.step for step in found)])
        return found

    async def probe(self, concurrency: int) -> _Probe:
        """So many requests in flight for a while, and the steps of that while."""
        load: dict[str, float] = {"concurrency": concurrency, "duration_s": self._asked.probe_s}
        records = await self._run(load)
        return _Probe(records, await self.steps())

    async def load(self, rate: float) -> Sequence[Record]:
        records = await self._run({"request_rate": rate, "duration_s": self._asked.each_s})
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


async def _steps(client: Client, model: str, after: int) -> Ran:
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


def _capacity(server: Simulation, asked: VerifySettings, places: int) -> float:
    """Of a closed loop, without its first and last round."""
    n = places * _ROUNDS
    requests = server.run([Arrival(0, asked.isl, asked.osl)] * n, places).requests
    counted = requests[places : n - places]
    return places / float(np.mean([one.e2e_s for one in counted]))


def _front_s(cost: StepCost, schedule: Schedule, records: Sequence[Record]) -> float:
    """What a request alone waits for beside its steps."""
    found = simulation(cost, schedule, records[0].answer.n_prompt or 1, 0.0).run(_arrivals(records))
    waited = [ttft / 1e3 for r in _in_order(records) if (ttft := ttft_ms(r.answer)) is not None]
    return max(0.0, float(np.median(np.array(waited) - found.of("ttft_s"))))


def _in_order(records: Iterable[Record]) -> list[Record]:
    return sorted(records, key=lambda record: record.answer.sent_s)


def _arrivals(records: Sequence[Record]) -> list[Arrival]:
    """As they were asked: when, and how long."""
    answers = [record.answer for record in _in_order(records)]
    return [Arrival(a.sent_s - answers[0].sent_s, max(1, a.n_prompt or 1), max(1, a.n_output)) for a in answers]


def _beside(
    share: float, capacity: float, records: Sequence[Record], cost: StepCost, probes: Sequence[StepRow],
    schedule: Schedule, front_s: float,
) -> Load:  # fmt: skip
    slower = pace(cost, probes)
    arrivals = _arrivals(records)
    n_input = round(float(np.mean([one.n_input for one in arrivals])))
    found = simulation(cost.scaled(slower), schedule, n_input, front_s).run(arrivals)
    return Load(share, share * capacity, len(records), slower, _figures(share, records, found))


def _figures(share: float, records: Sequence[Record], found: Simulated) -> tuple[Figure, ...]:
    answers = [record.answer for record in records]
    measured = {"ttft": [ttft_ms(a) for a in answers], "itl": [itl_ms(a) for a in answers],
                "e2e": [latency_ms(a) for a in answers]}  # fmt: skip
    figures: list[Figure] = []
    for name, values in measured.items():
        theirs = np.array([value / 1e3 for value in values if value is not None])
        ours, counts = found.of(f"{name}_s"), share <= _TTFT_UP_TO if name == "ttft" else share <= _UP_TO
        judged = counts and name != "e2e"
        figures += [
            Figure(name, "mean", float(ours.mean()), float(theirs.mean()), judged),
            Figure(name, "p95", float(np.quantile(ours, 0.95)), float(np.quantile(theirs, 0.95)), judged),
        ]
    begun, ended = min(a.sent_s for a in answers), max(last_s(a) for a in answers)
    took_s = max(one.last_s for one in found.requests)
    n = len(answers)
    return (*figures, Figure("throughput", "mean", n / took_s, n / (ended - begun), share <= _UP_TO))
