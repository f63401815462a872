"""Backend of a repository of tensor models; routes below /v2 find its models by name."""

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from millrace.model_repository.lifecycle.lifecycle import ModelRepository
from millrace.model_repository.lifecycle.operation_flags import OperationFlags
from millrace.model_repository.metrics.triton_metrics import (
    MachineMetrics,
    cache_metrics,
    failed_metrics,
    model_metrics,
)
from millrace.model_repository.models.repository_context import RepositoryContext
from millrace.model_repository.repository.repository_flags import RepositoryFlags
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.prometheus import MetricFamily
from millrace.serve.backend import Backend, ServedModel
from millrace.serve.http.bounded_executor import BoundedExecutor
from millrace.serve.http.connection_limits import number_of_connections
from millrace.serve.http.http_request import BufferedRequestLog
from millrace.serve.http.request_bodies import BodyLimiter
from millrace.serve.http.server_context import OFF_LOOP_BODY, ServerContext
from millrace.serve.ops.health import Heartbeat
from millrace.serve.protocols.kserve.restricted_apis import RestrictionFlags
from millrace.serve.protocols.kserve.shared_memory import SharedMemoryRegions

# Sizes up to which bodies share an executor: work of milliseconds does not wait for work of seconds.
_LANE_BYTES = (1 << 20, 16 << 20)
POLL_S = 0.1  # interval of checks whether models that failed at the start are ready
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _AlwaysHealthy:
    """Constant health of the backend: the event loop that answers is the one that works."""

    healthy: bool = True
    idle: bool = True
    last_step_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RepositoryModel(ServedModel):
    flags: RepositoryFlags
    guards: RestrictionFlags = field(default_factory=RestrictionFlags)
    operations: OperationFlags = field(default_factory=OperationFlags)

    @property
    def names(self) -> tuple[str, ...]:
        """Return no names, because the text protocols do not serve its models."""
        return ()

    def backend(self, serving: ServerContext) -> "RepositoryBackend":
        return RepositoryBackend(self, serving)


class RepositoryBackend(Backend):
    kind_name = "a repository of tensor models"
    failure_text = "tensor models could not be loaded"
    other_endpoints = (
        "ask its models at /v2/models/NAME/infer or /generate; here are those of "
        "`millrace serve MODEL --model-repository DIR`"
    )

    def __init__(self, model: RepositoryModel, serving: ServerContext) -> None:
        self.model, self.settings = model, serving.settings  # and no histograms of tokens
        settings, most = serving.settings, model.flags.http_max_input_size
        self.bodies = BodyLimiter(most, settings.body_timeout_s, max(settings.max_receiving_bytes, 2 * most))
        self._admission = serving.admission
        n_connections = number_of_connections(settings.max_connections)
        # Each request holds a connection until it is answered, which may be never: the rest is left to other protocols,
        # and what one model does not get to other models.
        self._n_open, self._max_open = 0, max(1, n_connections * 3 // 4)
        of_one = min(model.flags.max_model_requests, max(1, n_connections // 2))
        common = RepositoryContext.from_flags(model.operations, serving.tracer)
        self.repository = ModelRepository(replace(model.flags, max_model_requests=of_one), common)
        self.http_guard, self.grpc_guard = model.guards.http(), model.guards.grpc()
        self.shared = SharedMemoryRegions(most) if model.flags.allow_client_shm else None
        self.log = BufferedRequestLog()  # of requests that take microseconds
        names = ("tensors", "large-tensors", "largest-tensors")
        self._lanes = [BoundedExecutor(name, serving.settings.max_preparing) for name in names]
        self._machine = MachineMetrics()

    def start(self) -> None:
        return

    async def warm_up(self) -> str | None:
        return _line(await self.repository.start()) or None

    async def wait_until_recovered(self) -> bool:
        """Wait until all models are ready, by loads and unloads or changed folders; False in mode `none`."""
        if self.repository.flags.model_control_mode == "none":
            return False
        while not self.repository.is_ready():
            await asyncio.sleep(POLL_S)
        return True

    def current_failure(self, at_first: str) -> str:
        return _line(self.repository.unready_reasons())

    def degraded_reason(self) -> str:
        troubles = _line(self.repository.unready_reasons())
        return troubles and f"tensor models are not ready: {troubles}"

    def health(self) -> _AlwaysHealthy:
        return _AlwaysHealthy()

    def collect(self) -> Iterator[MetricFamily]:
        repository = self.repository
        yield from model_metrics(repository.models(), repository.common.metrics_config)
        if repository.common.cache is not None:
            yield from cache_metrics(repository.common.cache)
        yield from failed_metrics(repository.failed())
        yield from self._machine.collect()
        yield from repository.custom.collect()

    async def abort(self, within_s: float) -> None:
        await self.repository.close(within_s)

    async def run_off_loop(self, work: Callable[[], T], n_bytes: int) -> T:
        """Return `work()` on n_bytes, run in an executor if they are many. raises as `BoundedExecutor.run`"""
        if n_bytes <= OFF_LOOP_BODY:
            return work()
        return await self._lanes[bisect_left(_LANE_BYTES, n_bytes)].run(work, n_bytes)

    def is_ready(self, heartbeat: Heartbeat) -> bool:
        """Return whether the server is ready, including all models that were to be loaded, as KServe defines it."""
        return heartbeat.ready().ok

    @property
    def has_room(self) -> bool:
        """Return whether `admitted` would admit another request."""
        return self._n_open < self._max_open and not self._admission.is_draining

    @contextmanager
    def admitted(self, is_control: bool = False) -> Iterator[None]:
        """Admit a request while it is answered. raises BusyError while the server drains, StatusError if too many wait

        is_control: always admit it, so that a model that hangs can be unloaded
        """
        self.enter(is_control)
        try:
            yield
        finally:
            self.leave()

    def enter(self, is_control: bool = False) -> None:
        """Admit a request, until `leave`. raises as `admitted`"""
        if self._admission.is_draining or self._n_open < self._max_open or is_control:
            self._admission.enter()
            self._n_open += 1
            return
        what = f"Exceeds maximum queue size: {self._n_open} requests to tensor models wait for answers"
        raise StatusError(Code.UNAVAILABLE, what)

    def leave(self) -> None:
        """End an admitted request."""
        self._n_open -= 1
        self._admission.leave()

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()
        if self.shared is not None:
            self.shared.close()
        self.log.write()


def _line(troubles: Sequence[str]) -> str:
    return "; ".join(one.removesuffix(";") for one in troubles)
