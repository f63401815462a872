"""Measures inferences of a tensor model at a series of load levels, with the server's own statistics."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

from millrace.bench.analysis.metrics import RunMetrics, compute_metrics
from millrace.bench.client.certify import Certificate, certificate_of, kept_up
from millrace.bench.client.client_load import ClientHealth
from millrace.bench.client.request_record import BenchRecord, BenchRequest, Failure
from millrace.bench.infer.http_transport import HttpTransport
from millrace.bench.infer.inputs import RANDOM, ZERO, batches, parse_shapes, read_items, synthetic
from millrace.bench.infer.model import BenchModel, bounded_int
from millrace.bench.infer.settings import LevelSettings, LoadLevel, ModelSettings, levels
from millrace.bench.infer.target import InferTarget, Transport
from millrace.bench.load.arrivals import Arrivals
from millrace.bench.load.inputs import Session, Turn
from millrace.bench.names import GRPC, HTTP
from millrace.bench.null_server.ledger import NullTiming
from millrace.bench.null_server.process import NullProcess
from millrace.bench.run.plan import parse_headers
from millrace.bench.run.run import Run, RunLoad
from millrace.errors import ConfigError
from millrace.model_repository.request.tensors import InferTensor
from millrace.serve.protocols.kserve.grpc.grpc_dependency import check_grpc

EACH_S, WARM_UP = 5.0, 8
NULL_MS, NULL_PER_S = 20, {HTTP: 1000, GRPC: 500}  # latency and capacity (requests/s) of the null server
_STAGES = ("queue", "compute_input", "compute_infer", "compute_output")
OnRun = Callable[[Run], None]


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """Mean times in ms per request from the server's statistics; per_execution: mean batch size of an execution"""

    n: int
    whole_ms: float
    stages_ms: dict[str, float]
    per_execution: float | None


@dataclass(frozen=True, slots=True)
class LevelMeasurement:
    level: LoadLevel
    metrics: RunMetrics
    effort: ClientHealth
    server: ServerTimes | None


@dataclass(frozen=True, slots=True)
class InferResults:
    """Results of the completed levels. ended: why the run ended early, "" otherwise"""

    target: InferTarget
    model: BenchModel
    points: Sequence[LevelMeasurement]
    certificate: Certificate | None
    ended: str = ""

    @property
    def valid(self) -> bool | None:
        """Whether the client kept up at every level; None if not certified."""
        return kept_up(self.certificate, [p.effort for p in self.points])


@dataclass(frozen=True, slots=True)
class InferPlan:
    target: InferTarget
    model_settings: ModelSettings
    load: LevelSettings
    levels: Sequence[LoadLevel]


def infer_plan(url: str, model_settings: ModelSettings, load: LevelSettings) -> InferPlan:
    """Create a plan. raises ConfigError; mistakes that depend on the model are found by `infer`"""
    if not model_settings.model:
        raise ConfigError("there is no --model", "the name of a model that the server has", "give it")
    if model_settings.protocol == GRPC:
        check_grpc("--protocol grpc", "take http")
    parse_shapes(model_settings.shape)
    binary, headers = model_settings.tensor_format == "binary", parse_headers(model_settings.header)
    if model_settings.protocol == GRPC:
        from millrace.bench.infer.grpc_transport import check_headers  # an extra

        check_headers(headers)
    target = InferTarget(
        url,
        model_settings.model,
        model_settings.model_version,
        model_settings.protocol,
        binary,
        headers,
        model_settings.timeout_s,
    )
    return InferPlan(target, model_settings, load, levels(load))


async def infer(plan: InferPlan, certify_s: float, on_run: OnRun = lambda run: None) -> InferResults:
    """Measure all levels; Ctrl-C ends the current one, which is discarded. raises ConfigError, MachineError"""
    points, ended, certificate = list[LevelMeasurement](), "", None
    async with transport(plan.target, _max_concurrency(plan.levels)) as server:
        model = await server.model()
        shaped = _inputs_of(plan, model)  # finds mistakes before anything is measured
        if certify_s:
            certificate = await _certify(plan, shaped, certify_s)
        bodies: dict[int, list[Any]] = {}
        for level in plan.levels:
            if level.batch not in bodies:
                bodies = {level.batch: [server.body(tensors) for tensors in shaped(level.batch)]}
            asker = _LoadWorker(server, bodies[level.batch], level.batch, bool(model.max_batch))
            run, times = await _measure_level(asker, plan.load, level, on_run)
            if run.ended == "Ctrl-C":
                ended = run.ended
                break
            points.append(LevelMeasurement(level, compute_metrics(run.records), ClientHealth.from_run(run), times))
            if run.ended:
                ended = f"{level.description}: {run.ended}"
                break
    return InferResults(plan.target, model, points, certificate, ended)


def transport(target: InferTarget, at_a_time: int) -> Transport:
    if target.protocol == GRPC:
        from millrace.bench.infer.grpc_transport import GrpcTransport  # an extra

        return GrpcTransport(target, at_a_time)
    return HttpTransport(target)


def _max_concurrency(load_levels: Sequence[LoadLevel]) -> int:
    return max(level.concurrency or round(level.rate or 1) for level in load_levels)


def _inputs_of(plan: InferPlan, model: BenchModel) -> Callable[[int], list[list[InferTensor]]]:
    """Return a function from batch size to requests; all sizes are checked here. raises ConfigError"""
    settings, kind = plan.model_settings, plan.model_settings.input_data
    for size in {level.batch for level in plan.levels}:
        model.check_batch(size)
    is_synthetic = kind in (RANDOM, ZERO)
    model = model.with_shapes(parse_shapes(settings.shape), free_ends=not is_synthetic)
    if is_synthetic:
        return lambda size: synthetic(model, size, kind, settings.string_length, plan.load.random_seed)
    items = read_items(Path(kind), model)
    return lambda size: batches(model, size, items)


class _LoadWorker:
    """A client that sends the given requests in turn. in_batches: outputs have a batch dimension"""

    def __init__(self, server: Transport, bodies: Sequence[Any], batch: int, in_batches: bool = False) -> None:
        self.server, self._bodies, self._batch, self._number = server, bodies, batch, count()
        self._in_batches = in_batches

    async def ask(self, question: BenchRequest, answer: BenchRecord | None = None) -> BenchRecord:
        answer = answer or BenchRecord()
        await self.server.send(self._bodies[next(self._number) % len(self._bodies)], answer)
        if answer.failure is None:
            if self._in_batches and answer.n_reported != self._batch:
                n = "not the same" if answer.n_reported is None else answer.n_reported
                answer.fail(Failure.MALFORMED, f"its outputs' first dimension is {n}, for a batch of {self._batch}")
            answer.n_reported = self._batch
        return answer


async def _measure_level(
    asker: _LoadWorker, load: LevelSettings, level: LoadLevel, on_run: OnRun, ramp_s: float = 0.0
) -> tuple[Run, ServerTimes | None]:
    """Measure one level: warm-up, then the run between two snapshots of the server's statistics. ramp_s: ramp-up
    time"""
    n_warm, at_a_time = load.warmup_request_count, level.concurrency or 1
    n_warm = max(WARM_UP, at_a_time) if n_warm is None else n_warm  # opens all connections
    if n_warm:
        warming = Run(asker, RunLoad(at_a_time, n_sessions=n_warm))
        on_run(warming)
        await warming.drive(_sessions())
        if warming.ended:
            return warming, None
    before = await asker.server.statistics()
    duration_s = load.duration_s or (None if load.request_count else EACH_S)
    arrivals = Arrivals(level.rate, load.arrival_pattern) if level.rate else None
    run = Run(
        asker, RunLoad(level.concurrency, arrivals, load.request_count, duration_s, ramp_s, seed=load.random_seed)
    )
    on_run(run)
    await run.drive(_sessions())
    return run, _between(before, await asker.server.statistics())


def _sessions() -> Iterator[Session]:
    """Yield sessions without end; the client chooses the request bodies."""
    while True:
        yield _ONE


_ONE = Session((Turn("", 1),))


def _between(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> ServerTimes | None:
    """Return the difference of two statistics, which includes requests of other clients."""

    def grown(*path: str) -> int:
        values: list[int] = []
        for statistics in (before, after):
            value: Any = statistics
            for name in path:
                value = value[name]
            values.append(bounded_int(value, values[-1] if values else 0, 2**64 - 1))  # counters do not go back
        return values[1] - values[0]

    try:
        n = grown("inference_stats", "success", "count")
        whole_ns = grown("inference_stats", "success", "ns")
        stages_ns = {name: grown("inference_stats", name, "ns") for name in _STAGES}
        items, executions = grown("inference_count"), grown("execution_count")
    except (TypeError, KeyError, ValueError):  # no statistics, or of another server
        return None
    if n < 1:
        return None
    stages = {name: ns / n / 1e6 for name, ns in stages_ns.items()}
    return ServerTimes(n, whole_ns / n / 1e6, stages, items / executions if executions > 0 else None)


async def _certify(plan: InferPlan, inputs: Callable[[int], list[list[InferTensor]]], seconds: float) -> Certificate:
    """Run the heaviest level on the null server. raises MachineError if that does not start"""
    heaviest = max(plan.levels, key=lambda level: (level.concurrency or level.rate or 0, level.batch))
    max_per_s = NULL_PER_S[plan.target.protocol]
    latency_ms = max(NULL_MS, 1e3 * (heaviest.concurrency or 0) / max_per_s)
    null = NullProcess(NullTiming(str(latency_ms), "0"), over_grpc=plan.target.protocol == GRPC)
    with null:
        url = null.grpc_url if plan.target.protocol == GRPC else null.url
        target = replace(plan.target, url=url, model="any", version="", headers={})
        rate = min(heaviest.rate, max_per_s) if heaviest.rate else None
        load = replace(plan.load, duration_s=seconds, request_count=None)
        async with transport(target, _max_concurrency([heaviest])) as server:
            bodies = [server.body(tensors) for tensors in islice(inputs(heaviest.batch), 4)]
            level, ramp_s = replace(heaviest, rate=rate), latency_ms / 1e3  # or all would be answered at the same time
            run, _ = await _measure_level(
                _LoadWorker(server, bodies, heaviest.batch), load, level, lambda run: None, ramp_s
            )
        return certificate_of(run, null.truth)
