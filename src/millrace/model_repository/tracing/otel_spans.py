"""Traces as spans of OpenTelemetry, sent to a collector over OTLP (HTTP); the extra `otel`, imported when it is used.

    InferRequest            from the first byte of the request to the last of its answer; the client's span is above it
      <model>               in the model: an ensemble's steps, and models that a model asks, are such spans below it
        queue, compute_input, compute_infer, compute_output

Spans wait in a queue that is bounded, and a thread of the SDK's sends them in batches: whatever the collector does, no
request waits for it, and what there is no room for is lost.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from millrace import __version__
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.status_code import StatusError
from millrace.model_repository.tracing.trace_context import PARENT, STATE, Parent
from millrace.model_repository.tracing.trace_flags import Exporting

if TYPE_CHECKING:
    from opentelemetry.trace import Span

FLUSH_S = 3.0  # at the end, for what was not sent yet
ROOT = "InferRequest"  # Triton's name
BATCH = "millrace.batch_size"  # of what was computed in one; an ensemble is not
_SAMPLED = 1
_MOST_TEXT = 1000  # characters of what clients write: spans wait, and are many
Attributes = Mapping[str, str | int | float | Sequence[str]]
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Open:
    """The spans of a request that is under way. root: None where it is a part of another. state: the client's"""

    root: "Span | None"
    of_model: "Span"
    offset_ns: int  # from the clock of requests to that of spans
    state: str

    def carrier(self) -> dict[str, str]:
        """The headers by which whoever the model asks goes on with this trace."""
        ids = self.of_model.get_span_context()
        found = {PARENT: f"00-{ids.trace_id:032x}-{ids.span_id:016x}-01"}
        return found | ({STATE: self.state} if self.state else {})


class Spans:
    """Of one server; its methods are called in the event loop."""

    def __init__(self, to: Exporting) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        self.to, self._api = to, trace
        self._exporter = OTLPSpanExporter(endpoint=to.url)
        batches = BatchSpanProcessor(
            self._exporter, max_queue_size=to.queue, schedule_delay_millis=to.delay_ms, max_export_batch_size=to.batch
        )
        resource = Resource.create({"service.name": "millrace", "service.version": __version__, **to.resource})
        # Which requests are traced is decided before; and the process's end is `close`'s.
        self._provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(batches)
        self._tracer = self._provider.get_tracer("millrace", __version__)

    # ------------------------------------------------------------------ requests to tensor models

    def begin(self, model: str, began_ns: int, parent: Parent | None) -> Open:
        """Of a client's request. began_ns: time.monotonic_ns(), as all times here"""
        offset_ns = _offset_ns()
        kind = self._api.SpanKind.SERVER
        root = self._tracer.start_span(ROOT, self._under(parent), kind, start_time=began_ns + offset_ns)
        of_model = self._tracer.start_span(model, self._below(root), start_time=began_ns + offset_ns)
        return Open(root, of_model, offset_ns, parent.state if parent is not None else "")

    def begin_part(self, model: str, outer: Open) -> Open:
        """Of what is asked for the request that `outer` is of."""
        now_ns = time.monotonic_ns() + outer.offset_ns
        below = self._below(outer.of_model)
        return Open(None, self._tracer.start_span(model, below, start_time=now_ns), outer.offset_ns, outer.state)

    def end(
        self, spans: Open, request: InferRequest, done_ns: int, error: StatusError | None, told: Attributes,
        protocol: str, times: Sequence[tuple[str, int]],
    ) -> None:  # fmt: skip
        """told: what is known of it. protocol: "" in process. times: what the protocol did, and when"""
        for name, began_ns, ended_ns in _phases(request, done_ns) if told.get(BATCH) or not request.started_ns else ():
            self._one(name, self._below(spans.of_model), began_ns + spans.offset_ns, ended_ns + spans.offset_ns)
        root = spans.root
        for span in (spans.of_model, root) if root is not None else (spans.of_model,):
            span.set_attributes(_cut(told))
            if error is not None:
                self._failed(span, error.message, error.code.name)
        spans.of_model.end(done_ns + spans.offset_ns)
        if root is None:
            return
        if protocol:
            root.set_attribute("network.protocol.name", protocol)
        for name, ns in times:
            root.add_event(name, timestamp=ns + spans.offset_ns)
        root.end(max([done_ns, *(ns for _, ns in times)]) + spans.offset_ns)

    # ------------------------------------------------------------------ any other

    def told(
        self, name: str, began_ns: int, parent: Parent | None, attributes: Attributes, failed: str = "", kind: str = ""
    ) -> None:
        """A request that has ended now, as one span. failed: why, and what kind of error that is"""
        offset_ns = _offset_ns()
        span = self._tracer.start_span(
            name, self._under(parent), self._api.SpanKind.SERVER, _cut(attributes), start_time=began_ns + offset_ns
        )
        if failed:
            self._failed(span, failed, kind)
        span.end(time.monotonic_ns() + offset_ns)

    def close(self, within_s: float = FLUSH_S) -> None:
        """Send what there is, or give it up: a collector that is gone holds nobody up for longer."""
        ending = threading.Thread(target=self._provider.shutdown, name="millrace-spans-end", daemon=True)
        ending.start()
        ending.join(within_s)
        if ending.is_alive():
            log.warning("the collector of traces did not take the last spans within %g s: they are lost", within_s)
            self._exporter.shutdown()  # which ends its waiting for another try

    # ------------------------------------------------------------------ spans

    def _one(self, name: str, below: Any, began_ns: int, ended_ns: int) -> None:
        self._tracer.start_span(name, below, start_time=began_ns).end(ended_ns)

    def _below(self, span: "Span") -> Any:
        """A context of the API. Never the thread's own: whoever embeds a server may be within a span of theirs."""
        return self._api.set_span_in_context(span, _nothing())

    def _under(self, parent: Parent | None) -> Any:
        if parent is None:
            return _nothing()
        api = self._api
        flags, state = api.TraceFlags(_SAMPLED), api.TraceState.from_header([parent.state] if parent.state else [])
        ids = api.SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=flags, trace_state=state)
        return api.set_span_in_context(api.NonRecordingSpan(ids), _nothing())

    def _failed(self, span: "Span", message: str, kind: str) -> None:
        span.set_attribute("error.type", kind)
        span.set_status(self._api.Status(self._api.StatusCode.ERROR, message[:_MOST_TEXT]))


def _cut(told: Attributes) -> dict[str, Any]:
    """What clients write, an id for one, cut short; the SDK would, and tell the log each time."""
    return {key: value[:_MOST_TEXT] if isinstance(value, str) else value for key, value in told.items()}


def _nothing() -> Any:
    from opentelemetry.context import Context

    return Context()


def _offset_ns() -> int:
    return time.time_ns() - time.monotonic_ns()


def _phases(request: InferRequest, done_ns: int) -> list[tuple[str, int, int]]:
    """As the statistics have them: a backend that does not tell them apart has only the inference."""
    if not request.started_ns:
        return [("queue", request.queued_ns, done_ns)] if request.queued_ns else []
    found = [("queue", request.queued_ns, request.started_ns)]
    if not request.computing_ns:
        return [*found, ("compute_infer", request.started_ns, request.computed_ns or done_ns)]
    end_ns = request.computed_ns or done_ns
    found += [("compute_input", request.started_ns, request.computing_ns),
              ("compute_infer", request.computing_ns, end_ns), ("compute_output", end_ns, done_ns)]  # fmt: skip
    return found
