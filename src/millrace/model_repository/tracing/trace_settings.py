"""Which requests are traced: settings of a model stand before the server's, these before those of the command line."""

from collections.abc import Mapping
from typing import Any

from millrace.model_repository.request.status_code import invalid
from millrace.model_repository.tracing.trace_context import Parent
from millrace.model_repository.tracing.trace_flags import DEFAULTS, FLAG, NUMBERS, OTEL

FIELDS = ("trace_level", *NUMBERS)  # that clients may change; the file is the command line's alone
Change = Mapping[str, Any]  # of FIELDS, None for as it was


class Sampler:
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


class TraceSettings:
    """Of one server, and of its models."""

    def __init__(self, said: Mapping[str, Any] | None, *, as_spans: bool) -> None:
        """said: on the command line. as_spans: no files are written"""
        self._as_spans = as_spans
        self._default: dict[str, Any] = {**DEFAULTS, **(said or {})}
        self._server: dict[str, Any] = {}  # what clients said
        self._models: dict[str, dict[str, Any]] = {}
        self._own: dict[str, Sampler] = {}  # of models that have settings of their own
        self.of_server = Sampler(self._default)

    @property
    def is_on(self) -> bool:
        """Of any model."""
        return any(s.is_on for s in (self.of_server, *self._own.values()))

    def of(self, model: str) -> Sampler:
        """In effect; "": the server's."""
        return self._own.get(model, self.of_server)

    def change(self, change: Change, model: str) -> None:
        """raises StatusError, and nothing has changed"""
        for said, sampler in ((self._server, self.of_server), *((self._models[n], s) for n, s in self._own.items())):
            if "trace_count" in said:
                said["trace_count"] = sampler.n_left  # some were taken already
        said = {**(self._models.get(model, {}) if model else self._server), **change}
        new = {key: value for key, value in said.items() if value is not None}
        of_server = Sampler(self._default | self._server) if model else Sampler(self._default | new)
        self._check(new, new.get("trace_level", of_server.level))
        if model:
            self._models[model] = new
        else:
            self._server, self.of_server = new, of_server
        for name in [model] if model else list(self._models):
            self._fit(name)

    def _check(self, new: Mapping[str, Any], level: tuple[str, ...]) -> None:
        """raises StatusError"""
        if self._as_spans:
            if "TENSORS" in level or new.get("log_frequency") is not None:
                what = "trace level TENSORS" if "TENSORS" in level else "log_frequency"
                raise invalid(f"{what} is of trace mode triton, and the mode is {OTEL}")
        elif level != ("OFF",) and not self._default["trace_file"]:
            what = "Attempting to set invalid trace setting :trace file name is not given"
            raise invalid(f"{what}; start the server with {FLAG} triton,file=PATH")

    def _fit(self, model: str) -> None:
        """What it does not say itself is the server's."""
        self._own.pop(model, None)
        if not self._models[model]:
            del self._models[model]
            return
        left = {"trace_count": self.of_server.n_left}
        self._own[model] = Sampler({**self._default, **self._server, **left, **self._models[model]})
