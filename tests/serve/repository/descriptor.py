"""protobuf's own classes of the messages in `serve/repository/config.py`: what its reader makes is the truth here."""

from collections.abc import Iterator
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from millrace.serve.repository.config import ModelConfig
from millrace.serve.repository.declare import FieldSpec, specs

_Type = descriptor_pb2.FieldDescriptorProto


def messages(cls: type = ModelConfig, seen: dict[str, type] | None = None) -> dict[str, type]:
    """Every message that `cls` reaches, by name."""
    seen = {} if seen is None else seen
    if cls.__name__ not in seen:
        seen[cls.__name__] = cls
        for spec in specs(cls).values():
            for inner in (spec, *([spec.of] if spec.kind == "map" else [])):
                if inner.kind == "message":
                    messages(inner.of, seen)
    return seen


def enums() -> Iterator[Any]:
    found = {s.of for cls in messages().values() for s in specs(cls).values() if s.kind == "enum"}
    yield from sorted(found, key=lambda e: str(e.__name__))


@cache
def protobuf_class(name: str = "ModelConfig") -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="test/config.proto", package="test", syntax="proto3")
    for cls in messages().values():
        made = file.message_type.add(name=cls.__name__)
        oneofs: list[str] = []
        for spec in specs(cls).values():
            _add(made, cls.__name__, spec, oneofs)
        for oneof in oneofs:
            made.oneof_decl.add(name=oneof)
    for number, enum in enumerate(enums()):  # each in a scope of its own: names of values are unique there
        scope = file.message_type.add(name=f"Scope{enum.__name__}")
        made = scope.enum_type.add(name=enum.__name__)
        for value in enum:
            made.value.add(name=value.name, number=value.value)
        assert number < 100
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"test.{name}"))


def _add(to: Any, owner: str, spec: FieldSpec, oneofs: list[str]) -> None:
    made = to.field.add(name=spec.name, number=spec.number, label=_Type.LABEL_OPTIONAL)
    if spec.repeated or spec.kind == "map":
        made.label = _Type.LABEL_REPEATED
    if spec.oneof:
        if spec.oneof not in oneofs:
            oneofs.append(spec.oneof)
        made.oneof_index = oneofs.index(spec.oneof)
    if spec.kind == "map":
        assert spec.key is not None
        name = "".join(part.capitalize() for part in spec.name.split("_")) + "Entry"
        entry = to.nested_type.add(name=name)
        entry.options.map_entry = True
        _add(entry, owner, spec.key, [])
        _add(entry, owner, spec.of, [])
        made.type, made.type_name = _Type.TYPE_MESSAGE, f".test.{owner}.{name}"
    elif spec.kind == "message":
        made.type, made.type_name = _Type.TYPE_MESSAGE, f".test.{spec.of.__name__}"
    elif spec.kind == "enum":
        made.type, made.type_name = _Type.TYPE_ENUM, f".test.Scope{spec.of.__name__}.{spec.of.__name__}"
    else:
        made.type = getattr(_Type, f"TYPE_{spec.kind.upper()}")


def same(ours: Any, theirs: Any) -> bool:
    """Whether a message of ours says what protobuf's does, field by field, presence included."""
    cls: type = type(ours)
    for spec in specs(cls).values():
        mine, other = getattr(ours, spec.attribute), getattr(theirs, spec.name)
        if spec.kind == "map":
            if set(mine) != set(other) or not all(_equal(spec.of, mine[k], other[k]) for k in mine):
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
