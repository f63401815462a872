"""Which requests are traced, and what a trace says of one: Triton's settings and format, and why its batch was closed.

Settings of a model stand before the server's, these before those of the command line. Traces are records in files, or
spans of OpenTelemetry (`spans.py`); of these a client's own trace decides, where it says that a request belongs to one.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from millrace.serve.inference.batching import Batch
from millrace.serve.inference.request import InferRequest, InferResponse
from millrace.serve.inference.spans import BATCH, Attributes, Open, Spans
from millrace.serve.inference.status import StatusError, invalid
from millrace.serve.inference.trace_context import Parent, parent_of
from millrace.serve.inference.trace_files import Later, TraceFiles
from millrace.serve.inference.trace_flags import DEFAULTS, FLAG, NUMBERS, OTEL, TraceFlags
from millrace.serve.kserve.tensors import WIRE_NAMES, Array

FIELDS = ("trace_level", *NUMBERS)  # that clients may change; the file is the command line's alone
_MOST_VALUES = 4096  # of a tensor that is traced
Change = Mapping[str, Any]  # of FIELDS, None for as it was


class _Sampler:
    """Settings in effect, and how far they have come. n_left: traces to be taken, -1: any number"""

    __slots__ = ("file", "frequency", "is_on", "level", "mode", "n_left", "n_seen", "rate")

    def __init__(self, said: Mapping[str, Any]) -> None:
        self.file, self.level, self.rate = said["trace_file"], said["trace_level"], said["trace_rate"]
        self.n_left, self.frequency, self.n_seen = said["trace_count"], said["log_frequency"], 0
        self.mode = said["trace_mode"]
        self.is_on = self.level != ("OFF",) and (self.mode == OTEL or bool(self.file))

    def samples(self, parent: Parent | None = None) -> bool:
        """Whether the request that comes now is traced. parent: of the trace that its client has begun"""
        if parent is not None:
            return self.is_on and parent.is_sampled  # whatever rate and count say, as in Triton
        if not self.is_on or not self.n_left or not self.rate:
            return False
        self.n_seen += 1
        if self.n_seen % self.rate:
            return False
        self.n_left -= self.n_left > 0
        return True

    def told(self) -> dict[str, Any]:
        found = {
            "trace_level": list(self.level), "trace_rate": str(self.rate), "trace_count": str(self.n_left),
            "trace_mode": self.mode,
        }  # fmt: skip
        of_files = {"log_frequency": str(self.frequency), "trace_file": self.file}
        return found if self.mode == OTEL else found | of_files


class Trace:
    """Of one request, while it is under way. batch: the last that it was computed in

    spans: those that have begun, above: those of the request that it is a part of; in mode opentelemetry
    """

    __slots__ = ("above", "batch", "id", "outputs", "parent_id", "sampler", "spans")

    def __init__(self, number: int, sampler: _Sampler, parent_id: int = 0, above: Open | None = None) -> None:
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


class Call:
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

    def __enter__(self) -> "Call":
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
    """Of one server, in its event loop."""

    def __init__(
        self, said: Mapping[str, Any] | None = None, spans: Spans | None = None, later: Later | None = None
    ) -> None:
        """spans: in mode opentelemetry. later: calls what writes the files; None: they are whole when it is closed"""
        self._default: dict[str, Any] = {**DEFAULTS, **(said or {})}
        self.spans = spans
        self._server: dict[str, Any] = {}  # what clients said
        self._models: dict[str, dict[str, Any]] = {}
        self._own: dict[str, _Sampler] = {}  # of models that have settings of their own
        self._of_server = _Sampler(self._default)
        self._ids, self._files = itertools.count(1), TraceFiles(later)
        self.is_on = self._of_server.is_on  # of any model

    @classmethod
    def of(cls, flags: Sequence[str]) -> "Tracer":
        """`[MODE,]KEY=VALUE`, as Triton has them. raises ConfigError"""
        found = TraceFlags.of(flags)
        return cls(found.said, Spans(found.exporting) if found.exporting is not None else None, _later)

    # ------------------------------------------------------------------ settings

    def told(self, model: str = "") -> dict[str, Any]:
        """In effect for a model, or the server's, in Triton's words; numbers are strings there."""
        found = self._own.get(model, self._of_server).told()
        return found if self.spans is None else found | self.spans.to.told()

    def change(self, change: Change, model: str = "") -> None:
        """raises StatusError"""
        for said, sampler in ((self._server, self._of_server), *((self._models[n], s) for n, s in self._own.items())):
            if "trace_count" in said:
                said["trace_count"] = sampler.n_left  # some were taken already
        said = {**(self._models.get(model, {}) if model else self._server), **change}
        new = {key: value for key, value in said.items() if value is not None}
        of_server = _Sampler(self._default | self._server) if model else _Sampler(self._default | new)
        level = new.get("trace_level", of_server.level)
        if self.spans is not None:
            if "TENSORS" in level or new.get("log_frequency") is not None:
                what = "trace level TENSORS" if "TENSORS" in level else "log_frequency"
                raise invalid(f"{what} is of trace mode triton, and the mode is {OTEL}")
        elif level != ("OFF",) and not self._default["trace_file"]:
            what = "Attempting to set invalid trace setting :trace file name is not given"
            raise invalid(f"{what}; start the server with {FLAG} triton,file=PATH")
        self._files.write()
        if model:
            self._models[model] = new
        else:
            self._server, self._of_server = new, of_server
        for name in [model] if model else list(self._models):
            self._fit(name)
        self.is_on = any(s.is_on for s in (self._of_server, *self._own.values()))

    def _fit(self, model: str) -> None:
        """What it does not say itself is the server's."""
        self._own.pop(model, None)
        if not self._models[model]:
            del self._models[model]
            return
        left = {"trace_count": self._of_server.n_left}
        self._own[model] = _Sampler({**self._default, **self._server, **left, **self._models[model]})

    # ------------------------------------------------------------------ requests

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
        call, sampler = request.came, self._own.get(model, self._of_server)
        parent = call.parent if isinstance(call, Call) else None
        if sampler.samples(parent):
            request.trace = Trace(next(self._ids), sampler)
            if self.spans is not None:
                began_ns = call.times[0] if isinstance(call, Call) else request.received_ns
                request.trace.spans = self.spans.begin(model, began_ns, parent)

    def inner(self, request: InferRequest, outer: InferRequest) -> None:
        """One is a part of the other, and is traced where that is, and only there."""
        request.part_of(outer)
        if outer.trace is not None:
            above = outer.trace
            request.trace = Trace(next(self._ids), above.sampler, above.id, above.spans)

    def takes(self, parent: Parent | None) -> bool:
        """Whether a request that no tensor model answers is to be told as a span now."""
        return self.spans is not None and self._of_server.samples(parent)

    def end(self, request: InferRequest, model: str, version: int, done_ns: int, error: StatusError | None) -> None:
        call = request.came
        if isinstance(call, Call) and not call.answers_later:
            call.ended = model, version, done_ns, error
        else:
            self.write(request, model, version, done_ns, error)

    def write(self, request: InferRequest, model: str, version: int, done_ns: int, error: StatusError | None) -> None:
        trace, request.trace = request.trace, None
        assert isinstance(trace, Trace), "it is traced"
        call = request.came if isinstance(request.came, Call) else None
        if self.spans is None:
            records = [msgspec.json.encode(one) for one in _records(trace, request, model, version, done_ns, error)]
            self._files.add(trace.sampler.file, trace.sampler.frequency, records)
        elif trace.spans is not None:
            told = _attributes(trace, request, model, version)
            around = (call.prefix.lower(), call.told()) if call is not None else ("", ())
            self.spans.end(trace.spans, request, done_ns, error, told, *around)
        request.came = None

    def came(self, request: InferRequest, prefix: str, began_ns: int, parent: Parent | None = None) -> None:
        """By a stream, or by what is answered like one."""
        if self.is_on:
            request.came = Call(self, request, prefix, began_ns, parent)
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


def _attributes(trace: Trace, request: InferRequest, model: str, version: int) -> Attributes:
    """Of the spans of a request, in Triton's words; of its batch, in ours."""
    found: dict[str, Any] = {"triton.model_name": model, "triton.model_version": version, "triton.trace_id": trace.id}
    found |= {"triton.request_id": request.id} if request.id else {}
    found |= {"triton.trace_parent_id": trace.parent_id} if trace.parent_id else {}
    if trace.batch is not None:
        found |= {BATCH: trace.batch.size, "millrace.batch_closed": trace.batch.closed.value}
    return found


def _records(
    trace: Trace, request: InferRequest, model: str, version: int, done_ns: int, error: StatusError | None
) -> list[dict[str, Any]]:
    """The request, its times, its tensors; what it waited for in a batch is ours."""
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
        around = request.came.told() if isinstance(request.came, Call) else []
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
