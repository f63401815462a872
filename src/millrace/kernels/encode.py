"""Encodes one call of a program, checked by the declaration from which the C++ decoder is generated."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from millrace.kernels.catalogue import numbered
from millrace.kernels.declare import Param, Space
from millrace.kernels.layout import byte_row_bytes, matrix_bytes, panel_bytes, row_bytes, type_bytes, up

SIZE_FUNCTIONS = {f.__name__: f for f in (byte_row_bytes, matrix_bytes, panel_bytes, row_bytes, type_bytes, up)}


@dataclass(frozen=True, slots=True)
class Ref:
    """The place of an operand: a buffer and a byte offset in it."""

    space: Space
    offset: int

    def encoded(self) -> int:
        return int(self.space) << 56 | self.offset


def encode(name: str, operands: Mapping[str, Ref | None], params: Mapping[str, Param]) -> bytes:
    """Encode one call: kernel, operand references, parameters. Asserts what the C++ decoder will check."""
    number, kernel = numbered()[name]
    assert set(operands) <= {o.name for o in kernel.operands}, f"{name} has no operand among {sorted(operands)}"
    assert set(params) <= {n for _, n, _ in kernel.fields}, f"{name} has no parameter among {sorted(params)}"
    scope = {**SIZE_FUNCTIONS, **dict.fromkeys((f for _, f, _ in kernel.fields), 0), **params}
    for check in kernel.checks:
        assert eval(check, {"__builtins__": {}}, scope), f"{name}: {check} does not hold for {dict(params)}"
    parts = [struct.pack("<I", number)]
    for o in kernel.operands:
        ref = operands.get(o.name)
        assert ref is not None or o.access.endswith("?"), f"{name} needs {o.name}"
        parts.append(struct.pack("<Q", ref.encoded() if ref else 0))
    for kind, field, length in kernel.fields:
        value = params.get(field, 0)
        values = [value] if isinstance(value, int | float) else list(value)
        values += [0] * (length - len(values))
        assert kind != "size" or min(values) >= 0, f"{name}.{field} numbers no size: {values}"
        assert len(values) == length, f"{name}.{field} takes {length} values, not {len(values)}"
        parts.append(struct.pack(f"<{length}{'f' if kind == 'f32' else 'i'}", *values))
    return b"".join(parts)
