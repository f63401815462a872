"""The program builder: allocates buffers with their lifetimes, packed constants and caches, and records calls."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from millrace.compile.lower_cpu.memory import Buffer, plan_memory
from millrace.compile.lower_cpu.program import Bounds, Call, Program
from millrace.compile.lower_cpu.sizes import SizeTable
from millrace.engine.cache_specs import PAGE_TOKENS, CacheSpec, KvFormat, StateSpec
from millrace.engine.io_slots import Slot
from millrace.errors import GraphError
from millrace.graph.dims import Product, has_divisor
from millrace.graph.types import NUMPY, Dim, DType, Graph, Node, Port, Symbol, Value
from millrace.kernels.declare import MAX_CACHES, MAX_SYMBOLS, Param, Space
from millrace.kernels.elementwise.op import expression_params
from millrace.kernels.layout import row_bytes, up
from millrace.kernels.operand_places import (
    CacheLayer,
    OperandPlace,
    Operands,
    PackedPlace,
    StateLayer,
    View,
    pack_array,
)
from millrace.kernels.operators import ProgramWriter, int_attr, runnable
from millrace.kernels.row_storage import DENSE, Storage


@dataclass(slots=True)
class _Life:
    name: str
    nbytes: int
    first: int
    last: int


def _row_bytes(value: Value) -> int:
    """Return the bytes of one dense row."""
    return value.run * NUMPY[value.dtype].itemsize


def _is_dense(value: Value, view: View) -> bool:
    assert view.storage == DENSE, f"{value} is packed"
    return view.row_bytes == _row_bytes(value)


@dataclass(slots=True)
class _Cache:
    """Attention layers of one kind found so far; `buffer`: of its pages, if they last for one run."""

    spec: CacheSpec
    buffer: int | None


class ProgramBuilder(ProgramWriter):
    """Records calls in order. A buffer lives from the call that fills it to the last call that reads it.

    table: "f32" or "bf16", of embedding tables. tiles: bfloat16 products are summed as by AMX tiles
    """

    def __init__(
        self, graph: Graph, bounds: Mapping[Symbol, Bounds], kv_format: KvFormat, table: str, tiles: bool = False
    ) -> None:
        self.graph, self.table_format, self.tiles = graph, table, tiles
        self._bounds, self._sizes, self._kv_format = bounds, SizeTable(bounds), kv_format
        self._symbols = graph.symbols
        self._views: dict[Value, View] = {}
        self._lives: list[_Life] = []
        self._calls: list[Call] = []
        self._packed: dict[tuple[tuple[Value, ...], str], int] = {}
        self._weights: list[PackedPlace] = []
        self._readers, self._producers, self._results = graph.consumers(), graph.producers(), graph.results
        self._caches: dict[tuple[object, ...], _Cache] = {}
        self._cache_layers: dict[int, tuple[Node, CacheLayer]] = {}  # by attention's attribute `layer`
        self._states: dict[int, int] = {}  # floats per sequence in a layer -> layers
        if len(self._symbols) > MAX_SYMBOLS:
            raise GraphError(
                f"{len(self._symbols)} dimensions that only a run knows", f"at most {MAX_SYMBOLS}", "fix some of them"
            )

    def program(self) -> Program:
        """Return the program, with the graph's outputs in dense rows that live to the end. raises GraphError"""
        results = [(port, self._result(port)) for port in self.graph.outputs]
        for port in (*self.graph.inputs, *self.graph.outputs):
            if isinstance(elements := port.value.elements, Product) and has_divisor(elements):
                self.extent(elements)  # a loaded program checks the output's bounds by it
        plan = plan_memory([Buffer(b.name, b.nbytes, b.first, b.last) for b in self._lives])
        offsets, at = [], 0
        for packed in self._weights:
            offsets.append(at)
            at += up(packed.nbytes, 64)
        views = {p.name: self._views.get(p.value) for p in self.graph.inputs}
        inputs = [
            Slot(p.name, p.value.shape, p.value.dtype, plan.offsets[view.buffer] if (view := views[p.name]) else None)
            for p in self.graph.inputs
        ]
        caches = [
            c.spec if c.buffer is None else replace(c.spec, place=plan.offsets[c.buffer]) for c in self._caches.values()
        ]
        return Program(
            calls=tuple(self._calls), inputs=tuple(inputs),
            outputs=tuple(Slot(p.name, p.value.shape, p.value.dtype, plan.offsets[buffer]) for p, buffer in results),
            symbols={s: self._bounds[s] for s in self._symbols}, sizes=self._sizes.derived,
            weights=tuple(self._weights), weights_offsets=tuple(offsets), weights_bytes=at, memory=plan,
            caches=tuple(caches),
            states=tuple(StateSpec(layers, floats) for floats, layers in self._states.items()),
        )  # fmt: skip

    def _result(self, port: Port) -> int:
        """Return the buffer of an output."""
        value = port.value
        if value not in self._views or self._views[value].storage != DENSE:
            raise GraphError(
                f"the output {port.name} is {value}, which is not computed", "rows of floats that a node computes",
                "return what an operator gives",
            )  # fmt: skip
        view = self._views[value]
        if not _is_dense(value, view) or view.offset:
            view = self._copy(value, self._producers[value])
        self._lives[view.buffer].last = len(self._calls)
        return view.buffer

    def _buffer(self, name: str, nbytes: int) -> int:
        """Allocate a buffer, live from the next call on."""
        self._lives.append(_Life(name, nbytes, len(self._calls), len(self._calls)))
        return len(self._lives) - 1

    # --- called by operators' lowering (kernels/operators.py)

    def view(self, value: Value) -> View:
        if value.constant:
            name = "+".join(value.constant.origin) or repr(value)
            raise GraphError(
                f"the constant {name} is read by an operator that takes computed values only",
                "weights in Linear, Embedding, convolutions, norms and element-wise expressions",
                "use one of these, or transform the weights before they are given",
            )
        return self._views[value]

    def new(self, value: Value, name: str, storage: Storage = DENSE) -> View:
        of_row = _row_bytes(value) if storage == DENSE else row_bytes(storage.format, value.width, storage.group)
        buffer = self._buffer(name, of_row * self._sizes.upper_bound(value.rows))
        view = View(buffer, 0, of_row, self.extent(value.rows), storage)
        self._views[value] = view
        return view

    def share(self, value: Value, view: View) -> None:
        self._views[value] = view

    def dense(self, value: Value, node: Node) -> View:
        view = self.view(value)
        return view if _is_dense(value, view) else self._copy(value, node)

    def extent(self, dim: Dim) -> int:
        return self._sizes.number(dim)

    def writable(self, value: Value, node: Node) -> View:
        at = value
        while len(self._readers[at]) == 1 and at not in self._results:
            producer = self._producers.get(at)
            if producer is None:
                break  # an input or a constant
            if not runnable(producer).is_view:
                return self.view(value)
            at = producer.inputs[0]
        return self._copy(value, node)

    def _copy(self, value: Value, node: Node) -> View:
        assert value.dtype == DType.F32, f"a copy of {value}"
        view = self.view(value)
        fresh = self.new(Value(value.shape), "copy")
        self.add("elementwise", {"a": view, "y": fresh}, expression_params(0, [view], value.run), node, "copy")
        return fresh

    def constant(self, values: tuple[Value, ...], packing: str, make: Callable[[], PackedPlace]) -> OperandPlace:
        key = (values, packing)
        if key not in self._packed:
            self._weights.append(make())
            self._packed[key] = len(self._weights) - 1
        return OperandPlace(Space.WEIGHTS, self._packed[key])

    def vector(self, value: Value) -> OperandPlace:
        return self.constant((value,), "vector", lambda: pack_array(value, np.dtype(np.float32), "f32"))

    def cache(self, heads: int, key_size: int, value_size: int, *, persistent: bool, window: int = 0) -> CacheLayer:
        key = (heads, key_size, value_size, persistent, window)
        if key not in self._caches:
            if len(self._caches) == MAX_CACHES:
                raise GraphError(
                    f"attention of more than {MAX_CACHES} kinds", "fewer shapes of keys and values", "use one for all"
                )
            spec = CacheSpec(
                layers=0, heads=heads, key_size=key_size, value_size=value_size, format=self._kv_format, window=window
            )
            self._caches[key] = _Cache(spec, None if persistent else self._passing_pages(spec))
        cache = self._caches[key]
        layer = cache.spec.layers if persistent else 0  # the caches of one run are reused by each layer
        cache.spec = replace(cache.spec, layers=layer + 1)
        return CacheLayer(list(self._caches).index(key), layer, cache.spec.format.name.lower(), cache.buffer)

    def written_cache(self, node: Node) -> CacheLayer | None:
        writer, cache = self._cache_layers.get(int_attr(node, "layer"), (node, None))
        if writer.inputs[1:5] != node.inputs[1:5] or writer.attrs.get("window") != node.attrs.get("window"):
            raise GraphError(
                f"attention in {writer.origin[0]} and in {node.origin[0]} share a cache for different keys",
                "the same keys, values and window", "give each layer a cache of its own",
            )  # fmt: skip
        return cache

    def writes_cache(self, node: Node, cache: CacheLayer) -> None:
        self._cache_layers[int_attr(node, "layer")] = node, cache

    def state(self, floats: int) -> StateLayer:
        self._states[floats] = self._states.get(floats, 0) + 1
        return StateLayer(list(self._states).index(floats), self._states[floats] - 1)

    def add(
        self, kernel: str, operands: Operands, params: Mapping[str, Param], node: Node, note: str = "",
        cache: CacheLayer | None = None, state: StateLayer | None = None,
    ) -> None:  # fmt: skip
        used = [view.buffer for view in operands.values() if isinstance(view, View)]
        if cache is not None:
            params = {**params, "cache": cache.number, "layer": cache.layer}
            used += [cache.buffer] if cache.buffer is not None else []
        if state is not None:
            params = {**params, "state": state.number, "layer": state.layer}
        for buffer in used:
            self._lives[buffer].last = len(self._calls)
        places = {n: v.place() if isinstance(v, View) else v for n, v in operands.items()}
        self._calls.append(Call(kernel, places, params, node.origin, note))

    def _passing_pages(self, spec: CacheSpec) -> int:
        tokens, sequences = (self._bounds[s].high for s in self._symbols[:2])
        pages = tokens // PAGE_TOKENS + sequences
        return self._buffer("keys and values", pages * replace(spec, layers=1).page_bytes())


def lower(
    graph: Graph, bounds: Mapping[Symbol, Bounds], kv_format: KvFormat, table: str, *, tiles: bool = False
) -> Program:
    """Lower the graph. Arguments as in ProgramBuilder. raises GraphError for a graph that cannot be a program"""
    placement, read = ProgramBuilder(graph, bounds, kv_format, table, tiles), {*graph.consumers(), *graph.results}
    for port in graph.inputs:
        if port.value in read:
            placement.new(port.value, port.name)
    for node in graph.nodes:
        runnable(node).lower(node, placement)
    return placement.program()
