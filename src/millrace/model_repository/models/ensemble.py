"""Ensembles: models composed of steps that exchange named tensors; a step runs once its input tensors exist.

Models may answer small requests before `submit` returns, so a run keeps a work queue; steps do not call each other.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from millrace.model_repository.config.model_config import TransactionPolicy
from millrace.model_repository.models.ensemble_steps import (
    EnsembleGraph,
    check_steps,
    find_members,
    rebatched,
    steps_from_config,
)
from millrace.model_repository.models.model_version import NO_RESPONSE, Model, ModelVersionSource
from millrace.model_repository.repository.model_names import ModelId
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.request_validation import RawInput
from millrace.model_repository.request.reshape import backend_dims
from millrace.model_repository.request.response_stream import UnreadBytes
from millrace.model_repository.request.status_code import Code, StatusError, invalid
from millrace.model_repository.request.tensors import Array, output_datatype
from millrace.model_repository.scheduling.dynamic_batcher import Batch, CloseReason

MAX_INFLIGHT = 16  # default number of responses of a decoupled step that later steps process at a time
_MAX_DEPTH = 16  # nested ensembles: each adds some stack frames while quick models answer
_MAX_STEPS = 4096  # including those of nested ensembles, which can multiply: 16 levels of 2 are 2 ** 16 requests
_Find = Callable[[str, int | None], Model]


class Ensemble(Model):
    def __init__(self, source: ModelVersionSource, find: _Find, loop: asyncio.AbstractEventLoop) -> None:
        """find: returns the served model of a name and version. raises StatusError as `fit` does"""
        super().__init__(source, loop)
        scheduling = source.config.ensemble_scheduling
        assert scheduling is not None, source.name
        self._source, self.steps, self.find = source, steps_from_config(scheduling), find
        self.depth = self.n_steps = 0  # nesting depth, and number of all steps; set by `fit`
        self.flow = EnsembleGraph(self.steps)
        self.members = frozenset(step.model for step in self.steps)
        self.max_inflight = scheduling.max_inflight_requests or MAX_INFLIGHT
        self.output_dims = {output.name: backend_dims(output) for output in source.config.output}
        self._runs: dict[InferRequest, _EnsembleRun] = {}
        self._is_closed = asyncio.Event()
        self.fit()

    @property
    def cache_identity(self) -> object:
        return self._loading, *(self.find(step.model, step.version).cache_identity for step in self.steps)

    def fit(self) -> bool:
        """Adapt to the members as served now; return whether ensembles that contain this one are affected.

        raises StatusError if the members no longer fit, so that the ensemble must be unloaded
        """
        before = (self.depth, self.n_steps, self.is_decoupled, self.labels)
        members = find_members(self.name, self.steps, self.find)
        ensemble = ModelId(self.namespace, self.name)
        check_steps(ensemble, self._source.config, [members[step] for step in self.steps])
        inner = [member for member in members.values() if isinstance(member, Ensemble)]
        self.depth = 1 + max((member.depth for member in inner), default=0)
        self.n_steps = len(members) + sum(member.n_steps for member in inner)
        message = f"ensemble '{self.name}' is made of"
        if self.depth > _MAX_DEPTH:
            message = f"{message} ensembles in {self.depth} levels, at most {_MAX_DEPTH} are supported"
            raise StatusError(Code.UNSUPPORTED, message)
        if self.n_steps > _MAX_STEPS:
            message = f"{message} {self.n_steps} steps, with those of its ensembles, at most {_MAX_STEPS} are supported"
            raise StatusError(Code.UNSUPPORTED, message)
        policy, cached = self._source.config.model_transaction_policy, self._source.config.response_cache
        self.is_decoupled = any(m.is_decoupled for m in members.values()) or bool(policy and policy.decoupled)
        if self.is_decoupled and cached is not None and cached.enable:
            message = f"Response Cache does not currently support model {self.name} with 'decoupled' transaction policy"
            raise invalid(f"{message}. Please disable the response cache.")
        self.config = replace(
            self._source.config,
            model_transaction_policy=TransactionPolicy(decoupled=True) if self.is_decoupled else policy,
        )
        if self.is_decoupled and self.statistics.first_response is None:
            self.statistics.first_response = self._source.common.metrics_config.first_response(self.config)
        member_labels = {tensor: member.labels.get(name, ()) for step, member in members.items()
                  for name, tensor in step.outputs}  # fmt: skip
        self.labels = member_labels | dict(self._source.labels)
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
        """Always 0: a waiting request is counted by the member that it waits at."""
        return 0

    def _enqueue(self, request: InferRequest, now_ns: int) -> None:
        self._runs[request] = _EnsembleRun(self, request)

    def _start(self, request: InferRequest, now_ns: int) -> None:
        request.queued_ns = request.started_ns = now_ns
        self._runs[request].begin()

    def cancel(self, request: InferRequest) -> None:
        request.cancel()
        run = self._runs.get(request)
        if run is not None:
            run.end(request.cancelled_error())

    def trace_step(self, step_request: InferRequest, request: InferRequest) -> None:
        """Trace a step's request as a child of `request`."""
        self._tracer.trace_nested(step_request, request)

    def respond(
        self, request: InferRequest, response: InferResponse | None, error: StatusError | None, final: bool
    ) -> None:
        """Deliver a response of a run."""
        if response is not None:
            response, error = self._prepare_response(request, response, error)
        if final:
            del self._runs[request]
            now_ns = time.monotonic_ns()
            self.statistics.record_batch(Batch((request,), request.batch_size or 1, CloseReason.SINGLE), now_ns)
            self._finished(request, error, now_ns)
        assert request.receive is not None, "it was submitted"
        request.receive(response, error, final)
        if final:
            self._close_if_done()


@dataclass(slots=True, eq=False)
class _Branch:
    """Steps that run on the same tensors. missing: predecessors a step waits for. n_left: unanswered steps"""

    tensors: dict[str, Array]
    missing: dict[int, int]
    n_left: int
    n_bytes: int = 0  # of the response that started the branch, as `UnreadBytes` counts it


class _EnsembleRun:
    """One request passing through the steps.

    If a step is decoupled, all steps independent of it run first. Steps that depend on it run once per response, and
    their results are delivered in the order of these responses.
    """

    def __init__(self, ensemble: Ensemble, request: InferRequest) -> None:
        """raises StatusError if a member is no longer served"""
        self._ensemble, self._request, self._steps = ensemble, request, ensemble.steps
        self._outputs = request.outputs or tuple(ensemble.output_dims)
        needed = ensemble.flow.needed(self._outputs)
        self._members = {i: ensemble.find(ensemble.steps[i].model, ensemble.steps[i].version) for i in sorted(needed)}
        self._decoupled = next((i for i, member in self._members.items() if member.is_decoupled), None)
        behind = ensemble.flow.after(self._decoupled) if self._decoupled is not None else frozenset()
        self._later = self._count_missing(needed & behind)
        first = self._count_missing(needed - behind - {self._decoupled})
        self._root = _Branch(dict(request.inputs), first, len(first))
        self._branches: deque[_Branch] = deque()  # one per response of the decoupled step, in order
        self._waiting: deque[tuple[InferResponse, int]] = deque()  # responses beyond max_inflight, with their bytes
        self._stream_ended = False  # the decoupled step has sent its final response
        self._unread = UnreadBytes(ensemble)
        self._open: dict[InferRequest, Model] = {}  # requests submitted to members
        self._callers = (*request.callers, ensemble.name)
        self._work: deque[Callable[[], None]] = deque()
        self._is_working = self._is_over = False
        for member in self._members.values():
            member.pin()

    def _count_missing(self, steps: frozenset[int]) -> dict[int, int]:
        """Count the predecessors of each step among these steps. Other inputs exist, or are optional and absent."""
        counts = dict.fromkeys(sorted(steps), 0)
        for i in steps:
            for reader in self._ensemble.flow.successors[i] & steps:
                counts[reader] += 1
        return counts

    def begin(self) -> None:
        self._run_or_queue(self._begin)

    def _begin(self) -> None:
        self._start(self._root)
        if not self._root.n_left:  # the decoupled step depends on no other step
            self._done(self._root)

    def end(self, error: StatusError) -> None:
        """End the run with its first error, and cancel all open requests."""
        if not self._is_over:
            self._close()
            self._ensemble.respond(self._request, None, error, True)

    def _close(self) -> None:
        self._is_over = True
        self._work.clear()
        for step_request, member in self._open.items():
            member.cancel(step_request)
        self._open.clear()
        self._unread.close()
        for member in self._members.values():
            member.release()

    def _run_or_queue(self, work: Callable[[], None]) -> None:
        """Run work now or, if work is in progress, after it: quick models answer during `submit`."""
        self._work.append(work)
        if self._is_working:
            return
        self._is_working = True
        try:
            while self._work:
                self._work.popleft()()
        except StatusError as error:
            self.end(StatusError(error.code, f"in ensemble '{self._ensemble.name}', {error}"))
        finally:
            self._is_working = False

    # ------------------------------------------------------------------ steps

    def _start(self, branch: _Branch) -> None:
        for i, n_missing in branch.missing.items():
            if not n_missing:
                self._work.append(partial(self._submit_step, branch, i))

    def _submit_step(self, branch: _Branch, i: int) -> None:
        """Submit the request of step `i`. raises StatusError"""
        step, member, request = self._steps[i], self._members[i], self._request
        step_request = InferRequest({}, tuple(name for name, _ in step.outputs), request.id)
        step_request.is_step, step_request.parameters = True, dict(request.parameters)
        step_request.callers = self._callers
        step_request.correlation_id, step_request.flags = request.correlation_id, request.flags
        self._ensemble.trace_step(step_request, request)
        step_request.priority, step_request.timeout_us = request.priority, request.timeout_us
        member.checker.attach_inputs(step_request, list(self._step_inputs(branch, i)))
        self._open[step_request] = member
        try:
            member.submit(step_request, partial(self._receive, branch, i, step_request))
        except StatusError:
            del self._open[step_request]
            raise

    def _step_inputs(self, branch: _Branch, i: int) -> Iterator[RawInput]:
        """Yield the inputs of step `i` that exist."""
        checker, wants_batch = self._members[i].checker, self._members[i].config.max_batch_size > 0
        for name, tensor in self._steps[i].inputs:
            array = branch.tensors.get(tensor)
            if array is None:
                continue
            if (has_batch := self._has_batch(tensor)) != wants_batch and (
                declared := checker.declared_input(name)
            ) is not None:
                dims = declared[1][1 if wants_batch else 0 :]
                array = rebatched(array, dims, has_batch=has_batch, wants_batch=wants_batch)
            yield RawInput(name, output_datatype(tensor, array), array.shape, _common_outputs(array))

    def _has_batch(self, tensor: str) -> bool:
        """Return whether the tensor has a batch dimension, as the model that produced it does."""
        producer = self._ensemble.flow.producer(tensor)
        producer_config = self._ensemble.config if producer is None else self._members[producer].config
        return producer_config.max_batch_size > 0

    def _receive(
        self, branch: _Branch, i: int, step_request: InferRequest,
        response: InferResponse | None, error: StatusError | None, final: bool,
    ) -> None:  # fmt: skip
        if self._is_over:
            return
        if final:
            del self._open[step_request]
        self._run_or_queue(partial(self._on_step_response, branch, i, response, error, final))

    def _on_step_response(
        self, branch: _Branch, i: int, response: InferResponse | None, error: StatusError | None, final: bool
    ) -> None:
        """Handle a response of step `i`. raises StatusError"""
        if error is not None:
            raise error
        if i == self._decoupled:
            if response is not None:
                self._waiting.append((response, self._unread.add(self._request, response)))
            self._stream_ended = final
            self._advance()
            return
        if response is None or not final:
            raise StatusError(Code.INTERNAL, NO_RESPONSE)
        self._store_outputs(branch, i, response)
        for reader in self._ensemble.flow.successors[i]:
            if reader in branch.missing:
                branch.missing[reader] -= 1
                if not branch.missing[reader]:
                    self._work.append(partial(self._submit_step, branch, reader))
        branch.n_left -= 1
        if not branch.n_left:
            self._done(branch)

    def _store_outputs(self, branch: _Branch, i: int, response: InferResponse) -> None:
        """Store the outputs of step `i`; a model may omit outputs that depend on an omitted input."""
        for name, tensor in self._steps[i].outputs:
            array = response.outputs.get(name)
            if array is not None:
                branch.tensors[tensor] = array

    def _missing_output_error(self, tensor: str) -> StatusError:
        """Return the error for a requested output that does not exist."""
        producer = self._ensemble.flow.producer(tensor)
        if producer is None:
            return StatusError(Code.INTERNAL, f"output '{tensor}' is an input that was not given")
        step = self._steps[producer]
        name = next(name for name, output_tensor in step.outputs if output_tensor == tensor)
        return StatusError(Code.INTERNAL, f"model '{step.model}' computed no output '{name}'")

    def _done(self, branch: _Branch) -> None:
        """Continue after every step of a branch has answered."""
        if branch is not self._root:
            self._advance()
        elif self._decoupled is not None:
            self._submit_step(branch, self._decoupled)
        else:
            self._respond(branch, True)

    def _advance(self) -> None:
        """Deliver finished branches in order, and start waiting ones while fewer than max_inflight run."""
        while not self._is_over:
            if self._branches and not self._branches[0].n_left:
                branch = self._branches.popleft()
                self._unread.take_off(branch.n_bytes)
                self._respond(branch, self._stream_ended and not self._branches and not self._waiting)
            elif self._waiting and len(self._branches) < self._ensemble.max_inflight:
                self._branches.append(self._next_branch())
            else:
                break
        if self._stream_ended and not self._is_over and not self._branches:
            self._close()
            self._ensemble.respond(self._request, None, None, True)

    def _next_branch(self) -> _Branch:
        response, n_bytes = self._waiting.popleft()
        branch = _Branch(dict(self._root.tensors), dict(self._later), len(self._later), n_bytes)
        assert self._decoupled is not None, "only its responses wait"
        self._store_outputs(branch, self._decoupled, response)
        self._start(branch)
        return branch

    def _respond(self, branch: _Branch, final: bool) -> None:
        """Respond with the outputs of a branch. raises StatusError if a requested output is missing"""
        dims, wants_batch = self._ensemble.output_dims, self._ensemble.config.max_batch_size > 0
        outputs = dict[str, Array]()
        for name in self._outputs:
            array = branch.tensors.get(name)
            if array is None and self._request.is_step:
                continue
            if array is None:
                raise self._missing_output_error(name)
            has_batch = self._has_batch(name)
            outputs[name] = rebatched(array, dims[name], has_batch=has_batch, wants_batch=wants_batch)
        if final:
            self._close()
        self._ensemble.respond(self._request, InferResponse(outputs), None, final)


def _common_outputs(array: Array) -> Array:
    """Return a read-only view, because other steps or the response may share the array."""
    view = array.view()
    view.flags.writeable = False
    return view
