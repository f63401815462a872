"""A stateful model: a `BackendModel` whose batches are chosen by `sequence_batcher.py`."""

import asyncio
import time
from collections import deque

from millrace.model_repository.backends.backend import ModelBackend
from millrace.model_repository.execution.instance_worker import InstanceWorker
from millrace.model_repository.models.backend_model import BackendModel
from millrace.model_repository.models.bls import BlsExecutor
from millrace.model_repository.models.model_version import ModelVersionSource
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.model_repository.scheduling.dynamic_batcher import Batch
from millrace.model_repository.scheduling.sequence_batcher import SequenceBatcher, SequenceRules
from millrace.model_repository.scheduling.sequence_controls import SequenceControls
from millrace.model_repository.scheduling.sequence_states import SequenceStates


class SequenceModel(BackendModel):
    # A response may start the next request of its sequence, which must not happen inside the running `execute`.
    _computes_here = False

    def __init__(
        self,
        source: ModelVersionSource,
        backend: ModelBackend,
        bls: BlsExecutor,
        loop: asyncio.AbstractEventLoop,
        states: SequenceStates,
    ) -> None:
        """Start as `BackendModel` does. The configuration must have sequence_batching."""
        super().__init__(source, backend, bls, loop)
        batching = source.config.sequence_batching
        assert batching is not None, source.name
        self._controls, self._states = SequenceControls(source.config), states
        self._sequences = SequenceBatcher(
            SequenceRules.from_config(source.config), len(self._workers), self._ready, self._controls.null_request
        )
        self._numbers = {worker: i for i, worker in enumerate(self._workers)}
        self._is_finishing = False
        if batching.oldest is not None and batching.oldest.preserve_ordering:
            self._dispatched = deque()

    @property
    def n_pending(self) -> int:
        return len(self._sequences)

    def _enqueue(self, request: InferRequest, now_ns: int) -> None:
        if self._broken:
            raise StatusError(Code.UNAVAILABLE, request.error_prefix + self._broken)
        self._controls.check(request.correlation_id)
        request.send_by = self._send
        self._sequences.put(request, now_ns)

    def cancel(self, request: InferRequest) -> None:
        """Cancel a request and those waiting behind it: its sequence ends before it."""
        request.cancel()
        for cancelled in self._sequences.cancel(request, time.monotonic_ns()):
            cancelled.cancel()
            self._on_response(cancelled, None, cancelled.cancelled_error(), True)
        if not request.finished:
            for worker in self._workers:
                worker.on_cancel(request)

    def _waiting(self) -> list[InferRequest]:
        return self._sequences.drain()

    def on_batch_returned(self, worker: InstanceWorker, batch: Batch) -> None:
        """End the batch's sequences with an error: their state was lost with the instance."""
        self._lose(worker)
        for request in batch.requests:
            self._answer_lost(worker, request)
        self._free(worker)

    def on_worker_lost(self, worker: InstanceWorker, reason: str) -> None:
        """End the instance's sequences, whose state is lost."""
        self._lose(worker)
        super().on_worker_lost(worker, reason)

    def on_worker_restarted(self, worker: InstanceWorker) -> None:
        self._sequences.restore_instance(self._numbers[worker], time.monotonic_ns())
        super().on_worker_restarted(worker)

    def _lose(self, worker: InstanceWorker) -> None:
        for request in self._sequences.lose_instance(self._numbers[worker], worker.name, time.monotonic_ns()):
            self._answer_lost(worker, request)

    def _answer_lost(self, worker: InstanceWorker, request: InferRequest) -> None:
        gone = self._sequences.lost_error(request.correlation_id, worker.name)
        self._on_response(request, None, StatusError(gone.code, request.error_prefix + gone.message), True)

    # ------------------------------------------------------------------ batches

    def _ready(self, request: InferRequest) -> None:
        self._controls.add_inputs(request)
        self._states.add_inputs(request)

    def _refuse_late(self, now_ns: int) -> None:
        for request in self._sequences.take_expired(now_ns):
            self._on_response(request, None, StatusError(Code.UNAVAILABLE, self._sequences.timed_out), True)

    def _next(self, now_ns: int) -> tuple[InstanceWorker, Batch] | None:
        workers = (
            self._idle if self._limiter is None else self._limiter.select_runnable(self._idle, len(self._sequences) > 0)
        )
        for worker in workers:
            batch = self._sequences.take(now_ns, self._numbers[worker])
            if batch is not None:
                return worker, batch
        if self._limiter is not None:
            self._limiter.clear_waiting(workers)
        return None

    def _due_ns(self) -> int | None:
        return self._sequences.due_ns()

    def _end(self, worker: InstanceWorker, batch: Batch) -> None:
        super()._end(worker, batch)
        if self.is_decoupled:  # it may keep responding while the next request runs
            now_ns = time.monotonic_ns()
            for request in batch.requests:
                self._sequences.finish_request(request, now_ns)

    def _on_response(
        self, request: InferRequest, response: InferResponse | None, error: StatusError | None, final: bool
    ) -> None:
        if request.finished:
            return
        now_ns = time.monotonic_ns()
        if response is not None and request.started_ns:
            try:
                response = self._states.store(request, response)
            except StatusError as failed:
                response, error = None, failed
        if final and not self.is_decoupled:
            self._sequences.finish_request(request, now_ns)
        super()._on_response(request, response, error, final)
        if final:  # a slot or the sequence's next request may now be available
            self._dispatch(now_ns)

    def _close_if_done(self) -> None:
        if self._is_retired and not self._n_pins and not self._is_finishing:
            self._is_finishing = True
            now_ns = time.monotonic_ns()
            self._sequences.finish(now_ns)
            self._dispatch(now_ns)
        super()._close_if_done()
