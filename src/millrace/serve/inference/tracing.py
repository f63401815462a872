"""Which requests are traced, and what a trace says of one: Triton's settings and format, and why its batch was closed.

Settings of a model stand before the server's, these before those of the command line.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from millrace.errors import ConfigError, nearest
from millrace.serve.inference.batching import Batch
from millrace.serve.inference.request import InferRequest, InferResponse
from millrace.serve.inference.status import StatusError, invalid
from millrace.serve.inference.trace_files import TraceFiles
from millrace.serve.kserve.tensors import WIRE_NAMES, Array

FLAG = "--trace-config"
LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")
NUMBERS = {"trace_rate": (1, 2**32 - 1), "trace_count": (-1, 2**31 - 1), "log_frequency": (0, 2**32 - 1)}
FIELDS = ("trace_level", *NUMBERS)  # that clients may change; the file is the command line's alone
_FLAG_NAMES = {"file": "trace_file", "level": "trace_level", "rate": "trace_rate", "count": "trace_count",
               "log-frequency": "log_frequency", "mode": "mode"}  # fmt: skip
_DEFAULTS = {"trace_file": "", "trace_level": ("OFF",), "trace_rate": 1000, "trace_count": -1, "log_frequency": 0}
_MOST_VALUES = 4096  # of a tensor that is traced
Change = Mapping[str, Any]  # of FIELDS, None for as it was


class _Sampler:
    """Settings in effect, and how far they have come. n_left: traces to be taken, -1: any number"""

    __slots__ = ("file", "frequency", "is_on", "level", "n_left", "n_seen", "rate")

    def __init__(self, said: Mapping[str, Any]) -> None:
        self.file, self.level, self.rate = said["trace_file"], said["trace_level"], said["trace_rate"]
        self.n_left, self.frequency, self.n_seen = said["trace_count"], said["log_frequency"], 0
        self.is_on = self.level != ("OFF",) and bool(self.file)

    def samples(self) -> bool:
        """Whether the request that comes now is traced."""
        if not self.is_on or not self.n_left:
            return False
        self.n_seen += 1
        if self.n_seen % self.rate:
            return False
        self.n_left -= self.n_left > 0
        return True

    def told(self) -> dict[str, Any]:
        return {
            "trace_level": list(self.level), "trace_rate": str(self.rate), "trace_count": str(self.n_left),
            "log_frequency": str(self.frequency), "trace_file": self.file, "trace_mode": "triton",
        }  # fmt: skip


class Trace:
    """Of one request, while it is under way. batch: the last that it was computed in"""

    __slots__ = ("batch", "id", "outputs", "parent_id", "sampler")

    def __init__(self, number: int, sampler: _Sampler, parent_id: int = 0) -> None:
        self.id, self.sampler, self.parent_id = number, sampler, parent_id
        self.batch: Batch | None = None
        self.outputs: list[tuple[str, Array]] = []

    def responded(self, response: InferResponse) -> None:
        if "TENSORS" in self.sampler.level and len(self.outputs) < _MOST_VALUES:
            self.outputs += response.outputs.items()


class Call:
    """Around what a protocol does for one request: when it came, and when its answer was written."""

    __slots__ = ("_request", "_tracer", "answers_later", "ended", "prefix", "times")

    def __init__(self, tracer: "Tracer", request: InferRequest, prefix: str, began_ns: int) -> None:
        """Its reading has ended. prefix: HTTP or GRPC"""
        self._tracer, self._request, self.prefix = tracer, request, prefix
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

    def __init__(self, said: Mapping[str, Any] | None = None) -> None:
        self._default: dict[str, Any] = {**_DEFAULTS, **(said or {})}
        self._server: dict[str, Any] = {}  # what clients said
        self._models: dict[str, dict[str, Any]] = {}
        self._own: dict[str, _Sampler] = {}  # of models that have settings of their own
        self._of_server = _Sampler(self._default)
        self._ids, self._files = itertools.count(1), TraceFiles()
        self.is_on = self._of_server.is_on  # of any model

    @classmethod
    def of(cls, flags: Sequence[str]) -> "Tracer":
        """`[triton,]KEY=VALUE`, as Triton has them. raises ConfigError"""
        found: dict[str, Any] = {}
        for flag in flags:
            mode, comma, setting = flag.partition(",")
            key, equals, value = (setting if comma else flag).partition("=")
            if (comma and mode != "triton") or (key == "mode" and value != "triton"):
                what = f"{FLAG} {flag!r:.100} asks for another mode"
                raise ConfigError(what, "triton, which writes files", "leave the mode out")
            if not equals or key not in _FLAG_NAMES:
                raise ConfigError(f"{FLAG} is {flag!r:.100}", "KEY=VALUE, " + nearest(key, _FLAG_NAMES), "write it so")
            name = _FLAG_NAMES[key]
            try:
                if name == "trace_level":
                    found[name] = level_of([*found.get(name, ()), value])
                elif name in NUMBERS:
                    found[name] = number_of(name, value)
                elif name == "trace_file":
                    found[name] = value
            except StatusError as error:
                raise ConfigError(f"{FLAG} {flag!r:.100}: {error}", "one of its values", "correct it") from None
        if found and not found.get("trace_file") and found.get("trace_level", ("OFF",)) != ("OFF",):
            raise ConfigError(f"{FLAG} names no file", "file=PATH", f"{FLAG} triton,file=trace.json")
        if found.get("trace_file") and not Path(found["trace_file"]).absolute().parent.is_dir():
            raise ConfigError(
                f"{FLAG} file={found['trace_file']}", "a file in a folder that exists", "correct the path"
            )
        return cls(found)

    # ------------------------------------------------------------------ settings

    def told(self, model: str = "") -> dict[str, Any]:
        """In effect for a model, or the server's, in Triton's words; numbers are strings there."""
        return self._own.get(model, self._of_server).told()

    def change(self, change: Change, model: str = "") -> None:
        """raises StatusError"""
        for said, sampler in ((self._server, self._of_server), *((self._models[n], s) for n, s in self._own.items())):
            if "trace_count" in said:
                said["trace_count"] = sampler.n_left  # some were taken already
        said = {**(self._models.get(model, {}) if model else self._server), **change}
        new = {key: value for key, value in said.items() if value is not None}
        of_server = _Sampler(self._default | self._server) if model else _Sampler(self._default | new)
        level = new.get("trace_level", of_server.level)
        if level != ("OFF",) and not self._default["trace_file"]:
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

    def begin(self, request: InferRequest, model: str) -> None:
        """It came; it is traced, or not."""
        sampler = self._own.get(model, self._of_server)
        if not request.is_inner and sampler.samples():
            request.trace = Trace(next(self._ids), sampler)

    def inner(self, request: InferRequest, outer: InferRequest) -> None:
        """One is a part of the other, and is traced where that is, and only there."""
        request.is_inner = True
        if outer.trace is not None:
            request.trace = Trace(next(self._ids), outer.trace.sampler, outer.trace.id)

    def end(self, request: InferRequest, model: str, version: int, done_ns: int, error: StatusError | None) -> None:
        call = request.came
        if isinstance(call, Call) and not call.answers_later:
            call.ended = model, version, done_ns, error
        else:
            self.write(request, model, version, done_ns, error)

    def write(self, request: InferRequest, model: str, version: int, done_ns: int, error: StatusError | None) -> None:
        trace, request.trace = request.trace, None
        assert isinstance(trace, Trace), "it is traced"
        records = [msgspec.json.encode(one) for one in _records(trace, request, model, version, done_ns, error)]
        request.came = None
        self._files.add(trace.sampler.file, trace.sampler.frequency, records)

    def came(self, request: InferRequest, prefix: str, began_ns: int) -> None:
        """By a stream, or by what is answered like one."""
        if self.is_on:
            request.came = Call(self, request, prefix, began_ns)
            request.came.answers_later = True

    def close(self) -> None:
        self._files.write()


def level_of(said: Sequence[str]) -> tuple[str, ...]:
    """raises StatusError"""
    for one in said:
        if one not in LEVELS:
            raise invalid(f"Unsupported trace level: {one:.40}; expected: {', '.join(LEVELS)}")
    if "OFF" in said and len(said) > 1:
        raise invalid("Expect only one trace level 'OFF' is specified")
    return tuple(dict.fromkeys(said)) or ("OFF",)


def number_of(name: str, said: str) -> int:
    """raises StatusError"""
    low, high = NUMBERS[name]
    digits = said.removeprefix("-")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 20:
        raise invalid(f"Unable to parse '{name}', got: {said:.40}")
    if not low <= int(said) <= high:
        raise invalid(f"Unable to parse '{name}', value is out of range [{low}, {high}], got: {said}")
    return int(said)


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
