"""Traces as OpenTelemetry spans, sent to a collector over OTLP (HTTP). Needs the extra `otel`, imported on use.

    InferRequest            from the first byte of the request to the last of its answer; the client's span is above it
      <model>               in the model: an ensemble's steps, and models that a model asks, are such spans below it
        queue, compute_input, compute_infer, compute_output

Spans wait in a bounded queue, and an SDK thread sends them in batches: requests never wait for the collector, and spans
beyond the queue are dropped.
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
from millrace.model_repository.tracing.trace_flags import OtlpSettings

if TYPE_CHECKING:
    from opentelemetry.trace import Span

FLUSH_S = 3.0  # time at exit to send the remaining spans
ROOT = "InferRequest"  # Triton's name
BATCH = "millrace.batch_size"  # set for requests computed in a batch, not for ensembles
_SAMPLED = 1
_MAX_TEXT = 1000  # characters of client text per attribute, because many spans may be queued
Attributes = Mapping[str, str | int | float | Sequence[str]]
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenSpans:
    """Open spans of a request. root: None for a nested request. state: the client's tracestate"""

    root: "Span | None"
    of_model: "Span"
    offset_ns: int  # from the monotonic clock to the span clock
    state: str

    def carrier(self) -> dict[str, str]:
        """Return headers with which calls of the model continue this trace."""
        ids = self.of_model.get_span_context()
        headers = {PARENT: f"00-{ids.trace_id:032x}-{ids.span_id:016x}-01"}
        return headers | ({STATE: self.state} if self.state else {})


class SpanExporter:
    """Span exporter of one server; called in the event loop."""

    def __init__(self, settings: OtlpSettings) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        self.settings, self._api = settings, trace
        self._exporter = OTLPSpanExporter(endpoint=settings.url)
        batches = BatchSpanProcessor(
            self._exporter,
            max_queue_size=settings.queue,
            schedule_delay_millis=settings.delay_ms,
            max_export_batch_size=settings.batch,
        )
        resource = Resource.create({"service.name": "millrace", "service.version": __version__, **settings.resource})
        # Sampling has been decided before, and `close` handles the shutdown.
        self._provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(batches)
        self._tracer = self._provider.get_tracer("millrace", __version__)

    # ------------------------------------------------------------------ requests to tensor models

    def begin(self, model: str, began_ns: int, parent: Parent | None) -> OpenSpans:
        """Start the spans of a client's request. began_ns: time.monotonic_ns(), as all times here"""
        offset_ns = _offset_ns()
        kind = self._api.SpanKind.SERVER
        root = self._tracer.start_span(ROOT, self._under(parent), kind, start_time=began_ns + offset_ns)
        of_model = self._tracer.start_span(model, self._below(root), start_time=began_ns + offset_ns)
        return OpenSpans(root, of_model, offset_ns, parent.state if parent is not None else "")

    def begin_part(self, model: str, outer: OpenSpans) -> OpenSpans:
        """Start the span of a request nested in that of `outer`."""
        now_ns = time.monotonic_ns() + outer.offset_ns
        below = self._below(outer.of_model)
        return OpenSpans(None, self._tracer.start_span(model, below, start_time=now_ns), outer.offset_ns, outer.state)

    def end(
        self, spans: OpenSpans, request: InferRequest, done_ns: int, error: StatusError | None, attributes: Attributes,
        protocol: str, times: Sequence[tuple[str, int]],
    ) -> None:  # fmt: skip
        """End the spans of a request. protocol: "" in process. times: named events of the protocol"""
        for name, began_ns, ended_ns in (
            _phases(request, done_ns) if attributes.get(BATCH) or not request.started_ns else ()
        ):
            self._add_span(name, self._below(spans.of_model), began_ns + spans.offset_ns, ended_ns + spans.offset_ns)
        root = spans.root
        for span in (spans.of_model, root) if root is not None else (spans.of_model,):
            span.set_attributes(_cut(attributes))
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

    def record_span(
        self, name: str, began_ns: int, parent: Parent | None, attributes: Attributes, failed: str = "", kind: str = ""
    ) -> None:
        """Record a request that ends now as one span. failed, kind: error message and error type"""
        offset_ns = _offset_ns()
        span = self._tracer.start_span(
            name, self._under(parent), self._api.SpanKind.SERVER, _cut(attributes), start_time=began_ns + offset_ns
        )
        if failed:
            self._failed(span, failed, kind)
        span.end(time.monotonic_ns() + offset_ns)

    def close(self, within_s: float = FLUSH_S) -> None:
        """Send the remaining spans, for at most `within_s` seconds."""
        ending = threading.Thread(target=self._provider.shutdown, name="millrace-spans-end", daemon=True)
        ending.start()
        ending.join(within_s)
        if ending.is_alive():
            log.warning("the collector of traces did not take the last spans within %g s: they are lost", within_s)
            self._exporter.shutdown()  # stops its retries

    # ------------------------------------------------------------------ spans

    def _add_span(self, name: str, below: Any, began_ns: int, ended_ns: int) -> None:
        self._tracer.start_span(name, below, start_time=began_ns).end(ended_ns)

    def _below(self, span: "Span") -> Any:
        """Return a context below a span, never the thread's: an embedding application may have its own span open."""
        return self._api.set_span_in_context(span, _no_instrument())

    def _under(self, parent: Parent | None) -> Any:
        if parent is None:
            return _no_instrument()
        api = self._api
        flags, state = api.TraceFlags(_SAMPLED), api.TraceState.from_header([parent.state] if parent.state else [])
        ids = api.SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=flags, trace_state=state)
        return api.set_span_in_context(api.NonRecordingSpan(ids), _no_instrument())

    def _failed(self, span: "Span", message: str, kind: str) -> None:
        span.set_attribute("error.type", kind)
        span.set_status(self._api.Status(self._api.StatusCode.ERROR, message[:_MAX_TEXT]))


def _cut(attributes: Attributes) -> dict[str, Any]:
    """Truncate client text such as ids; the SDK would do so too, but log each time."""
    return {key: value[:_MAX_TEXT] if isinstance(value, str) else value for key, value in attributes.items()}


def _no_instrument() -> Any:
    from opentelemetry.context import Context

    return Context()


def _offset_ns() -> int:
    return time.time_ns() - time.monotonic_ns()


def _phases(request: InferRequest, done_ns: int) -> list[tuple[str, int, int]]:
    """Return the phases as in the statistics; a backend that does not separate them has only inference."""
    if not request.started_ns:
        return [("queue", request.queued_ns, done_ns)] if request.queued_ns else []
    phases = [("queue", request.queued_ns, request.started_ns)]
    if not request.computing_ns:
        return [*phases, ("compute_infer", request.started_ns, request.computed_ns or done_ns)]
    end_ns = request.computed_ns or done_ns
    phases += [("compute_input", request.started_ns, request.computing_ns),
              ("compute_infer", request.computing_ns, end_ns), ("compute_output", end_ns, done_ns)]  # fmt: skip
    return phases
