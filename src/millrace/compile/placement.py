"""Where a program's values lie while it is written: buffers with their lives, packed constants, caches, calls."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from millrace.compile.memory import Buffer, plan_memory
from millrace.compile.program import Bounds, Call, Packed, Place, Program
from millrace.engine.kv import PAGE_TOKENS, CacheSpec, KvFormat
from millrace.engine.slots import Slot
from millrace.errors import GraphError
from millrace.graph.types import Array, Constant, Graph, Node, Symbol, Value
from millrace.kernels.declare import MAX_CACHES, MAX_SYMBOLS, Space, WeightFormat
from millrace.kernels.encode import Param
from millrace.kernels.layout import byte_row_bytes, matrix_bytes, row_bytes, up
from millrace.kernels.matmul.pack import (
    interleave_codes,
    interleave_halves,
    pack_codes,
    pack_matrix,
    quantise_matrix,
    stored_codes,
)
from millrace.kernels.rescore.pack import pack_byte_rows
from millrace.kernels.storage import DENSE, Storage

_BITS = {WeightFormat.W8: 8, WeightFormat.W4: 4}


def _sizes(value: Value) -> tuple[int, ...]:
    return tuple(d for d in value.shape if isinstance(d, int))


def _constant(value: Value) -> Constant:
    assert value.constant, f"{value} is computed in the step, not a constant"
    return value.constant


def _bytes(array: Array) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def pack_vector(value: Value, kind: str) -> Packed:
    """Norm weights, biases, rotary tables: float32, as they are."""
    constant, shape = _constant(value), _sizes(value)
    nbytes = int(np.prod(shape)) * 4
    return Packed(
        _name(constant), constant.origin, shape, "f32", nbytes, lambda: _bytes(constant.load().astype(np.float32))
    )


def pack_table(value: Value, kind: str) -> Packed:
    """The embedding table, row by row, in float32 or bfloat16."""
    constant, shape = _constant(value), _sizes(value)
    dtype = np.dtype(np.float32) if kind == "f32" else np.dtype(ml_dtypes.bfloat16)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return Packed(_name(constant), constant.origin, shape, kind, nbytes, lambda: _bytes(constant.load().astype(dtype)))


def pack_weight(values: Sequence[Value], format: WeightFormat, group: int, name: str) -> Packed:
    """A matrix in panels; two of them are interleaved as gate and up."""
    constants, (n, k) = [_constant(v) for v in values], _sizes(values[0])
    gated = len(constants) == 2
    rows = 2 * up(n, 16) if gated else n

    def pack() -> NDArray[np.uint8]:
        codes = stored_codes(constants, _BITS[format], group) if format in _BITS else None
        if codes:
            return pack_codes(interleave_codes(*codes) if gated else codes[0], format)
        arrays = [c.load() for c in constants]
        whole = interleave_halves(*(a.astype(np.float32) for a in arrays)) if gated else arrays[0]
        return pack_matrix(whole, format, group)  # type: ignore[arg-type]

    origin = tuple(o for c in constants for o in c.origin)
    return Packed("+".join(origin), origin, (rows, k), name, matrix_bytes(format, rows, k, group), pack)


def pack_bytes(value: Value, group: int) -> Packed:
    """A matrix of 8-bit codes, output by output."""
    constant, (n, k) = _constant(value), _sizes(value)

    def pack() -> NDArray[np.uint8]:
        stored = stored_codes([constant], 8, group)
        return pack_byte_rows(stored[0] if stored else quantise_matrix(constant.load().astype(np.float32), 8, group))

    nbytes = n * byte_row_bytes(k, group)
    return Packed(_name(constant), constant.origin, (n, k), f"w8g{group} by output", nbytes, pack)


def _name(constant: Constant) -> str:
    return "+".join(constant.origin)


@dataclass(frozen=True, slots=True)
class View:
    """Where a value lies: `offset` bytes into a buffer, rows `stride` apart (elements if float32, bytes if packed)."""

    buffer: int
    offset: int
    stride: int
    rows: int  # the number of the symbol that says how many there are
    storage: Storage = DENSE

    def place(self) -> Place:
        return Place(Space.ACTIVATIONS, self.buffer, self.offset)

    @property
    def stride_bytes(self) -> int:
        return self.stride * 4 if self.storage == DENSE else self.stride


Operands = Mapping[str, View | Place | None]


@dataclass(slots=True)
class _Life:
    name: str
    nbytes: int
    first: int
    last: int


@dataclass(slots=True)
class _Cache:
    """Attention layers of one kind, as far as they were met; `buffer` where its pages are the run's own."""

    spec: CacheSpec
    buffer: int | None


class Placement:
    """Calls are added in their order; a buffer lives from the call that fills it to the last that reads it."""

    def __init__(self, graph: Graph, bounds: Mapping[Symbol, Bounds], kv_format: KvFormat) -> None:
        self._graph, self._bounds, self._kv_format = graph, bounds, kv_format
        self._symbols = graph.symbols
        self._views: dict[Value, View] = {}
        self._lives: list[_Life] = []
        self._calls: list[Call] = []
        self._packed: dict[tuple[object, str], int] = {}
        self._weights: list[Packed] = []
        self._readers, self._producers, self._results = graph.consumers(), graph.producers(), graph.results
        self._caches: dict[tuple[object, ...], _Cache] = {}
        if len(self._symbols) > MAX_SYMBOLS:
            raise GraphError(
                f"{len(self._symbols)} dimensions that only a run knows", f"at most {MAX_SYMBOLS}", "fix some of them"
            )

    def _planned(self, outputs: list[tuple[str, Value, View]]) -> Program:
        plan = plan_memory([Buffer(b.name, b.nbytes, b.first, b.last) for b in self._lives])
        offsets, at = [], 0
        for packed in self._weights:
            offsets.append(at)
            at += up(packed.nbytes, 64)
        views = {p.name: self._views.get(p.value) for p in self._graph.inputs}
        inputs = [
            Slot(p.name, p.value.shape, p.value.dtype, plan.offsets[view.buffer] if (view := views[p.name]) else None)
            for p in self._graph.inputs
        ]
        caches = [
            c.spec if c.buffer is None else replace(c.spec, place=plan.offsets[c.buffer]) for c in self._caches.values()
        ]
        return Program(
            calls=tuple(self._calls), inputs=tuple(inputs),
            outputs=tuple(Slot(name, v.shape, v.dtype, plan.offsets[view.buffer]) for name, v, view in outputs),
            symbols={s: self._bounds[s] for s in self._symbols}, weights=tuple(self._weights),
            weights_offsets=tuple(offsets), weights_bytes=at, memory=plan, caches=tuple(caches),
        )  # fmt: skip

    def _rows(self, value: Value) -> int:
        """The number of the symbol that counts its rows."""
        if value.shape and isinstance(value.shape[0], Symbol):
            return self._symbols.index(value.shape[0])
        raise GraphError(
            f"a value of the shape {list(value.shape)} is computed",
            "rows that only a run counts", 'name the first dimension of the inputs, as in ("batch", 784)',
        )  # fmt: skip

    def _buffer(self, name: str, nbytes: int) -> int:
        """A fresh one, alive from the call that is about to be added."""
        self._lives.append(_Life(name, nbytes, len(self._calls), len(self._calls)))
        return len(self._lives) - 1

    def _new(self, value: Value, name: str, storage: Storage = DENSE) -> View:
        """A fresh dense buffer for a value."""
        rows = self._rows(value)
        nbytes = row_bytes(storage.format, value.width, storage.group)
        buffer = self._buffer(name, nbytes * self._bounds[self._symbols[rows]].high)
        view = View(buffer, 0, value.width if storage == DENSE else nbytes, rows, storage)
        self._views[value] = view
        return view

    def _constant(self, value: Value, kind: str, make: Callable[[Value, str], Packed]) -> Place:
        key = (value, kind)
        if key not in self._packed:
            self._weights.append(make(value, kind))
            self._packed[key] = len(self._weights) - 1
        return Place(Space.WEIGHTS, self._packed[key])

    def _vector(self, value: Value) -> Place:
        return self._constant(value, "vector", pack_vector)

    def _add(self, kernel: str, operands: Operands, params: Mapping[str, Param], node: Node, note: str = "") -> None:
        for view in operands.values():
            if isinstance(view, View):
                self._lives[view.buffer].last = len(self._calls)
        places = {n: v.place() if isinstance(v, View) else v for n, v in operands.items()}
        self._calls.append(Call(kernel, places, params, node.origin, note))

    def _cache(self, heads: int, key_size: int, value_size: int, *, kept: bool) -> tuple[int, int, str]:
        """(number of the cache, layer in it, its format for people) of one layer more."""
        key = (heads, key_size, value_size, kept)
        if key not in self._caches:
            if len(self._caches) == MAX_CACHES:
                raise GraphError(
                    f"attention of more than {MAX_CACHES} kinds", "fewer shapes of keys and values", "use one for all"
                )
            spec = CacheSpec(layers=0, heads=heads, key_size=key_size, value_size=value_size, format=self._kv_format)
            self._caches[key] = _Cache(spec, None if kept else self._passing_pages(spec))
        cache = self._caches[key]
        layer = cache.spec.layers if kept else 0  # those of one run serve one layer after the other
        cache.spec = replace(cache.spec, layers=layer + 1)
        return list(self._caches).index(key), layer, cache.spec.format.name.lower()

    def _passing_pages(self, spec: CacheSpec) -> int:
        tokens, sequences = (self._bounds[s].high for s in self._symbols[:2])
        pages = tokens // PAGE_TOKENS + sequences
        return self._buffer("keys and values", pages * replace(spec, layers=1).page_bytes())
