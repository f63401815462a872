"""The reference interpreter of whole graphs, before or after any pass, in NumPy.

It computes in float64 and rounds where a kernel would store. It is slow and simple: it defines correct results, and the
native executor is tested against it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.engine.cache_specs import PAGE_TOKENS, KvFormat
from millrace.graph.dims import value_of
from millrace.graph.types import NUMPY, DType, Graph, Node, Shape, Symbol, Value
from millrace.kernels.arrays import Array, IntArray
from millrace.kernels.attention.ref import ROUNDINGS
from millrace.kernels.broadcast.ref import as_type
from millrace.kernels.convert.ref import to_bf16, to_q8
from millrace.kernels.declare import RowFormat
from millrace.kernels.operators import EvaluationContext, Rows, StoredValue, runnable
from millrace.kernels.row_storage import storage_of

PageTables = Sequence[IntArray]  # of each sequence, its pages in order


@dataclass(frozen=True, slots=True)
class WindowTables:
    """Page tables of one window: number of pages, the pages of each sequence, and the number of its first page."""

    n_pages: int
    tables: PageTables
    first: Sequence[int]


@dataclass(slots=True)
class _Pages:
    """Stored keys and values of one attention layer: (pages, page tokens, heads, size)."""

    keys: Rows
    values: Rows


class Interpreter(EvaluationContext):
    """kv: the KV format. bf16_table: round embedding tables, as engines other than FP32 do

    fp8_rows: names of linear layers whose bfloat16 input rows are rounded to E4M3 first, each by its own scale
    """

    def __init__(
        self, graph: Graph, *, kv: KvFormat, bf16_table: bool, n_pages: int = 0, fp8_rows: Collection[str] = ()
    ) -> None:
        self._graph, self._kv, self._n_pages = graph, kv, n_pages
        self.bf16_table, self._fp8_rows = bf16_table, frozenset(fp8_rows)
        self.constants = {v: _rounded(v.constant.load(), v.dtype) for v in graph.constants() if v.constant}
        self._pages: dict[tuple[int, int], _Pages] = {}  # by window and layer
        self._values: dict[Value, StoredValue] = {}
        self._sizes: dict[Symbol, int] = {}
        self._tables: PageTables = ()
        self._windows: Mapping[int, WindowTables] = {}
        self._states: dict[tuple[int, int], Rows] = {}  # by layer and slot
        self._slots: Sequence[tuple[int, int]] = ()
        self.embeddings: Rows | None = None
        self._places: IntArray | None = None

    def run(
        self, inputs: Mapping[str, NDArray[np.generic]], tables: PageTables = (),
        windows: Mapping[int, WindowTables] | None = None, slots: Sequence[tuple[int, int]] = (),
        embeddings: NDArray[np.float32] | None = None, places: IntArray | None = None,
    ) -> dict[str, NDArray[Any]]:  # fmt: skip
        """Return its outputs by name, floats as float64; keys and values are stored in the pages of `tables`.

        windows: page tables of windows, by their tokens
        slots: state slots of each sequence before and after this run
        embeddings: as in StepInputs. places: positions of the tokens, if the input positions are rotary ones
        """
        self._places = places
        self.embeddings = None if embeddings is None else embeddings.astype(np.float64)
        self._tables, self._windows, self._slots = tables, windows or {}, slots
        for p in self._graph.inputs:
            array = inputs[p.name]
            self._sizes.update((d, n) for d, n in zip(p.value.shape, array.shape, strict=True) if isinstance(d, Symbol))
            self._values[p.value] = _rounded(array, p.value.dtype)
        for node in self._graph.nodes:
            result = runnable(node).reference(node, self)
            self._values.update(zip(node.outputs, result if isinstance(result, tuple) else (result,), strict=True))
        return {p.name: self._result(p.value) for p in self._graph.outputs}

    def _result(self, value: Value) -> NDArray[Any]:
        value_rows = self.stored_value(value)
        return self.rows(value) if value.dtype.is_float or not isinstance(value_rows, np.ndarray) else value_rows

    def copy_page(self, source: int, target: int, window: int = 0) -> None:
        """Copy the contents of one page to another."""
        for (node_group, _), pages in self._pages.items():
            if node_group == window:
                pages.keys[target], pages.values[target] = pages.keys[source], pages.values[source]

    def forget(self) -> None:
        """Clear all keys, values and states."""
        self._pages.clear()
        self._states.clear()

    # --- called by operators' references (kernels/operators.py)

    def stored_value(self, value: Value) -> StoredValue:
        return self.constants[value] if value.constant else self._values[value]

    def rows(self, value: Value) -> Rows:
        value_rows = self.stored_value(value)
        assert isinstance(value_rows, np.ndarray), f"{value} is packed"
        return value_rows.astype(np.float64, copy=False)

    def numbers(self, value: Value) -> IntArray:
        value_rows = self._values[value]
        assert isinstance(value_rows, np.ndarray), value
        return value_rows.astype(np.int32, copy=False)

    def integers(self, value: Value) -> IntArray:
        value_rows = self.stored_value(value)
        assert isinstance(value_rows, np.ndarray) and not value.dtype.is_float, value
        return value_rows.astype(np.int64, copy=False)

    def sized(self, shape: Shape) -> tuple[int, ...]:
        return tuple(value_of(d, self._sizes) for d in shape)

    def cache_positions(self, positions: Value) -> IntArray:
        return self.numbers(positions) if self._places is None else self._places

    def stored(self, x: Array, node: Node) -> StoredValue:
        if node.outputs[0].dtype != DType.F32:
            return as_type(x, node.outputs[0].dtype)
        rounded, storage = x.astype(np.float32), storage_of(node)
        if storage.format >= RowFormat.Q8:
            return to_q8(rounded, storage.group, storage.hadamard)
        return (to_bf16(rounded) if storage.format == RowFormat.BF16 else rounded).astype(np.float64)

    def meets_fp8(self, node: Node) -> bool:
        return any(name in self._fp8_rows for name in node.origin)

    @property
    def bf16_weights(self) -> bool:
        return self._kv in (KvFormat.BF16, KvFormat.FP8)

    def as_kept(self, q: Rows, k: Rows, v: Rows) -> tuple[Rows, Rows, Rows]:
        rounding = ROUNDINGS[self._kv.name.lower()]
        q, k, v = (code(x).astype(np.float64) for code, x in zip(rounding, (q, k, v), strict=True))
        return q, k, v

    def remember(self, layer: int, window: int, sequence: int, first: int, k: Rows, v: Rows) -> tuple[Rows, Rows]:
        n_pages, table = self._n_pages, self._tables[sequence] if not window else None
        if table is None:
            tables = self._windows[window]
            n_pages, table, first = (
                tables.n_pages,
                tables.tables[sequence],
                first - tables.first[sequence] * PAGE_TOKENS,
            )
        if (window, layer) not in self._pages:
            self._pages[window, layer] = _empty(n_pages, k.shape[1:], v.shape[1:])
        pages, last = self._pages[window, layer], first + len(k)
        places = np.arange(first, last)
        pages.keys[table[places // PAGE_TOKENS], places % PAGE_TOKENS] = k
        pages.values[table[places // PAGE_TOKENS], places % PAGE_TOKENS] = v
        keys, values = (a[table].reshape(-1, *a.shape[2:])[:last] for a in (pages.keys, pages.values))
        return keys, values

    def past_rows(self, layer: int, sequence: int, first: int, x: Rows, n: int) -> Rows:
        before, behind = self._slots[sequence]
        past = self._states[layer, before] if first else np.zeros((n, x.shape[1]))
        self._states[layer, behind] = np.concatenate([past, x])[len(x) :]
        return past


def _rounded(array: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """Return floats as float64, other types unchanged."""
    return array.astype(np.float64 if dtype.is_float else NUMPY[dtype])


def _empty(n_pages: int, *shapes: tuple[int, ...]) -> _Pages:
    return _Pages(*(np.zeros((n_pages, PAGE_TOKENS, *shape)) for shape in shapes))
