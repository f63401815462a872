"""Inference requests and responses: the only types that protocols and backends of tensor models share."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.model_repository.request.status_code import Code, StatusError, invalid
from millrace.model_repository.request.tensors import Array

Parameter = bool | int | float | str
UNKNOWN_ID = "<id_unknown>"
START, END = 1, 2  # flags of a sequence's first and last request


@dataclass(frozen=True, slots=True)
class InferResponse:
    """A response. outputs: by name, in order. Where a response is optional, None marks the end of a stream"""

    outputs: Mapping[str, Array]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


class TokenUsage:
    """Counter of tokens that language models and encoders compute for a client. Thread-safe."""

    __slots__ = ("_lock", "generated", "prompt")

    def __init__(self) -> None:
        self.prompt = self.generated = 0
        self._lock = threading.Lock()

    def add(self, prompt: int = 0, generated: int = 0) -> None:
        with self._lock:
            self.prompt += prompt
            self.generated += generated

    def take(self) -> int:
        """Return all tokens added since the last call, and reset the counter."""
        with self._lock:
            total, self.prompt, self.generated = self.prompt + self.generated, 0, 0
            return total


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """Timestamps of one model's work on a request. Steps that were not reached are 0."""

    model: str
    queued_ns: int
    started_ns: int
    computing_ns: int
    computed_ns: int
    done_ns: int


# Called in the event loop: a response, an error or neither, and whether it is the last.
Receiver = Callable[[InferResponse | None, StatusError | None, bool], None]
Sender = Callable[["InferRequest", InferResponse | None, StatusError | None, bool], None]


def _reject_unsubmitted(request: "InferRequest", response: Any, error: Any, final: bool) -> None:
    raise AssertionError("a request was answered that no model has taken")


class InferRequest:
    """A request. inputs: by name, with a batch dimension if the model has one; BYTES are arrays of `bytes` objects.

    outputs: requested names; empty for all. batch_size: 0 for a model without batching.
    priority: 0 is the model's default. timeout_us: 0 is none. Times are time.monotonic_ns().
    """

    __slots__ = (
        "_watchers", "batch", "batch_size", "callers", "cancelled", "computed_ns", "computing_ns", "correlation_id",
        "deadline_ns", "digest", "exchange", "finished", "flags", "has_failed", "id", "inputs", "is_inner",
        "is_step", "n_responses", "outputs", "parameters", "priority", "queued_ns", "ready_ns", "receive",
        "received_ns", "reschedule_by", "send_by", "sequence", "shape_key", "started_ns", "tenant", "timeout_us",
        "timings", "token_usage", "trace",
    )  # fmt: skip

    def __init__(self, inputs: dict[str, Array], outputs: tuple[str, ...] = (), request_id: str = "") -> None:
        self.id, self.inputs, self.outputs = request_id, inputs, outputs
        self.parameters: dict[str, Parameter] = {}
        self.batch_size = self.priority = self.timeout_us = self.flags = 0
        self.correlation_id: int | str = 0
        self.callers: tuple[str, ...] = ()  # models and ensembles that it came through, the outermost first
        self.tenant = ""  # name of the client's API key, if there are several
        self.digest = b""  # of the inputs, if the model's responses are cached
        self.shape_key: object = None  # requests with equal keys may share a batch
        # queued_ns: arrival at the scheduler; ready_ns: since when it may join a batch
        self.received_ns = self.queued_ns = self.ready_ns = self.started_ns = self.deadline_ns = 0
        self.computing_ns = self.computed_ns = 0  # when the backend had gathered the inputs and computed the outputs
        self.n_responses, self.finished, self.cancelled = 0, False, False
        self.has_failed = False  # any of its responses was an error
        self.is_inner = False  # submitted by a model on behalf of another request
        self.is_step = False  # submitted by an ensemble, which checks outputs itself
        self.receive: Receiver | None = None
        self.batch: Any = None  # the `dynamic_batcher.Batch` that it is in, until that is counted
        self.sequence: Any = None  # its `sequence_batcher.InferSequence`
        self.exchange: Any = None  # its `tracer.TracedExchange`, if tracing is on
        self.trace: Any = None  # its `trace_records.InferTrace`, if it is traced
        self.token_usage: TokenUsage | None = None  # shared with nested requests
        self.timings: list[RequestTiming] | None = None  # of all models involved, if the client asked for them
        self.send_by: Sender = _reject_unsubmitted
        self.reschedule_by: Callable[[InferRequest], None] | None = None  # if its scheduler supports rescheduling
        self._watchers: dict[object, Callable[[], None]] | None = None

    @property
    def error_prefix(self) -> str:
        """Prefix of error messages, as in Triton."""
        return f"[request id: {self.id or UNKNOWN_ID}] "

    def cancelled_error(self) -> StatusError:
        return StatusError(Code.CANCELLED, f"{self.error_prefix}request was cancelled")

    def inherit_from(self, outer: "InferRequest") -> None:
        """Mark it as nested in `outer` and share its accounting; only the first call counts."""
        if not self.is_inner:
            self.is_inner, self.token_usage, self.timings, self.tenant = (
                True,
                outer.token_usage,
                outer.timings,
                outer.tenant,
            )

    def copy_with(self, inputs: dict[str, Array]) -> "InferRequest":
        """Return a copy with other inputs of the same shapes."""
        copy = InferRequest(inputs, self.outputs, self.id)
        copy.batch_size, copy.shape_key = self.batch_size, self.shape_key
        copy.priority, copy.timeout_us, copy.flags = self.priority, self.timeout_us, self.flags
        copy.correlation_id = self.correlation_id
        if self.parameters:
            copy.parameters = dict(self.parameters)
        return copy

    def send(self, response: InferResponse | None, final: bool = True) -> None:
        """Send a response, from any thread. Only decoupled models send several; after the last, nothing is sent."""
        self.send_by(self, response, None, final)

    def reschedule(self) -> None:
        """Queue the request again instead of answering it; from any thread."""
        if self.reschedule_by is not None:
            self.reschedule_by(self)
            return
        message = (
            "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, which its model's scheduler does not"
        )
        self.fail(invalid(f"{self.error_prefix}{message} take: say sequence_batching {{ iterative_sequence: true }}"))

    def fail(self, error: StatusError, final: bool = True) -> None:
        self.send_by(self, None, error, final)

    def cancel(self) -> None:
        """Cancel the request. A running computation may continue; it sees `cancelled`."""
        self.cancelled = True
        for watcher in list((self._watchers or {}).values()):
            watcher()

    def watch(self, owner: object, watcher: Callable[[], None]) -> None:
        """Call `watcher` in the event loop on cancellation, unless `by` stops watching before."""
        if self._watchers is None:
            self._watchers = {}
        self._watchers[owner] = watcher

    def unwatch(self, owner: object) -> None:
        if self._watchers is not None:
            self._watchers.pop(owner, None)
