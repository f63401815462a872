"""The places of a program's values and packed constants, as used by operators' lowerings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.graph.types import Array, Constant, Value
from millrace.kernels.declare import RowFormat, Space
from millrace.kernels.matmul.pack import SlabTask, finite
from millrace.kernels.row_storage import DENSE, Storage

ELEMENT_BYTES = {RowFormat.F32: 4, RowFormat.BF16: 2}  # a Q8 row ends with scales and sums


@dataclass(frozen=True, slots=True)
class PackedPlace:
    """One constant in the bytes that a kernel reads. `pack` makes them, in slabs if it is large.

    They are written once and then mapped.
    """

    name: str
    origin: tuple[str, ...]
    shape: tuple[int, ...]
    format: str  # "f32", "bf16", "w8g128", ...
    nbytes: int
    pack: Callable[[SlabTask], NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class OperandPlace:
    """An operand before offsets are known: the number of a buffer or of a packed constant, and a byte offset in it."""

    space: Space
    number: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """The place of a value: `offset` bytes into a buffer, with rows `row_bytes` apart."""

    buffer: int
    offset: int
    row_bytes: int
    rows: int  # number of the symbol that counts them
    storage: Storage = DENSE

    def place(self) -> OperandPlace:
        return OperandPlace(Space.ACTIVATIONS, self.buffer, self.offset)

    @property
    def row_elements(self) -> int:
        """Distance between rows, in elements of the row's format."""
        return self.row_bytes // ELEMENT_BYTES[self.storage.format]

    @property
    def row_floats(self) -> int:
        """Distance between rows that a kernel reads or writes as floats."""
        assert self.storage == DENSE, f"rows of {self.storage} are not floats"
        return self.row_elements


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """An attention layer's part of a cache, by the cache's number; format: "f32", "bf16" or "int8".

    buffer: of its pages, if they last for one run only
    """

    number: int
    layer: int
    format: str
    buffer: int | None


@dataclass(frozen=True, slots=True)
class StateLayer:
    """A layer's part of a kind of state, by the kind's number."""

    number: int
    layer: int


Operands = Mapping[str, View | OperandPlace | None]


def constant_of(value: Value) -> Constant:
    assert value.constant, f"{value} is computed in the step, not a constant"
    return value.constant


def pack_array(value: Value, dtype: np.dtype[np.generic], format: str) -> PackedPlace:
    """Pack an array unchanged, row by row: norm weights, biases, rotary tables, embedding tables."""
    constant, shape = constant_of(value), tuple(d for d in value.shape if isinstance(d, int))

    def pack(_: SlabTask) -> NDArray[np.uint8]:
        return as_bytes(finite(constant.load(), dtype))

    return PackedPlace(
        "+".join(constant.origin), constant.origin, shape, format, int(np.prod(shape)) * dtype.itemsize, pack
    )


def as_bytes(array: Array) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
