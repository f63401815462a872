"""Trace records of one request in Triton's format, plus the close reason of its batch."""

import json
from collections.abc import Sequence
from typing import Any

from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.status_code import StatusError
from millrace.model_repository.request.tensors import WIRE_NAMES, Array
from millrace.model_repository.scheduling.dynamic_batcher import Batch
from millrace.model_repository.tracing.otel_spans import BATCH, Attributes, OpenSpans
from millrace.model_repository.tracing.trace_settings import Sampler

_MAX_VALUES = 4096  # traced values per tensor
Times = Sequence[tuple[str, int]]  # named times in ns


class InferTrace:
    """Trace of one running request. batch: the last batch that it was in

    spans, above: in mode opentelemetry, its open spans and those of its parent request
    """

    __slots__ = ("above", "batch", "id", "outputs", "parent_id", "sampler", "spans")

    def __init__(self, number: int, sampler: Sampler, parent_id: int = 0, above: OpenSpans | None = None) -> None:
        self.id, self.sampler, self.parent_id, self.above = number, sampler, parent_id, above
        self.batch: Batch | None = None
        self.spans: OpenSpans | None = None
        self.outputs: list[tuple[str, Array]] = []

    def add_response(self, response: InferResponse) -> None:
        if "TENSORS" in self.sampler.level and len(self.outputs) < _MAX_VALUES:
            self.outputs += response.outputs.items()

    @property
    def context(self) -> str | None:
        """Trace headers as JSON, for calls outside of this server; None without spans."""
        return json.dumps(self.spans.carrier()) if self.spans is not None else None


def attributes(trace: InferTrace, request: InferRequest, model: str, version: int) -> Attributes:
    """Return the span attributes: Triton's for the request, ours for its batch."""
    values: dict[str, Any] = {"triton.model_name": model, "triton.model_version": version, "triton.trace_id": trace.id}
    values |= {"triton.request_id": request.id} if request.id else {}
    values |= {"triton.trace_parent_id": trace.parent_id} if trace.parent_id else {}
    if trace.batch is not None:
        values |= {BATCH: trace.batch.size, "millrace.batch_closed": trace.batch.close_reason.value}
    return values


def records(
    trace: InferTrace, request: InferRequest, model: str, version: int, done_ns: int, error: StatusError | None,
    around: Times,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the records: request, timestamps and tensors. around: times of the protocol"""
    head: dict[str, Any] = {"id": trace.id, "model_name": model, "model_version": version}
    head |= {"request_id": request.id} if request.id else {}
    head |= {"parent_id": trace.parent_id} if trace.parent_id else {}
    if trace.batch is not None:
        head |= {"batch_size": trace.batch.size, "batch_closed": trace.batch.close_reason.value}
    head |= {"error": error.message} if error is not None else {}
    entries = [head]
    if "TIMESTAMPS" in trace.sampler.level:
        timestamps = (
            ("REQUEST_START", request.received_ns), ("QUEUE_START", request.queued_ns),
            ("COMPUTE_START", request.started_ns), ("COMPUTE_INPUT_END", request.computing_ns),
            ("COMPUTE_OUTPUT_START", request.computed_ns), ("COMPUTE_END", request.started_ns and done_ns),
            ("INFER_RESPONSE_COMPLETE", 0 if error else done_ns), ("REQUEST_END", done_ns),
        )  # fmt: skip
        times = [{"name": name, "ns": ns} for name, ns in (*timestamps, *around) if ns]
        entries.append({"id": trace.id, "timestamps": times})
    if "TENSORS" in trace.sampler.level:
        entries += [_tensor(trace.id, "TENSOR_QUEUE_INPUT", *tensor) for tensor in request.inputs.items()]
        entries += [_tensor(trace.id, "TENSOR_BACKEND_OUTPUT", *tensor) for tensor in trace.outputs]
    return entries


def _tensor(number: int, activity: str, name: str, array: Array) -> dict[str, Any]:
    """Return a tensor's record, with its first values."""
    values = array.reshape(-1)[:_MAX_VALUES]
    texts = (v.decode("utf-8", "replace") if isinstance(v, bytes) else str(v) for v in values)
    shape = ",".join(map(str, array.shape))
    description = {"name": name, "data": ",".join(texts), "shape": shape, "dtype": WIRE_NAMES.get(array.dtype, "")}
    return {"id": number, "activity": activity, "tensor": description}
