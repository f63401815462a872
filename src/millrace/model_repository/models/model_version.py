"""One version of a model, loaded, as protocols see it: what a request to it must be, its answers, its statistics.

`backend_model.py` has models that a backend computes, `ensemble.py` those that are made of other models.
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
from millrace.model_repository.metrics.statistics import Statistics
from millrace.model_repository.models.repository_context import RepositoryContext
from millrace.model_repository.request.infer_request import (
    InferRequest,
    InferResponse,
    Parameter,
    Receiver,
    RequestTiming,
)
from millrace.model_repository.request.request_validation import RequestValidator
from millrace.model_repository.request.reshape import OutputReshaper
from millrace.model_repository.request.response_cache import ResponseCache, key_of
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.model_repository.request.tensors import Array

NO_RESPONSE = "received an unexpected null response"


@dataclass(frozen=True, slots=True)
class ModelVersionSource:
    """A version as it is found in a repository. config: completed by its backend, too"""

    name: str
    version: int
    config: ModelConfig
    folder: Path
    labels: Mapping[str, Sequence[str]]  # of an output
    max_requests: int  # that wait for answers; further ones are refused
    common: RepositoryContext = field(default_factory=RepositoryContext)
    namespace: str = ""  # as `ModelId` has it


class Model(ABC):
    """Of one event loop, in which everything here runs."""

    def __init__(self, of: ModelVersionSource, loop: asyncio.AbstractEventLoop, *, ragged: bool = False) -> None:
        """ragged: as `RequestValidator` has it"""
        self.name, self.version, self.config, self.labels = of.name, of.version, of.config, of.labels
        self.namespace = of.namespace
        cached = bool(of.config.response_cache and of.config.response_cache.enable)
        self.cache = of.common.cache if cached else None
        self._tracer = of.common.tracer
        self._brought: OverrideFolder | None = None
        self._loading = object()  # another one each time
        self.checker = RequestValidator(of.config, ragged, self.cache is not None)
        self._reshaped = OutputReshaper(of.config)
        self.is_decoupled = bool(of.config.model_transaction_policy and of.config.model_transaction_policy.decoupled)
        self.statistics = Statistics.of(of.config, of.common.measures, is_decoupled=self.is_decoupled)
        self.unread_bytes = 0  # of responses that wait for their readers: `response_stream.py` counts them
        self._loop, self._max_open = loop, of.max_requests
        self._n_open = 0  # requests that were taken and not answered to the end
        self._n_holds = 0
        self._is_retired = False
        self.load_s = 0.0  # that loading it took

    # ------------------------------------------------------------------ its life

    @abstractmethod
    async def loaded(self) -> None:
        """raises StatusError, and nothing of it is left, where it cannot be loaded"""

    @abstractmethod
    async def retire(self) -> None:
        """Answer what it has taken, and unload. It is given nothing any more, but by those who hold it."""

    @abstractmethod
    def abort(self) -> None:
        """End what waits; what is being computed is left behind."""

    def pin(self) -> None:
        """A request to an ensemble has begun, and will come here: until `release` it is not unloaded."""
        self._n_holds += 1

    def release(self) -> None:
        self._n_holds -= 1
        self._close_if_done()

    def attach_override_folder(self, folder: OverrideFolder) -> None:
        """It was loaded from there, and may read it until it is unloaded."""
        folder.hold()
        self._brought = folder

    def _unloaded(self) -> None:
        """At the end of `retire`."""
        if self._brought is not None:
            self._brought.release()
            self._brought = None

    @property
    def _is_over(self) -> bool:
        return self._is_retired and not self._n_open and not self._n_holds

    @abstractmethod
    def _close_if_done(self) -> None:
        """Unload it where it `_is_over`, and nothing of it computes."""

    @property
    def is_ready(self) -> bool:
        """Whether anything computes its requests now."""
        return True

    @property
    def unready_reason(self) -> str:
        """Of a part of it, or of all: what computes nothing now, though it should; empty: all is well."""
        return ""

    # ------------------------------------------------------------------ requests

    @property
    @abstractmethod
    def n_pending(self) -> int:
        """Requests that nothing computes yet."""

    def submit(self, request: InferRequest, receive: Receiver) -> None:
        """request: `checker` took it. receive: called in the event loop. raises StatusError: it is full, or unloaded"""
        now_ns = time.monotonic_ns()
        request.receive = receive
        request.received_ns = request.received_ns or now_ns
        if self._tracer.is_on:
            self._tracer.begin(request, self.name)
        try:
            if self._is_retired and not self._n_holds:  # while the request was read, which threads do
                what = f"Request for unknown model: '{self.name}' version {self.version} is not at ready state"
                raise StatusError(Code.UNAVAILABLE, what)
            if self._n_open >= self._max_open:  # it may never answer: it takes so much of the server, and no more
                what = f"Exceeds maximum queue size: {self._n_open} requests to model '{self.name}' wait for answers"
                raise StatusError(Code.UNAVAILABLE, request.named + what)
            if self.cache is not None and not self.is_decoupled and self._answer_from_cache(self.cache, request):
                return
            self._enqueue(request, now_ns)
        except StatusError as error:
            self.statistics.failed(request, now_ns, "REJECTED")
            self._traced(request, now_ns, error)
            raise
        self._n_open += 1
        self._start(request, now_ns)

    @property
    def as_loaded(self) -> object:
        """Equal as long as the same inputs have the same answers: of an ensemble also those of its members."""
        return self._loading

    def _answer_from_cache(self, cache: ResponseCache, request: InferRequest) -> bool:
        """As it was answered before; False: it was not, and what is answered now is kept."""
        receive, began_ns = request.receive, time.monotonic_ns()
        assert receive is not None, "it was submitted"
        key = key_of(self.as_loaded, request)
        found = cache.look(key)
        looked_ns = time.monotonic_ns()
        if found is not None:
            request.finished = True
            self.statistics.answered_again(request, began_ns, looked_ns)
            self._traced(request, looked_ns)
            receive(found, None, True)
            return True

        def kept(response: InferResponse | None, error: StatusError | None, final: bool) -> None:
            if response is not None and error is None and final:
                now_ns = time.monotonic_ns()
                cache.keep(key, response)
                took_ns = looked_ns - began_ns + time.monotonic_ns() - now_ns
                self.statistics.stages["cache_miss"].add(took_ns)
            receive(response, error, final)

        request.receive = kept
        return False

    @abstractmethod
    def _enqueue(self, request: InferRequest, now_ns: int) -> None:
        """raises StatusError where there is no room for it"""

    @abstractmethod
    def _start(self, request: InferRequest, now_ns: int) -> None:
        """What was taken may be computed, and be answered at once."""

    @abstractmethod
    def waits_for(self, request: InferRequest, surely: bool) -> "Sequence[Waiting] | None":
        """The requests one of which must be answered before anything happens to this; None: something may happen.

        surely: without those for which an instance only may wait
        """

    @abstractmethod
    def cancel(self, request: InferRequest) -> None:
        """Nobody waits for it any more. One that nothing computes ends at once."""

    def can_run_inline(self, n_bytes: int) -> bool:
        """Whether `infer_inline` answers a request with inputs of so many bytes now."""
        return False

    def infer_inline(self, like: InferRequest, inputs: dict[str, Array], came_ns: int) -> "Answered":
        """As `infer`, of `like` with these inputs, where it `can_run_inline`. raises StatusError"""
        raise AssertionError(f"{self.name} does not answer at once")

    async def infer(self, request: InferRequest) -> InferResponse:
        """The one response of a model that is not decoupled. raises StatusError; cancels it where it is cancelled"""
        done: asyncio.Future[InferResponse] = self._loop.create_future()

        def answered(response: InferResponse | None, error: StatusError | None) -> None:
            if done.done():
                return
            if response is not None:
                done.set_result(response)
            elif error is not None:
                done.set_exception(error)

        self.submit(request, only_response(answered))
        try:
            return await done
        except asyncio.CancelledError:
            self.cancel(request)
            raise

    def _prepare_response(
        self, request: InferRequest, response: InferResponse, error: StatusError | None
    ) -> tuple[InferResponse | None, StatusError | None]:
        """With a response, which may be its first: as clients see it, or why they cannot."""
        if self._reshaped:
            try:
                response = self._reshaped.told(request.named, response)
            except StatusError as unfit:
                return None, unfit
        request.n_responses += 1
        if request.trace is not None:
            request.trace.responded(response)
        if request.n_responses == 1 and self.statistics.first_response is not None:
            self.statistics.first_response.add(time.monotonic_ns() - request.received_ns)
        return response, error

    def _finished(self, request: InferRequest, error: StatusError | None, now_ns: int) -> None:
        request.finished = True
        self._n_open -= 1
        self._traced(request, now_ns, error)
        if error is None and not request.has_failed:
            self.statistics.answered(request, now_ns)
            return
        reason = "CANCELED" if request.cancelled else "BACKEND" if request.started_ns else "REJECTED"
        self.statistics.failed(request, now_ns, reason)

    def _traced(self, request: InferRequest, done_ns: int, error: StatusError | None = None) -> None:
        """It has ended."""
        if request.hops is not None:
            times = request.queued_ns, request.started_ns, request.computing_ns, request.computed_ns, done_ns
            request.hops.append(RequestTiming(self.name, *times))
        if request.trace is not None:
            self._tracer.end(request, self.name, self.version, done_ns, error)

    def statistics_dict(self) -> dict[str, Any]:
        return self.statistics.told(self.name, self.version)


def only_response(answered: Callable[[InferResponse | None, StatusError | None], None]) -> Receiver:
    """Receives the one response of a model that is not decoupled, or the error in its place."""

    def receive(response: InferResponse | None, error: StatusError | None, final: bool) -> None:
        if error is not None:
            answered(None, error)
        elif final:
            answered(response, None if response is not None else StatusError(Code.INTERNAL, NO_RESPONSE))

    return receive


Answered = tuple[Mapping[str, Array], Mapping[str, Parameter]]  # an InferResponse's
Waiting = tuple[Model, InferRequest]  # a request, and who has it
