"""The flag `--trace-config` with Triton's syntax: KEY=VALUE for all modes, MODE,KEY=VALUE for one."""

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.errors import ConfigError, nearest
from millrace.model_repository.request.status_code import StatusError, invalid

FLAG = "--trace-config"
TRITON, OTEL = "triton", "opentelemetry"
LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")
NUMBERS = {"trace_rate": (1, 2**32 - 1), "trace_count": (-1, 2**31 - 1), "log_frequency": (0, 2**32 - 1)}
DEFAULTS: Mapping[str, Any] = {
    "trace_file": "", "trace_level": ("OFF",), "trace_rate": 1000, "trace_count": -1, "log_frequency": 0,
    "trace_mode": TRITON,
}  # fmt: skip
_NAMES = {"file": "trace_file", "level": "trace_level", "rate": "trace_rate", "count": "trace_count",
          "log-frequency": "log_frequency", "mode": "trace_mode"}  # fmt: skip
_OF_FILES = ("file", "log-frequency")
_BATCHES = {"bsp_max_queue_size": (1, 10**6), "bsp_schedule_delay": (1, 10**7), "bsp_max_export_batch_size": (1, 10**6)}
_OF_SPANS = ("url", "resource", *_BATCHES)
_URL = re.compile(r"https?://[^/\s]+(/\S*)?")
_RESOURCE = re.compile(r"[A-Za-z][\w.\-/]*=.+")
_EXPECTED = re.compile("[;,] expected: ")
_EXTRA = "millrace[otel]"


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpSettings:
    """Export of spans. url: of the collector. delay_ms: between batches, unless one fills earlier"""

    url: str = "http://localhost:4318/v1/traces"
    resource: Mapping[str, str] = field(default_factory=dict)
    queue: int = 2048  # maximum of queued spans; further ones are dropped
    delay_ms: int = 5000
    batch: int = 512

    def to_dict(self) -> dict[str, Any]:
        """Return the settings with Triton's names."""
        return {
            "url": self.url, "resource": [f"{key}={value}" for key, value in self.resource.items()],
            "bsp_max_queue_size": str(self.queue), "bsp_schedule_delay": str(self.delay_ms),
            "bsp_max_export_batch_size": str(self.batch),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class TraceFlags:
    """Parsed flags. settings: those set by flags, by their protocol names"""

    settings: Mapping[str, Any] = field(default_factory=dict)
    otlp: OtlpSettings | None = None  # set in mode opentelemetry

    @classmethod
    def from_flags(cls, flags: Sequence[str]) -> "TraceFlags":
        """Parse flags. raises ConfigError, also if packages for the mode are missing"""
        settings: dict[str, Any] = {}
        flags_by_mode: dict[str, list[str]] = {}  # flags that belong to a single mode
        for flag in flags:
            mode, key, value = _split(flag)
            if key in _OF_FILES or key in _OF_SPANS or mode:
                flags_by_mode.setdefault(mode or (OTEL if key in _OF_SPANS else TRITON), []).append(flag)
            try:
                _parse_setting(settings, key, value)
            except StatusError as error:
                reason, *expected = _EXPECTED.split(str(error), 1)
                message = f"{FLAG} {flag!r:.100}: {reason}"
                raise ConfigError(message, "".join(expected) or _range(key), "correct it") from None
        chosen = settings.get("trace_mode", TRITON)
        for mode, theirs in flags_by_mode.items():
            if mode != chosen:
                message = f"{FLAG} {theirs[0]!r:.100} is of mode {mode}, and the mode is {chosen}"
                raise ConfigError(message, f"settings of mode {chosen}", f"add {FLAG} mode={mode}, or leave it out")
        return cls._for_files(settings) if chosen == TRITON else cls._for_spans(settings)

    @classmethod
    def _for_files(cls, settings: dict[str, Any]) -> "TraceFlags":
        if settings.get("trace_rate") == 0:
            _refuse("rate=0", f"1 to {NUMBERS['trace_rate'][1]}: value is out of range")
        if settings and not settings.get("trace_file") and settings.get("trace_level", ("OFF",)) != ("OFF",):
            raise ConfigError(f"{FLAG} names no file", "file=PATH", f"{FLAG} triton,file=trace.json")
        if settings.get("trace_file") and not Path(settings["trace_file"]).absolute().parent.is_dir():
            raise ConfigError(
                f"{FLAG} file={settings['trace_file']}", "a file in a folder that exists", "correct the path"
            )
        return cls(settings)

    @classmethod
    def _for_spans(cls, settings: dict[str, Any]) -> "TraceFlags":
        if "TENSORS" in settings.get("trace_level", ()):
            _refuse("level=TENSORS", "TIMESTAMPS: spans hold no tensors, which mode triton writes")
        names = {"url": "url", "resource": "resource", "bsp_max_queue_size": "queue",
                 "bsp_schedule_delay": "delay_ms", "bsp_max_export_batch_size": "batch"}  # fmt: skip
        exporting = OtlpSettings(**{name: settings.pop(key) for key, name in names.items() if key in settings})
        if exporting.batch > exporting.queue:
            _refuse(f"bsp_max_export_batch_size={exporting.batch}", f"at most bsp_max_queue_size, {exporting.queue}")
        check_extra()
        return cls(settings, exporting)


def check_extra() -> None:
    """Check that OpenTelemetry is installed. raises ConfigError"""
    for package in ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter",
                    "opentelemetry.exporter.otlp", "opentelemetry.exporter.otlp.proto",
                    "opentelemetry.exporter.otlp.proto.http"):  # fmt: skip
        if importlib.util.find_spec(package) is None:  # parent packages first
            message = f"{FLAG} mode={OTEL} without OpenTelemetry's SDK and exporter"
            raise ConfigError(message, f'pip install "{_EXTRA}"', "install it, or choose mode=triton")


def _split(flag: str) -> tuple[str, str, str]:
    """Split a flag into mode ("" if none), key and value. raises ConfigError"""
    head, comma, setting = flag.partition(",")
    if not comma or "=" in head:
        head, setting = "", flag
    key, equals, value = setting.partition("=")
    if head not in ("", TRITON, OTEL) or (key == "mode" and value not in (TRITON, OTEL)):
        message = f"{FLAG} {flag!r:.100} asks for another mode"
        raise ConfigError(message, f"{TRITON}, which writes files, or {OTEL}", "choose one of them")
    theirs = {TRITON: (*_NAMES,), OTEL: (*_OF_SPANS, "level", "rate", "count")}.get(head, (*_NAMES, *_OF_SPANS))
    if not equals or key not in theirs:
        raise ConfigError(f"{FLAG} is {flag!r:.100}", "KEY=VALUE, " + nearest(key, theirs), "write it so")
    return head, key, value


def _parse_setting(settings: dict[str, Any], key: str, value: str) -> None:
    """Parse a setting. raises StatusError"""
    name = _NAMES.get(key, key)
    parsers: Mapping[str, Callable[[], Any]] = {
        "trace_level": lambda: parse_level([*settings.get(name, ()), value]), "trace_file": lambda: value,
        "trace_mode": lambda: value, "url": lambda: _match(_URL, "url", value, "http://HOST:PORT/v1/traces"),
        "trace_rate": lambda: parse_number(name, value, minimum=0),
        "resource": lambda: settings.get(name, {}) | dict([_match(_RESOURCE, name, value, "KEY=VALUE").split("=", 1)]),
    }  # fmt: skip
    settings[name] = parsers[name]() if name in parsers else parse_number(name, value)


def _range(key: str) -> str:
    low, high = (NUMBERS | _BATCHES).get(_NAMES.get(key, key), (0, 0))
    return f"a whole number from {low} to {high}" if high else "one of its values"


def _match(form: re.Pattern[str], key: str, value: str, expected: str) -> str:
    if not form.fullmatch(value):
        raise invalid(f"{key} is {value!r:.100}, expected: {expected}")
    return value


def _refuse(setting: str, expected: str) -> None:
    raise ConfigError(f"{FLAG} {setting}", expected, "correct it")


def parse_level(levels: Sequence[str]) -> tuple[str, ...]:
    """Parse a setting. raises StatusError"""
    for level in levels:
        if level not in LEVELS:
            raise invalid(f"Unsupported trace level: {level:.40}; expected: {', '.join(LEVELS)}")
    if "OFF" in levels and len(levels) > 1:
        raise invalid("Expect only one trace level 'OFF' is specified")
    return tuple(dict.fromkeys(levels)) or ("OFF",)


def parse_number(name: str, text: str, minimum: int | None = None) -> int:
    """Parse a number. minimum: overrides the usual one. raises StatusError"""
    low, high = (NUMBERS | _BATCHES)[name]
    low = low if minimum is None else minimum
    digits = text.removeprefix("-")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 20:
        raise invalid(f"Unable to parse '{name}', got: {text:.40}")
    if not low <= int(text) <= high:
        raise invalid(f"Unable to parse '{name}', value is out of range [{low}, {high}], got: {text}")
    return int(text)
