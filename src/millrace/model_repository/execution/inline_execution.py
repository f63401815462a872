"""Inline execution: answers a request on the event loop's thread with an idle instance that takes microseconds."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping

from millrace.model_repository.backends.backend import select_requested_outputs
from millrace.model_repository.execution.instance_worker import InstanceWorker, to_status_error
from millrace.model_repository.metrics.statistics import ModelStatistics
from millrace.model_repository.models.model_version import NO_RESPONSE, Answered
from millrace.model_repository.request.infer_request import InferRequest, InferResponse, Parameter
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.model_repository.request.tensors import Array
from millrace.model_repository.scheduling.dynamic_batcher import BatchQueue

SETTLED_S = 0.1  # maximum delay until inline requests are counted in the statistics
_NOTHING_MORE: Mapping[str, Parameter] = {}
log = logging.getLogger(__name__)


class InlineExecutor:
    """Inline executor of one model, used only while the model's `can_run_inline` holds."""

    def __init__(
        self, name: str, idle: deque[InstanceWorker], queue: BatchQueue, statistics: ModelStatistics,
        loop: asyncio.AbstractEventLoop,
    ) -> None:  # fmt: skip
        """idle: idle instances, of which the first is used. queue: must be empty on calls"""
        self._name, self._idle, self._queue, self._statistics, self._loop = name, idle, queue, statistics, loop
        self._alone = statistics.inline_times
        statistics.single_close_reason = queue.single_close_reason

    def infer(self, template: InferRequest, inputs: dict[str, Array], came_ns: int) -> Answered:
        """Infer as `Model.infer_inline`, without creating a request if the instance needs none. raises StatusError"""
        compute, alone = self._idle[0].compute_function, self._alone
        if compute is None:
            response = self._inferred(template.copy_with(inputs))
            return response.outputs, response.parameters
        began_ns = time.monotonic_ns()
        try:
            outputs = compute(inputs)
            if template.outputs:
                outputs = select_requested_outputs(template, outputs)
        except BaseException as error:
            raise self._failed(error, template, came_ns, began_ns) from error
        done_ns = time.monotonic_ns()
        self._idle[0].record_time(inputs, done_ns - began_ns)  # after which the instance may no longer run inline
        if not alone:
            self._loop.call_later(SETTLED_S, self._statistics.settle)
        alone.append((came_ns, began_ns, done_ns, template.batch_size))
        return outputs, _NOTHING_MORE

    def _failed(self, error: BaseException, template: InferRequest, came_ns: int, began_ns: int) -> StatusError:
        failed, done_ns, request = to_status_error(error), time.monotonic_ns(), template.copy_with({})
        log.debug("%s: %s", self._idle[0].name, failed, exc_info=error)
        request.received_ns = request.started_ns = came_ns
        request.computing_ns, request.computed_ns = began_ns, done_ns
        self._statistics.record_batch(self._queue.single_batch(request), done_ns)
        self._statistics.record_failure(request, done_ns, "BACKEND")
        return failed

    def _inferred(self, request: InferRequest) -> InferResponse:
        """Infer with an instance that takes requests. raises StatusError"""
        answers: list[tuple[InferRequest, InferResponse | None, StatusError | None, bool]] = []
        request.send_by = lambda *answer: answers.append(answer)
        request.received_ns = request.queued_ns = request.started_ns = time.monotonic_ns()
        batch = self._queue.single_batch(request)
        self._idle[0].compute(batch)
        done_ns = time.monotonic_ns()
        for _, response, error, final in answers:
            if error is None and response is not None and final:
                self._statistics.record_batch(batch, done_ns)
                self._statistics.record_success(request, done_ns)
                return response
            if error is not None or final:
                break
        else:
            error = StatusError(Code.INTERNAL, f"{request.error_prefix}no response from model '{self._name}'")
        self._statistics.record_batch(batch, done_ns)
        self._statistics.record_failure(request, done_ns, "BACKEND")
        raise error or StatusError(Code.INTERNAL, NO_RESPONSE)
