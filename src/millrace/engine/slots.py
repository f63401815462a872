"""What goes into a program and comes out of it, by name: shapes, types and where the bytes lie."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.graph.types import DType, Shape, Symbol

DTYPES = {DType.F32: np.dtype(np.float32), DType.I32: np.dtype(np.int32)}


@dataclass(frozen=True, slots=True)
class Slot:
    """A named input or output of a program: dense rows, `offset` bytes into the activations; None: it is not read."""

    name: str
    shape: Shape
    dtype: DType
    offset: int | None

    def sized(self, sizes: Mapping[Symbol, int]) -> list[int]:
        """Its shape in a run where the symbols are so large."""
        return [sizes[d] if isinstance(d, Symbol) else d for d in self.shape]


def slot(slots: Sequence[Slot], name: str) -> Slot | None:
    return next((s for s in slots if s.name == name), None)


def read_slot(memory: NDArray[np.uint8], place: Slot, sizes: Mapping[Symbol, int]) -> NDArray[np.generic]:
    """A copy of what lies there after a run of so many rows of each symbol. memory: the activations"""
    shape, dtype = place.sized(sizes), DTYPES[place.dtype]
    assert place.offset is not None, place
    nbytes = math.prod(shape) * dtype.itemsize
    return memory[place.offset : place.offset + nbytes].view(dtype).reshape(shape).copy()


def write_slot(memory: NDArray[np.uint8], place: Slot, array: NDArray[np.generic]) -> None:
    """For the next run. Where no kernel reads it, it is not kept."""
    if place.offset is not None:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        memory[place.offset : place.offset + data.size] = data
