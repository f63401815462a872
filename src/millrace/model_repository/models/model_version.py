"""A loaded version of a model, as protocols see it: request validation, responses, statistics, tracing.

`backend_model.py` holds models computed by a backend, `ensemble.py` models composed of other models.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.lifecycle.load_override import OverrideFolder
from millrace.model_repository.metrics.statistics import ModelStatistics
from millrace.model_repository.models.repository_context import RepositoryContext
from millrace.model_repository.request.infer_request import (
    InferRequest,
    InferResponse,
    Receiver,
    RequestTiming,
)
from millrace.model_repository.request.request_validation import RequestValidator
from millrace.model_repository.request.reshape import OutputReshaper
from millrace.model_repository.request.response_cache import LocalResponseCache, cache_key
from millrace.model_repository.request.status_code import Code, StatusError

NO_RESPONSE = "received an unexpected null response"


@dataclass(frozen=True, slots=True)
class ModelVersionSource:
    """A model version to load, as found in a repository. config: completed, also by the backend"""

    name: str
    version: int
    config: ModelConfig
    folder: Path
    labels: Mapping[str, Sequence[str]]  # of an output
    max_requests: int  # unanswered requests at a time; further ones are rejected
    common: RepositoryContext = field(default_factory=RepositoryContext)
    namespace: str = ""  # as `ModelId` has it


class Model(ABC):
    """Base class of loaded models. Everything here runs in one event loop."""

    def __init__(self, source: ModelVersionSource, loop: asyncio.AbstractEventLoop, *, ragged: bool = False) -> None:
        """ragged: as `RequestValidator` has it"""
        self.name, self.version, self.config, self.labels = source.name, source.version, source.config, source.labels
        self.namespace = source.namespace
        cached = bool(source.config.response_cache and source.config.response_cache.enable)
        self.cache = source.common.cache if cached else None
        self._tracer = source.common.tracer
        self._override_folder: OverrideFolder | None = None
        self._loading = object()  # unique for each load
        self.checker = RequestValidator(source.config, ragged, self.cache is not None)
        self._reshaped = OutputReshaper(source.config)
        self.is_decoupled = bool(
            source.config.model_transaction_policy and source.config.model_transaction_policy.decoupled
        )
        self.statistics = ModelStatistics.from_config(
            source.config, source.common.metrics_config, is_decoupled=self.is_decoupled
        )
        self.unread_bytes = 0  # of unread responses, counted by `response_stream.py`
        self._loop, self._max_open = loop, source.max_requests
        self._n_open = 0  # accepted requests without a final response
        self._n_pins = 0
        self._is_retired = False
        self.load_s = 0.0  # load time

    # ------------------------------------------------------------------ its life

    @abstractmethod
    async def loaded(self) -> None:
        """Wait until it is loaded. raises StatusError, after releasing everything, if it fails to load"""

    @abstractmethod
    async def retire(self) -> None:
        """Finish the accepted requests and unload. Only requests of pinning ensembles are accepted from now on."""

    @abstractmethod
    def abort(self) -> None:
        """End waiting requests without waiting for those in execution."""

    def pin(self) -> None:
        """Keep it loaded until `release`: a request to an ensemble has started and will reach this model."""
        self._n_pins += 1

    def release(self) -> None:
        self._n_pins -= 1
        self._close_if_done()

    def attach_override_folder(self, folder: OverrideFolder) -> None:
        """Hold the folder that it was loaded from until it is unloaded."""
        folder.hold()
        self._override_folder = folder

    def _unloaded(self) -> None:
        """Release the override folder at the end of `retire`."""
        if self._override_folder is not None:
            self._override_folder.release()
            self._override_folder = None

    @property
    def _is_over(self) -> bool:
        return self._is_retired and not self._n_open and not self._n_pins

    @abstractmethod
    def _close_if_done(self) -> None:
        """Unload it if it `_is_over` and no instance computes."""

    @property
    def is_ready(self) -> bool:
        """Whether any instance can compute requests now."""
        return True

    @property
    def unready_reason(self) -> str:
        """Why it is not, or only partly, ready; empty if all instances are ready."""
        return ""

    # ------------------------------------------------------------------ requests

    @property
    @abstractmethod
    def n_pending(self) -> int:
        """Number of requests that are not in execution yet."""

    def submit(self, request: InferRequest, receive: Receiver) -> None:
        """Submit a validated request. receive: called in the event loop. raises StatusError if full or unloaded"""
        try:
            response = self._infer_inline(request)
        except StatusError as error:
            receive(None, error, True)
            return
        if response is not None:
            receive(response, None, True)
            return
        self._submit(request, receive)

    def _submit(self, request: InferRequest, receive: Receiver) -> None:
        """Submit a request that is not computed inline. raises as `submit`"""
        now_ns = time.monotonic_ns()
        request.receive = receive
        request.received_ns = request.received_ns or now_ns
        if self._tracer.is_on:
            self._tracer.begin(request, self.name)
        try:
            if self._is_retired and not self._n_pins:  # retired while a thread was parsing the request
                message = f"Request for unknown model: '{self.name}' version {self.version} is not at ready state"
                raise StatusError(Code.UNAVAILABLE, message)
            if self._n_open >= self._max_open:  # bounds what a model that never answers can occupy
                message = f"Exceeds maximum queue size: {self._n_open} requests to model '{self.name}' wait for answers"
                raise StatusError(Code.UNAVAILABLE, request.error_prefix + message)
            if self.cache is not None and not self.is_decoupled and self._answer_from_cache(self.cache, request):
                return
            self._enqueue(request, now_ns)
        except StatusError as error:
            self.statistics.record_failure(request, now_ns, "REJECTED")
            self._end_trace(request, now_ns, error)
            raise
        self._n_open += 1
        self._start(request, now_ns)

    @property
    def cache_identity(self) -> object:
        """A value that changes with each load of the model or, for an ensemble, of a member: part of cache keys."""
        return self._loading

    def _answer_from_cache(self, cache: LocalResponseCache, request: InferRequest) -> bool:
        """Respond from the cache and return True; otherwise arrange for the response to be cached."""
        receive, began_ns = request.receive, time.monotonic_ns()
        assert receive is not None, "it was submitted"
        key = cache_key(self.cache_identity, request)
        cached_response = cache.get(key)
        looked_ns = time.monotonic_ns()
        if cached_response is not None:
            request.finished = True
            self.statistics.record_cache_hit(request, began_ns, looked_ns)
            self._end_trace(request, looked_ns)
            receive(cached_response, None, True)
            return True

        def store_response(response: InferResponse | None, error: StatusError | None, final: bool) -> None:
            if response is not None and error is None and final:
                now_ns = time.monotonic_ns()
                cache.put(key, response)
                took_ns = looked_ns - began_ns + time.monotonic_ns() - now_ns
                self.statistics.stages["cache_miss"].add(took_ns)
            receive(response, error, final)

        request.receive = store_response
        return False

    @abstractmethod
    def _enqueue(self, request: InferRequest, now_ns: int) -> None:
        """Queue a request. raises StatusError if the queue is full"""

    @abstractmethod
    def _start(self, request: InferRequest, now_ns: int) -> None:
        """Start computing queued requests; may respond immediately."""

    @abstractmethod
    def cancel(self, request: InferRequest) -> None:
        """Cancel a request. A request that is not in execution ends immediately."""

    def _infer_inline(self, request: InferRequest) -> InferResponse | None:
        """Compute a validated request in this thread if nothing is queued and an instance runs inline; None: submit it.

        raises StatusError
        """
        return None

    async def infer(self, request: InferRequest) -> InferResponse:
        """Return the response of a model that is not decoupled. raises StatusError; propagates cancellation"""
        if (response := self._infer_inline(request)) is not None:
            return response
        done: asyncio.Future[InferResponse] = self._loop.create_future()

        def settle(response: InferResponse | None, error: StatusError | None) -> None:
            if done.done():
                return
            if response is not None:
                done.set_result(response)
            elif error is not None:
                done.set_exception(error)

        self._submit(request, only_response(settle))
        try:
            return await done
        except asyncio.CancelledError:
            self.cancel(request)
            raise

    def _prepare_response(
        self, request: InferRequest, response: InferResponse, error: StatusError | None
    ) -> tuple[InferResponse | None, StatusError | None]:
        """Reshape, trace and count a response; return it, or the error in its place."""
        if self._reshaped:
            try:
                response = self._reshaped.reshape(request.error_prefix, response)
            except StatusError as unfit:
                return None, unfit
        request.n_responses += 1
        if request.trace is not None:
            request.trace.add_response(response)
        if request.n_responses == 1 and self.statistics.first_response is not None:
            self.statistics.first_response.add(time.monotonic_ns() - request.received_ns)
        return response, error

    def _finished(self, request: InferRequest, error: StatusError | None, now_ns: int) -> None:
        request.finished = True
        self._n_open -= 1
        self._end_trace(request, now_ns, error)
        if error is None and not request.has_failed:
            self.statistics.record_success(request, now_ns)
            return
        reason = "CANCELED" if request.cancelled else "BACKEND" if request.started_ns else "REJECTED"
        self.statistics.record_failure(request, now_ns, reason)

    def _end_trace(self, request: InferRequest, done_ns: int, error: StatusError | None = None) -> None:
        """Record the end of a request in its timings and its trace."""
        if request.timings is not None:
            times = request.queued_ns, request.started_ns, request.computing_ns, request.computed_ns, done_ns
            request.timings.append(RequestTiming(self.name, *times))
        if request.trace is not None:
            self._tracer.end(request, self.name, self.version, done_ns, error)

    def statistics_dict(self) -> dict[str, Any]:
        return self.statistics.to_dict(self.name, self.version)


def only_response(settle: Callable[[InferResponse | None, StatusError | None], None]) -> Receiver:
    """Return a receiver for the single response, or error, of a model that is not decoupled."""

    def receive(response: InferResponse | None, error: StatusError | None, final: bool) -> None:
        if error is not None:
            settle(None, error)
        elif final:
            settle(response, None if response is not None else StatusError(Code.INTERNAL, NO_RESPONSE))

    return receive
