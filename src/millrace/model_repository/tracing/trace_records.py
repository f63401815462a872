"""What a trace says of one request, in Triton's words and format, and why its batch was closed, in ours."""

import json
from collections.abc import Sequence
from typing import Any

from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.status_code import StatusError
from millrace.model_repository.request.tensors import WIRE_NAMES, Array
from millrace.model_repository.scheduling.dynamic_batcher import Batch
from millrace.model_repository.tracing.otel_spans import BATCH, Attributes, Open
from millrace.model_repository.tracing.trace_settings import Sampler

_MOST_VALUES = 4096  # of a tensor that is traced
Times = Sequence[tuple[str, int]]  # in ns, by their names


class Trace:
    """Of one request, while it is under way. batch: the last that it was computed in

    spans: those that have begun, above: those of the request that it is a part of; in mode opentelemetry
    """

    __slots__ = ("above", "batch", "id", "outputs", "parent_id", "sampler", "spans")

    def __init__(self, number: int, sampler: Sampler, parent_id: int = 0, above: Open | None = None) -> None:
        self.id, self.sampler, self.parent_id, self.above = number, sampler, parent_id, above
        self.batch: Batch | None = None
        self.spans: Open | None = None
        self.outputs: list[tuple[str, Array]] = []

    def responded(self, response: InferResponse) -> None:
        if "TENSORS" in self.sampler.level and len(self.outputs) < _MOST_VALUES:
            self.outputs += response.outputs.items()

    @property
    def context(self) -> str | None:
        """For whom the model asks outside of this server: the trace's headers, as JSON; None: they go on with none."""
        return json.dumps(self.spans.carrier()) if self.spans is not None else None


def attributes(trace: Trace, request: InferRequest, model: str, version: int) -> Attributes:
    """Of the spans of a request, in Triton's words; of its batch, in ours."""
    found: dict[str, Any] = {"triton.model_name": model, "triton.model_version": version, "triton.trace_id": trace.id}
    found |= {"triton.request_id": request.id} if request.id else {}
    found |= {"triton.trace_parent_id": trace.parent_id} if trace.parent_id else {}
    if trace.batch is not None:
        found |= {BATCH: trace.batch.size, "millrace.batch_closed": trace.batch.closed.value}
    return found


def records(
    trace: Trace, request: InferRequest, model: str, version: int, done_ns: int, error: StatusError | None,
    around: Times,
) -> list[dict[str, Any]]:  # fmt: skip
    """The request, its times, its tensors; what it waited for in a batch is ours. around: what its protocol did"""
    head: dict[str, Any] = {"id": trace.id, "model_name": model, "model_version": version}
    head |= {"request_id": request.id} if request.id else {}
    head |= {"parent_id": trace.parent_id} if trace.parent_id else {}
    if trace.batch is not None:
        head |= {"batch_size": trace.batch.size, "batch_closed": trace.batch.closed.value}
    head |= {"error": error.message} if error is not None else {}
    found = [head]
    if "TIMESTAMPS" in trace.sampler.level:
        told = (
            ("REQUEST_START", request.received_ns), ("QUEUE_START", request.queued_ns),
            ("COMPUTE_START", request.started_ns), ("COMPUTE_INPUT_END", request.computing_ns),
            ("COMPUTE_OUTPUT_START", request.computed_ns), ("COMPUTE_END", request.started_ns and done_ns),
            ("INFER_RESPONSE_COMPLETE", 0 if error else done_ns), ("REQUEST_END", done_ns),
        )  # fmt: skip
        times = [{"name": name, "ns": ns} for name, ns in (*told, *around) if ns]
        found.append({"id": trace.id, "timestamps": times})
    if "TENSORS" in trace.sampler.level:
        found += [_tensor(trace.id, "TENSOR_QUEUE_INPUT", *one) for one in request.inputs.items()]
        found += [_tensor(trace.id, "TENSOR_BACKEND_OUTPUT", *one) for one in trace.outputs]
    return found


def _tensor(number: int, activity: str, name: str, array: Array) -> dict[str, Any]:
    """Its first values."""
    values = array.reshape(-1)[:_MOST_VALUES]
    texts = (v.decode("utf-8", "replace") if isinstance(v, bytes) else str(v) for v in values)
    shape = ",".join(map(str, array.shape))
    told = {"name": name, "data": ",".join(texts), "shape": shape, "dtype": WIRE_NAMES.get(array.dtype, "")}
    return {"id": number, "activity": activity, "tensor": told}
