"""Trace settings: a model's settings override the server's, which override the command line's."""

from collections.abc import Mapping
from typing import Any

from millrace.model_repository.request.status_code import invalid
from millrace.model_repository.tracing.trace_context import Parent
from millrace.model_repository.tracing.trace_flags import DEFAULTS, FLAG, NUMBERS, OTEL

FIELDS = ("trace_level", *NUMBERS)  # changeable by clients; the file is set only on the command line
Change = Mapping[str, Any]  # of FIELDS; None resets a setting


class Sampler:
    """Settings in effect, and their progress. n_left: remaining traces, -1 for any number"""

    __slots__ = ("file", "frequency", "is_on", "level", "mode", "n_left", "n_seen", "rate")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.file, self.level, self.rate = settings["trace_file"], settings["trace_level"], settings["trace_rate"]
        self.n_left, self.frequency, self.n_seen = settings["trace_count"], settings["log_frequency"], 0
        self.mode = settings["trace_mode"]
        self.is_on = self.level != ("OFF",) and (self.mode == OTEL or bool(self.file))

    def samples(self, parent: Parent | None = None) -> bool:
        """Decide whether to trace the next request. parent: the client's span, if any"""
        if parent is not None:
            return self.is_on and parent.is_sampled  # regardless of rate and count, as in Triton
        if not self.is_on or not self.n_left or not self.rate:
            return False
        self.n_seen += 1
        if self.n_seen % self.rate:
            return False
        self.n_left -= self.n_left > 0
        return True

    def to_dict(self) -> dict[str, Any]:
        settings = {
            "trace_level": list(self.level), "trace_rate": str(self.rate), "trace_count": str(self.n_left),
            "trace_mode": self.mode,
        }  # fmt: skip
        of_files = {"log_frequency": str(self.frequency), "trace_file": self.file}
        return settings if self.mode == OTEL else settings | of_files


class TraceSettings:
    """Trace settings of one server and its models."""

    def __init__(self, settings: Mapping[str, Any] | None, *, as_spans: bool) -> None:
        """settings: from the command line. as_spans: spans instead of files"""
        self._as_spans = as_spans
        self._default: dict[str, Any] = {**DEFAULTS, **(settings or {})}
        self._server: dict[str, Any] = {}  # set by clients
        self._models: dict[str, dict[str, Any]] = {}
        self._own: dict[str, Sampler] = {}  # samplers of models with their own settings
        self.server_sampler = Sampler(self._default)

    @property
    def is_on(self) -> bool:
        """Whether any model is traced."""
        return any(s.is_on for s in (self.server_sampler, *self._own.values()))

    def sampler_for(self, model: str) -> Sampler:
        """Return the sampler of a model; "" for the server's."""
        return self._own.get(model, self.server_sampler)

    def change(self, change: Change, model: str) -> None:
        """Change settings of a model, or of the server for "". raises StatusError, changing nothing"""
        for settings, sampler in (
            (self._server, self.server_sampler),
            *((self._models[n], s) for n, s in self._own.items()),
        ):
            if "trace_count" in settings:
                settings["trace_count"] = sampler.n_left  # keep the remaining count
        settings = {**(self._models.get(model, {}) if model else self._server), **change}
        new = {key: value for key, value in settings.items() if value is not None}
        of_server = Sampler(self._default | self._server) if model else Sampler(self._default | new)
        self._check(new, new.get("trace_level", of_server.level))
        if model:
            self._models[model] = new
        else:
            self._server, self.server_sampler = new, of_server
        for name in [model] if model else list(self._models):
            self._fit(name)

    def _check(self, new: Mapping[str, Any], level: tuple[str, ...]) -> None:
        """Check a change. raises StatusError"""
        if self._as_spans:
            if "TENSORS" in level or new.get("log_frequency") is not None:
                message = "trace level TENSORS" if "TENSORS" in level else "log_frequency"
                raise invalid(f"{message} is of trace mode triton, and the mode is {OTEL}")
        elif level != ("OFF",) and not self._default["trace_file"]:
            message = "Attempting to set invalid trace setting :trace file name is not given"
            raise invalid(f"{message}; start the server with {FLAG} triton,file=PATH")

    def _fit(self, model: str) -> None:
        """Recompute a model's sampler; unset values come from the server's settings."""
        self._own.pop(model, None)
        if not self._models[model]:
            del self._models[model]
            return
        left = {"trace_count": self.server_sampler.n_left}
        self._own[model] = Sampler({**self._default, **self._server, **left, **self._models[model]})
