"""The graph: named inputs and outputs, and between them nodes and values, each value assigned once.

A graph says what is computed. How it is computed (precision, where rows lie, in which steps) is the compiler's affair.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.quantised import QuantisedFormat, QuantisedMatrix
from millrace.errors import GraphError

Array = NDArray[np.generic]


class DType(StrEnum):
    """Of a value's elements, as a model means them: engines may hold float32 in fewer bits."""

    F32 = "f32"
    I32 = "i32"


@dataclass(frozen=True, slots=True)
class Symbol:
    """A dimension known only when the graph runs. It belongs to the graph whose inputs have it; engines bound it."""

    name: str

    def __repr__(self) -> str:
        return self.name

    def _unknown(self, other: object) -> bool:
        raise GraphError(
            f"the dimension {self.name} is compared with {other!r}", "sizes that are known while the model is traced",
            "write forward() so that it holds for any size: what it does is fixed when it is traced",
        )  # fmt: skip

    __lt__ = __le__ = __gt__ = __ge__ = _unknown


Dim = int | Symbol
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
        """Elements of one row: everything behind the first dimension."""
        total = 1
        for d in self.shape[1:]:
            assert isinstance(d, int), f"only the first dimension of {self.shape} may be a symbol"
            total *= d
        return total

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
    fused: only the compiler's passes write it, no model does
    """

    name: str
    inputs: tuple[int, int]
    shapes: Callable[[Inputs, Attrs], tuple[Shape, ...]]
    attrs: frozenset[str] = frozenset()
    fused: bool = False


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
        """Its dimensions that are not numbers, in the order in which the inputs name them."""
        return tuple(dict.fromkeys(d for port in self.inputs for d in port.value.shape if isinstance(d, Symbol)))

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

    def constants(self) -> Iterator[Value]:
        """Every constant once, in the order of first use."""
        seen: set[Value] = set()
        for n in self.nodes:
            for v in n.inputs:
                if v.constant and v not in seen:
                    seen.add(v)
                    yield v


def find(ports: tuple[Port, ...], name: str) -> Value | None:
    return next((p.value for p in ports if p.name == name), None)
