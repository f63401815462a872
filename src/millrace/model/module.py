"""Module, ModuleList and Parameter: a model is written as its paper writes it, and traced into a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from millrace.checkpoint.quantised import QuantisedMatrix
from millrace.errors import CheckpointError, GraphError, nearest
from millrace.graph.types import I32, Array, Constant, Graph, Shape, T, Value
from millrace.graph.verify import verify
from millrace.model.tensor import Tensor, Trace

Stored = Callable[[int, int], QuantisedMatrix | None]


class Parameter(Tensor):
    """A tensor of the checkpoint, named by where it hangs in the model: `layers.0.mlp.up_proj.weight`."""

    __slots__ = ("_shape", "name")

    def __init__(self, *shape: int) -> None:
        super().__init__(None, Value(shape))
        self._shape: Shape = shape
        self.name = ""

    def bind(self, trace: Trace, name: str, load: Callable[[], Array], stored: Stored | None = None) -> None:
        self.name = name
        self._trace = trace
        self._value = Value(self._shape, constant=Constant(load, (name,), stored))


class Table(Parameter):
    """A constant that the model computes itself (rotary angles), instead of reading it from the checkpoint."""

    __slots__ = ("compute",)

    def __init__(self, shape: tuple[int, ...], compute: Callable[[], Array]) -> None:
        super().__init__(*shape)
        self.compute = compute


class Module:
    """Assign Parameters, Modules and ModuleLists as attributes; write forward(). Calling a module traces it."""

    _scope = ""

    def forward(self, *args: Any) -> Tensor:
        raise GraphError(f"{type(self).__name__} has no forward()", "def forward(self, x)", "write it")

    def __call__(self, *args: Any) -> Tensor:
        trace = next((a.trace for a in args if isinstance(a, Tensor)), None)
        if trace is None:
            raise GraphError(
                f"{type(self).__name__} was called without a tensor", "a tensor among the arguments", "pass one"
            )
        trace.scope.append(self._scope)
        try:
            return self.forward(*args)
        finally:
            trace.scope.pop()

    def children(self) -> Iterator[tuple[str, Module | Parameter]]:
        for name, value in vars(self).items():
            if isinstance(value, Module | Parameter):
                yield name, value

    def parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """Every parameter once, under its first name; a parameter shared by two modules is one tensor."""
        seen: set[int] = set()
        for name, p in self._walk(prefix):
            if id(p) not in seen:
                seen.add(id(p))
                yield name, p

    def _walk(self, prefix: str) -> Iterator[tuple[str, Parameter]]:
        for name, child in self.children():
            path = f"{prefix}{name}"
            if isinstance(child, Parameter):
                yield path, child
            else:
                child._scope = path
                yield from child._walk(f"{path}.")


class ModuleList(Module):
    """Modules under the names "0", "1", ..."""

    def __init__(self, modules: list[Any]) -> None:
        self._modules: list[Module] = list(modules)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, i: int) -> Any:
        return self._modules[i]

    def children(self) -> Iterator[tuple[str, Module | Parameter]]:
        for i, module in enumerate(self._modules):
            yield str(i), module


class Weights:
    """What trace() needs of a checkpoint: the shape of each tensor, and a way to load one.

    stored: of (name, bits, group), a matrix that the checkpoint holds in such codes already; None for any other
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        load: Callable[[str], Array],
        stored: Callable[[str, int, int], QuantisedMatrix | None] | None = None,
    ) -> None:
        self.shapes = shapes
        self.load = load
        self.stored = stored


def trace_model(model: Module, weights: Weights, *, renamed: Mapping[str, str] | None = None) -> Graph:
    """The graph of model(tokens), each parameter bound to its tensor of the checkpoint.

    renamed: parameter name -> tensor name, where the two differ (a prefix that older checkpoints lack).
    raises CheckpointError for a missing tensor, a wrong shape, or a tensor that the model does not use.
    """
    trace = Trace()
    used: set[str] = set()
    for name, parameter in model.parameters():
        if isinstance(parameter, Table):
            parameter.bind(trace, name, parameter.compute)
            continue
        tensor = (renamed or {}).get(name, name)
        used.add(tensor)
        _check_tensor(tensor, parameter.shape, weights)
        stored = partial(weights.stored, tensor) if weights.stored else None
        parameter.bind(trace, name, partial(weights.load, tensor), stored)
    unused = sorted(set(weights.shapes) - used)
    if unused:
        raise CheckpointError(
            f'tensor "{unused[0]}" of the checkpoint is not used by {type(model).__name__} ({len(unused)} such)',
            "every tensor to have its place in the model",
            "check that config.json belongs to these weights",
        )
    tokens = Value((T,), I32)
    output = model(Tensor(trace, tokens))
    for _, parameter in model.parameters():
        parameter._trace = None
    return verify(Graph(tokens, tuple(trace.nodes), output.value), after="trace")


def _check_tensor(name: str, shape: Shape, weights: Weights) -> None:
    found = weights.shapes.get(name)
    if found is None:
        raise CheckpointError(
            f'the checkpoint has no tensor "{name}"', nearest(name, weights.shapes), "check that all shards are there"
        )
    if found != shape:
        raise CheckpointError(
            f'tensor "{name}" is {found}', f"{shape}, by config.json", "check that config.json belongs to these weights"
        )
