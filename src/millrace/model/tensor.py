"""Symbolic tensors: the arithmetic with which a model is written. Nothing is computed; each operation adds a node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from millrace.errors import GraphError
from millrace.graph.dims import divide, product
from millrace.graph.expressions import Tree
from millrace.graph.rewrite import make_node
from millrace.graph.shape_rules import find_operator
from millrace.graph.types import Dim, Node, Operators, Shape, Value

Number = int | float


@dataclass(slots=True)
class Trace:
    """The graph under construction, and the module that is being traced."""

    names: Mapping[int, str]  # of the model's modules, by their id
    operators: Operators
    nodes: list[Node] = field(default_factory=list)
    scope: list[str] = field(default_factory=list)
    caches: dict[tuple[Value, Value, int], int] = field(default_factory=dict)  # keys, values, window -> cache
    n_states: int = 0
    results: dict[str, Value] = field(default_factory=dict)  # results of the modules, by path

    def add(
        self, op: str, inputs: tuple[Tensor, ...], attrs: Mapping[str, object] | None = None, origin: str | None = None
    ) -> Tensor:
        """Add an operator with one output, and return it. origin: its module's name; None: the one that is traced"""
        (output,) = self.add_all(op, inputs, attrs, origin)
        return output

    def add_all(
        self, op: str, inputs: tuple[Tensor, ...], attrs: Mapping[str, object] | None = None, origin: str | None = None
    ) -> tuple[Tensor, ...]:
        """Add an operator, and return all outputs. raises GraphError for inputs that it does not take"""
        operator, where = find_operator(self.operators, op), self.scope[-1] if origin is None else origin
        try:
            node = make_node(operator, tuple(t.value for t in inputs), attrs or {}, (where,))
        except GraphError as error:
            what = f"in {where}: {error.what}" if where else error.what
            raise GraphError(what, error.expected, "change the forward() that says it") from error
        self.nodes.append(node)
        return tuple(Tensor(self, value) for value in node.outputs)


class Tensor:
    """A value of the traced graph. Supports + - * / with tensors and numbers, reshape, and the functions of ops.py."""

    __slots__ = ("_trace", "_value")

    def __init__(self, trace: Trace | None, value: Value) -> None:
        self._trace = trace
        self._value = value

    @property
    def value(self) -> Value:
        return self._value

    @property
    def trace(self) -> Trace:
        if self._trace is None:
            raise GraphError(
                "a parameter is used outside of forward()",
                "arithmetic while the model is traced",
                "move it into forward()",
            )
        return self._trace

    @property
    def shape(self) -> Shape:
        return self._value.shape

    def reshape(self, *shape: Dim) -> Tensor:
        """Return the same elements in another shape, as (T, H*D) to (T, H, D) or (N, H*W/2, 2*C); one -1: the rest."""
        if -1 in (numbers := [d for d in shape if isinstance(d, int)]) and numbers.count(-1) == 1:
            rest = divide(product(self.shape), product(d for d in shape if d != -1))
            shape = tuple(rest if d == -1 else d for d in shape)
        return self.trace.add("reshape", (self,), {"shape": tuple(shape)})

    def flatten(self, first: int = 0) -> Tensor:
        """Merge dimension `first` and all after it."""
        return self.reshape(*self.shape[:first], product(self.shape[first:]))

    def transpose(self, *order: int) -> Tensor:
        """Reorder the dimensions: output dimension i is input dimension `order[i]`."""
        return self.trace.add("transpose", (self,), {"order": tuple(order)})

    def split(self, *widths: int) -> tuple[Tensor, ...]:
        """Split (T, N) by columns: (T, width) for each width; the widths add up to N."""
        return self.trace.add_all("split", (self,), {"widths": tuple(widths)})

    def __add__(self, other: Tensor | Number) -> Tensor:
        return elementwise("add", self, other)

    def __radd__(self, other: Number) -> Tensor:
        return elementwise("add", other, self)

    def __sub__(self, other: Tensor | Number) -> Tensor:
        return elementwise("sub", self, other)

    def __rsub__(self, other: Number) -> Tensor:
        return elementwise("sub", other, self)

    def __mul__(self, other: Tensor | Number) -> Tensor:
        return elementwise("mul", self, other)

    def __rmul__(self, other: Number) -> Tensor:
        return elementwise("mul", other, self)

    def __truediv__(self, other: Tensor | Number) -> Tensor:
        return elementwise("div", self, other)

    def __rtruediv__(self, other: Number) -> Tensor:
        return elementwise("div", other, self)

    def __neg__(self) -> Tensor:
        return elementwise("neg", self)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *operands: Any, **options: object) -> Tensor:
        """Accept NumPy's numbers as operands, but not its functions: nothing is computed here."""
        if ufunc not in _OF_NUMPY or method != "__call__":
            raise _foreign(f"numpy.{ufunc.__name__} is called on a tensor of the model")
        return elementwise(_OF_NUMPY[ufunc], *operands)

    def __repr__(self) -> str:
        return f"Tensor({self._value})"


_OF_NUMPY: Mapping[np.ufunc, str] = {np.add: "add", np.subtract: "sub", np.multiply: "mul", np.divide: "div"}


def _foreign(what: str) -> GraphError:
    return GraphError(
        what, "tensors and numbers with + - * /, and the functions of millrace.model.ops",
        "write it with these; an array that the model needs is a Parameter or a Table of its module",
    )  # fmt: skip


def elementwise(op: str, *operands: Tensor | Number) -> Tensor:
    """Apply one operation to each element; the node's tree is (op, operand, ...)."""
    tensors: list[Tensor] = []
    tree: list[Tree | str] = [op]
    for x in operands:
        if not isinstance(x, Tensor):
            if not isinstance(x, int | float | np.number):
                raise _foreign(f"{type(x).__name__} stands beside a tensor of the model")
            tree.append(float(x))
            continue
        place = next((i for i, t in enumerate(tensors) if t.value is x.value), len(tensors))
        if place == len(tensors):
            tensors.append(x)
        tree.append(place)
    trace = next(t.trace for t in tensors)
    return trace.add("elementwise", tuple(tensors), {"tree": tuple(tree)})
