"""Requests that are answered in the call that brings them, by an instance that is idle and takes microseconds."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping

from millrace.model_repository.backends.backend import select_requested_outputs
from millrace.model_repository.execution.instance_worker import Worker, to_status_error
from millrace.model_repository.metrics.statistics import Statistics
from millrace.model_repository.models.model_version import NO_RESPONSE, Answered
from millrace.model_repository.request.infer_request import InferRequest, InferResponse, Parameter
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.model_repository.request.tensors import Array
from millrace.model_repository.scheduling.dynamic_batcher import BatchQueue

SETTLED_S = 0.1  # at most, until such a request is counted
_NOTHING_MORE: Mapping[str, Parameter] = {}
log = logging.getLogger(__name__)


class InlineExecutor:
    """Of one model, whose `can_run_inline` says when it may be asked."""

    def __init__(
        self, name: str, idle: deque[Worker], queue: BatchQueue, statistics: Statistics,
        loop: asyncio.AbstractEventLoop,
    ) -> None:  # fmt: skip
        """idle: instances, the first of which is asked; queue: nothing waits in it"""
        self._name, self._idle, self._queue, self._statistics, self._loop = name, idle, queue, statistics, loop
        self._alone = statistics.alone
        statistics.closed_alone = queue.closed_alone

    def infer(self, like: InferRequest, inputs: dict[str, Array], came_ns: int) -> Answered:
        """As `Model.infer_inline`: where the instance needs no request, none is made. raises StatusError"""
        compute, alone = self._idle[0].alone, self._alone
        if compute is None:
            response = self._inferred(like.copied(inputs))
            return response.outputs, response.parameters
        began_ns = time.monotonic_ns()
        try:
            outputs = compute(inputs)
            if like.outputs:
                outputs = select_requested_outputs(like, outputs)
        except BaseException as error:
            raise self._failed(error, like, came_ns, began_ns) from error
        done_ns = time.monotonic_ns()
        self._idle[0].took(inputs, done_ns - began_ns)  # by which it may lose its place in the event loop's thread
        if not alone:
            self._loop.call_later(SETTLED_S, self._statistics.settle)
        alone.append((came_ns, began_ns, done_ns, like.batch_size))
        return outputs, _NOTHING_MORE

    def _failed(self, error: BaseException, like: InferRequest, came_ns: int, began_ns: int) -> StatusError:
        failed, done_ns, request = to_status_error(error), time.monotonic_ns(), like.copied({})
        log.debug("%s: %s", self._idle[0].name, failed, exc_info=error)
        request.received_ns = request.started_ns = came_ns
        request.computing_ns, request.computed_ns = began_ns, done_ns
        self._statistics.executed(self._queue.alone(request), done_ns)
        self._statistics.failed(request, done_ns, "BACKEND")
        return failed

    def _inferred(self, request: InferRequest) -> InferResponse:
        """By an instance that answers requests. raises StatusError"""
        answers: list[tuple[InferRequest, InferResponse | None, StatusError | None, bool]] = []
        request.send_by = lambda *answer: answers.append(answer)
        request.received_ns = request.queued_ns = request.started_ns = time.monotonic_ns()
        batch = self._queue.alone(request)
        self._idle[0].compute(batch)
        done_ns = time.monotonic_ns()
        for _, response, error, final in answers:
            if error is None and response is not None and final:
                self._statistics.executed(batch, done_ns)
                self._statistics.answered(request, done_ns)
                return response
            if error is not None or final:
                break
        else:
            error = StatusError(Code.INTERNAL, f"{request.named}no response from model '{self._name}'")
        self._statistics.executed(batch, done_ns)
        self._statistics.failed(request, done_ns, "BACKEND")
        raise error or StatusError(Code.INTERNAL, NO_RESPONSE)
