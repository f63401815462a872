"""An ensemble: a model made of others, the steps, by named tensors; each step runs once its tensors are there.

Models answer small requests before `submit` returns, so that a request is a list of work, and no step calls the next.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from millrace.model_repository.config.model_config import TransactionPolicy
from millrace.model_repository.models.ensemble_steps import (
    EnsembleGraph,
    check_steps,
    find_members,
    rebatched,
    steps_of,
)
from millrace.model_repository.models.model_version import NO_RESPONSE, Model, ModelVersionSource, Waiting
from millrace.model_repository.repository.model_names import ModelId
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.request_validation import RawInput
from millrace.model_repository.request.reshape import backend_dims
from millrace.model_repository.request.response_stream import UnreadBytes
from millrace.model_repository.request.status_code import Code, StatusError, invalid
from millrace.model_repository.request.tensors import Array, named_type
from millrace.model_repository.scheduling.dynamic_batcher import Batch, Closed

MOST_INFLIGHT = 16  # responses of a decoupled step that the steps after it compute at a time, where it says no number
_DEEPEST = 16  # ensembles in ensembles: each is some calls deep while quick models answer
_MOST_STEPS = 4096  # with those of its ensembles: where each asks the next twice, 16 small files are 2 ** 16 requests
_Find = Callable[[str, int | None], Model]


class Ensemble(Model):
    def __init__(self, of: ModelVersionSource, find: _Find, loop: asyncio.AbstractEventLoop) -> None:
        """find: the model of a name and a version, as it is served now. raises StatusError as `fit` does"""
        super().__init__(of, loop)
        scheduling = of.config.ensemble_scheduling
        assert scheduling is not None, of.name
        self._of, self.steps, self.find = of, steps_of(scheduling), find
        self.depth = self.n_steps = 0  # of ensembles in one another, and of all their steps; `fit` knows
        self.flow = EnsembleGraph(self.steps)
        self.members = frozenset(step.model for step in self.steps)
        self.max_inflight = scheduling.max_inflight_requests or MOST_INFLIGHT
        self.output_dims = {output.name: backend_dims(output) for output in of.config.output}
        self._runs: dict[InferRequest, _Run] = {}
        self._is_closed = asyncio.Event()
        self.fit()

    @property
    def as_loaded(self) -> object:
        return self._loading, *(self.find(step.model, step.version).as_loaded for step in self.steps)

    def fit(self) -> bool:
        """To its members as they are served now; whether ensembles that it is a step of see another one.

        raises StatusError where it does not fit, and is to be unloaded
        """
        before = (self.depth, self.n_steps, self.is_decoupled, self.labels)
        members = find_members(self.name, self.steps, self.find)
        of = ModelId(self.namespace, self.name)
        check_steps(of, self._of.config, [members[step] for step in self.steps])
        inner = [member for member in members.values() if isinstance(member, Ensemble)]
        self.depth = 1 + max((member.depth for member in inner), default=0)
        self.n_steps = len(members) + sum(member.n_steps for member in inner)
        what = f"ensemble '{self.name}' is made of"
        if self.depth > _DEEPEST:
            what = f"{what} ensembles in {self.depth} levels, at most {_DEEPEST} are supported"
            raise StatusError(Code.UNSUPPORTED, what)
        if self.n_steps > _MOST_STEPS:
            what = f"{what} {self.n_steps} steps, with those of its ensembles, at most {_MOST_STEPS} are supported"
            raise StatusError(Code.UNSUPPORTED, what)
        said, cached = self._of.config.model_transaction_policy, self._of.config.response_cache
        self.is_decoupled = any(m.is_decoupled for m in members.values()) or bool(said and said.decoupled)
        if self.is_decoupled and cached is not None and cached.enable:
            what = f"Response Cache does not currently support model {self.name} with 'decoupled' transaction policy"
            raise invalid(f"{what}. Please disable the response cache.")
        self.config = replace(
            self._of.config, model_transaction_policy=TransactionPolicy(decoupled=True) if self.is_decoupled else said
        )
        if self.is_decoupled and self.statistics.first_response is None:
            self.statistics.first_response = self._of.common.measures.first_response(self.config)
        theirs = {tensor: member.labels.get(name, ()) for step, member in members.items()
                  for name, tensor in step.outputs}  # fmt: skip
        self.labels = theirs | dict(self._of.labels)
        return before != (self.depth, self.n_steps, self.is_decoupled, self.labels)

    async def loaded(self) -> None:
        return

    async def retire(self) -> None:
        self._is_retired = True
        self._close_if_done()
        await self._is_closed.wait()
        self._unloaded()

    @property
    def is_ready(self) -> bool:
        return all(self.find(step.model, step.version).is_ready for step in self.steps)

    def abort(self) -> None:
        for run in list(self._runs.values()):
            run.end(StatusError(Code.UNAVAILABLE, "Server is stopping"))

    def _close_if_done(self) -> None:
        if self._is_over:
            self._is_closed.set()

    @property
    def n_pending(self) -> int:
        """None ever: what waits, waits at a member, which counts it."""
        return 0

    def _enqueue(self, request: InferRequest, now_ns: int) -> None:
        self._runs[request] = _Run(self, request)

    def _start(self, request: InferRequest, now_ns: int) -> None:
        request.queued_ns = request.started_ns = now_ns
        self._runs[request].begin()

    def waits_for(self, request: InferRequest, surely: bool) -> Sequence[Waiting] | None:
        run = self._runs.get(request)
        return run.asked() if run is not None else None

    def cancel(self, request: InferRequest) -> None:
        request.cancel()
        run = self._runs.get(request)
        if run is not None:
            run.end(StatusError(Code.CANCELLED, f"{request.named}request was cancelled"))

    def trace_step(self, asking: InferRequest, request: InferRequest) -> None:
        """What it asks for `request`, whose trace has it as a part."""
        self._tracer.inner(asking, request)

    def answered(
        self, request: InferRequest, response: InferResponse | None, error: StatusError | None, final: bool
    ) -> None:
        """By its run."""
        if response is not None:
            response, error = self._prepare_response(request, response, error)
        if final:
            del self._runs[request]
            now_ns = time.monotonic_ns()
            self.statistics.executed(Batch((request,), request.batch_size or 1, Closed.SINGLE), now_ns)
            self._finished(request, error, now_ns)
        assert request.receive is not None, "it was submitted"
        request.receive(response, error, final)
        if final:
            self._close_if_done()


@dataclass(slots=True, eq=False)
class _Branch:
    """Steps that run on the same tensors. missing: for how many a step waits. n_left: steps that have not answered"""

    tensors: dict[str, Array]
    missing: dict[int, int]
    n_left: int
    n_bytes: int = 0  # of the response that it began with, as `UnreadBytes` counts it


class _Run:
    """One request on its way through the steps.

    Where a step is decoupled, all that do not need it run before it; those that do run for each of its responses, and
    give what they make in the order of these.
    """

    def __init__(self, of: Ensemble, request: InferRequest) -> None:
        """raises StatusError where a model is gone"""
        self._of, self._request, self._steps = of, request, of.steps
        self._outputs = request.outputs or tuple(of.output_dims)
        wanted = of.flow.needed(self._outputs)
        self._members = {i: of.find(of.steps[i].model, of.steps[i].version) for i in sorted(wanted)}
        self._decoupled = next((i for i, member in self._members.items() if member.is_decoupled), None)
        behind = of.flow.after(self._decoupled) if self._decoupled is not None else frozenset()
        self._later = self._waits(wanted & behind)
        first = self._waits(wanted - behind - {self._decoupled})
        self._root = _Branch(dict(request.inputs), first, len(first))
        self._branches: deque[_Branch] = deque()  # of the decoupled step's responses, in their order
        self._waiting: deque[tuple[InferResponse, int]] = deque()  # those for which there is no room yet, by bytes
        self._is_told = False  # the decoupled step has answered to the end
        self._unread = UnreadBytes(of)
        self._open: dict[InferRequest, Model] = {}  # at the members
        self._work: deque[Callable[[], None]] = deque()
        self._is_working = self._is_over = False
        for member in self._members.values():
            member.pin()

    def _waits(self, steps: frozenset[int]) -> dict[int, int]:
        """For how many of these steps each waits; what else it takes is there, or is optional and was not given."""
        found = dict.fromkeys(sorted(steps), 0)
        for i in steps:
            for reader in self._of.flow.behind[i] & steps:
                found[reader] += 1
        return found

    def begin(self) -> None:
        self._do(self._begin)

    def _begin(self) -> None:
        self._start(self._root)
        if not self._root.n_left:  # the decoupled step needs no other
            self._done(self._root)

    def asked(self) -> list[Waiting] | None:
        return [(member, asking) for asking, member in self._open.items()] or None

    def end(self, error: StatusError) -> None:
        """The first error is the answer, and what runs is cancelled."""
        if not self._is_over:
            self._close()
            self._of.answered(self._request, None, error, True)

    def _close(self) -> None:
        self._is_over = True
        self._work.clear()
        for asking, member in self._open.items():
            member.cancel(asking)
        self._open.clear()
        self._unread.close()
        for member in self._members.values():
            member.release()

    def _do(self, work: Callable[[], None]) -> None:
        """Now, or after what is being done: what is quick answers while it is asked."""
        self._work.append(work)
        if self._is_working:
            return
        self._is_working = True
        try:
            while self._work:
                self._work.popleft()()
        except StatusError as error:
            self.end(StatusError(error.code, f"in ensemble '{self._of.name}', {error}"))
        finally:
            self._is_working = False

    # ------------------------------------------------------------------ steps

    def _start(self, branch: _Branch) -> None:
        for i, n_missing in branch.missing.items():
            if not n_missing:
                self._work.append(partial(self._ask, branch, i))

    def _ask(self, branch: _Branch, i: int) -> None:
        """raises StatusError"""
        step, member, request = self._steps[i], self._members[i], self._request
        asking = InferRequest({}, tuple(name for name, _ in step.outputs), request.id)
        asking.is_step, asking.parameters = True, dict(request.parameters)
        asking.correlation_id, asking.flags = request.correlation_id, request.flags
        self._of.trace_step(asking, request)
        asking.priority, asking.timeout_us = request.priority, request.timeout_us
        member.checker.take(asking, list(self._given(branch, i)))
        self._open[asking] = member
        try:
            member.submit(asking, partial(self._receive, branch, i, asking))
        except StatusError:
            del self._open[asking]
            raise

    def _given(self, branch: _Branch, i: int) -> Iterator[RawInput]:
        """What step `i` takes of what is there."""
        checker, wants_batch = self._members[i].checker, self._members[i].config.max_batch_size > 0
        for name, tensor in self._steps[i].inputs:
            array = branch.tensors.get(tensor)
            if array is None:
                continue
            if (has_batch := self._has_batch(tensor)) != wants_batch and (said := checker.said(name)) is not None:
                dims = said[1][1 if wants_batch else 0 :]
                array = rebatched(array, dims, has_batch=has_batch, wants_batch=wants_batch)
            yield RawInput(name, named_type(tensor, array), array.shape, _common_outputs(array))

    def _has_batch(self, tensor: str) -> bool:
        """Whether its first dimension is a batch's: by the model that made it."""
        maker = self._of.flow.maker(tensor)
        made = self._of.config if maker is None else self._members[maker].config
        return made.max_batch_size > 0

    def _receive(
        self, branch: _Branch, i: int, asking: InferRequest,
        response: InferResponse | None, error: StatusError | None, final: bool,
    ) -> None:  # fmt: skip
        if self._is_over:
            return
        if final:
            del self._open[asking]
        self._do(partial(self._answered, branch, i, response, error, final))

    def _answered(
        self, branch: _Branch, i: int, response: InferResponse | None, error: StatusError | None, final: bool
    ) -> None:
        """raises StatusError"""
        if error is not None:
            raise error
        if i == self._decoupled:
            if response is not None:
                self._waiting.append((response, self._unread.add(self._request, response)))
            self._is_told = final
            self._advance()
            return
        if response is None or not final:
            raise StatusError(Code.INTERNAL, NO_RESPONSE)
        self._keep(branch, i, response)
        for reader in self._of.flow.behind[i]:
            if reader in branch.missing:
                branch.missing[reader] -= 1
                if not branch.missing[reader]:
                    self._work.append(partial(self._ask, branch, reader))
        branch.n_left -= 1
        if not branch.n_left:
            self._done(branch)

    def _keep(self, branch: _Branch, i: int, response: InferResponse) -> None:
        """The tensors that step `i` makes; a model may leave out what follows from an input that was left out."""
        for name, tensor in self._steps[i].outputs:
            array = response.outputs.get(name)
            if array is not None:
                branch.tensors[tensor] = array

    def _missing(self, tensor: str) -> StatusError:
        """Why there is no such output, which was requested."""
        maker = self._of.flow.maker(tensor)
        if maker is None:
            return StatusError(Code.INTERNAL, f"output '{tensor}' is an input that was not given")
        step = self._steps[maker]
        name = next(name for name, made in step.outputs if made == tensor)
        return StatusError(Code.INTERNAL, f"model '{step.model}' computed no output '{name}'")

    def _done(self, branch: _Branch) -> None:
        """Every step of it has answered."""
        if branch is not self._root:
            self._advance()
        elif self._decoupled is not None:
            self._ask(branch, self._decoupled)
        else:
            self._respond(branch, True)

    def _advance(self) -> None:
        """Of the decoupled step's responses: give what is done, in their order, and begin what there is room for."""
        while not self._is_over:
            if self._branches and not self._branches[0].n_left:
                branch = self._branches.popleft()
                self._unread.take_off(branch.n_bytes)
                self._respond(branch, self._is_told and not self._branches and not self._waiting)
            elif self._waiting and len(self._branches) < self._of.max_inflight:
                self._branches.append(self._next_branch())
            else:
                break
        if self._is_told and not self._is_over and not self._branches:
            self._close()
            self._of.answered(self._request, None, None, True)

    def _next_branch(self) -> _Branch:
        response, n_bytes = self._waiting.popleft()
        branch = _Branch(dict(self._root.tensors), dict(self._later), len(self._later), n_bytes)
        assert self._decoupled is not None, "only its responses wait"
        self._keep(branch, self._decoupled, response)
        self._start(branch)
        return branch

    def _respond(self, branch: _Branch, final: bool) -> None:
        """raises StatusError where an output that was requested is missing"""
        dims, wants_batch = self._of.output_dims, self._of.config.max_batch_size > 0
        found = dict[str, Array]()
        for name in self._outputs:
            array = branch.tensors.get(name)
            if array is None and self._request.is_step:
                continue
            if array is None:
                raise self._missing(name)
            has_batch = self._has_batch(name)
            found[name] = rebatched(array, dims[name], has_batch=has_batch, wants_batch=wants_batch)
        if final:
            self._close()
        self._of.answered(self._request, InferResponse(found), None, final)


def _common_outputs(array: Array) -> Array:
    """Read-only: other steps, or the answer, may have the same; a model that writes into its inputs gets a copy."""
    view = array.view()
    view.flags.writeable = False
    return view
