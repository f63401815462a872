"""Tracer: follows traced requests from their start to their records or spans.

Traces are records in files (`trace_records.py`) or OpenTelemetry spans (`otel_spans.py`). A client's own trace decides
whether a request gets spans; otherwise `trace_settings.py` does.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.status_code import StatusError
from millrace.model_repository.tracing.otel_spans import SpanExporter
from millrace.model_repository.tracing.trace_context import Parent, parse_parent
from millrace.model_repository.tracing.trace_files import CallLater, TraceFiles
from millrace.model_repository.tracing.trace_flags import TraceFlags
from millrace.model_repository.tracing.trace_records import InferTrace, attributes, records
from millrace.model_repository.tracing.trace_settings import Change, TraceSettings


class TracedExchange:
    """Context of one request in a protocol: records when it arrived and when its response was written."""

    __slots__ = ("_request", "_tracer", "ended", "parent", "prefix", "responds_async", "times")

    def __init__(
        self, tracer: "Tracer", request: InferRequest, prefix: str, began_ns: int, parent: Parent | None = None
    ) -> None:
        """Start after the request was read. prefix: HTTP or GRPC"""
        self._tracer, self._request, self.prefix, self.parent = tracer, request, prefix, parent
        self.times = [began_ns, time.monotonic_ns()]
        self.ended: tuple[str, int, int, StatusError | None] | None = None  # of its model; the trace is written on exit
        self.responds_async = False  # by a stream, whose end is not awaited

    def __enter__(self) -> "TracedExchange":
        if self._tracer.is_on:
            self._request.exchange = self
        return self

    def on_response(self) -> None:
        """Record that the model has responded and the response is being written."""
        self.times.append(time.monotonic_ns())

    def __exit__(self, *_: object) -> None:
        self.responds_async = True  # a cancelled request may still be computing
        if self._request.trace is None:
            self._request.exchange = None  # avoids a reference cycle
        elif self.ended is not None:
            if len(self.times) == 3:
                self.times.append(time.monotonic_ns())
            self._tracer.write(self._request, *self.ended)

    def named_times(self) -> list[tuple[str, int]]:
        waits = "RECV" if self.prefix == "HTTP" else "WAITREAD"
        names = f"{waits}_START", f"{waits}_END", "SEND_START", "SEND_END"
        return [(f"{self.prefix}_{name}", ns) for name, ns in zip(names, self.times, strict=False)]


class Tracer:
    """Tracer of one server, used in its event loop. is_on: whether any model is traced"""

    def __init__(
        self,
        settings: Mapping[str, Any] | None = None,
        spans: SpanExporter | None = None,
        later: CallLater | None = None,
    ) -> None:
        """spans: for mode opentelemetry. later: schedules writes; None: files are complete only after `close`"""
        self.settings, self.spans = TraceSettings(settings, as_spans=spans is not None), spans
        self._ids, self._files = itertools.count(1), TraceFiles(later)
        self.is_on = self.settings.is_on  # cached, because every request reads it

    @classmethod
    def from_flags(cls, flags: Sequence[str]) -> "Tracer":
        """Create a tracer from `[MODE,]KEY=VALUE` flags, as in Triton. raises ConfigError"""
        parsed = TraceFlags.from_flags(flags)
        return cls(parsed.settings, SpanExporter(parsed.otlp) if parsed.otlp is not None else None, _later)

    def settings_dict(self, model: str = "") -> dict[str, Any]:
        """Return the settings in effect for a model or, for "", the server, with Triton's names and string numbers."""
        settings = self.settings.sampler_for(model).to_dict()
        return settings if self.spans is None else settings | self.spans.settings.to_dict()

    def change(self, change: Change, model: str = "") -> None:
        """Change settings. raises StatusError"""
        self._files.write()
        self.settings.change(change, model)
        self.is_on = self.settings.is_on

    def parent(self, parent: bytes | str | None, state: bytes | str | None) -> Parent | None:
        """Parse a client's `traceparent` and `tracestate` headers, if spans are on."""
        return parse_parent(parent, state) if self.spans is not None and self.is_on else None

    def begin(self, request: InferRequest, model: str) -> None:
        """Start the trace of a new request, if it is sampled."""
        trace = request.trace
        if request.is_inner:
            if self.spans is not None and trace is not None and trace.above is not None:
                trace.spans = self.spans.begin_part(model, trace.above)
            return
        call, sampler = request.exchange, self.settings.sampler_for(model)
        parent = call.parent if isinstance(call, TracedExchange) else None
        if sampler.samples(parent):
            request.trace = InferTrace(next(self._ids), sampler)
            if self.spans is not None:
                began_ns = call.times[0] if isinstance(call, TracedExchange) else request.received_ns
                request.trace.spans = self.spans.begin(model, began_ns, parent)

    def trace_nested(self, request: InferRequest, outer: InferRequest) -> None:
        """Mark a request as nested in `outer`; it is traced if that is."""
        request.inherit_from(outer)
        if outer.trace is not None:
            above = outer.trace
            request.trace = InferTrace(next(self._ids), above.sampler, above.id, above.spans)

    def samples_other(self, parent: Parent | None) -> bool:
        """Decide whether to record a span for a request outside of tensor models."""
        return self.spans is not None and self.settings.server_sampler.samples(parent)

    def end(self, request: InferRequest, model: str, version: int, done_ns: int, error: StatusError | None) -> None:
        call = request.exchange
        if isinstance(call, TracedExchange) and not call.responds_async:
            call.ended = model, version, done_ns, error
        else:
            self.write(request, model, version, done_ns, error)

    def write(self, request: InferRequest, model: str, version: int, done_ns: int, error: StatusError | None) -> None:
        trace, request.trace = request.trace, None
        assert isinstance(trace, InferTrace), "it is traced"
        call = request.exchange if isinstance(request.exchange, TracedExchange) else None
        prefix, around = (call.prefix.lower(), call.named_times()) if call is not None else ("", [])
        if self.spans is None:
            entries = records(trace, request, model, version, done_ns, error, around)
            lines = [msgspec.json.encode(entry) for entry in entries]
            self._files.add(trace.sampler.file, trace.sampler.frequency, lines)
        elif trace.spans is not None:
            about = attributes(trace, request, model, version)
            self.spans.end(trace.spans, request, done_ns, error, about, prefix, around)
        request.exchange = None

    def trace_stream(self, request: InferRequest, prefix: str, began_ns: int, parent: Parent | None = None) -> None:
        """Attach an exchange to a request whose responses are streamed."""
        if self.is_on:
            request.exchange = TracedExchange(self, request, prefix, began_ns, parent)
            request.exchange.responds_async = True

    def close(self) -> None:
        """Write the remaining traces, after the last request to a tensor model."""
        self._files.write()

    def close_spans(self) -> None:
        """Close the span exporter after the last request; may take `otel_spans.FLUSH_S`."""
        if self.spans is not None:
            self.spans.close()


def _later(seconds: float, call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds, call)
