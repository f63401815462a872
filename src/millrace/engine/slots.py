"""What goes into a program and comes out of it, by name: shapes, types and where the bytes lie."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.errors import RequestError
from millrace.graph.types import DType, Port, Shape, Symbol

DTYPES = {DType.F32: np.dtype(np.float32), DType.I32: np.dtype(np.int32)}


@dataclass(frozen=True, slots=True)
class Slot:
    """A named input or output of a program: dense rows, `offset` bytes into the activations; None: it is not read."""

    name: str
    shape: Shape
    dtype: DType
    offset: int | None

    @classmethod
    def of(cls, port: Port) -> "Slot":
        """Of a graph's, which lies nowhere."""
        return cls(port.name, port.value.shape, port.value.dtype, None)

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


def sizes_of(
    slots: Sequence[Slot], bounds: Mapping[Symbol, int], inputs: Mapping[str, NDArray[np.generic]]
) -> dict[Symbol, int]:
    """What the symbols are, by the shapes of the inputs; in the order of `bounds`.

    raises RequestError for an input that is missing, unknown, or not of the shape, type and bounds it was built for
    """
    names = [s.name for s in slots]
    if not isinstance(inputs, Mapping):
        raise RequestError(
            f"the inputs are of type {type(inputs).__name__}", "a dict of arrays by name", "give " + ", ".join(names)
        )
    for name in [n for n in names if n not in inputs] + [n for n in inputs if n not in names]:
        what = "is missing" if name in names else "is none of this network's"
        raise RequestError(f"the input {name!r:.60} {what}", "inputs " + ", ".join(names), "give each of them, by name")
    found: dict[Symbol, int] = {}
    for s in slots:
        array = inputs[s.name]
        if not isinstance(array, np.ndarray):
            raise RequestError(
                f"the input {s.name} is of type {type(array).__name__}", f"a NumPy array of {DTYPES[s.dtype]}",
                f"give numpy.array(..., numpy.{DTYPES[s.dtype]})",
            )  # fmt: skip
        expected = [found.get(d, d) if isinstance(d, Symbol) else d for d in s.shape]
        fits = array.dtype == DTYPES[s.dtype] and len(array.shape) == len(expected)
        for given, asked in zip(array.shape, expected, strict=False):
            if isinstance(asked, Symbol):
                found[asked] = given
            fits = fits and (1 <= given <= bounds[asked] if isinstance(asked, Symbol) else given == asked)
        if not fits:
            limits = ", ".join(f"{d} from 1 to {bounds[d]}" for d in expected if isinstance(d, Symbol))
            raise RequestError(
                f"the input {s.name} is {array.dtype}{list(array.shape)}",
                f"{DTYPES[s.dtype]}{expected}" + (f", {limits}" if limits else ""), "change the input's shape or type",
            )  # fmt: skip
    return {symbol: found[symbol] for symbol in bounds}
