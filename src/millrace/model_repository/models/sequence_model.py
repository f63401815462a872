"""A model of sequences: a `BackendModel` whose instances are given what `sequence_batcher.py` says."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence

from millrace.model_repository.backends.backend import ModelBackend
from millrace.model_repository.execution.instance_worker import Worker
from millrace.model_repository.models.backend_model import BackendModel
from millrace.model_repository.models.bls import BlsExecutor
from millrace.model_repository.models.model_version import ModelVersionSource, Waiting
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.model_repository.scheduling.dynamic_batcher import Batch
from millrace.model_repository.scheduling.sequence_batcher import SequenceBatcher, SequenceRules
from millrace.model_repository.scheduling.sequence_controls import Controls
from millrace.model_repository.scheduling.sequence_states import States


class SequenceModel(BackendModel):
    # An answer may let the next of its sequence be computed, which must not be within the call that computes this one.
    _computes_here = False

    def __init__(
        self,
        of: ModelVersionSource,
        backend: ModelBackend,
        others: BlsExecutor,
        loop: asyncio.AbstractEventLoop,
        states: States,
    ) -> None:
        """As `BackendModel`; its configuration has sequence_batching"""
        super().__init__(of, backend, others, loop)
        said = of.config.sequence_batching
        assert said is not None, of.name
        self._controls, self._states = Controls(of.config), states
        self._sequences = SequenceBatcher(
            SequenceRules.of(of.config), len(self._workers), self._ready, self._controls.null
        )
        self._numbers = {worker: i for i, worker in enumerate(self._workers)}
        self._is_finishing = False
        if said.oldest is not None and said.oldest.preserve_ordering:
            self._begun = deque()

    @property
    def n_pending(self) -> int:
        return len(self._sequences)

    def can_run_inline(self, n_bytes: int) -> bool:
        return False

    def _enqueue(self, request: InferRequest, now_ns: int) -> None:
        if self._broken:
            raise StatusError(Code.UNAVAILABLE, request.named + self._broken)
        self._controls.check(request.correlation_id)
        request.send_by = self._send
        self._sequences.put(request, now_ns)

    def cancel(self, request: InferRequest) -> None:
        """With it those that wait behind it: its sequence ends before it."""
        request.cancel()
        for one in self._sequences.leave(request, time.monotonic_ns()):
            one.cancel()
            self._on_response(one, None, StatusError(Code.CANCELLED, f"{one.named}request was cancelled"), True)
        if not request.finished:
            for worker in self._workers:
                worker.cancelled(request)

    def _waiting(self) -> list[InferRequest]:
        return self._sequences.drained()

    def on_batch_returned(self, worker: Worker, batch: Batch) -> None:
        """Its sequences were the instance's, and what that knew of them is gone with it."""
        self._lose(worker)
        for request in batch.requests:
            self._answer_lost(worker, request)
        self._free(worker)

    def on_worker_lost(self, worker: Worker, why: str) -> None:
        """Sequences would go on without what the instance knew of them: they end."""
        self._lose(worker)
        super().on_worker_lost(worker, why)

    def on_worker_restarted(self, worker: Worker) -> None:
        self._sequences.found(self._numbers[worker], time.monotonic_ns())
        super().on_worker_restarted(worker)

    def _lose(self, worker: Worker) -> None:
        for request in self._sequences.lost(self._numbers[worker], worker.name, time.monotonic_ns()):
            self._answer_lost(worker, request)

    def _answer_lost(self, worker: Worker, request: InferRequest) -> None:
        gone = self._sequences.was_lost(request.correlation_id, worker.name)
        self._on_response(request, None, StatusError(gone.code, request.named + gone.message), True)

    def waits_for(self, request: InferRequest, surely: bool) -> Sequence[Waiting] | None:
        """As of any model; and of a sequence for what computes the request before it, or for a slot."""
        if request.started_ns:
            return super().waits_for(request, surely)
        holders = self._sequences.holders(request)
        workers = [self._workers[i] for i in holders or ()]
        return None if any(worker.is_lost for worker in workers) else self._all_wait_for(workers, surely)

    # ------------------------------------------------------------------ batches

    def _ready(self, request: InferRequest) -> None:
        self._controls.give(request)
        self._states.give(request)

    def _refuse_late(self, now_ns: int) -> None:
        for request in self._sequences.expired(now_ns):
            self._on_response(request, None, StatusError(Code.UNAVAILABLE, self._sequences.timed_out), True)

    def _next(self, now_ns: int) -> tuple[Worker, Batch] | None:
        workers = self._idle if self._limiter is None else self._limiter.among(self._idle, len(self._sequences) > 0)
        for worker in workers:
            batch = self._sequences.take(now_ns, self._numbers[worker])
            if batch is not None:
                return worker, batch
        if self._limiter is not None:
            self._limiter.forget(workers)
        return None

    def _due_ns(self) -> int | None:
        return self._sequences.due_ns()

    def _end(self, worker: Worker, batch: Batch) -> None:
        super()._end(worker, batch)
        if self.is_decoupled:  # it may answer for as long as it likes, while the next is computed
            now_ns = time.monotonic_ns()
            for request in batch.requests:
                self._sequences.done(request, now_ns)

    def _on_response(
        self, request: InferRequest, response: InferResponse | None, error: StatusError | None, final: bool
    ) -> None:
        if request.finished:
            return
        now_ns = time.monotonic_ns()
        if response is not None and request.started_ns:
            try:
                response = self._states.keep(request, response)
            except StatusError as failed:
                response, error = None, failed
        if final and not self.is_decoupled:
            self._sequences.done(request, now_ns)
        super()._on_response(request, response, error, final)
        if final:  # a slot, or the next of a sequence, may be free
            self._dispatch(now_ns)

    def _close_if_done(self) -> None:
        if self._is_retired and not self._n_holds and not self._is_finishing:
            self._is_finishing = True
            now_ns = time.monotonic_ns()
            self._sequences.finish(now_ns)
            self._dispatch(now_ns)
        super()._close_if_done()
