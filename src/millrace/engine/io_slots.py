"""Inputs and outputs of a program by name: shapes, types and places in memory."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.errors import RequestError
from millrace.graph.dims import Dim, NotWholeError, symbols_of, value_of
from millrace.graph.types import NUMPY, DType, Port, Shape, Symbol

DTYPES = NUMPY


@dataclass(frozen=True, slots=True)
class Size:
    """A derived dimension of a program: an expression of its symbols, from 1 to `most`."""

    dim: Dim
    most: int


@dataclass(frozen=True, slots=True)
class Slot:
    """A named input or output of a program: dense rows at `offset` bytes in the activations; None: it is unused."""

    name: str
    shape: Shape
    dtype: DType
    offset: int | None

    @classmethod
    def from_port(cls, port: Port) -> "Slot":
        """Return the slot of a graph's input or output, without a place."""
        return cls(port.name, port.value.shape, port.value.dtype, None)

    def sized(self, sizes: Mapping[Symbol, int]) -> list[int]:
        """Return the shape for given symbols. raises RequestError if a dimension is not an integer"""
        result = [_evaluate(d, sizes) for d in self.shape]
        if wrong := [d for d in result if not isinstance(d, int)]:
            raise RequestError(
                f"the dimension {wrong[0]} of {self.name} is not an integer for {_sizes_text(sizes)}", "an integer",
                "give inputs of other sizes",
            )  # fmt: skip
        return [d for d in result if isinstance(d, int)]


def slot(slots: Sequence[Slot], name: str) -> Slot | None:
    return next((s for s in slots if s.name == name), None)


def read_slot(memory: NDArray[np.uint8], place: Slot, sizes: Mapping[Symbol, int]) -> NDArray[np.generic]:
    """Copy an output after a run. memory: the activations; sizes: the symbols of the run"""
    shape, dtype = place.sized(sizes), DTYPES[place.dtype]
    assert place.offset is not None, place
    nbytes = math.prod(shape) * dtype.itemsize
    return memory[place.offset : place.offset + nbytes].view(dtype).reshape(shape).copy()


def write_slot(memory: NDArray[np.uint8], place: Slot, array: NDArray[np.generic]) -> None:
    """Write an input for the next run; do nothing if no kernel reads it."""
    if place.offset is not None:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        memory[place.offset : place.offset + data.size] = data


def sizes_of(
    slots: Sequence[Slot], bounds: Mapping[Symbol, int], inputs: Mapping[str, NDArray[np.generic]],
    derived: Sequence[Size] = (),
) -> dict[Symbol, int]:  # fmt: skip
    """Determine the symbols from the shapes of the inputs, in the order of `bounds`.

    derived: expressions of symbols; each of these dimensions has its own size in this run
    raises RequestError for an input that is missing, unknown, or not of the declared shape, type and bounds
    """
    names = [s.name for s in slots]
    if not isinstance(inputs, Mapping):
        raise RequestError(
            f"the inputs are of type {type(inputs).__name__}", "a dict of arrays by name", "give " + ", ".join(names)
        )
    for name in [n for n in names if n not in inputs] + [n for n in inputs if n not in names]:
        what = "is missing" if name in names else "is not an input of this model"
        raise RequestError(f"the input {name!r:.60} {what}", "inputs " + ", ".join(names), "give each of them, by name")
    result: dict[Symbol, int] = {}
    for s in slots:
        array = inputs[s.name]
        if not isinstance(array, np.ndarray):
            raise RequestError(
                f"the input {s.name} is of type {type(array).__name__}", f"a NumPy array of {DTYPES[s.dtype]}",
                f"give numpy.array(..., numpy.{DTYPES[s.dtype]})",
            )  # fmt: skip
        expected = [_evaluate(d, result) for d in s.shape]
        fits = array.dtype == DTYPES[s.dtype] and len(array.shape) == len(expected)
        for size, dim in zip(array.shape, expected, strict=False):
            if isinstance(dim, Symbol):
                result[dim] = size
            elif not isinstance(dim, int):
                continue  # an expression of symbols that later inputs determine
            fits = fits and (1 <= size <= bounds[dim] if isinstance(dim, Symbol) else size == dim)
        if not fits:
            limits = ", ".join(f"{d} from 1 to {bounds[d]}" for d in expected if isinstance(d, Symbol))
            related = {symbol: result[symbol] for d in s.shape for symbol in symbols_of(d) if symbol not in expected}
            where = f", as {list(s.shape)} where {_sizes_text(related)}" if related else ""
            raise RequestError(
                f"the input {s.name} is {array.dtype}{list(array.shape)}",
                f"{DTYPES[s.dtype]}{expected}{where}" + (f", {limits}" if limits else ""),
                "change the input's shape or type",
            )  # fmt: skip
    for s in slots:
        if (shape := [_evaluate(d, result) for d in s.shape]) != list(inputs[s.name].shape):
            raise RequestError(
                f"the input {s.name} is {list(inputs[s.name].shape)}",
                f"{shape} = {list(s.shape)}, {_sizes_text(result)}",
                "give inputs of shapes that agree",
            )  # fmt: skip
    for size in derived:
        n = _evaluate(size.dim, result)
        if not isinstance(n, int) or not 1 <= n <= size.most:
            raise RequestError(
                f"the dimension {size.dim} is {n if isinstance(n, int) else 'no whole number'} where "
                f"{_sizes_text({symbol: result[symbol] for symbol in dict.fromkeys(symbols_of(size.dim))})}",
                f"a whole number from 1 to {size.most}", "give inputs of other sizes",
            )  # fmt: skip
    return {symbol: result[symbol] for symbol in bounds}


def _evaluate(d: Dim, sizes: Mapping[Symbol, int]) -> Dim:
    """Return the number of a dimension if the sizes determine it, otherwise the dimension."""
    try:
        return value_of(d, sizes) if all(symbol in sizes for symbol in symbols_of(d)) else d
    except NotWholeError:
        return d


def _sizes_text(sizes: Mapping[Symbol, int]) -> str:
    return ", ".join(f"{symbol} = {size}" for symbol, size in sizes.items())
