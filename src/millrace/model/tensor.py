"""Symbolic tensors: the arithmetic with which a model is written. Nothing is computed; each operation adds a node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from millrace.errors import GraphError
from millrace.graph.rewrite import make_node
from millrace.graph.rules import named
from millrace.graph.trees import Tree
from millrace.graph.types import Dim, Node, Operators, Shape, Value

Number = int | float


@dataclass(slots=True)
class Trace:
    """The graph under construction, and the module that is speaking."""

    names: Mapping[int, str]  # of the model's modules, by their id
    operators: Operators
    nodes: list[Node] = field(default_factory=list)
    scope: list[str] = field(default_factory=list)
    n_caches: int = 0
    results: dict[str, Value] = field(default_factory=dict)  # what each module gave, by where it hangs

    def add(self, op: str, inputs: tuple[Tensor, ...], attrs: Mapping[str, object] | None = None) -> Tensor:
        operator = named(self.operators, op)
        node = make_node(operator, tuple(t.value for t in inputs), attrs or {}, (self.scope[-1],))
        self.nodes.append(node)
        return Tensor(self, node.output)


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
        """The same rows cut differently, e.g. (T, H*D) to (T, H, D)."""
        return self.trace.add("reshape", (self,), {"shape": tuple(shape)})

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

    def __repr__(self) -> str:
        return f"Tensor({self._value})"


def elementwise(op: str, *operands: Tensor | Number) -> Tensor:
    """One operation on each element; the node's tree is (op, operand, ...)."""
    tensors: list[Tensor] = []
    tree: list[Tree | str] = [op]
    for x in operands:
        if not isinstance(x, Tensor):
            tree.append(float(x))
            continue
        place = next((i for i, t in enumerate(tensors) if t.value is x.value), len(tensors))
        if place == len(tensors):
            tensors.append(x)
        tree.append(place)
    trace = next(t.trace for t in tensors)
    return trace.add("elementwise", tuple(tensors), {"tree": tuple(tree)})
