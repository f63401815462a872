"""The graph: named inputs and outputs, and between them nodes and values, each value assigned once.

A graph defines what is computed. How it is computed (precision, storage of rows, calls) is decided by the compiler.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.weights.quantized_matrix import QuantisedFormat, QuantisedMatrix, joined_format
from millrace.errors import GraphError
from millrace.graph.dims import Dim as Dim
from millrace.graph.dims import Symbol as Symbol
from millrace.graph.dims import product, symbols_of

Array = NDArray[np.generic]


class DType(StrEnum):
    """The type of a value's elements in the model; engines may store float32 in fewer bits."""

    F32 = "f32"
    I32 = "i32"
    F16 = "f16"
    I8 = "i8"
    I64 = "i64"
    BOOL = "bool"

    @property
    def is_float(self) -> bool:
        return self in (DType.F32, DType.F16)


NUMPY: Mapping[DType, np.dtype[np.generic]] = {
    DType.F32: np.dtype(np.float32), DType.I32: np.dtype(np.int32), DType.F16: np.dtype(np.float16),
    DType.I8: np.dtype(np.int8), DType.I64: np.dtype(np.int64), DType.BOOL: np.dtype(np.bool_),
}  # fmt: skip


Shape = tuple[Dim, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """Weights, read only when they are packed. `load` returns the array of `shape`; `origin` names its source.

    stored: of (bits, group), the checkpoint's own integers, if it has such codes
    format: of these integers, known before they are read; None if there are none, or several formats
    transformed: of (bits, group, groups of rows), the codes that an engine has made for transformed rows
    parts: the constants that it stacks along a new first dimension, such as one matrix of each expert
    """

    load: Callable[[], Array]
    origin: tuple[str, ...]
    stored: Callable[[int, int], QuantisedMatrix | None] | None = None
    format: QuantisedFormat | None = None
    transformed: Callable[[int, int, int], QuantisedMatrix] | None = None
    parts: tuple["Constant", ...] = ()


def stack_constants(parts: Sequence[Constant], name: str) -> Constant:
    """Return the constants, of one shape, stacked along a new first dimension. Nothing is read."""

    def load() -> Array:
        arrays = [part.load() for part in parts]
        if len({array.dtype for array in arrays}) > 1:  # NumPy has no common type of float16 and bfloat16
            arrays = [array.astype(np.float32) for array in arrays]
        return np.stack(arrays)

    return Constant(load, (name,), format=joined_format([part.format for part in parts]), parts=tuple(parts))


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """An edge of the graph. Two values are the same only if they are the same object."""

    shape: Shape
    dtype: DType = DType.F32
    constant: Constant | None = None

    @property
    def width(self) -> int:
        """Elements of one row: all dimensions after the first. raises GraphError if they are known only at run time"""
        result = product(self.shape[1:])
        if not isinstance(result, int):
            raise GraphError(
                f"{self} is used as rows of {result} elements", "a row size that is known at build time",
                "reshape so that all symbols come first, or make these dimensions constant",
            )  # fmt: skip
        return result

    @property
    def elements(self) -> Dim:
        return product(self.shape)

    @property
    def rows(self) -> Dim:
        """Number of dense runs of `run` elements: the first dimension, and all up to the last symbol."""
        return product(self.shape[: self._run_axis])

    @property
    def run(self) -> int:
        """Elements after the last dimension that is not a number, and after the first."""
        return math.prod(d for d in self.shape[self._run_axis :] if isinstance(d, int))

    @property
    def _run_axis(self) -> int:
        unknown = [axis for axis, d in enumerate(self.shape) if not isinstance(d, int)]
        return max([1, *(axis + 1 for axis in unknown)])

    def __repr__(self) -> str:
        kind = "constant " if self.constant else ""
        return f"{kind}{self.dtype}{list(self.shape)}"


Inputs = tuple[Value, ...]
Attrs = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """A kind of node: its number of inputs, its attributes, and its output shapes.

    inputs: (minimum, maximum)
    shapes: return the outputs' shapes; raise GraphError for inputs that it does not take
    dtypes: of the outputs; None: all are f32, and so are the inputs, except the i32 inputs numbered in `integers`
    fused: only the compiler's passes make such nodes
    """

    name: str
    inputs: tuple[int, int]
    shapes: Callable[[Inputs, Attrs], tuple[Shape, ...]]
    attrs: frozenset[str] = frozenset()
    fused: bool = False
    dtypes: Callable[[Inputs, Attrs], tuple[DType, ...]] | None = None
    integers: frozenset[int] = frozenset()

    def results(self, inputs: Inputs, attrs: Attrs) -> tuple["Value", ...]:
        """Return new values for its outputs. raises GraphError for inputs that it does not take"""
        if not self.inputs[0] <= len(inputs) <= self.inputs[1]:
            raise GraphError(
                f"{self.name} of {len(inputs)} inputs", f"{self.inputs[0]} to {self.inputs[1]}", "correct the call"
            )
        shapes = self.shapes(inputs, attrs)
        if self.dtypes:
            return tuple(map(Value, shapes, self.dtypes(inputs, attrs)))
        for number, value in enumerate(inputs):
            expected = DType.I32 if number in self.integers else DType.F32
            if value.dtype != expected:
                raise GraphError(
                    f"{self.name}: its input {number + 1} is {value}", f"{expected} there",
                    f'convert it: ops.cast(x, "{expected}")',
                )  # fmt: skip
        return tuple(map(Value, shapes))


Operators = Mapping[str, Operator]


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """`outputs = operator(*inputs, **attrs)`; `origin` names the modules of the model that it came from."""

    operator: Operator
    inputs: Inputs
    outputs: tuple[Value, ...]
    attrs: Attrs = field(default_factory=dict)
    origin: tuple[str, ...] = ()

    @property
    def op(self) -> str:
        """Name of its operator."""
        return self.operator.name

    @property
    def output(self) -> Value:
        """The output of an operator that has one."""
        (only,) = self.outputs
        return only


@dataclass(frozen=True, slots=True)
class Port:
    """A named input or output."""

    name: str
    value: Value


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in an order in which they can run."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    nodes: tuple[Node, ...]

    @property
    def symbols(self) -> tuple[Symbol, ...]:
        """The symbols in its dimensions, in the order of its inputs."""
        return tuple(dict.fromkeys(s for port in self.inputs for d in port.value.shape for s in symbols_of(d)))

    @property
    def results(self) -> set[Value]:
        """The values of its outputs."""
        return {port.value for port in self.outputs}

    def producers(self) -> dict[Value, Node]:
        return {v: n for n in self.nodes for v in n.outputs}

    def consumers(self) -> dict[Value, list[Node]]:
        """Return the readers of each value; being an output of the graph is not counted."""
        readers: dict[Value, list[Node]] = {}
        for n in self.nodes:
            for v in n.inputs:
                readers.setdefault(v, []).append(n)
        return readers

    def last_reads(self) -> list[tuple[Value, ...]]:
        """Return, for each node, the values that nothing reads after it: inputs, and results that are not outputs."""
        last = {v: i for i, node in enumerate(self.nodes) for v in (*node.outputs, *node.inputs) if not v.constant}
        result: list[list[Value]] = [[] for _ in self.nodes]
        for value, at in last.items():
            if value not in self.results:
                result[at].append(value)
        return [tuple(values) for values in result]

    def constants(self) -> Iterator[Value]:
        """Yield every constant once, in the order of first use."""
        visited: set[Value] = set()
        for n in self.nodes:
            for v in n.inputs:
                if v.constant and v not in visited:
                    visited.add(v)
                    yield v


def find(ports: tuple[Port, ...], name: str) -> Value | None:
    return next((p.value for p in ports if p.name == name), None)
