"""Module, ModuleList and Parameter: models are written like their papers, and traced into a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from millrace.checkpoint.weights.quantized_matrix import QuantisedFormat, QuantisedMatrix
from millrace.errors import CheckpointError, ConfigError, GraphError, nearest
from millrace.graph.dims import parse_dim
from millrace.graph.types import Array, Constant, Dim, DType, Graph, Operators, Port, Shape, Value
from millrace.graph.verify import verify
from millrace.model.tensor import Tensor, Trace

F32, I32 = DType.F32, DType.I32
Stored = Callable[[int, int], QuantisedMatrix | None]


class Parameter(Tensor):
    """A tensor of the checkpoint, named by its path in the model: `layers.0.mlp.up_proj.weight`.

    first_row: number of the tensor's first row that the model uses; the rows before it are not loaded
    """

    __slots__ = ("_dtype", "_first_row", "_shape", "name")

    def __init__(self, *shape: int, dtype: DType = F32, first_row: int = 0) -> None:
        super().__init__(None, Value(shape, dtype))
        self._shape: Shape = shape
        self._dtype, self._first_row = dtype, first_row
        self.name = ""

    @property
    def stored_shape(self) -> Shape:
        """The shape of the tensor in the checkpoint."""
        first, *rest = self.shape
        assert isinstance(first, int), self.name
        return (first + self._first_row, *rest)

    def bind(
        self, trace: Trace, name: str, load: Callable[[], Array], stored: Stored | None = None,
        format: QuantisedFormat | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self._trace = trace
        if self._first_row:
            load_tensor = load
            load, stored, format = (lambda: load_tensor()[self._first_row :]), None, None
        self._value = Value(self._shape, self._dtype, Constant(load, (name,), stored, format))


class Table(Parameter):
    """A constant that the model computes (rotary angles), instead of reading it from the checkpoint."""

    __slots__ = ("compute",)

    def __init__(self, shape: tuple[int, ...], compute: Callable[[], Array], dtype: DType = F32) -> None:
        super().__init__(*shape, dtype=dtype)
        self.compute = compute


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs and outputs of a network: shapes and types of inputs by name, in forward()'s order; output names.

    A dimension known at run time is a symbol: {"pixels": ("images", 784)}; one that follows from symbols is an
    expression, as in graph/dims.py: {"mask": ("N", "H*W/2")}.
    """

    inputs: Mapping[str, tuple[str | Dim, ...]]
    outputs: tuple[str, ...]
    dtypes: Mapping[str, DType] = field(default_factory=dict)  # of the inputs that are not float32

    def ports(self) -> tuple[Port, ...]:
        return tuple(
            Port(
                name, Value(tuple(parse_dim(d) if isinstance(d, str) else d for d in shape), self.dtypes.get(name, F32))
            )
            for name, shape in self.inputs.items()
        )


# A step of a language model: T tokens of S sequences, packed; `rows`: the tokens for which logits are computed.
DECODER = Signature(
    {"tokens": ("T",), "positions": ("T",), "lengths": ("S",), "rows": ("R",)}, ("logits",),
    dict.fromkeys(("tokens", "positions", "lengths", "rows"), I32),
)  # fmt: skip

# Whole sequences, packed, each becoming one vector; `types` distinguish the two texts of a pair.
ENCODER = Signature(
    {"tokens": ("T",), "types": ("T",), "positions": ("T",), "lengths": ("S",)}, ("embeddings",),
    dict.fromkeys(("tokens", "types", "positions", "lengths"), I32),
)  # fmt: skip

# The same, with the index of each sequence's first token in `rows`.
ENCODER_OF_FIRST = Signature({**ENCODER.inputs, "rows": ("S",)}, ENCODER.outputs, {**ENCODER.dtypes, "rows": I32})

# A cross-encoder: each sequence is two texts, and becomes one score.
CROSS_ENCODER = Signature(ENCODER_OF_FIRST.inputs, ("scores",), ENCODER_OF_FIRST.dtypes)


class Module:
    """Assign Parameters, Modules and ModuleLists as attributes; write forward(). Calling a module traces it.

    signature: of a whole network; its parts need none
    """

    signature: ClassVar[Signature]

    def forward(self, *args: Any) -> Any:
        raise GraphError(f"{type(self).__name__} has no forward()", "def forward(self, x)", "write it")

    def __call__(self, *args: Any) -> Tensor:
        trace = next((a.trace for a in args if isinstance(a, Tensor)), None)
        if trace is None:
            raise GraphError(
                f"{type(self).__name__} was called without a tensor", "a tensor among the arguments", "pass one"
            )
        path = trace.names.get(id(self), "")
        trace.scope.append(path)
        try:
            result: Tensor = self.forward(*args)
        finally:
            trace.scope.pop()
        if isinstance(result, Tensor):
            trace.results[path] = result.value
        return result

    def children(self) -> Iterator[tuple[str, Module | Parameter]]:
        for name, value in vars(self).items():
            if isinstance(value, Module | Parameter):
                yield name, value

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield every parameter once, under its first name; a parameter shared by two modules is one tensor."""
        visited: set[int] = set()
        for path, module in self.modules():
            for name, child in module.children():
                if isinstance(child, Parameter) and id(child) not in visited:
                    visited.add(id(child))
                    yield f"{path}.{name}" if path else name, child

    def modules(self, path: str = "") -> Iterator[tuple[str, Module]]:
        """Yield the module and all its parts, each with its path."""
        yield path, self
        for name, child in self.children():
            if isinstance(child, Module):
                yield from child.modules(f"{path}.{name}" if path else name)


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
    """What trace_model() needs of a checkpoint: the shape of each tensor, and a way to load one.

    stored: of (name, bits, group), a matrix that the checkpoint has in such codes; None for any other
    formats: of these matrices, by name
    from_user: the weights are the user's arrays and not a checkpoint's, which changes the error texts
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        load: Callable[[str], Array],
        stored: Callable[[str, int, int], QuantisedMatrix | None] | None = None,
        *,
        formats: Mapping[str, QuantisedFormat] | None = None,
        from_user: bool = False,
    ) -> None:
        self.shapes = shapes
        self.formats = formats or {}
        self.from_user = from_user
        self.load = load
        self.stored = stored


def trace_model(
    model: Module,
    weights: Weights,
    operators: Operators,
    *,
    keep: Sequence[str] = (),
) -> Graph:
    """Return the graph of the model with its signature's inputs, each parameter bound to its tensor.

    operators: the model's operators by name
    keep: modules, by name, whose results become outputs; any other value by its number in `inspect --graph`
    raises CheckpointError for a missing tensor, a wrong shape, or an unused tensor (ConfigError if the weights are the
    user's own), GraphError for an illegal graph
    """
    trace = Trace({id(module): path for path, module in model.modules()}, operators)
    for name, parameter in model.parameters():
        if isinstance(parameter, Table):
            parameter.bind(trace, name, parameter.compute)
            continue
        stored = partial(weights.stored, name) if weights.stored else None
        parameter.bind(trace, name, partial(weights.load, name), stored, weights.formats.get(name))
    _check_tensors(model, weights)
    inputs = _signature(model).ports()
    results: object = model(*(Tensor(trace, port.value) for port in inputs))
    for _, parameter in model.parameters():
        parameter._trace = None
    outputs = (*_output_ports(model, results), *(Port(name, _result_of(trace, name, len(inputs))) for name in keep))
    return verify(Graph(inputs, outputs, tuple(trace.nodes)), after="trace")


def _result_of(trace: Trace, name: str, n_inputs: int) -> Value:
    if name in trace.results:
        return trace.results[name]
    computed = [
        value for node in trace.nodes for value in node.outputs
    ]  # numbered after the inputs (graph/graph_json.py)
    if name.isdecimal() and 0 <= (number := int(name[:9]) - n_inputs) < len(computed):
        return computed[number]
    raise ConfigError(
        f'the model has no module "{name}" to keep', nearest(name, trace.results),
        "correct the name, or give the number of a value in millrace inspect --graph",
    )  # fmt: skip


def _signature(model: Module) -> Signature:
    signature = getattr(model, "signature", None)
    if not isinstance(signature, Signature):
        raise GraphError(
            f"{type(model).__name__} has no signature", "what it takes and gives, as in model/module.py",
            "write signature = DECODER for a language model, or a Signature of its own",
        )  # fmt: skip
    return signature


def _output_ports(model: Module, results: object) -> tuple[Port, ...]:
    """Name the results of forward() by the signature."""
    names = model.signature.outputs
    tensors = results if isinstance(results, tuple) else (results,)
    if len(tensors) != len(names) or not all(isinstance(t, Tensor) for t in tensors):
        from_user = ", ".join(type(t).__name__ for t in tensors)
        raise GraphError(
            f"forward() of {type(model).__name__} gives {from_user}", f"a tensor for each of {', '.join(names)}",
            "return them in this order",
        )  # fmt: skip
    return tuple(Port(name, t.value) for name, t in zip(names, tensors, strict=True))


def _check_tensors(model: Module, weights: Weights) -> None:
    """Check that each parameter has its tensor, and each tensor its parameter."""
    needed = {name: p.stored_shape for name, p in model.parameters() if not isinstance(p, Table)}
    unused = sorted(weights.shapes.keys() - needed.keys())
    whose, name = type(model).__name__, "correct the names"
    missing = next((name for name in needed if name not in weights.shapes), None)
    if missing is not None:
        near = nearest(missing, unused) if unused else "a tensor for each parameter"
        if weights.from_user:
            raise ConfigError(f'the weights given have no "{missing}", which {whose} has', near, name)
        raise CheckpointError(f'the checkpoint has no tensor "{missing}"', near, "check that all shards are there")
    for parameter, shape in needed.items():
        if weights.shapes[parameter] == shape:
            continue
        what = f'tensor "{parameter}" is {weights.shapes[parameter]}'
        if weights.from_user:
            raise ConfigError(
                what, f"{shape}, by {whose}", "give an array of that shape (a Linear's is outputs x inputs)"
            )
        raise CheckpointError(what, f"{shape}, by config.json", "check that config.json belongs to these weights")
    if unused and weights.from_user:
        raise ConfigError(
            f'{whose} has no parameter "{unused[0]}" ({len(unused)} such)', nearest(unused[0], needed), name
        )
    if unused:
        raise CheckpointError(
            f'tensor "{unused[0]}" of the checkpoint is not used by {whose} ({len(unused)} such)',
            "every tensor to have its place in the model", "check that config.json belongs to these weights",
        )  # fmt: skip
