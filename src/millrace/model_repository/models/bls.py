"""Business logic scripting (BLS): requests from one model to another, limited in depth and in time.

A model that waits for another model blocks its instance. If all instances of a model wait for requests that in turn
wait for these instances, none is ever answered: hence the timeout of every nested request. The depth limit stops
requests that models with free instances pass on without end.
"""

import asyncio
import concurrent.futures
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from millrace.model_repository.lifecycle.load_override import Files
from millrace.model_repository.metrics.custom_metrics import CustomMetrics
from millrace.model_repository.models.model_version import NO_RESPONSE, Model
from millrace.model_repository.models.repository_context import RepositoryContext
from millrace.model_repository.repository.model_names import ModelId
from millrace.model_repository.request.infer_request import InferRequest, InferResponse, Receiver
from millrace.model_repository.request.request_validation import RawInput
from millrace.model_repository.request.response_stream import UnreadBytes
from millrace.model_repository.request.status_code import Code, StatusError

MAX_DEPTH = 32  # models and ensembles that a request may have passed through when a model calls another
TIMEOUT_S = 300.0  # without a response, for a nested request that has no timeout of its own
LOAD_CHECK_INTERVAL_S = 0.25  # between two searches for models that wait for each other to load
T = TypeVar("T")


@dataclass(eq=False, slots=True)
class NestedRequest:
    """One request from a model to another.

    inputs: the inputs of `request`. parents: the call is cancelled when all of these are.
    receive: called in the event loop
    """

    model: str
    version: int | None
    is_decoupled: bool
    request: InferRequest
    inputs: Sequence[RawInput]
    parents: Sequence[InferRequest]
    receive: Receiver
    is_over: bool = False
    target: Model | None = None
    unread: UnreadBytes | None = None
    sizes: deque[int] = field(default_factory=deque)  # of unread responses, in bytes
    deadline_s: float = 0.0  # in the event loop's time; moved on by each response
    timer: asyncio.TimerHandle | None = None

    @property
    def timeout_s(self) -> float:
        return self.request.timeout_us / 1e6 or TIMEOUT_S

    @property
    def path(self) -> str:
        """The models that the request came through, and the called one."""
        return " -> ".join((*self.request.callers, self.model))

    def outer_cancelled(self) -> bool:
        return bool(self.parents) and all(outer.cancelled for outer in self.parents)


class BlsRepository(Protocol):
    """The repository that nested requests go to. `get`, `load` and `unload` raise StatusError."""

    common: RepositoryContext

    def get(self, name: str, version: int | None = None) -> Model: ...

    def find_by_name(self, name: str) -> list[ModelId]: ...

    def pending_members(self, model: ModelId) -> frozenset[ModelId]: ...

    async def load(
        self, name: str, config: Mapping[str, Any] | None = None, files: Files | None = None, *, owner: str = ""
    ) -> None: ...

    async def unload(self, name: str, *, with_members: bool = False, owner: str = "") -> None: ...


class BlsExecutor:
    """Runs the nested requests of all models in one event loop."""

    def __init__(self, repository: BlsRepository, custom: CustomMetrics, loop: asyncio.AbstractEventLoop) -> None:
        self._repository, self.custom, self._loop = repository, custom, loop
        self._loads: dict[ModelId, list[str]] = {}  # by a model that is loading: the models it waits for

    # ------------------------------------------------------------------ from any thread

    def post(self, work: Callable[..., None], *arguments: Any) -> bool:
        """Schedule `work` in the event loop; False, without effect, if the loop has ended."""
        try:
            self._loop.call_soon_threadsafe(work, *arguments)
        except RuntimeError:
            return False
        return True

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop and wait. raises what it raises; StatusError if the loop has ended"""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except (RuntimeError, concurrent.futures.CancelledError):
            work.close()
            raise StatusError(Code.UNAVAILABLE, "Server is stopping") from None

    # ------------------------------------------------------------------ of the event loop

    async def load(
        self, caller: ModelId, is_loading: bool, name: str, config: Mapping[str, Any] | None, files: Files
    ) -> None:
        """Load a model for a calling model. is_loading: the caller itself is still loading. raises StatusError"""
        if not is_loading:
            return await self._repository.load(name, config, files)
        waiting = self._loads.setdefault(caller, [])
        waiting.append(name)
        loading = self._loop.create_task(self._repository.load(name, config, files))
        try:
            while not loading.done():
                self._check_load(caller, name)  # an ensemble's members are known only while it loads
                await asyncio.wait((loading,), timeout=LOAD_CHECK_INTERVAL_S)
            return await loading
        finally:
            loading.cancel()
            waiting.remove(name)
            if not waiting:
                del self._loads[caller]

    def _check_load(self, caller: ModelId, name: str) -> None:
        """Check that loading a model does not need the caller itself. raises StatusError"""
        paths = [[caller, model_id] for model_id in self._repository.find_by_name(name)]
        visited = set[ModelId]()
        while paths:
            path = paths.pop()
            if path[-1] == caller:
                message = (
                    f"deadlock: model '{caller}' loads model '{name}', which waits until '{caller}' itself is loaded"
                )
                raise StatusError(Code.UNAVAILABLE, f"{message} ({' -> '.join(map(str, path))})")
            if path[-1] not in visited:
                visited.add(path[-1])
                requested = (
                    model_id
                    for requested_name in self._loads.get(path[-1], ())
                    for model_id in self._repository.find_by_name(requested_name)
                )
                paths += [[*path, following] for following in {*requested, *self._repository.pending_members(path[-1])}]

    async def unload(self, name: str, with_members: bool) -> None:
        """Unload a model. raises StatusError"""
        await self._repository.unload(name, with_members=with_members)

    async def is_ready(self, name: str, version: int | None) -> bool:
        try:
            return self._repository.get(name, version).is_ready
        except StatusError:
            return False

    def begin(self, call: NestedRequest) -> None:
        """Submit a nested request. Errors are delivered as its response."""
        if call.is_over:  # cancelled before it was submitted
            return
        try:
            self._begin(call)
        except StatusError as error:
            self._on_nested_response(call, None, error, True)

    def cancel(self, call: NestedRequest) -> None:
        self._end_early(call, call.request.cancelled_error())

    def on_response_read(self, call: NestedRequest) -> None:
        """Release the bytes of the call's oldest unread response."""
        if call.unread is not None and call.sizes:
            call.unread.take_off(call.sizes.popleft())

    def _begin(self, call: NestedRequest) -> None:
        """Submit a nested request. raises StatusError"""
        if len(call.request.callers) > MAX_DEPTH:
            message = (
                f"a request passes through more models than {MAX_DEPTH}, the limit of nested requests ({call.path})"
            )
            raise StatusError(Code.INVALID_ARG, call.request.error_prefix + message)
        try:
            model = self._repository.get(call.model, call.version)
        except StatusError as error:
            if error.code is Code.INVALID_ARG:  # an ambiguous name: a model cannot give a namespace
                raise
            message = f"Failed for execute the inference request. Model '{call.model}' is not ready."
            raise StatusError(Code.INTERNAL, message) from None
        if model.is_decoupled and not call.is_decoupled:
            raise StatusError(
                Code.INTERNAL,
                f"Model {call.model} is using the decoupled. The current BLS request call doesn't support models using "
                "the decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' "
                "calls for decoupled models.'",
            )
        model.checker.attach_inputs(call.request, call.inputs)
        if call.outer_cancelled():
            raise call.request.cancelled_error()
        call.target, call.unread, watcher = model, UnreadBytes(model), partial(self._outer_cancelled, call)
        for outer in call.parents:
            outer.watch(call, watcher)
        call.deadline_s = self._loop.time() + call.timeout_s
        call.timer = self._loop.call_at(call.deadline_s, self._check_timeout, call)
        for outer in call.parents:
            self._repository.common.tracer.trace_nested(call.request, outer)
        model.submit(call.request, lambda *answer: self._on_nested_response(call, *answer))

    def _check_timeout(self, call: NestedRequest) -> None:
        """End a call that got no response for its timeout; wait on if a response has moved the deadline."""
        if self._loop.time() < call.deadline_s:
            call.timer = self._loop.call_at(call.deadline_s, self._check_timeout, call)
            return
        message = (
            f"model '{call.model}' gave no response for {call.timeout_s:g} s ({call.path}). Usually all instances of a "
            "model then wait for requests that wait for these instances: give the model more instances, or do not let "
            "it call itself, directly or through others. If it needs more time, pass `timeout`, in microseconds, "
            "to pb_utils.InferenceRequest"
        )
        self._end_early(call, StatusError(Code.UNAVAILABLE, call.request.error_prefix + message))

    def _outer_cancelled(self, call: NestedRequest) -> None:
        if call.outer_cancelled():
            self.cancel(call)

    def _end_early(self, call: NestedRequest, error: StatusError) -> None:
        """End a call with an error. The caller continues immediately; the called model may take longer."""
        if not call.is_over:
            self._on_nested_response(call, None, error, True)
            if call.target is not None:
                call.target.cancel(call.request)

    def _on_nested_response(
        self, call: NestedRequest, response: InferResponse | None, error: StatusError | None, final: bool
    ) -> None:
        if call.is_over:
            return
        if not call.is_decoupled and error is None and (response is None or not final):
            error, final = StatusError(Code.INTERNAL, NO_RESPONSE), True
        if final:
            self._end(call)
        else:
            call.deadline_s = self._loop.time() + call.timeout_s
        if response is not None and error is None and call.unread is not None:
            try:
                call.sizes.append(call.unread.add(call.request, response))
            except StatusError as too_much:
                self._end_early(call, too_much)
                return
        call.receive(response, error, final)

    def _end(self, call: NestedRequest) -> None:
        call.is_over = True
        if call.timer is not None:
            call.timer.cancel()
        for outer in call.parents:
            outer.unwatch(call)
