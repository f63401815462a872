"""The reference of whole graphs: interprets one, before or after any pass, in NumPy.

Computes in float64 and rounds where a kernel would store. Slow and plain: it says what is right, and the tests hold the
native core against it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.engine.kv import PAGE_TOKENS, KvFormat
from millrace.graph.types import DType, Graph, Node, Value
from millrace.kernels.arrays import Array, IntArray
from millrace.kernels.attention.ref import ROUNDINGS
from millrace.kernels.convert.ref import to_bf16, to_q8
from millrace.kernels.declare import RowFormat
from millrace.kernels.operators import Held, Rows, Values, runnable
from millrace.kernels.storage import storage_of

PageTables = Sequence[IntArray]  # of each sequence, its pages in order


@dataclass(slots=True)
class _Pages:
    """Keys and values of one attention layer, as they are stored: (pages, tokens of a page, heads, size)."""

    keys: Rows
    values: Rows


class Interpreter(Values):
    """kv: how keys and values are kept. bf16_table: embedding tables are rounded, as in engines other than FP32.

    fp8_rows: linear layers by name whose rows, of bfloat16, are rounded to E4M3 first, each by its own scale
    """

    def __init__(
        self, graph: Graph, *, kv: KvFormat, bf16_table: bool, n_pages: int = 0, fp8_rows: Collection[str] = ()
    ) -> None:
        self._graph, self._kv, self._n_pages = graph, kv, n_pages
        self.bf16_table, self._fp8_rows = bf16_table, frozenset(fp8_rows)
        self.constants = {v: v.constant.load().astype(np.float64) for v in graph.constants() if v.constant}
        self._pages: dict[int, _Pages] = {}
        self._values: dict[Value, Held] = {}
        self._tables: PageTables = ()

    def run(self, inputs: Mapping[str, NDArray[np.generic]], tables: PageTables = ()) -> dict[str, Rows]:
        """Its outputs by name; keys and values go into the pages of `tables`, which a language model keeps."""
        self._tables = tables
        for p in self._graph.inputs:
            given = inputs[p.name]
            self._values[p.value] = given.astype(np.int32 if p.value.dtype == DType.I32 else np.float64)  # type: ignore[assignment]
        for node in self._graph.nodes:
            found = runnable(node).reference(node, self)
            self._values.update(zip(node.outputs, found if isinstance(found, tuple) else (found,), strict=True))
        return {p.name: self.rows(p.value) for p in self._graph.outputs}

    def copy_page(self, source: int, target: int) -> None:
        """What is kept in one becomes the other's, too."""
        for pages in self._pages.values():
            pages.keys[target], pages.values[target] = pages.keys[source], pages.values[source]

    def forget(self) -> None:
        """All keys and values."""
        self._pages.clear()

    # --- what an operator's reference asks for (kernels/operators.py)

    def held(self, value: Value) -> Held:
        return self._values[value]

    def rows(self, value: Value) -> Rows:
        held = self.constants[value] if value.constant else self._values[value]
        assert isinstance(held, np.ndarray), f"{value} is packed"
        return held.astype(np.float64, copy=False)

    def numbers(self, value: Value) -> IntArray:
        held = self._values[value]
        assert isinstance(held, np.ndarray), value
        return held.astype(np.int32, copy=False)

    def stored(self, x: Array, node: Node) -> Held:
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

    def remember(self, layer: int, sequence: int, first: int, k: Rows, v: Rows) -> tuple[Rows, Rows]:
        pages = self._pages.setdefault(layer, self._empty(k.shape[1:], v.shape[1:]))
        table, last = self._tables[sequence], first + len(k)
        places = np.arange(first, last)
        pages.keys[table[places // PAGE_TOKENS], places % PAGE_TOKENS] = k
        pages.values[table[places // PAGE_TOKENS], places % PAGE_TOKENS] = v
        keys, values = (a[table].reshape(-1, *a.shape[2:])[:last] for a in (pages.keys, pages.values))
        return keys, values

    def _empty(self, *shapes: tuple[int, ...]) -> _Pages:
        return _Pages(*(np.zeros((self._n_pages, PAGE_TOKENS, *shape)) for shape in shapes))
