"""protobuf's own classes of the messages in `config/model_config.py`: the independent truth for our reader."""

from typing import Any

from millrace.model_repository.config.message_fields import FieldSpec, specs
from millrace.model_repository.config.model_config import ModelConfig


def messages(cls: type = ModelConfig, seen: dict[str, type] | None = None) -> dict[str, type]:
    """Every message that `cls` reaches, by name."""
    seen = {} if seen is None else seen
    if cls.__name__ not in seen:
        seen[cls.__name__] = cls
        for spec in specs(cls).values():
            for inner in (spec, *([spec.value_type] if spec.kind == "map" else [])):
                if inner.kind == "message":
                    messages(inner.value_type, seen)
    return seen


def same(ours: Any, theirs: Any) -> bool:
    """Whether a message of ours says what protobuf's does, field by field, presence included."""
    cls: type = type(ours)
    for spec in specs(cls).values():
        mine, other = getattr(ours, spec.attribute), getattr(theirs, spec.name)
        if spec.kind == "map":
            if set(mine) != set(other) or not all(_equal(spec.value_type, mine[k], other[k]) for k in mine):
                return False
        elif spec.repeated:
            if len(mine) != len(other) or not all(_equal(spec, a, b) for a, b in zip(mine, other, strict=True)):
                return False
        elif spec.kind == "message":
            if (mine is not None) != theirs.HasField(spec.name) or (mine is not None and not same(mine, other)):
                return False
        elif not _equal(spec, mine, other):
            return False
    return True


def _equal(spec: FieldSpec, mine: Any, other: Any) -> bool:
    if spec.kind == "message":
        return same(mine, other)
    return bool(mine == other) or (mine != mine and other != other)
