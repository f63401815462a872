"""Requests that are traced, from their beginning to the record or the spans that are told of them.

Traces are records in files (`trace_records.py`), or OpenTelemetry spans (`otel_spans.py`). Whether a request has spans
is decided by the client's own trace, if it names one, otherwise by `trace_settings.py`.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.status_code import StatusError
from millrace.model_repository.tracing.otel_spans import Spans
from millrace.model_repository.tracing.trace_context import Parent, parent_of
from millrace.model_repository.tracing.trace_files import Later, TraceFiles
from millrace.model_repository.tracing.trace_flags import TraceFlags
from millrace.model_repository.tracing.trace_records import Trace, attributes, records
from millrace.model_repository.tracing.trace_settings import Change, TraceSettings


class TracedExchange:
    """Around what a protocol does for one request: when it came, and when its answer was written."""

    __slots__ = ("_request", "_tracer", "answers_later", "ended", "parent", "prefix", "times")

    def __init__(
        self, tracer: "Tracer", request: InferRequest, prefix: str, began_ns: int, parent: Parent | None = None
    ) -> None:
        """Its reading has ended. prefix: HTTP or GRPC"""
        self._tracer, self._request, self.prefix, self.parent = tracer, request, prefix, parent
        self.times = [began_ns, time.monotonic_ns()]
        self.ended: tuple[str, int, int, StatusError | None] | None = None  # of its model; the trace waits for `exit`
        self.answers_later = False  # by a stream, whose end nobody waits for

    def __enter__(self) -> "TracedExchange":
        if self._tracer.is_on:
            self._request.came = self
        return self

    def answered(self) -> None:
        """By its model; it is written now."""
        self.times.append(time.monotonic_ns())

    def __exit__(self, *_: object) -> None:
        self.answers_later = True  # what is cancelled may be computed for a while
        if self._request.trace is None:
            self._request.came = None  # which would hold each other
        elif self.ended is not None:
            if len(self.times) == 3:
                self.times.append(time.monotonic_ns())
            self._tracer.write(self._request, *self.ended)

    def told(self) -> list[tuple[str, int]]:
        waits = "RECV" if self.prefix == "HTTP" else "WAITREAD"
        names = f"{waits}_START", f"{waits}_END", "SEND_START", "SEND_END"
        return [(f"{self.prefix}_{name}", ns) for name, ns in zip(names, self.times, strict=False)]


class Tracer:
    """Of one server, in its event loop. is_on: whether requests to any model are traced"""

    def __init__(
        self, said: Mapping[str, Any] | None = None, spans: Spans | None = None, later: Later | None = None
    ) -> None:
        """spans: in mode opentelemetry. later: calls what writes the files; None: they are whole when it is closed"""
        self.settings, self.spans = TraceSettings(said, as_spans=spans is not None), spans
        self._ids, self._files = itertools.count(1), TraceFiles(later)
        self.is_on = self.settings.is_on  # looked at by every request

    @classmethod
    def of(cls, flags: Sequence[str]) -> "Tracer":
        """`[MODE,]KEY=VALUE`, as Triton has them. raises ConfigError"""
        found = TraceFlags.of(flags)
        return cls(found.said, Spans(found.exporting) if found.exporting is not None else None, _later)

    def told(self, model: str = "") -> dict[str, Any]:
        """In effect for a model, or the server's, in Triton's words; numbers are strings there."""
        found = self.settings.of(model).told()
        return found if self.spans is None else found | self.spans.to.told()

    def change(self, change: Change, model: str = "") -> None:
        """raises StatusError"""
        self._files.write()
        self.settings.change(change, model)
        self.is_on = self.settings.is_on

    def parent(self, parent: bytes | str | None, state: bytes | str | None) -> Parent | None:
        """By the headers `traceparent` and `tracestate` of a client."""
        return parent_of(parent, state) if self.spans is not None and self.is_on else None

    def begin(self, request: InferRequest, model: str) -> None:
        """It came; it is traced, or not."""
        trace = request.trace
        if request.is_inner:
            if self.spans is not None and trace is not None and trace.above is not None:
                trace.spans = self.spans.begin_part(model, trace.above)
            return
        call, sampler = request.came, self.settings.of(model)
        parent = call.parent if isinstance(call, TracedExchange) else None
        if sampler.samples(parent):
            request.trace = Trace(next(self._ids), sampler)
            if self.spans is not None:
                began_ns = call.times[0] if isinstance(call, TracedExchange) else request.received_ns
                request.trace.spans = self.spans.begin(model, began_ns, parent)

    def inner(self, request: InferRequest, outer: InferRequest) -> None:
        """One is a part of the other, and is traced where that is, and only there."""
        request.part_of(outer)
        if outer.trace is not None:
            above = outer.trace
            request.trace = Trace(next(self._ids), above.sampler, above.id, above.spans)

    def takes(self, parent: Parent | None) -> bool:
        """Whether a request that no tensor model answers is to be told as a span now."""
        return self.spans is not None and self.settings.of_server.samples(parent)

    def end(self, request: InferRequest, model: str, version: int, done_ns: int, error: StatusError | None) -> None:
        call = request.came
        if isinstance(call, TracedExchange) and not call.answers_later:
            call.ended = model, version, done_ns, error
        else:
            self.write(request, model, version, done_ns, error)

    def write(self, request: InferRequest, model: str, version: int, done_ns: int, error: StatusError | None) -> None:
        trace, request.trace = request.trace, None
        assert isinstance(trace, Trace), "it is traced"
        call = request.came if isinstance(request.came, TracedExchange) else None
        prefix, around = (call.prefix.lower(), call.told()) if call is not None else ("", [])
        if self.spans is None:
            told = records(trace, request, model, version, done_ns, error, around)
            lines = [msgspec.json.encode(one) for one in told]
            self._files.add(trace.sampler.file, trace.sampler.frequency, lines)
        elif trace.spans is not None:
            about = attributes(trace, request, model, version)
            self.spans.end(trace.spans, request, done_ns, error, about, prefix, around)
        request.came = None

    def came(self, request: InferRequest, prefix: str, began_ns: int, parent: Parent | None = None) -> None:
        """By a stream, or by what is answered like one."""
        if self.is_on:
            request.came = TracedExchange(self, request, prefix, began_ns, parent)
            request.came.answers_later = True

    def close(self) -> None:
        """No request to a tensor model comes any more."""
        self._files.write()

    def close_spans(self) -> None:
        """No request comes any more. It may take `spans.FLUSH_S`."""
        if self.spans is not None:
            self.spans.close()


def _later(seconds: float, call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds, call)
