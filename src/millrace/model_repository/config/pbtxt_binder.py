"""Binds parsed config.pbtxt text to messages; unknown fields and wrong types are reported with line and column.

All problems of a file are reported at once; a syntax error is reported alone, because what follows it is meaningless.
"""

import math
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import field as member
from pathlib import Path
from types import MappingProxyType
from typing import Any

from millrace.errors import nearest
from millrace.model_repository.config.message_fields import RANGES, FieldSpec, empty, specs
from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.config.pbtxt_parser import (
    PbtxtBlock,
    PbtxtField,
    PbtxtList,
    PbtxtScalar,
    PbtxtSyntaxError,
    read_text,
)
from millrace.model_repository.config.problems import ConfigProblem, Level, SourcePosition

Path_ = tuple[str | int, ...]  # for example ("input", 0, "dims", 1); map keys follow the field name
MAX_PROBLEMS = 50  # per level and file; beyond that, one note says so
MORE = f"more than {MAX_PROBLEMS} such", "fewer", "fix those above, then run it again"
_TRUE, _FALSE = ("true", "True", "t", "1"), ("false", "False", "f", "0")
_EXPECTED = {"string": "a string in quotes", "bool": "true or false", "float": "a number", "double": "a number"}


class TooManyProblems(Exception):  # noqa: N818 - internal
    """Raised when a file has more errors than are listed."""


@dataclass(slots=True)
class ParsedConfig:
    """A parsed file. config: the valid part of it. places: positions by path"""

    file: Path
    config: ModelConfig = member(default_factory=lambda: empty(ModelConfig))
    places: dict[Path_, SourcePosition] = member(default_factory=dict)
    problems: list[ConfigProblem] = member(default_factory=list)
    _counts: Counter[Level] = member(default_factory=Counter)

    def place(self, path: Path_) -> SourcePosition | None:
        return place_of(self.places, path)

    def add(self, level: Level, place: SourcePosition | None, message: str, expected: str, fix: str) -> None:
        """Add a problem. raises TooManyProblems"""
        before = self._counts[level]
        self._counts[level] += 1
        if before == MAX_PROBLEMS:
            message, expected, fix = MORE
        if before <= MAX_PROBLEMS:
            self.problems.append(ConfigProblem(level, self.file, place, message, expected, fix))
        if before >= MAX_PROBLEMS and level is Level.ERROR:
            raise TooManyProblems


def place_of(places: Mapping[Path_, SourcePosition], path: Path_) -> SourcePosition | None:
    """Return the position of `path`, or of the closest enclosing field."""
    while path and path not in places:
        path = path[:-1]
    return places.get(path)


def read_config(data: bytes, file: Path) -> ParsedConfig:
    """Parse config.pbtxt. file: only its name, for problems"""
    read = ParsedConfig(file)
    try:
        block = read_text(data)
    except PbtxtSyntaxError as error:
        read.add(Level.ERROR, error.place, error.what, error.expected, error.fix)
        return read
    with suppress(TooManyProblems):
        read.config = _message(read, ModelConfig, block, ())
    return read


def _message(read: ParsedConfig, cls: type, block: PbtxtBlock, path: Path_) -> Any:
    field_specs, first_fields, groups = specs(cls), dict[str, PbtxtField](), dict[str, PbtxtField]()
    values: dict[str, Any] = {}
    for field in block.fields:
        spec = field_specs.get(field.name)
        if spec is None:
            where = ".".join(str(p) for p in path if isinstance(p, str)) or "a configuration"
            fix = "remove it, or correct its name"
            read.add(
                Level.ERROR,
                field.place,
                f'"{field.name}" is no field of {where}',
                nearest(field.name, field_specs),
                fix,
            )
            continue
        first = first_fields.setdefault(field.name, field)
        many = spec.repeated or spec.kind == "map"
        if first is not field and not many:
            message = f"{field.name} a second time; it stands in line {first.place.line}"
            read.add(Level.ERROR, field.place, message, "one of them", "remove the other")
            continue
        other = groups.setdefault(spec.oneof, field) if spec.oneof else field
        if other.name != field.name:
            message = f"{field.name} beside {other.name} of line {other.place.line}"
            read.add(Level.ERROR, field.place, message, "one of them", "remove the other")
            continue
        if first is field:
            _report_unused(read, spec, field)
            read.places[(*path, field.name)] = field.place
        _field(read, spec, field, path, values)
    for name, value in values.items():
        if field_specs[name].kind == "map":
            values[name] = MappingProxyType(value)
        elif field_specs[name].repeated:
            values[name] = tuple(value)
    return cls(**{field_specs[name].attribute: value for name, value in values.items()})


def _report_unused(read: ParsedConfig, spec: FieldSpec, field: PbtxtField) -> None:
    if spec.ignored:
        read.add(Level.IGNORED, field.place, f"{spec.name} changes nothing", spec.ignored, "it may stay or go")
    if spec.refused:
        read.add(
            Level.ERROR, field.place, f"{spec.name} is not supported: {spec.refused}", "a model without", "remove it"
        )


def _field(read: ParsedConfig, spec: FieldSpec, field: PbtxtField, path: Path_, target: dict[str, Any]) -> None:
    path, value = (*path, spec.name), field.value
    if isinstance(value, PbtxtList) and not (spec.repeated or spec.kind == "map"):
        read.add(Level.ERROR, value.place, f"a list for {spec.name}", "one value", "leave out the [ ]")
        return
    if not field.colon and spec.kind not in ("message", "map"):
        read.add(Level.ERROR, value.place, f"a block for {spec.name}", _expected(spec), f"write `{spec.name}: ...`")
        return
    items = value.items if isinstance(value, PbtxtList) else (value,)
    if spec.kind == "map":
        into = target.setdefault(spec.name, {})
        for item in items:
            _entry(read, spec, item, path, into)
    elif spec.repeated:
        values = target.setdefault(spec.name, [])
        for item in items:
            read.places[(*path, len(values))] = item.place
            _keep(read, spec, item, (*path, len(values)), values.append)
    else:
        _keep(read, spec, items[0], path, lambda value: target.__setitem__(spec.name, value))


def _keep(
    read: ParsedConfig, spec: FieldSpec, item: PbtxtScalar | PbtxtBlock, path: Path_, keep: Callable[[Any], None]
) -> None:
    """Store a valid value; report an invalid one and leave it out."""
    if spec.kind == "message":
        if isinstance(item, PbtxtBlock):
            keep(_message(read, spec.value_type, item, path))
        else:
            read.add(
                Level.ERROR, item.place, f"{item.text:.60} for {spec.name}", "a block in {}", f"{spec.name} {{ ... }}"
            )
        return
    value = _scalar(spec, item) if isinstance(item, PbtxtScalar) else None
    if value is None:
        message = f"{item.text:.60} for {spec.name}" if isinstance(item, PbtxtScalar) else f"a block for {spec.name}"
        read.add(Level.ERROR, item.place, message, _expected(spec, item), "correct it")
        return
    keep(value)


def _entry(
    read: ParsedConfig, spec: FieldSpec, item: PbtxtScalar | PbtxtBlock, path: Path_, into: dict[Any, Any]
) -> None:
    """Bind one `{ key: ... value: ... }` of a map; either may be omitted, as in protobuf."""
    if not isinstance(item, PbtxtBlock):
        fix = f'{spec.name} {{ key: "..." value: ... }}'
        read.add(Level.ERROR, item.place, f"{item.text:.60} for {spec.name}", "a block with key and value", fix)
        return
    assert spec.key is not None
    entry: dict[str, Any] = {}
    parts: Mapping[str, FieldSpec] = {"key": spec.key, "value": spec.value_type}
    keys = [f.value for f in item.fields if f.name == "key"]
    key = _scalar(spec.key, keys[0]) if keys and isinstance(keys[0], PbtxtScalar) else None
    here = (*path, str(key if key is not None else ""))
    before = len(read.problems)
    for field in item.fields:
        if field.name not in parts:
            message = f'"{field.name}" is no part of {spec.name}'
            read.add(Level.ERROR, field.place, message, nearest(field.name, parts), "remove it, or correct its name")
        elif field.name in entry:
            read.add(Level.ERROR, field.place, f"{field.name} a second time", "one of them", "remove the other")
        else:
            entry[field.name] = None
            _field(read, parts[field.name], field, here, entry)
    if any(p.level is Level.ERROR for p in read.problems[before:]):
        return
    key = entry.get("key", spec.key.default)
    if key in into:
        message = (
            f"the key {key!r} of {spec.name} a second time: the value of line {read.places[here].line} is not used"
        )
        read.add(Level.WARNING, item.place, message, "each key once", "remove the one that is not meant")
    read.places[here] = item.place
    value = entry.get("value", spec.value_type.default)
    into[key] = spec.value_type.value_type() if value is None and spec.value_type.kind == "message" else value


def _scalar(spec: FieldSpec, item: PbtxtScalar) -> Any:
    """Return the value, or None if it is not of the field's type."""
    kind, text = spec.kind, item.text
    if kind == "string":
        return _utf8(item.data) if item.kind == "string" else None
    if item.kind == "string":
        return None
    if kind == "bool":
        return True if text in _TRUE else False if text in _FALSE else None
    if kind == "enum":
        return spec.value_type.__members__.get(text) if item.kind == "name" else _numbered(spec, text)
    if kind in RANGES:
        low, high = RANGES[kind]
        number = _parse_int(text) if item.kind == "number" else None
        return number if number is not None and low <= number <= high else None
    return _parse_float(text, item.kind, single=kind == "float")


def _utf8(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:  # only possible through escapes, because the file itself is UTF-8
        return None


def _numbered(spec: FieldSpec, text: str) -> Any:
    number = _parse_int(text)
    return spec.value_type(number) if number in list(spec.value_type) else None


def _parse_int(text: str) -> int | None:
    """Parse a decimal, hexadecimal (0x) or C-style octal (0) integer."""
    digits = text.removeprefix("-")
    base = 16 if digits[:2] in ("0x", "0X") else 8 if digits[:1] == "0" and len(digits) > 1 else 10
    try:
        return int(text, base) if base != 8 else int(text.replace("0", "0o", 1), 8)
    except ValueError:
        return None


def _parse_float(text: str, kind: str, *, single: bool) -> float | None:
    if kind == "name":
        word = text.removeprefix("-").lower()
        number = math.inf if word in ("inf", "infinity") else math.nan if word == "nan" else None
        return -number if number is not None and text[0] == "-" else number
    digits = text.removeprefix("-")
    if digits[:2] in ("0x", "0X") or (digits.isdigit() and digits[0] == "0" and len(digits) > 1):
        return None
    number = float(text.rstrip("fF"))
    try:
        return (
            struct.unpack("<f", struct.pack("<f", number))[0] if single else number if math.isfinite(number) else None
        )
    except OverflowError:
        return None


def _expected(spec: FieldSpec, item: PbtxtScalar | PbtxtBlock | None = None) -> str:
    if spec.kind in RANGES:
        low, high = RANGES[spec.kind]
        return f"a whole number from {low} to {high}"
    if spec.kind == "enum":
        word = item.text if isinstance(item, PbtxtScalar) and item.kind == "name" else ""
        meant = next((name for name in spec.value_type.__members__ if name.partition("_")[2] == word), word)  # FP32
        return nearest(meant, spec.value_type.__members__)
    if spec.kind == "string" and isinstance(item, PbtxtScalar) and item.kind == "string":
        return "text: its escapes are not UTF-8"
    return _EXPECTED.get(spec.kind, "a block in {}")
