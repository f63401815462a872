"""One request to a tensor model, and what a model answers; no protocol and no backend knows more of each other."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.model_repository.request.status_code import StatusError, invalid
from millrace.model_repository.request.tensors import Array

Parameter = bool | int | float | str
UNKNOWN_ID = "<id_unknown>"
START, END = 1, 2  # flags of a sequence's first and last request


@dataclass(frozen=True, slots=True)
class InferResponse:
    """outputs: by name, in the order in which they are told. None in place of a response: nothing but the end"""

    outputs: Mapping[str, Array]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


class TokenUsage:
    """Tokens that are computed for whoever asks, by language models and encoders; from any thread."""

    __slots__ = ("_lock", "generated", "prompt")

    def __init__(self) -> None:
        self.prompt = self.generated = 0
        self._lock = threading.Lock()

    def add(self, prompt: int = 0, generated: int = 0) -> None:
        with self._lock:
            self.prompt += prompt
            self.generated += generated

    def settled(self) -> int:
        """All that was added, which is charged now and not again."""
        with self._lock:
            found, self.prompt, self.generated = self.prompt + self.generated, 0, 0
            return found


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """What one model did for a request. started_ns and what follows: 0 where it has not come so far"""

    model: str
    queued_ns: int
    started_ns: int
    computing_ns: int
    computed_ns: int
    done_ns: int


# Of the event loop: a response or an error or neither, and whether it is the last.
Receiver = Callable[[InferResponse | None, StatusError | None, bool], None]
Sender = Callable[["InferRequest", InferResponse | None, StatusError | None, bool], None]


def _nobody(request: "InferRequest", response: Any, error: Any, final: bool) -> None:
    raise AssertionError("a request was answered that no model has taken")


class InferRequest:
    """inputs: by name, each with its batch dimension where the model has one; BYTES are arrays of `bytes` objects.

    outputs: names that are asked for; none is all. batch_size: 0 for a model without batches.
    priority: 0 is the model's default. timeout_us: 0 is none. Times are time.monotonic_ns().
    """

    __slots__ = (
        "_watchers", "again_by", "batch", "batch_size", "bill", "came", "cancelled", "computed_ns", "computing_ns",
        "correlation_id", "deadline_ns", "digest", "finished", "flags", "has_failed", "hops", "id", "inputs",
        "is_inner", "is_step",
        "n_responses", "outputs", "parameters", "priority", "queued_ns", "ready_ns", "receive", "received_ns",
        "send_by", "sequence", "shape_key", "started_ns", "tenant", "timeout_us", "trace",
    )  # fmt: skip

    def __init__(self, inputs: dict[str, Array], outputs: tuple[str, ...] = (), request_id: str = "") -> None:
        self.id, self.inputs, self.outputs = request_id, inputs, outputs
        self.parameters: dict[str, Parameter] = {}
        self.batch_size = self.priority = self.timeout_us = self.flags = 0
        self.correlation_id: int | str = 0
        self.tenant = ""  # whose API key it came with, where there are several
        self.digest = b""  # of its inputs, where its model's answers are kept
        self.shape_key: object = None  # requests with equal ones may be in one batch
        # queued_ns: when it came to its scheduler; ready_ns: since when it may be in a batch
        self.received_ns = self.queued_ns = self.ready_ns = self.started_ns = self.deadline_ns = 0
        self.computing_ns = self.computed_ns = 0  # when its backend had its inputs, and its outputs
        self.n_responses, self.finished, self.cancelled = 0, False, False
        self.has_failed = False  # one of its responses was an error, the last or another
        self.is_inner = False  # a model asks it, for a request of its own
        self.is_step = False  # an ensemble asks it, which knows itself which outputs it needs
        self.receive: Receiver | None = None
        self.batch: Any = None  # `batching.Batch` that it is computed in, until that is counted
        self.sequence: Any = None  # `sequences.Sequence` that it belongs to
        self.came: Any = None  # `tracing.TracedExchange` that it came by, where anything is traced
        self.trace: Any = None  # `trace_records.Trace` where it is traced
        self.bill: TokenUsage | None = None  # of its client, and of whatever is asked for it
        self.hops: list[RequestTiming] | None = None  # of all that computed for it, where its client asks for that
        self.send_by: Sender = _nobody
        self.again_by: Callable[[InferRequest], None] | None = None  # where it may be computed again
        self._watchers: dict[object, Callable[[], None]] | None = None

    @property
    def named(self) -> str:
        """In front of an error, as Triton has it."""
        return f"[request id: {self.id or UNKNOWN_ID}] "

    def part_of(self, outer: "InferRequest") -> None:
        """A model, or an ensemble, asks it for `outer`; of several for the first."""
        if not self.is_inner:
            self.is_inner, self.bill, self.hops, self.tenant = True, outer.bill, outer.hops, outer.tenant

    def copied(self, inputs: dict[str, Array]) -> "InferRequest":
        """The same with other numbers: inputs of the same shapes."""
        found = InferRequest(inputs, self.outputs, self.id)
        found.batch_size, found.shape_key = self.batch_size, self.shape_key
        found.priority, found.timeout_us, found.flags = self.priority, self.timeout_us, self.flags
        found.correlation_id = self.correlation_id
        if self.parameters:
            found.parameters = dict(self.parameters)
        return found

    def send(self, response: InferResponse | None, final: bool = True) -> None:
        """Answer, from any thread. Only decoupled models answer more than once; after the last nothing is sent."""
        self.send_by(self, response, None, final)

    def again(self) -> None:
        """From any thread, in place of its last answer: its model wants to compute it again."""
        if self.again_by is not None:
            self.again_by(self)
            return
        what = "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, which its model's scheduler does not"
        self.fail(invalid(f"{self.named}{what} take: say sequence_batching {{ iterative_sequence: true }}"))

    def fail(self, error: StatusError, final: bool = True) -> None:
        self.send_by(self, None, error, final)

    def cancel(self) -> None:
        """Nobody waits any more. What is computed may go on, and is told by `cancelled`."""
        self.cancelled = True
        for watcher in list((self._watchers or {}).values()):
            watcher()

    def watch(self, by: object, watcher: Callable[[], None]) -> None:
        """Call it, in the event loop, when this is cancelled, unless `by` ends watching before."""
        if self._watchers is None:
            self._watchers = {}
        self._watchers[by] = watcher

    def unwatch(self, by: object) -> None:
        if self._watchers is not None:
            self._watchers.pop(by, None)
