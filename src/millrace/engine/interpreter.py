"""The reference of whole graphs: interprets one, before or after any pass, in NumPy.

Computes in float64 and rounds where a kernel would store. Slow and plain: it says what is right, and the tests hold the
native core against it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.quantised import QuantisedMatrix
from millrace.engine.kv import PAGE_TOKENS, KvFormat
from millrace.graph.trees import as_tree, evaluate
from millrace.graph.types import DType, Graph, Node, Value
from millrace.kernels.arrays import Array, IntArray
from millrace.kernels.attention.ref import attention, to_int8, to_int16
from millrace.kernels.convert.ref import Quantised, to_bf16, to_q8
from millrace.kernels.declare import RowFormat
from millrace.kernels.layer_norm.ref import layer_norm
from millrace.kernels.matmul import ref as products
from millrace.kernels.matmul.pack import quantise_matrix, stored_codes
from millrace.kernels.mean_rows.ref import mean_rows
from millrace.kernels.normalise.ref import normalise
from millrace.kernels.precision import Precision
from millrace.kernels.rescore.ref import largest
from millrace.kernels.rms_norm.ref import rms_norm
from millrace.kernels.rope.ref import rope
from millrace.kernels.storage import storage_of

Rows = NDArray[np.float64]
Held = Rows | Quantised | IntArray
PageTables = Sequence[IntArray]  # of each sequence, its pages in order


@dataclass(slots=True)
class _Pages:
    """Keys and values of one attention layer, as they are stored: (pages, tokens of a page, heads, size)."""

    keys: Rows
    values: Rows


class Interpreter:
    """kv: how keys and values are kept. bf16_table: embedding tables are rounded, as in engines other than FP32."""

    def __init__(self, graph: Graph, *, kv: KvFormat, bf16_table: bool, n_pages: int = 0) -> None:
        self._graph, self._kv, self._bf16_table, self._n_pages = graph, kv, bf16_table, n_pages
        self.constants = {v: v.constant.load().astype(np.float64) for v in graph.constants() if v.constant}
        self._groups = {v: storage_of(n).group for n in graph.nodes for v in n.outputs}
        self._pages: dict[int, _Pages] = {}
        self._values: dict[Value, Held] = {}
        self._tables: PageTables = ()
        self._rules: dict[str, Callable[[Node], Held | tuple[Held, ...]]] = {
            "embedding": self._embedding, "linear": self._linear, "gated_linear": self._gated_linear,
            "elementwise": self._elementwise, "rms_norm": self._rms_norm, "layer_norm": self._layer_norm,
            "normalise": self._normalise, "convert": self._convert, "reshape": self._reshape, "split": self._split,
            "rope": self._rope, "attention": self._attention, "rope_attention": self._attention,
            "full_attention": self._full_attention, "gather_rows": self._gather_rows, "mean_rows": self._mean_rows,
            "rescore": self._rescore,
        }  # fmt: skip

    def run(self, inputs: Mapping[str, NDArray[np.generic]], tables: PageTables = ()) -> dict[str, Rows]:
        """Its outputs by name; keys and values go into the pages of `tables`, which a language model keeps."""
        self._tables = tables
        for p in self._graph.inputs:
            given = inputs[p.name]
            self._values[p.value] = given.astype(np.int32 if p.value.dtype == DType.I32 else np.float64)  # type: ignore[assignment]
        for node in self._graph.nodes:
            found = self._rules[node.op](node)
            self._values.update(zip(node.outputs, found if isinstance(found, tuple) else (found,), strict=True))
        return {p.name: self._rows(p.value) for p in self._graph.outputs}

    def forget(self) -> None:
        """All keys and values."""
        self._pages.clear()

    # --- values

    def _rows(self, value: Value) -> Rows:
        held = self.constants[value] if value.constant else self._values[value]
        assert isinstance(held, np.ndarray), f"{value} is packed"
        return held.astype(np.float64, copy=False)

    def _numbers(self, value: Value) -> IntArray:
        held = self._values[value]
        assert isinstance(held, np.ndarray), value
        return held.astype(np.int32, copy=False)

    def _stored(self, x: Array, node: Node) -> Held:
        """Rounded as the kernel writes it."""
        rounded, storage = x.astype(np.float32), storage_of(node)
        if storage.format == RowFormat.Q8:
            return to_q8(rounded, storage.group)
        return (to_bf16(rounded) if storage.format == RowFormat.BF16 else rounded).astype(np.float64)

    # --- one method per operator

    def _embedding(self, node: Node) -> Held:
        scale = node.attrs["scale"]
        assert isinstance(scale, float)
        rows = self._rows(node.inputs[1])[self._numbers(node.inputs[0])]
        stored = to_bf16(rows).astype(np.float64) if self._bf16_table else rows
        return self._stored(stored * scale, node)

    def _product(self, x: Value, w: Value, precision: object) -> Rows:
        assert isinstance(precision, Precision)
        held = self._values[x]
        if precision.quantised:
            codes = self._codes(w, precision.bits, self._groups[x])
            if isinstance(held, Quantised):
                return products.matmul_q8(held, codes)
            return products.matmul_a16(self._rows(x), codes)
        rows, whole = self._rows(x), self._rows(w).astype(np.float32).astype(np.float64)
        y = products.matmul_bf16(rows, whole) if precision == Precision.BF16 else products.matmul(rows, whole)
        return y.astype(np.float64)

    def _codes(self, w: Value, bits: int, group: int) -> QuantisedMatrix:
        stored = stored_codes([w.constant], bits, group) if w.constant else None
        return stored[0] if stored else quantise_matrix(self._rows(w).astype(np.float32), bits, group)

    def _linear(self, node: Node) -> Held:
        y = self._product(node.inputs[0], node.inputs[1], node.attrs["precision"])
        if node.attrs.get("bias"):
            y = y + self._rows(node.inputs[2])
        y = evaluate(as_tree(node.attrs.get("tree", 0)), [y]).astype(np.float64)
        if node.attrs.get("residual"):
            y = y + self._rows(node.inputs[-1])
        return self._stored(y, node)

    def _rescore(self, node: Node) -> Held:
        logits, x, w = node.inputs
        count = node.attrs["count"]
        assert isinstance(count, int)
        again = self._product(x, w, node.attrs["precision"])
        y = self._rows(logits)
        return self._stored(np.where(largest(y, count), again, y), node)

    def _gated_linear(self, node: Node) -> Held:
        x, gate, up = node.inputs
        halves = [self._product(x, w, node.attrs["precision"]) for w in (gate, up)]
        return self._stored(evaluate(as_tree(node.attrs["tree"]), halves).astype(np.float64), node)

    def _elementwise(self, node: Node) -> Held:
        inputs = [self._rows(v) for v in node.inputs]
        return self._stored(evaluate(as_tree(node.attrs["tree"]), inputs).astype(np.float64), node)

    def _rms_norm(self, node: Node) -> Held:
        return self._stored(rms_norm(self._rows(node.inputs[0]), self._rows(node.inputs[1]), _eps(node)), node)

    def _layer_norm(self, node: Node) -> Held:
        x, w, b = (self._rows(v) for v in node.inputs)
        return self._stored(layer_norm(x, w, b, _eps(node)), node)

    def _normalise(self, node: Node) -> Held:
        return self._stored(normalise(self._rows(node.inputs[0]), _eps(node)), node)

    def _convert(self, node: Node) -> Held:
        return self._stored(self._rows(node.inputs[0]), node)

    def _reshape(self, node: Node) -> Held:
        sizes = [d for d in node.output.shape[1:] if isinstance(d, int)]
        return self._rows(node.inputs[0]).reshape(-1, *sizes)

    def _split(self, node: Node) -> tuple[Held, ...]:
        ends = np.cumsum([v.width for v in node.outputs])
        return tuple(np.split(self._rows(node.inputs[0]), ends[:-1], axis=1))

    def _rope(self, node: Node) -> Held:
        return self._rotated(*node.inputs)

    def _rotated(self, x: Value, positions: Value, table: Value) -> Rows:
        y = rope(self._rows(x), self._numbers(positions), self._rows(table))
        return y.astype(np.float32).astype(np.float64)

    def _attention(self, node: Node) -> Held:
        v, positions, lengths = node.inputs[2:5]
        heads = [
            self._rotated(x, positions, node.inputs[5]) if node.op == "rope_attention" else self._rows(x)
            for x in node.inputs[:2]
        ]
        q, k, v_rows = self._as_kept(heads[0], heads[1], self._rows(v))
        layer, scale = node.attrs["layer"], node.attrs["scale"]
        assert isinstance(layer, int) and isinstance(scale, float)
        pages = self._pages.setdefault(layer, self._empty(k.shape[1:], v_rows.shape[1:]))
        y = np.zeros((*q.shape[:2], v_rows.shape[2]))
        at, places = 0, self._numbers(positions)
        for length, table in zip(self._numbers(lengths), self._tables, strict=True):
            part = slice(at, at := at + int(length))
            y[part] = self._attend(q[part], k[part], v_rows[part], pages, table, int(places[part][0]), scale)
        return self._stored(y, node)

    def _as_kept(self, q: Rows, k: Rows, v: Rows) -> tuple[Rows, Rows, Rows]:
        """Rounded as queries meet keys and values of the cache's format."""
        if self._kv == KvFormat.BF16:
            q, k, v = (to_bf16(x).astype(np.float64) for x in (q, k, v))
        elif self._kv == KvFormat.INT8:
            q, k, v = (code(x).astype(np.float64) for code, x in ((to_int16, q), (to_int8, k), (to_int8, v)))
        return q, k, v

    def _attend(self, q: Rows, k: Rows, v: Rows, pages: _Pages, table: IntArray, first: int, scale: float) -> Rows:
        """Stores one sequence's new keys and values in its pages, then attends to all of them."""
        last = first + len(k)
        places = np.arange(first, last)
        pages.keys[table[places // PAGE_TOKENS], places % PAGE_TOKENS] = k
        pages.values[table[places // PAGE_TOKENS], places % PAGE_TOKENS] = v
        keys, values = (a[table].reshape(-1, *a.shape[2:])[:last] for a in (pages.keys, pages.values))
        return attention(q, keys, values, first, scale, bf16_weights=self._kv == KvFormat.BF16).astype(np.float64)

    def _empty(self, *shapes: tuple[int, ...]) -> _Pages:
        return _Pages(*(np.zeros((self._n_pages, PAGE_TOKENS, *shape)) for shape in shapes))

    def _full_attention(self, node: Node) -> Held:
        q, k, v, lengths = node.inputs
        q_rows, k_rows, v_rows = self._as_kept(self._rows(q), self._rows(k), self._rows(v))
        scale = node.attrs["scale"]
        assert isinstance(scale, float)
        y, at, rounded = np.zeros((*q_rows.shape[:2], v_rows.shape[2])), 0, self._kv == KvFormat.BF16
        for length in self._numbers(lengths):
            part = slice(at, at := at + int(length))
            y[part] = attention(q_rows[part], k_rows[part], v_rows[part], None, scale, bf16_weights=rounded)
        return self._stored(y, node)

    def _gather_rows(self, node: Node) -> Held:
        return self._rows(node.inputs[0])[self._numbers(node.inputs[1])]

    def _mean_rows(self, node: Node) -> Held:
        return self._stored(mean_rows(self._rows(node.inputs[0]), self._numbers(node.inputs[1])), node)


def _eps(node: Node) -> float:
    eps = node.attrs["eps"]
    assert isinstance(eps, float)
    return eps
