"""A sizing question from arguments or a YAML file; unknown and contradictory settings are refused."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from millrace.errors import ConfigError, nearest, sanitize
from millrace.settings import Settings, plain_type, read_bounded
from millrace.size.performance.operating_point import Limits
from millrace.size.question.settings import (
    GROUPS,
    READING,
    DemandSettings,
    HardwareSettings,
    LimitSettings,
    MoneySettings,
    RequestSettings,
    SearchSettings,
)

_MAX_BYTES, _MAX_VALUES, _MAX_INTEGER = 1 << 20, 64, 1 << 64
_NUMBER = re.compile(r"\d+(\.\d*)?(e[+-]?\d+)?", re.IGNORECASE)
NAMES = {f.name: group for group in GROUPS for f in fields(group)}


@dataclass(frozen=True, slots=True)
class SizingQuestion:
    """A sizing question; its parts validate themselves."""

    request: RequestSettings
    load: DemandSettings
    limits: LimitSettings
    hardware: HardwareSettings
    search: SearchSettings
    money: MoneySettings

    @classmethod
    def from_answers(cls, answers: Mapping[str, Any]) -> "SizingQuestion":
        """Create a question from settings by name, with `-` or `_`. raises ConfigError"""
        values: dict[str, Any] = {}
        for name, value in _normalise_names(answers).items():
            if value is not None:
                values[name] = _convert(NAMES[name], name, value)
        return cls(*(group(**{n: v for n, v in values.items() if NAMES[n] is group}) for group in GROUPS))  # type: ignore[arg-type]

    @property
    def non_defaults(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults."""
        parts = (self.request, self.load, self.limits, self.hardware, self.search, self.money)
        return {f.name: value for part in parts for f in fields(part) if (value := getattr(part, f.name)) != f.default}


def _normalise_names(answers: Mapping[Any, Any]) -> dict[str, Any]:
    """Normalise the names of settings. raises ConfigError for unknown and repeated ones"""
    values: dict[str, Any] = {}
    for key, value in answers.items():
        name = str(key).replace("-", "_")
        if name not in NAMES:
            begun = next(
                (candidate for candidate in NAMES if candidate.startswith(f"{name}_")), name
            )  # ttft, without _ms
            raise ConfigError(f"{key!r:.60} is no question", nearest(begun, NAMES), "correct it, or leave it out")
        if name in values:
            raise ConfigError(f"{name} is answered twice", "once", "leave one out")
        values[name] = value
    return values


def _convert(group: type[Settings], name: str, value: Any) -> Any:
    """Convert a value to the type of its setting (YAML reads 1e6 as a string, hours as a list). raises ConfigError"""
    kind = plain_type(group, name)
    if name == "daily" and isinstance(value, list) and len(value) <= _MAX_VALUES:
        return ",".join(map(str, value))
    if name == "systems" and type(value) is int:
        return str(value)
    if kind is float and isinstance(value, str) and _NUMBER.fullmatch(value):
        return float(value)
    if kind is tuple:
        values = value if isinstance(value, list | tuple) else [value]
        if len(values) > _MAX_VALUES or not all(isinstance(v, str) and sanitize(v) == v for v in values):
            raise ConfigError(f"{name} is {value!r:.80}", f"names, at most {_MAX_VALUES}", "write a list of them")
        return tuple(values)
    if type(value) is int and abs(value) >= _MAX_INTEGER:
        raise ConfigError(f"{name} is a number of {value.bit_length()} bits", "at most 64", "correct it")
    if kind is float and type(value) is int:
        return float(value)
    if isinstance(value, str) and sanitize(value) != value:  # values of an untrusted file are printed
        raise ConfigError(f"{name} is {value!r:.80}", "a line that can be shown", "correct it")
    if type(value) is not kind:
        expected = {float: "a number", int: "a whole number", str: "a text", bool: "true or false"}[kind]
        unit = ' with its unit, such as "3500 words"' if name in ("input", "output") else ""
        raise ConfigError(f"{name} is {value!r:.80}", expected + unit, "correct it")
    return value


def read_answers(path: Path) -> dict[str, Any]:
    """Read settings from a YAML (or JSON) file: one mapping of names to values. raises ConfigError"""
    try:
        data = read_bounded(path, _MAX_BYTES)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}", "a YAML file of answers", "check the path"
        ) from None
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{path} is larger than {_MAX_BYTES} bytes", "a page of answers", "check the file")
    try:
        document = yaml.load(data, _Strict)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ConfigError(
            f"{path} is no YAML: {sanitize(str(error))}", "name: value, a line each", "correct it"
        ) from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path} holds no answers", "name: value, a line each", "write model: llama-3-8b, and so on")
    return _normalise_names(document)


class _Strict(yaml.SafeLoader):  # type: ignore[misc]  # it has no types
    """A SafeLoader that refuses duplicate keys, of which YAML takes the last, and aliases, which may expand without
    end."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.MarkedYAMLError(problem="references are not taken", problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in names:
                raise yaml.MarkedYAMLError(problem=f"{name:.60} stands twice", problem_mark=key.start_mark)
            names.add(name)
        return super().construct_mapping(node, deep)


def parse_limits(settings: LimitSettings) -> Limits:
    """Return the latency limits of a mode. raises ConfigError if one is missing, or unknown in this mode"""
    if settings.burstiness != 1 and settings.arrivals != "gamma":
        raise ConfigError("--burstiness without --arrivals gamma", "both, or neither", "say how requests come")
    limits = {name: value for name in ("ttft_ms", "itl_ms", "e2e_ms", "reading") if (value := getattr(settings, name))}
    if settings.mode == "offline":
        _no_other(limits, (), "--mode offline has no latency limits")
        return Limits(statistic=settings.of)
    if settings.mode == "sequential":
        _no_other(limits, ("e2e_ms",), "a sequential caller sees nothing before the last token")
    if "itl_ms" in limits and "reading" in limits:
        raise ConfigError("itl_ms and reading are both given", "one of them", "leave one out")
    if not limits:
        example = "--e2e-ms 5000" if settings.mode == "sequential" else "--ttft-ms 500"
        raise ConfigError(f"no limit is said for {settings.mode} requests", f"{example}, or --mode offline",
                          "say what users may wait for at most")  # fmt: skip
    itl_s = READING[settings.reading] if settings.reading else _seconds(settings.itl_ms)
    return Limits(_seconds(settings.ttft_ms), itl_s, _seconds(settings.e2e_ms), settings.of)


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1e3


def _no_other(limits: Mapping[str, Any], allowed: tuple[str, ...], reason: str) -> None:
    for name in limits:
        if name not in allowed:
            raise ConfigError(f"{name} is given, but {reason}", " or ".join(allowed) or "no limit",
                              "leave it out, or choose --mode streaming")  # fmt: skip
