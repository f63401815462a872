"""Configurations as JSON in Triton's form: for /v2/models/M/config and `model_config` of Python models.

The form is protobuf's JSON with Triton's three differences: field names as in files, defaults included (except unset
messages and unset members of a oneof), 64-bit integers as numbers.
"""

import math
from enum import IntEnum
from typing import Any

from millrace.model_repository.config.message_fields import FieldSpec, specs
from millrace.model_repository.config.model_config import ModelConfig


def config_json(config: ModelConfig) -> dict[str, Any]:
    """Return a completed configuration as JSON."""
    return _message(config)


def _message(message: Any) -> dict[str, Any]:
    fields, cls = {}, message.__class__
    for spec in specs(cls).values():
        value = getattr(message, spec.attribute)
        unset = value is None or (spec.oneof and value == spec.default)
        if not unset:
            fields[spec.name] = _field(spec, value)
    return fields


def _field(spec: FieldSpec, value: Any) -> Any:
    if spec.kind == "map":
        return {str(key): _value(item) for key, item in value.items()}
    return [_value(item) for item in value] if spec.repeated else _value(value)


def _value(value: Any) -> Any:
    if isinstance(value, IntEnum):
        return value.name
    if isinstance(value, float) and not math.isfinite(value):  # as protobuf writes non-finite numbers
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value if isinstance(value, str | bool | int | float) else _message(value)
