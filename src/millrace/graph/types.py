"""The graph: values, nodes, and the few symbols that a dimension may be. Single assignment, one output a node."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.quantised import QuantisedMatrix

Array = NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Symbol:
    """A dimension known only when a step runs; it has an upper bound in every engine."""

    name: str

    def __repr__(self) -> str:
        return self.name


T = Symbol("T")  # tokens of a step
S = Symbol("S")  # sampled rows of a step

Dim = int | Symbol
Shape = tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Storage:
    """How a value lies in memory: "i32", "f32", "bf16" or "q8" (int8 codes with a scale and a sum per group)."""

    kind: str
    group: int = 0

    def __repr__(self) -> str:
        return f"{self.kind}g{self.group}" if self.group else self.kind


F32, I32 = Storage("f32"), Storage("i32")


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """Weights, read only when they are packed. `load` gives the array of `shape`; `origin` names where it came from.

    stored: of (bits, group), the integers that the checkpoint itself holds, where it has them in such codes
    """

    load: Callable[[], Array]
    origin: tuple[str, ...]
    stored: Callable[[int, int], QuantisedMatrix | None] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """An edge of the graph. Two values are the same only if they are the same object."""

    shape: Shape
    storage: Storage = F32
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
        return f"{kind}{self.storage}{list(self.shape)}"


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """`output = op(*inputs, **attrs)`; `origin` names the modules of the model that it came from."""

    op: str
    inputs: tuple[Value, ...]
    output: Value
    attrs: Mapping[str, object] = field(default_factory=dict)
    origin: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in an order in which they can run. `tokens` is the only input besides the step's bookkeeping."""

    tokens: Value
    nodes: tuple[Node, ...]
    output: Value

    def producers(self) -> dict[Value, Node]:
        return {n.output: n for n in self.nodes}

    def consumers(self) -> dict[Value, list[Node]]:
        """Who reads each value; the graph's output is read by nobody in here."""
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
