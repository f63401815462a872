"""From the graph to the program: each node becomes one kernel call or two, values become places in buffers."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from millrace.compile.placement import Operands, Placement, View, pack_bytes, pack_table, pack_weight
from millrace.compile.program import Bounds, Place, Program
from millrace.engine.kv import KvFormat
from millrace.errors import GraphError
from millrace.graph.trees import as_tree
from millrace.graph.types import Graph, Node, Symbol, Value, find
from millrace.kernels.declare import MAX_INPUTS, Space
from millrace.kernels.encode import Param
from millrace.kernels.expression import compile_tree
from millrace.kernels.layout import up
from millrace.kernels.precision import BF16_BY_TILES, Precision
from millrace.kernels.storage import DENSE, storage_of


class Lowering(Placement):
    """One use: `Lowering(graph, bounds, ...).program()`.

    table: "f32" or "bf16", of embedding tables. tiles: products of bfloat16 are summed as the tiles of AMX do it
    """

    def __init__(
        self, graph: Graph, bounds: Mapping[Symbol, Bounds], kv_format: KvFormat, table: str, tiles: bool = False
    ) -> None:
        super().__init__(graph, bounds, kv_format)
        self._table, self._tiles = table, tiles

    def program(self) -> Program:
        rules: dict[str, Callable[[Node], None]] = {
            "embedding": self._embedding, "linear": self._linear, "gated_linear": self._linear,
            "elementwise": self._elementwise, "rms_norm": self._rms_norm, "layer_norm": self._layer_norm,
            "normalise": self._normalise, "convert": self._convert, "reshape": self._reshape, "split": self._split,
            "rope": self._rope, "attention": self._attention, "rope_attention": self._attention,
            "full_attention": self._full_attention, "gather_rows": self._gather_rows, "mean_rows": self._mean_rows,
            "rescore": self._rescore,
        }  # fmt: skip
        for port in self._graph.inputs:
            if port.value in self._readers or port.value in self._results:
                self._new(port.value, port.name)
        for node in self._graph.nodes:
            rules[node.op](node)
        outputs = [self._result(port.name, port.value) for port in self._graph.outputs]
        return self._planned(outputs)

    def _result(self, name: str, value: Value) -> tuple[str, Value, View]:
        """Dense rows that live to the end."""
        if value not in self._views or self._views[value].storage != DENSE:
            raise GraphError(
                f"the output {name} is {value}, which is not computed", "rows of floats that a node computes",
                "return what an operator gives",
            )  # fmt: skip
        view = self._views[value]
        if view.stride != value.width or view.offset:
            view = self._copy(value, self._producers[value])
        self._lives[view.buffer].last = len(self._calls)
        return name, value, view

    # --- one method per operator

    def _embedding(self, node: Node) -> None:
        ids, table = node.inputs
        scale = node.attrs["scale"]
        assert isinstance(scale, float)
        kind = self._table
        vocab, width = table.shape
        assert isinstance(vocab, int) and isinstance(width, int)
        view = self._views[ids]
        params = {"rows": view.rows, "n": width, "vocab": vocab, "bf16": int(kind == "bf16"), "scale": scale}
        place = self._constant(table, kind, pack_table)
        y = self._new(node.output, "embedding")
        self._add("embed", {"ids": view, "table": place, "y": y}, params, node, kind)

    def _linear(self, node: Node) -> None:
        precision = node.attrs["precision"]
        x = node.inputs[0]
        view = self._views[x]
        assert isinstance(precision, Precision)
        weights = precision.weights
        gated, tiles = node.op == "gated_linear", self._tiles and precision == Precision.BF16
        group = view.storage.group
        width, k = node.output.width, x.width
        code: list[int] = []
        numbers: list[float] = []
        if "tree" in node.attrs:
            code, numbers = compile_tree(as_tree(node.attrs["tree"]), 2 if gated else 1)
        params: dict[str, Param] = {
            "rows": view.rows, "n": 2 * up(width, 16) if gated else width, "k": k, "group": group,
            "format": view.storage.format, "weights": weights, "x_stride": view.stride_bytes, "y_stride": width,
            "gated": int(gated), "tiles": int(tiles), "code": code, "imm": numbers,
        }  # fmt: skip
        pair = node.inputs[1:3] if gated else node.inputs[1:2]
        name = f"{weights.name.lower()}{f'g{group}' if group else ''}"
        key = (pair, name)
        if key not in self._packed:
            self._weights.append(pack_weight(pair, weights, group, name))
            self._packed[key] = len(self._weights) - 1
        operands: dict[str, View | Place | None] = {"x": view, "w": Place(Space.WEIGHTS, self._packed[key])}
        if node.attrs.get("bias"):
            operands["bias"] = self._vector(node.inputs[2])
        if node.attrs.get("residual"):
            operands["residual"] = self._dense(node.inputs[-1], node)
        operands["y"] = self._new(node.output, node.origin[0] if node.origin else "linear")
        self._add("matmul", operands, params, node, BF16_BY_TILES if tiles else str(precision))

    def _rescore(self, node: Node) -> None:
        logits, x, w = node.inputs
        view, count = self._views[x], node.attrs["count"]
        assert isinstance(count, int)
        group = view.storage.group
        place = self._constant(w, f"w8g{group} by output", lambda value, _: pack_bytes(value, group))
        params: dict[str, Param] = {
            "rows": view.rows, "n": node.output.width, "k": x.width, "group": group, "x_stride": view.stride,
            "count": min(count, node.output.width),
        }  # fmt: skip
        operands: dict[str, View | Place | None] = {"x": view, "w": place, "y": self._views[logits]}
        self._add("rescore", operands, params, node, f"the best {count} in {node.attrs['precision']}")
        self._views[node.output] = self._views[logits]

    def _dense(self, value: Value, node: Node) -> View:
        """The value's rows side by side; columns of a wider value are copied."""
        view = self._views[value]
        if view.stride == value.width:
            return view
        return self._copy(value, node)

    def _copy(self, value: Value, node: Node) -> View:
        view = self._views[value]
        fresh = self._new(Value(value.shape), "copy")
        self._add("elementwise", {"a": view, "y": fresh}, self._elementwise_params(0, [view], value), node, "copy")
        return fresh

    def _elementwise_params(self, tree: object, inputs: list[View | Place], value: Value) -> dict[str, Param]:
        code, numbers = compile_tree(as_tree(tree), len(inputs))
        views = [v for v in inputs if isinstance(v, View)]
        params: dict[str, Param] = {"rows": views[0].rows, "n": value.width, "code": code, "imm": numbers}
        for name, source in zip("abcd"[:MAX_INPUTS], inputs, strict=False):
            params[f"{name}_stride"] = source.stride if isinstance(source, View) else 0
        return params

    def _elementwise(self, node: Node) -> None:
        inputs: list[View | Place] = [self._vector(v) if v.constant else self._views[v] for v in node.inputs]
        params = self._elementwise_params(node.attrs["tree"], inputs, node.output)
        operands: dict[str, View | Place | None] = dict(zip("abcd", inputs, strict=False))
        operands["y"] = self._new(node.output, node.origin[0])
        self._add("elementwise", operands, params, node)

    def _rms_norm(self, node: Node) -> None:
        x, w = node.inputs
        view = self._views[x]
        n = x.shape[-1]
        assert isinstance(n, int)
        out = self._new(node.output, node.origin[0], storage_of(node))
        params = {**self._norm_params(node, view, out, n), "runs": x.width // n}
        self._add("rms_norm", {"x": view, "w": self._vector(w), "y": out}, params, node, str(out.storage))

    def _norm_params(self, node: Node, view: View, out: View, n: int) -> dict[str, Param]:
        eps = node.attrs["eps"]
        assert isinstance(eps, float)
        return {
            "rows": view.rows, "n": n, "x_stride": view.stride, "y_stride": out.stride_bytes,
            "format": out.storage.format, "group": out.storage.group, "eps": eps,
        }  # fmt: skip

    def _layer_norm(self, node: Node) -> None:
        x, w, b = node.inputs
        view = self._views[x]
        out = self._new(node.output, node.origin[0], storage_of(node))
        operands: Operands = {"x": view, "w": self._vector(w), "b": self._vector(b), "y": out}
        self._add("layer_norm", operands, self._norm_params(node, view, out, x.width), node, str(out.storage))

    def _normalise(self, node: Node) -> None:
        x = node.inputs[0]
        view, eps = self._views[x], node.attrs["eps"]
        assert isinstance(eps, float)
        params: dict[str, Param] = {"rows": view.rows, "n": x.width, "x_stride": view.stride, "eps": eps}
        self._add("normalise", {"x": view, "y": self._new(node.output, node.origin[0])}, params, node)

    def _convert(self, node: Node) -> None:
        view = self._views[node.inputs[0]]
        storage = storage_of(node)
        out = self._new(node.output, f"{storage}", storage)
        params: dict[str, Param] = {
            "rows": view.rows, "n": node.output.width, "x_stride": view.stride, "y_stride": out.stride,
            "format": storage.format, "group": storage.group,
        }  # fmt: skip
        self._add("convert", {"x": view, "y": out}, params, node, str(storage))

    def _reshape(self, node: Node) -> None:
        self._views[node.output] = self._views[node.inputs[0]]

    def _split(self, node: Node) -> None:
        view = self._views[node.inputs[0]]
        at = view.offset
        for part in node.outputs:
            self._views[part] = replace(view, offset=at)
            at += 4 * part.width

    def _to_write(self, value: Value, node: Node) -> View:
        """A view that may be written: the value's own where nobody else reads what it is of, else a copy."""
        at = value
        while len(self._readers[at]) == 1 and at not in self._results:
            producer = self._producers.get(at)
            if producer is None:
                break  # an input, or a constant
            if producer.op not in ("reshape", "split"):
                return self._views[value]
            at = producer.inputs[0]
        return self._copy(value, node)

    def _rope(self, node: Node) -> None:
        x, positions, table = node.inputs
        view = self._to_write(x, node)
        _, heads, size = x.shape
        assert isinstance(heads, int) and isinstance(size, int)
        params: dict[str, Param] = {
            "rows": view.rows, "heads": heads, "kv_heads": 0, "head_dim": size, "value_dim": size,
            "q_stride": view.stride, "k_stride": 0, "v_stride": 0, "context": _length(table), "cache": 0, "layer": -1,
        }  # fmt: skip
        operands: Operands = {"q": view, "positions": self._views[positions], "table": self._vector(table)}
        self._add("rope", operands, params, node)
        self._views[node.output] = view

    def _attention(self, node: Node) -> None:
        q, k = node.inputs[:2]
        if node.op == "attention":
            self._attend(node, self._views[q], self._views[k], {}, causal=True)
            return
        q_view, k_view = (self._to_write(x, node) for x in (q, k))
        rotation: Operands = {
            "q": q_view,
            "positions": self._views[node.inputs[3]],
            "table": self._vector(node.inputs[5]),
        }
        self._attend(node, q_view, k_view, rotation, causal=True, context=_length(node.inputs[5]))

    def _full_attention(self, node: Node) -> None:
        """Keys and values go into pages that live for one run, so that one kernel serves both kinds of attention."""
        q, k, _, lengths = node.inputs
        if find(self._graph.inputs, "lengths") is not lengths or self._symbols[:2] != (q.shape[0], lengths.shape[0]):
            raise GraphError(
                f"attention over sequences of the lengths {lengths}",
                'the input "lengths", and inputs that name tokens first, then sequences', "name the inputs so",
            )  # fmt: skip
        self._attend(node, self._views[q], self._views[k], {}, causal=False)

    def _attend(self, node: Node, q: View, k: View, rotation: Operands, *, causal: bool, context: int = 1) -> None:
        """Two calls: keys are rotated and written with their values, then all are attended to."""
        _, heads, size = node.inputs[0].shape
        _, kv_heads, value_size = node.inputs[2].shape
        scale, v = node.attrs["scale"], self._views[node.inputs[2]]
        assert isinstance(heads, int) and isinstance(size, int) and isinstance(kv_heads, int)
        assert isinstance(value_size, int) and isinstance(scale, float)
        number, layer, note = self._cache(kv_heads, size, value_size, kept=causal)
        shape: dict[str, Param] = {
            "rows": q.rows, "kv_heads": kv_heads, "head_dim": size, "value_dim": value_size, "q_stride": q.stride,
            "cache": number, "layer": layer,
        }  # fmt: skip
        rotated = bool(rotation)
        write = {
            **shape, "heads": heads if rotated else 0, "q_stride": q.stride if rotated else 0, "k_stride": k.stride,
            "v_stride": v.stride, "context": context,
        }  # fmt: skip
        self._add("rope", {"k": k, "v": v, **rotation}, write, node, "and KV write" if rotated else "KV write")
        out = self._new(node.output, node.origin[0])
        attend = {**shape, "heads": heads, "causal": int(causal), "scale": scale}
        self._add("attention", {"q": q, "y": out}, attend, node, note)
        for cache in self._caches.values():
            if cache.buffer is not None:
                self._lives[cache.buffer].last = len(self._calls)

    def _gather_rows(self, node: Node) -> None:
        x, index = (self._views[v] for v in node.inputs)
        params = {"rows": index.rows, "rows_from": x.rows, "n": node.output.width, "x_stride": x.stride}
        y = self._new(node.output, "gathered rows")
        self._add("gather_rows", {"x": x, "index": index, "y": y}, params, node)

    def _mean_rows(self, node: Node) -> None:
        x, lengths = (self._views[v] for v in node.inputs)
        params = {"rows": lengths.rows, "rows_from": x.rows, "n": node.output.width, "x_stride": x.stride}
        y = self._new(node.output, "means")
        self._add("mean_rows", {"x": x, "lengths": lengths, "y": y}, params, node)


def _length(table: Value) -> int:
    """Of a rotary table: its positions."""
    length = table.shape[0]
    assert isinstance(length, int)
    return length
