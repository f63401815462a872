"""Settings classes: flag, help, default and range come from a field, for the command line and for Python.

A settings class is frozen, and checked when it is created. Sizes in bytes may be written "512M" or "2GiB".
"""

import errno
import os
import re
import select
import time
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from millrace.errors import ConfigError

LOGGER = "millrace"  # the root of the package's loggers

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Setting:
    """Declaration of a settings field. `low`/`high` bound numbers; `choices` lists the allowed values."""

    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] | None = None
    metavar: str | None = None
    size: bool = False  # bytes, which may be written with a unit


def setting(default: Any, help: str, **more: Any) -> Any:
    """Declare a field: `port: int = setting(8000, "port to listen on", low=0, high=65535)`."""
    return field(default=default, metadata={"setting": Setting(help, **more)})


_PIPE_S = 10.0  # maximum wait for data in a pipe, such as a shell's `<(...)`


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Read a file or pipe named by a setting, at most max_bytes + 1 bytes.

    raises OSError, also if a pipe stays empty for 10 s
    """
    result, until = bytearray(), time.monotonic() + _PIPE_S
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        while len(result) <= max_bytes:
            try:
                part = os.read(file, min(max_bytes + 1 - len(result), 1 << 20))
            except BlockingIOError:
                if not select.select([file], [], [], max(0.0, until - time.monotonic()))[0]:
                    raise TimeoutError(errno.ETIMEDOUT, f"nothing came out of the pipe for {_PIPE_S:g} s") from None
                continue
            if not part:
                break
            result += part
    finally:
        os.close(file)
    return bytes(result)


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. raises ValueError for a duplicate key"""
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f'"{next(n for n in names if names.count(n) > 1):.80}" is there twice')
    return result


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def parse_size(text: str | int, name: str) -> int:
    """Parse bytes: 536870912, "512M" or "0.5GiB" (all units are powers of 1024). raises ConfigError"""
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ConfigError(f'{flag_of(name)} is "{text}"', "a number of bytes like 512M or 2GiB", "write it so")
    return int(float(match[1]) * _UNITS[match[2].lower()])


@dataclass(frozen=True)
class Settings:
    """Base of all settings: checks every field against its declaration."""

    title: ClassVar[str | None] = None  # heading of these settings in `--help`

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None and f.default is not None:
                raise ConfigError(f"{flag_of(f.name)} is None", "a value", "write one, or leave it out")
            if declared(f).size and value is not None:
                value = parse_size(value, f.name)
                object.__setattr__(self, f.name, value)
            if value is not None:
                _check(f, value)

    @property
    def changed_fields(self) -> list[str]:
        """Names of the fields that differ from their defaults."""
        defaults = type(self)()
        return [f.name for f in fields(self) if getattr(self, f.name) != getattr(defaults, f.name)]


def declared(f: "Field[Any]") -> Setting:
    result = f.metadata.get("setting")
    assert isinstance(result, Setting), f"{f.name} has no setting()"
    return result


def plain_type(settings: type, name: str) -> type:
    """Return the type of a field without its Optional: int, float, str, bool or tuple."""
    hint = get_type_hints(settings)[name]
    options = [t for t in get_args(hint) if t is not type(None)] if type(None) in get_args(hint) else [hint]
    first = options[0]
    plain = get_origin(first) or first
    assert isinstance(plain, type)
    return plain


def check_value(f: "Field[Any]", value: Any) -> None:
    """Check one value of a field before the settings are made. raises ConfigError"""
    _check(f, parse_size(value, f.name) if declared(f).size else value)


def _check(f: "Field[Any]", value: Any) -> None:
    s = declared(f)
    if s.choices and value not in s.choices:
        raise ConfigError(f'{flag_of(f.name)} is "{value}"', "one of " + ", ".join(s.choices), "choose one of them")
    if isinstance(f.default, bool) and not isinstance(value, bool):  # "off" would be on
        raise ConfigError(f"{flag_of(f.name)} is {value!r:.80}", "True or False", "write one of them")
    if s.low is None and s.high is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{flag_of(f.name)} is {value!r}", "a number", "write one")
    if not ((s.low is None or value >= s.low) and (s.high is None or value <= s.high)):
        span = f"at least {s.low:.10g}" if s.high is None else f"{s.low:.10g} to {s.high:.10g}"
        raise ConfigError(f"{flag_of(f.name)} is {value}", span, "choose a value in this range")
