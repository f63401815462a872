"""Conversion of a JSON configuration to config.pbtxt text, so that it is parsed and checked like a file."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from millrace.model_repository.config.message_fields import FieldSpec, specs
from millrace.model_repository.config.model_config import ModelConfig

_WORD, _NUMBER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*"), re.compile(r"-?[0-9]+")


def to_pbtxt(config: Mapping[str, Any]) -> str:
    """Convert a configuration, one line per field. Unknown fields and wrong types are kept for the parser to report"""
    return "\n".join(_fields(ModelConfig, config))


def _fields(cls: type, values: Mapping[str, Any]) -> Iterator[str]:
    field_specs = specs(cls)
    for name, value in values.items():
        spec = field_specs.get(name)
        if not _WORD.fullmatch(name):
            yield f"unknown_field: {json.dumps(name)}"
        elif value is None:
            continue  # null means unset in protobuf's JSON
        elif spec is not None and spec.kind == "map" and isinstance(value, dict):
            for key, item in value.items():
                assert spec.key is not None
                yield f"{name} {{ key: {_scalar(spec.key, key)} {_field('value', spec.value_type, item)} }}"
        else:
            for item in value if isinstance(value, list) else [value]:
                yield _field(name, spec, item)


def _field(name: str, spec: FieldSpec | None, value: Any) -> str:
    if isinstance(value, dict):
        inside = _fields(spec.value_type, value) if spec is not None and spec.kind == "message" else iter(())
        return f"{name} {{ {' '.join(inside)} }}"
    return f"{name}: {_scalar(spec, value)}"


def _scalar(spec: FieldSpec | None, value: Any) -> str:
    if isinstance(value, str) and spec is not None and spec.kind != "string":
        plain = _WORD if spec.kind == "enum" else _NUMBER  # protobuf's JSON writes 64-bit integers as strings
        return value if plain.fullmatch(value) else json.dumps(value)
    return json.dumps(value)
