"""A configuration that comes as JSON, as the text of config.pbtxt: so it is read and checked like any other."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from millrace.model_repository.config.message_fields import FieldSpec, specs
from millrace.model_repository.config.model_config import ModelConfig

_WORD, _NUMBER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*"), re.compile(r"-?[0-9]+")


def text_of(config: Mapping[str, Any]) -> str:
    """What no field has, or has another type, is written as it is, and found wrong by the reader. A line a field"""
    return "\n".join(_fields(ModelConfig, config))


def _fields(cls: type, given: Mapping[str, Any]) -> Iterator[str]:
    known = specs(cls)
    for name, value in given.items():
        spec = known.get(name)
        if not _WORD.fullmatch(name):
            yield f"unknown_field: {json.dumps(name)}"
        elif value is None:
            continue  # protobuf's JSON: as though it were not there
        elif spec is not None and spec.kind == "map" and isinstance(value, dict):
            for key, one in value.items():
                assert spec.key is not None
                yield f"{name} {{ key: {_scalar(spec.key, key)} {_field('value', spec.of, one)} }}"
        else:
            for one in value if isinstance(value, list) else [value]:
                yield _field(name, spec, one)


def _field(name: str, spec: FieldSpec | None, value: Any) -> str:
    if isinstance(value, dict):
        inside = _fields(spec.of, value) if spec is not None and spec.kind == "message" else iter(())
        return f"{name} {{ {' '.join(inside)} }}"
    return f"{name}: {_scalar(spec, value)}"


def _scalar(spec: FieldSpec | None, value: Any) -> str:
    if isinstance(value, str) and spec is not None and spec.kind != "string":
        plain = _WORD if spec.kind == "enum" else _NUMBER  # 64-bit integers are strings there
        return value if plain.fullmatch(value) else json.dumps(value)
    return json.dumps(value)
