"""Inferences of a model at one level of load after another: how many a second, how long, and what the server says."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

from millrace.bench.analysis.metrics import Metrics, measured
from millrace.bench.client.certify import Certificate, certificate_of, kept_up
from millrace.bench.client.client_load import Effort
from millrace.bench.client.request_record import Answer, Failure, Question
from millrace.bench.infer.http_transport import OverHttp
from millrace.bench.infer.inputs import RANDOM, ZERO, batches, parse_shapes, read_items, synthetic
from millrace.bench.infer.model import Model, whole
from millrace.bench.infer.settings import Level, LevelSettings, ModelSettings, levels
from millrace.bench.infer.target import InferTarget, Transport
from millrace.bench.load.arrivals import Arrivals
from millrace.bench.load.inputs import Session, Turn
from millrace.bench.names import GRPC, HTTP
from millrace.bench.null_server.ledger import NullTiming
from millrace.bench.null_server.process import NullProcess
from millrace.bench.run.plan import parsed_headers
from millrace.bench.run.run import Load, Run
from millrace.errors import ConfigError
from millrace.model_repository.request.tensors import Tensor
from millrace.serve.protocols.kserve.grpc.extra import check_grpc

EACH_S, WARM_UP = 5.0, 8
NULL_MS, NULL_PER_S = 20, {HTTP: 1000, GRPC: 500}  # requests that the null server itself can bear
_STAGES = ("queue", "compute_input", "compute_infer", "compute_output")
OnRun = Callable[[Run], None]


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """Of the server's own statistics, ms for each request; per_execution: items that it computed together"""

    n: int
    whole_ms: float
    stages_ms: dict[str, float]
    per_execution: float | None


@dataclass(frozen=True, slots=True)
class Point:
    level: Level
    metrics: Metrics
    effort: Effort
    server: ServerTimes | None


@dataclass(frozen=True, slots=True)
class InferResults:
    """points: of the levels that were reached; ended: why not of all, else "" """

    target: InferTarget
    model: Model
    points: Sequence[Point]
    certificate: Certificate | None
    ended: str = ""

    @property
    def valid(self) -> bool | None:
        """Whether the client kept up at every level. None: as far as is known"""
        return kept_up(self.certificate, [p.effort for p in self.points])


@dataclass(frozen=True, slots=True)
class InferPlan:
    target: InferTarget
    what: ModelSettings
    load: LevelSettings
    levels: Sequence[Level]


def infer_plan(url: str, what: ModelSettings, load: LevelSettings) -> InferPlan:
    """raises ConfigError; what only the model can tell is said in `infer`"""
    if not what.model:
        raise ConfigError("there is no --model", "the name of a model that the server has", "give it")
    if what.protocol == GRPC:
        check_grpc("--protocol grpc", "take http")
    parse_shapes(what.shape)
    binary, headers = what.tensor_format == "binary", parsed_headers(what.header)
    if what.protocol == GRPC:
        from millrace.bench.infer.grpc_transport import check_headers  # an extra

        check_headers(headers)
    target = InferTarget(url, what.model, what.model_version, what.protocol, binary, headers, what.timeout_s)
    return InferPlan(target, what, load, levels(load))


async def infer(plan: InferPlan, certify_s: float, on_run: OnRun = lambda run: None) -> InferResults:
    """All levels; Ctrl-C ends the one that runs, which is not counted. raises ConfigError, MachineError"""
    points, ended, certificate = list[Point](), "", None
    async with transport(plan.target, _most_at_a_time(plan.levels)) as server:
        model = await server.model()
        shaped = _inputs_of(plan, model)  # mistakes show before anything is measured
        if certify_s:
            certificate = await _certified(plan, shaped, certify_s)
        bodies: dict[int, list[Any]] = {}
        for level in plan.levels:
            if level.batch not in bodies:
                bodies = {level.batch: [server.body(tensors) for tensors in shaped(level.batch)]}
            asker = _LoadWorker(server, bodies[level.batch], level.batch, bool(model.max_batch))
            run, times = await _measured(asker, plan.load, level, on_run)
            if run.ended == "Ctrl-C":
                ended = run.ended
                break
            points.append(Point(level, measured(run.records), Effort.of(run), times))
            if run.ended:
                ended = f"{level.says}: {run.ended}"
                break
    return InferResults(plan.target, model, points, certificate, ended)


def transport(target: InferTarget, at_a_time: int) -> Transport:
    if target.protocol == GRPC:
        from millrace.bench.infer.grpc_transport import OverGrpc  # an extra

        return OverGrpc(target, at_a_time)
    return OverHttp(target)


def _most_at_a_time(of: Sequence[Level]) -> int:
    return max(level.concurrency or round(level.rate or 1) for level in of)


def _inputs_of(plan: InferPlan, model: Model) -> Callable[[int], list[list[Tensor]]]:
    """Requests of a batch size, all of which are tried here. raises ConfigError"""
    what, kind = plan.what, plan.what.input_data
    for size in {level.batch for level in plan.levels}:
        model.check_batch(size)
    drawn = kind in (RANDOM, ZERO)
    model = model.shaped(parse_shapes(what.shape), free_ends=not drawn)
    if drawn:
        return lambda size: synthetic(model, size, kind, what.string_length, plan.load.random_seed)
    items = read_items(Path(kind), model)
    return lambda size: batches(model, size, items)


class _LoadWorker:
    """Sends the same requests in turns; whatever a run asks of it. in_batches: answers have the batch as their first
    dimension"""

    def __init__(self, server: Transport, bodies: Sequence[Any], batch: int, in_batches: bool = False) -> None:
        self.server, self._bodies, self._batch, self._number = server, bodies, batch, count()
        self._in_batches = in_batches

    async def ask(self, question: Question, answer: Answer | None = None) -> Answer:
        answer = answer or Answer()
        await self.server.send(self._bodies[next(self._number) % len(self._bodies)], answer)
        if answer.failure is None:
            if self._in_batches and answer.n_told != self._batch:
                n = "not the same" if answer.n_told is None else answer.n_told
                answer.fail(Failure.MALFORMED, f"its outputs' first dimension is {n}, for a batch of {self._batch}")
            answer.n_told = self._batch
        return answer


async def _measured(
    asker: _LoadWorker, load: LevelSettings, level: Level, on_run: OnRun, ramp_s: float = 0.0
) -> tuple[Run, ServerTimes | None]:
    """One level: warm-up, and the run between two looks at the server's statistics. ramp_s: in which users begin"""
    n_warm, at_a_time = load.warmup_request_count, level.concurrency or 1
    n_warm = max(WARM_UP, at_a_time) if n_warm is None else n_warm  # which opens all connections
    if n_warm:
        warming = Run(asker, Load(at_a_time, n_sessions=n_warm))
        on_run(warming)
        await warming.drive(_sessions())
        if warming.ended:
            return warming, None
    before = await asker.server.statistics()
    duration_s = load.duration_s or (None if load.request_count else EACH_S)
    arrivals = Arrivals(level.rate, load.arrival_pattern) if level.rate else None
    run = Run(asker, Load(level.concurrency, arrivals, load.request_count, duration_s, ramp_s, seed=load.random_seed))
    on_run(run)
    await run.drive(_sessions())
    return run, _between(before, await asker.server.statistics())


def _sessions() -> Iterator[Session]:
    """Without end; what is in a request the asker knows."""
    while True:
        yield _ONE


_ONE = Session((Turn("", 1),))


def _between(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> ServerTimes | None:
    """What the statistics have grown by; what others asked meanwhile is in it."""

    def grown(*path: str) -> int:
        values: list[int] = []
        for told in (before, after):
            found: Any = told
            for name in path:
                found = found[name]
            values.append(whole(found, values[-1] if values else 0, 2**64 - 1))  # counters do not go back
        return values[1] - values[0]

    try:
        n = grown("inference_stats", "success", "count")
        whole_ns = grown("inference_stats", "success", "ns")
        stages_ns = {name: grown("inference_stats", name, "ns") for name in _STAGES}
        items, executions = grown("inference_count"), grown("execution_count")
    except (TypeError, KeyError, ValueError):  # none, or another server's
        return None
    if n < 1:
        return None
    stages = {name: ns / n / 1e6 for name, ns in stages_ns.items()}
    return ServerTimes(n, whole_ns / n / 1e6, stages, items / executions if executions > 0 else None)


async def _certified(plan: InferPlan, inputs: Callable[[int], list[list[Tensor]]], seconds: float) -> Certificate:
    """The heaviest level on the null server, with its own tensors. raises MachineError where that does not start"""
    heaviest = max(plan.levels, key=lambda level: (level.concurrency or level.rate or 0, level.batch))
    most_per_s = NULL_PER_S[plan.target.protocol]
    latency_ms = max(NULL_MS, 1e3 * (heaviest.concurrency or 0) / most_per_s)
    null = NullProcess(NullTiming(str(latency_ms), "0"), over_grpc=plan.target.protocol == GRPC)
    with null:
        url = null.grpc_url if plan.target.protocol == GRPC else null.url
        target = replace(plan.target, url=url, model="any", version="", headers={})
        rate = min(heaviest.rate, most_per_s) if heaviest.rate else None
        load = replace(plan.load, duration_s=seconds, request_count=None)
        async with transport(target, _most_at_a_time([heaviest])) as server:
            bodies = [server.body(tensors) for tensors in islice(inputs(heaviest.batch), 4)]
            level, ramp_s = replace(heaviest, rate=rate), latency_ms / 1e3  # or all would be answered at the same time
            run, _ = await _measured(_LoadWorker(server, bodies, heaviest.batch), load, level, lambda run: None, ramp_s)
        return certificate_of(run, null.truth)
