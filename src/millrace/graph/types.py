"""The graph: named inputs and outputs, and between them nodes and values, each value assigned once.

A graph says what is computed. How it is computed (precision, where rows lie, in which steps) is the compiler's affair.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.weights.quantized_matrix import QuantisedFormat, QuantisedMatrix
from millrace.errors import GraphError
from millrace.graph.dims import Dim as Dim
from millrace.graph.dims import Symbol as Symbol
from millrace.graph.dims import product, symbols_of

Array = NDArray[np.generic]


class DType(StrEnum):
    """Of a value's elements, as a model means them: engines may hold float32 in fewer bits."""

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
    """Weights, read only when they are packed. `load` gives the array of `shape`; `origin` names where it came from.

    stored: of (bits, group), the integers that the checkpoint itself holds, where it has them in such codes
    format: of these integers, known before they are read; None where there are none, or in several formats
    transformed: of (bits, group, groups of rows), what an engine has rounded for rows that are transformed in such
    """

    load: Callable[[], Array]
    origin: tuple[str, ...]
    stored: Callable[[int, int], QuantisedMatrix | None] | None = None
    format: QuantisedFormat | None = None
    transformed: Callable[[int, int, int], QuantisedMatrix] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """An edge of the graph. Two values are the same only if they are the same object."""

    shape: Shape
    dtype: DType = DType.F32
    constant: Constant | None = None

    @property
    def width(self) -> int:
        """Elements of one row: everything behind the first dimension. raises GraphError where a run alone knows"""
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
        """How many dense runs of `run` elements there are: the first dimension, and all up to the last symbol."""
        return product(self.shape[: self._run_axis])

    @property
    def run(self) -> int:
        """Elements behind the last dimension that is no number, and behind the first one."""
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
    """What a node may be: how many inputs it has, which attributes, and the shapes that come out.

    inputs: (at least, at most)
    shapes: those of the outputs; raises GraphError for inputs that it does not take
    dtypes: of the outputs; None: all are f32, and so are the inputs, but for those of i32 that `integers` numbers
    fused: only the compiler's passes write it, no model does
    """

    name: str
    inputs: tuple[int, int]
    shapes: Callable[[Inputs, Attrs], tuple[Shape, ...]]
    attrs: frozenset[str] = frozenset()
    fused: bool = False
    dtypes: Callable[[Inputs, Attrs], tuple[DType, ...]] | None = None
    integers: frozenset[int] = frozenset()

    def results(self, inputs: Inputs, attrs: Attrs) -> tuple["Value", ...]:
        """Fresh values for its outputs. raises GraphError for inputs that it does not take"""
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
        """Its operator's name."""
        return self.operator.name

    @property
    def output(self) -> Value:
        """Of an operator that has one."""
        (only,) = self.outputs
        return only


@dataclass(frozen=True, slots=True)
class Port:
    """Where a value goes in or comes out, by name."""

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
        """The names in its dimensions, in the order in which the inputs name them."""
        return tuple(dict.fromkeys(s for port in self.inputs for d in port.value.shape for s in symbols_of(d)))

    @property
    def results(self) -> set[Value]:
        """What is asked of it: the values of its outputs."""
        return {port.value for port in self.outputs}

    def producers(self) -> dict[Value, Node]:
        return {v: n for n in self.nodes for v in n.outputs}

    def consumers(self) -> dict[Value, list[Node]]:
        """Who reads each value; the graph's outputs are read by nobody in here."""
        readers: dict[Value, list[Node]] = {}
        for n in self.nodes:
            for v in n.inputs:
                readers.setdefault(v, []).append(n)
        return readers

    def last_reads(self) -> list[tuple[Value, ...]]:
        """For each node, the values that nothing reads after it: inputs, and what nodes gave that is no output."""
        last = {v: i for i, node in enumerate(self.nodes) for v in (*node.outputs, *node.inputs) if not v.constant}
        result: list[list[Value]] = [[] for _ in self.nodes]
        for value, at in last.items():
            if value not in self.results:
                result[at].append(value)
        return [tuple(values) for values in result]

    def constants(self) -> Iterator[Value]:
        """Every constant once, in the order of first use."""
        visited: set[Value] = set()
        for n in self.nodes:
            for v in n.inputs:
                if v.constant and v not in visited:
                    visited.add(v)
                    yield v


def find(ports: tuple[Port, ...], name: str) -> Value | None:
    return next((p.value for p in ports if p.name == name), None)
