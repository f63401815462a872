"""Requests that models make of other models (business logic scripting, in Triton's words), and what may hold them up.

A model that waits for another one holds its instance. Where all instances of a model wait in this way for requests that
wait for these very instances, nothing would ever move again: every so often those that wait are looked at, and the
youngest of such a ring is answered with an error that names it.
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
from millrace.model_repository.models.model_version import NO_RESPONSE, Model, Waiting
from millrace.model_repository.models.repository_context import RepositoryContext
from millrace.model_repository.repository.model_names import ModelId
from millrace.model_repository.request.infer_request import InferRequest, InferResponse, Receiver
from millrace.model_repository.request.request_validation import RawInput
from millrace.model_repository.request.response_stream import UnreadBytes
from millrace.model_repository.request.status_code import Code, StatusError

LOOK_S = 0.25  # between two looks at those that wait; a ring is one when it is seen in both
LONG_LOOKS = 20  # in a row, where an instance may wait for what a thread of its model asked, and nobody can see whether
T = TypeVar("T")


@dataclass(eq=False, slots=True)
class NestedRequest:
    """One request of a model to another.

    by: the model that asks. given: what `request` is to be given. behind: it ends when all of these are cancelled.
    waits_by: what the instance that asks waits for, where it waits for this, too: surely, or perhaps.
    receive: called in the event loop
    """

    by: str
    model: str
    version: int | None
    is_decoupled: bool
    request: InferRequest
    given: Sequence[RawInput]
    behind: Sequence[InferRequest]
    waits_by: "dict[Waiting, bool] | None"
    is_sure: bool
    receive: Receiver
    is_over: bool = False
    asked: Model | None = None
    unread: UnreadBytes | None = None
    sizes: deque[int] = field(default_factory=deque)  # of responses that were not read, in bytes
    n_looks: int = 0  # in a row, that saw it in a ring of those that surely wait
    n_long: int = 0  # the same of those that perhaps do

    def outer_cancelled(self) -> bool:
        return bool(self.behind) and all(outer.cancelled for outer in self.behind)


class Repository(Protocol):
    """What models are asked of. `get`, `load` and `unload` raise StatusError"""

    common: RepositoryContext

    def get(self, name: str, version: int | None = None) -> Model: ...

    def named(self, name: str) -> list[ModelId]: ...

    def loads_behind(self, one: ModelId) -> frozenset[ModelId]: ...

    async def load(
        self, name: str, config: Mapping[str, Any] | None = None, files: Files | None = None, *, owner: str = ""
    ) -> None: ...

    async def unload(self, name: str, *, with_members: bool = False, owner: str = "") -> None: ...


class BlsExecutor:
    """Of one event loop."""

    def __init__(self, repository: Repository, custom: CustomMetrics, loop: asyncio.AbstractEventLoop) -> None:
        self._repository, self.custom, self._loop = repository, custom, loop
        self._loads: dict[ModelId, list[str]] = {}  # of models that are being loaded themselves, which they wait for
        self._open: dict[NestedRequest, None] = {}  # in the order in which they came
        self._timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------ from any thread

    def post(self, work: Callable[..., None], *arguments: Any) -> bool:
        """Do it in the event loop; False: that has ended, and nothing happens."""
        try:
            self._loop.call_soon_threadsafe(work, *arguments)
        except RuntimeError:
            return False
        return True

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """raises what it raises; StatusError where the event loop has ended"""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except (RuntimeError, concurrent.futures.CancelledError):
            work.close()
            raise StatusError(Code.UNAVAILABLE, "Server is stopping") from None

    # ------------------------------------------------------------------ of the event loop

    async def load(
        self, by: ModelId, is_loading: bool, name: str, config: Mapping[str, Any] | None, files: Files
    ) -> None:
        """By a model; is_loading: it is being loaded itself. raises StatusError"""
        if not is_loading:
            return await self._repository.load(name, config, files)
        waiting = self._loads.setdefault(by, [])
        waiting.append(name)
        loading = self._loop.create_task(self._repository.load(name, config, files))
        try:
            while not loading.done():
                self._check_load(by, name)  # an ensemble knows its models only once it is being loaded itself
                await asyncio.wait((loading,), timeout=LOOK_S)
            return await loading
        finally:
            loading.cancel()
            waiting.remove(name)
            if not waiting:
                del self._loads[by]

    def _check_load(self, by: ModelId, name: str) -> None:
        """raises StatusError where that model can be loaded only after `by`"""
        ways = [[by, one] for one in self._repository.named(name)]
        seen = set[ModelId]()
        while ways:
            way = ways.pop()
            if way[-1] == by:
                what = f"deadlock: model '{by}' loads model '{name}', which waits until '{by}' itself is loaded"
                raise StatusError(Code.UNAVAILABLE, f"{what} ({' -> '.join(map(str, way))})")
            if way[-1] not in seen:
                seen.add(way[-1])
                asked = (one for of_name in self._loads.get(way[-1], ()) for one in self._repository.named(of_name))
                ways += [[*way, following] for following in {*asked, *self._repository.loads_behind(way[-1])}]

    async def unload(self, name: str, with_members: bool) -> None:
        """raises StatusError"""
        await self._repository.unload(name, with_members=with_members)

    async def is_ready(self, name: str, version: int | None) -> bool:
        try:
            return self._repository.get(name, version).is_ready
        except StatusError:
            return False

    def begin(self, call: NestedRequest) -> None:
        """Ask. Whatever goes wrong is an answer."""
        if call.is_over:  # cancelled before it came here
            return
        try:
            self._begin(call)
        except StatusError as error:
            self._answered(call, None, error, True)

    def cancel(self, call: NestedRequest) -> None:
        self._cut(call, _cancelled(call))

    def taken(self, call: NestedRequest) -> None:
        """Its oldest response was read."""
        if call.unread is not None and call.sizes:
            call.unread.take_off(call.sizes.popleft())

    def _begin(self, call: NestedRequest) -> None:
        """raises StatusError"""
        try:
            model = self._repository.get(call.model, call.version)
        except StatusError as error:
            if error.code is Code.INVALID_ARG:  # which of several is meant: a name is all that a model can say
                raise
            what = f"Failed for execute the inference request. Model '{call.model}' is not ready."
            raise StatusError(Code.INTERNAL, what) from None
        if model.is_decoupled and not call.is_decoupled:
            raise StatusError(
                Code.INTERNAL,
                f"Model {call.model} is using the decoupled. The current BLS request call doesn't support models using "
                "the decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' "
                "calls for decoupled models.'",
            )
        model.checker.take(call.request, call.given)
        if call.outer_cancelled():
            raise _cancelled(call)
        call.asked, call.unread, watcher = model, UnreadBytes(model), partial(self._outer_cancelled, call)
        for outer in call.behind:
            outer.watch(call, watcher)
        if call.waits_by is not None:
            call.waits_by[model, call.request] = call.is_sure
        self._open[call] = None
        for outer in call.behind:
            self._repository.common.tracer.inner(call.request, outer)
        model.submit(call.request, lambda *answer: self._answered(call, *answer))
        if self._open and self._timer is None:
            self._timer = self._loop.call_later(LOOK_S, self._look)

    def _outer_cancelled(self, call: NestedRequest) -> None:
        if call.outer_cancelled():
            self.cancel(call)

    def _cut(self, call: NestedRequest, error: StatusError) -> None:
        """Whoever asks goes on at once; what computes may take longer."""
        if not call.is_over:
            self._answered(call, None, error, True)
            if call.asked is not None:
                call.asked.cancel(call.request)

    def _answered(
        self, call: NestedRequest, response: InferResponse | None, error: StatusError | None, final: bool
    ) -> None:
        if call.is_over:
            return
        if not call.is_decoupled and error is None and (response is None or not final):
            error, final = StatusError(Code.INTERNAL, NO_RESPONSE), True
        if final:
            self._end(call)
        if response is not None and error is None and call.unread is not None:
            try:
                call.sizes.append(call.unread.add(call.request, response))
            except StatusError as too_much:
                self._cut(call, too_much)
                return
        call.receive(response, error, final)

    def _end(self, call: NestedRequest) -> None:
        call.is_over = True
        self._open.pop(call, None)
        for outer in call.behind:
            outer.unwatch(call)
        if call.waits_by is not None and call.asked is not None:
            call.waits_by.pop((call.asked, call.request), None)

    # ------------------------------------------------------------------ rings

    def _look(self) -> None:
        """Once in LOOK_S, while models wait for models."""
        self._timer = None
        for call in reversed(list(self._open)):  # the youngest first: without it the others may go on
            ring = _ring(call, surely=True)
            call.n_looks = call.n_looks + 1 if ring else 0
            ring = ring or _ring(call, surely=False)
            call.n_long = call.n_long + 1 if ring else 0
            if call.n_looks > 1 or call.n_long > LONG_LOOKS:
                self._cut(call, _deadlock(call, ring))
        if self._open:
            self._timer = self._loop.call_later(LOOK_S, self._look)


def _ring(call: NestedRequest, surely: bool) -> list[Waiting]:
    """How `call` waits for itself to be over, one waiting for the next; empty where it may yet be answered."""
    if call.waits_by is None or call.asked is None or (surely and not call.is_sure):
        return []
    first: Waiting = (call.asked, call.request)
    seen, left = {first}, [first]
    while left:
        behind = _behind(left.pop(), surely)
        if behind is None:
            return []
        left += [waiting for waiting in behind if waiting not in seen]
        seen.update(behind)
    return _circle(first, surely)


def _circle(first: Waiting, surely: bool) -> list[Waiting]:
    """From one of those that only wait for one another to the second time that one of them comes."""
    path = [first]
    while (behind := _behind(path[-1], surely)) is not None:
        path.append(behind[0])
        if behind[0] in path[:-1]:
            break
    return path


def _behind(waiting: Waiting, surely: bool) -> Sequence[Waiting] | None:
    model, request = waiting
    return model.waits_for(request, surely)


def _deadlock(call: NestedRequest, ring: Sequence[Waiting]) -> StatusError:
    names = [model.name for model, _ in ring]
    if names[-2:-1] == [call.by]:  # it came round to whoever asks
        names.pop()
    way = " -> ".join([call.by, *names])
    return StatusError(
        Code.UNAVAILABLE,
        f"{call.request.named}deadlock: model '{call.by}' asks model '{call.model}', all of whose instances wait, in "
        f"the end for one another ({way}); give these models more instances, or let none of them ask itself",
    )


def _cancelled(call: NestedRequest) -> StatusError:
    return StatusError(Code.CANCELLED, f"{call.request.named}request was cancelled")
