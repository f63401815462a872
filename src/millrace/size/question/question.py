"""The six questions with their answers, from arguments or a YAML file; what is unknown or contradictory is refused."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from millrace.errors import ConfigError, nearest, sanitize
from millrace.settings import Settings, plain_type, read_given
from millrace.size.performance.operating_point import Limits
from millrace.size.question.settings import (
    GROUPS,
    READING,
    HardwareSettings,
    LimitSettings,
    LoadSettings,
    MoneySettings,
    RequestSettings,
    SearchSettings,
)

_MOST_BYTES, _MOST_VALUES, _MOST = 1 << 20, 64, 1 << 64
_NUMBER = re.compile(r"\d+(\.\d*)?(e[+-]?\d+)?", re.IGNORECASE)
NAMES = {f.name: group for group in GROUPS for f in fields(group)}


@dataclass(frozen=True, slots=True)
class Question:
    """What was answered; its parts are checked by themselves."""

    request: RequestSettings
    load: LoadSettings
    limits: LimitSettings
    hardware: HardwareSettings
    search: SearchSettings
    money: MoneySettings

    @classmethod
    def of(cls, answers: Mapping[str, Any]) -> "Question":
        """answers: by the settings' names, with `-` or `_`. raises ConfigError"""
        known: dict[str, Any] = {}
        for name, value in _named(answers).items():
            if value is not None:
                known[name] = _typed(NAMES[name], name, value)
        return cls(*(group(**{n: v for n, v in known.items() if NAMES[n] is group}) for group in GROUPS))  # type: ignore[arg-type]

    @property
    def given(self) -> dict[str, Any]:
        """All that is not as it is where nothing is said."""
        parts = (self.request, self.load, self.limits, self.hardware, self.search, self.money)
        return {f.name: value for part in parts for f in fields(part) if (value := getattr(part, f.name)) != f.default}


def _named(answers: Mapping[Any, Any]) -> dict[str, Any]:
    """By the settings' names. raises ConfigError for others, and for what is answered twice"""
    found: dict[str, Any] = {}
    for key, value in answers.items():
        name = str(key).replace("-", "_")
        if name not in NAMES:
            begun = next((known for known in NAMES if known.startswith(f"{name}_")), name)  # ttft, without _ms
            raise ConfigError(f"{key!r:.60} is no question", nearest(begun, NAMES), "correct it, or leave it out")
        if name in found:
            raise ConfigError(f"{name} is answered twice", "once", "leave one out")
        found[name] = value
    return found


def _typed(group: type[Settings], name: str, value: Any) -> Any:
    """As the setting has it: YAML takes 1e6 for a text, and a list of hours is a text of them. raises ConfigError"""
    kind = plain_type(group, name)
    if name == "daily" and isinstance(value, list) and len(value) <= _MOST_VALUES:
        return ",".join(map(str, value))
    if name == "systems" and type(value) is int:
        return str(value)
    if kind is float and isinstance(value, str) and _NUMBER.fullmatch(value):
        return float(value)
    if kind is tuple:
        values = value if isinstance(value, list | tuple) else [value]
        if len(values) > _MOST_VALUES or not all(isinstance(v, str) and sanitize(v) == v for v in values):
            raise ConfigError(f"{name} is {value!r:.80}", f"names, at most {_MOST_VALUES}", "write a list of them")
        return tuple(values)
    if type(value) is int and abs(value) >= _MOST:
        raise ConfigError(f"{name} is a number of {value.bit_length()} bits", "at most 64", "correct it")
    if kind is float and type(value) is int:
        return float(value)
    if isinstance(value, str) and sanitize(value) != value:  # a file may be somebody else's, and is shown
        raise ConfigError(f"{name} is {value!r:.80}", "a line that can be shown", "correct it")
    if type(value) is not kind:
        wanted = {float: "a number", int: "a whole number", str: "a text", bool: "true or false"}[kind]
        unit = ' with its unit, such as "3500 words"' if name in ("input", "output") else ""
        raise ConfigError(f"{name} is {value!r:.80}", wanted + unit, "correct it")
    return value


def read_answers(path: Path) -> dict[str, Any]:
    """Of a YAML file, one mapping of names to values, which are the settings'; JSON is YAML, too. raises ConfigError"""
    try:
        data = read_given(path, _MOST_BYTES)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}", "a YAML file of answers", "check the path"
        ) from None
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"{path} is larger than {_MOST_BYTES} bytes", "a page of answers", "check the file")
    try:
        found = yaml.load(data, _Strict)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ConfigError(
            f"{path} is no YAML: {sanitize(str(error))}", "name: value, a line each", "correct it"
        ) from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no answers", "name: value, a line each", "write model: llama-3-8b, and so on")
    return _named(found)


class _Strict(yaml.SafeLoader):  # type: ignore[misc]  # it has no types
    """Without names that occur twice, of which YAML takes the last, and without references, which may grow endlessly.

    (A SafeLoader makes numbers, texts, lists and mappings, and nothing else.)
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.MarkedYAMLError(problem="references are not taken", problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                raise yaml.MarkedYAMLError(problem=f"{name:.60} stands twice", problem_mark=key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


def limits_of(asked: LimitSettings) -> Limits:
    """By who waits for what. raises ConfigError for a limit that is missing, or that this mode has not"""
    if asked.burstiness != 1 and asked.arrivals != "gamma":
        raise ConfigError("--burstiness without --arrivals gamma", "both, or neither", "say how requests come")
    given = {name: value for name in ("ttft_ms", "itl_ms", "e2e_ms", "reading") if (value := getattr(asked, name))}
    if asked.mode == "offline":
        _no_other(given, (), "offline nobody waits")
        return Limits(of=asked.of)
    if asked.mode == "sequential":
        _no_other(given, ("e2e_ms",), "a sequential caller sees nothing before the last token")
    if "itl_ms" in given and "reading" in given:
        raise ConfigError("itl_ms and reading are both given", "one of them", "leave one out")
    if not given:
        wanted = "--e2e-ms 5000" if asked.mode == "sequential" else "--ttft-ms 500"
        raise ConfigError(f"no limit is said for {asked.mode} requests", f"{wanted}, or --mode offline",
                          "say what users may wait for at most")  # fmt: skip
    itl_s = READING[asked.reading] if asked.reading else _seconds(asked.itl_ms)
    return Limits(_seconds(asked.ttft_ms), itl_s, _seconds(asked.e2e_ms), asked.of)


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1e3


def _no_other(given: Mapping[str, Any], allowed: tuple[str, ...], why: str) -> None:
    for name in given:
        if name not in allowed:
            raise ConfigError(f"{name} is given, but {why}", " or ".join(allowed) or "no limit",
                              "leave it out, or choose --mode streaming")  # fmt: skip
