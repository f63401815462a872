"""Declaration of protocol messages: frozen dataclasses whose fields carry their protobuf numbers.

    @message
    class ModelQueuePolicy:
        timeout_action: TimeoutAction = field(1)
        max_queue_size: UInt32 = field(4)
        profile: tuple[str, ...] = field(5, ignored="there are no GPUs here")

The annotation is the wire type: `str`, `bool`, one of the aliases below, an `IntEnum`, `tuple[T, ...]` for repeated, a
`Mapping` for a map, another message `| None`. Defaults are protobuf's: 0, "", (), {}, None.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from types import MappingProxyType, UnionType
from typing import Annotated, Any, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

Int32 = Annotated[int, "int32"]
UInt32 = Annotated[int, "uint32"]
Int64 = Annotated[int, "int64"]
UInt64 = Annotated[int, "uint64"]
Float = Annotated[float, "float"]
Double = Annotated[float, "double"]
M = TypeVar("M")
RANGES = {"int32": (-(1 << 31), (1 << 31) - 1), "uint32": (0, (1 << 32) - 1), "int64": (-(1 << 63), (1 << 63) - 1),
          "uint64": (0, (1 << 64) - 1)}  # fmt: skip


def field(number: int, *, oneof: str = "", called: str = "", ignored: str = "", refused: str = "") -> Any:
    """Declare a field. called: its name in files, if that is a Python keyword.
    ignored: why it has no effect, reported if a file sets it; refused: why a model that sets it is not served
    """
    more = {"number": number, "oneof": oneof, "called": called, "ignored": ignored, "refused": refused}
    return dataclasses.field(default=None, metadata=more)


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """A field. kind: "string", "bool", a name in RANGES, "float", "double", "enum", "message", "map". key: of a map"""

    name: str  # in files
    attribute: str  # of the dataclass
    number: int
    kind: str
    repeated: bool
    value_type: Any  # the class of an enum or a message; the FieldSpec of a map's value
    key: "FieldSpec | None"
    oneof: str
    ignored: str
    refused: str

    @property
    def default(self) -> Any:
        if self.repeated:
            return ()
        plain = {"string": "", "bool": False, "float": 0.0, "double": 0.0, "message": None}
        if self.kind == "map":
            return _empty_mapping()
        return self.value_type(0) if self.kind == "enum" else plain.get(self.kind, 0)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def message(cls: type) -> Any:
    """Turn a class into a frozen dataclass with protobuf's defaults."""
    for name in cls.__annotations__:
        declared = getattr(cls, name)
        spec = _spec(name, get_type_hints(cls, include_extras=True)[name], declared.metadata)
        if spec.kind == "map" and not spec.repeated:  # dataclasses reject it as a default value
            attribute = dataclasses.field(default_factory=_empty_mapping, metadata=declared.metadata)
        else:
            attribute = dataclasses.field(default=spec.default, metadata=declared.metadata)
        setattr(cls, name, attribute)
    return dataclass(frozen=True, kw_only=True)(cls)


def _empty_mapping() -> Mapping[Any, Any]:
    return MappingProxyType({})


def empty(cls: type[M]) -> M:
    """Return a message with all fields at their defaults."""
    return cls()


@cache
def specs(cls: type) -> Mapping[str, FieldSpec]:
    """Return the field specs of a message by name, in order of declaration."""
    hints = get_type_hints(cls, include_extras=True)
    field_specs = [_spec(f.name, hints[f.name], f.metadata) for f in dataclasses.fields(cls)]
    return {spec.name: spec for spec in field_specs}


def _spec(name: str, hint: Any, metadata: Mapping[str, Any]) -> FieldSpec:
    kind, repeated, element, key = "message", False, None, None
    if isinstance(hint, UnionType) or type(None) in get_args(hint):
        (hint,) = (a for a in get_args(hint) if a is not type(None))
    if get_origin(hint) is tuple:
        repeated, hint = True, get_args(hint)[0]
    origin = get_origin(hint)
    if origin is not None and issubclass(origin, Mapping):
        kind = "map"
        none = dict.fromkeys(("oneof", "called", "ignored", "refused"), "")
        of_key, of_value = get_args(hint)
        key = _spec("key", of_key, {"number": 1, **none})
        element = _spec("value", of_value, {"number": 2, **none})
    elif origin is Annotated:
        kind = get_args(hint)[1]
    elif hint in (str, bool):
        kind = "string" if hint is str else "bool"
    else:
        kind, element = ("enum" if issubclass(hint, IntEnum) else "message"), hint
    return FieldSpec(
        metadata["called"] or name,
        name,
        metadata["number"],
        kind,
        repeated,
        element,
        key,
        metadata["oneof"],
        metadata["ignored"],
        metadata["refused"],
    )
