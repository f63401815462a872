"""From the graph to the program: each node becomes one kernel call or two, values become places in buffers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from millrace.compile.memory import Buffer, plan_memory
from millrace.compile.weights import pack_bytes, pack_table, pack_vector, pack_weight
from millrace.engine.native import KvFormat, KvShape
from millrace.engine.program import Packed, Place, Program, ProgramStep
from millrace.errors import GraphError
from millrace.graph.types import F32, Graph, Node, S, Value
from millrace.kernels.declare import MAX_INPUTS, RowFormat, Space
from millrace.kernels.encode import Limits, Param
from millrace.kernels.expression import compile_tree
from millrace.kernels.layout import row_bytes, up
from millrace.kernels.precision import Precision

_ROW_FORMAT = {"f32": RowFormat.F32, "bf16": RowFormat.BF16, "q8": RowFormat.Q8}


@dataclass(frozen=True, slots=True)
class View:
    """Where a value lies: `offset` bytes into a buffer, rows `stride` apart (elements if float32, bytes if packed)."""

    buffer: int
    offset: int
    stride: int
    rows: int  # 0: one row per token, 1: one per sampled row

    def place(self) -> Place:
        return Place(Space.ACTIVATIONS, self.buffer, self.offset)


@dataclass(slots=True)
class _Life:
    name: str
    nbytes: int
    first: int
    last: int


class Lowering:
    """One use: `Lowering(graph, limits, max_context, ...).program()`."""

    def __init__(self, graph: Graph, limits: Limits, max_context: int, kv_format: KvFormat, table: str) -> None:
        self._graph, self._limits, self._max_context = graph, limits, max_context
        self._kv_format, self._table = kv_format, table
        self._views: dict[Value, View] = {}
        self._lives: list[_Life] = []
        self._steps: list[ProgramStep] = []
        self._packed: dict[tuple[object, str], int] = {}
        self._weights: list[Packed] = []
        self._readers, self._producers = graph.consumers(), graph.producers()
        self._kv: tuple[int, int] | None = None
        self._layers = 0

    def program(self) -> Program:
        rules: dict[str, Callable[[Node], None]] = {
            "embedding": self._embedding, "linear": self._linear, "gated_linear": self._linear,
            "elementwise": self._elementwise, "rms_norm": self._rms_norm, "convert": self._convert,
            "reshape": self._reshape, "slice": self._slice, "rope": self._rope, "attention": self._attention,
            "rope_attention": self._attention, "sampled_rows": self._sampled_rows, "rescore": self._rescore,
        }  # fmt: skip
        for node in self._graph.nodes:
            rules[node.op](node)
        output = self._graph.output
        if output.shape[0] is not S or output.storage != F32 or len(output.shape) != 2:
            raise GraphError(
                f"the model's output is {output}",
                "float32 [S, vocabulary]",
                "end forward() with a head over sampled_rows(x)",
            )
        view = self._views[output]
        self._lives[view.buffer].last = len(self._steps)
        return self._planned(view.buffer, output.width)

    def _planned(self, logits: int, vocab_size: int) -> Program:
        plan = plan_memory([Buffer(b.name, b.nbytes, b.first, b.last) for b in self._lives])
        offsets, at = [], 0
        for packed in self._weights:
            offsets.append(at)
            at += up(packed.nbytes, 64)
        heads, size = self._kv or (1, 16)
        return Program(
            steps=tuple(self._steps), weights=tuple(self._weights), weights_offsets=tuple(offsets), weights_bytes=at,
            buffer_names=tuple(b.name for b in plan.buffers), buffer_bytes=tuple(b.nbytes for b in plan.buffers),
            buffer_offsets=plan.offsets, activation_bytes=plan.total_bytes, activation_lower_bound=plan.lower_bound,
            logits_buffer=logits, limits=self._limits, max_context=self._max_context, vocab_size=vocab_size,
            kv=KvShape(layers=self._layers, heads=heads, head_dim=size, format=self._kv_format),
        )  # fmt: skip

    # --- buffers, constants, steps

    def _new(self, value: Value, name: str) -> View:
        """A fresh dense buffer for a value, alive from the step that is about to be added."""
        rows = 1 if value.shape[0] is S else 0
        format = _ROW_FORMAT[value.storage.kind]
        nbytes = row_bytes(format, value.width, value.storage.group)
        count = self._limits.S if rows else self._limits.T
        self._lives.append(_Life(name, nbytes * count, len(self._steps), len(self._steps)))
        stride = value.width if format == RowFormat.F32 else nbytes
        view = View(len(self._lives) - 1, 0, stride, rows)
        self._views[value] = view
        return view

    def _constant(self, value: Value, kind: str, make: Callable[[Value, str], Packed]) -> Place:
        key = (value, kind)
        if key not in self._packed:
            self._weights.append(make(value, kind))
            self._packed[key] = len(self._weights) - 1
        return Place(Space.WEIGHTS, self._packed[key])

    def _add(
        self,
        kernel: str,
        operands: Mapping[str, View | Place | None],
        params: Mapping[str, Param],
        node: Node,
        note: str = "",
    ) -> None:
        for view in operands.values():
            if isinstance(view, View):
                self._lives[view.buffer].last = len(self._steps)
        places = {n: v.place() if isinstance(v, View) else v for n, v in operands.items()}
        self._steps.append(ProgramStep(kernel, places, params, node.origin, note))

    # --- one method per operator

    def _embedding(self, node: Node) -> None:
        _, table = node.inputs
        scale = node.attrs["scale"]
        assert isinstance(scale, float)
        kind = self._table
        vocab, width = table.shape
        assert isinstance(vocab, int) and isinstance(width, int)
        params = {"n": width, "vocab": vocab, "bf16": int(kind == "bf16"), "scale": scale}
        place = self._constant(table, kind, pack_table)
        self._add("embed", {"table": place, "y": self._new(node.output, "embedding")}, params, node, kind)

    def _linear(self, node: Node) -> None:
        precision = node.attrs["precision"]
        x = node.inputs[0]
        view = self._views[x]
        assert isinstance(precision, Precision)
        weights = precision.weights
        gated = node.op == "gated_linear"
        group = x.storage.group
        width, k = node.output.width, x.width
        code: list[int] = []
        numbers: list[float] = []
        if gated:
            tree = node.attrs["tree"]
            assert isinstance(tree, int | float | tuple)
            code, numbers = compile_tree(tree, 2)
        format = _ROW_FORMAT[x.storage.kind]
        params: dict[str, Param] = {
            "rows": view.rows, "n": 2 * up(width, 16) if gated else width, "k": k, "group": group, "format": format,
            "weights": weights, "x_stride": view.stride * 4 if format == RowFormat.F32 else view.stride,
            "y_stride": width, "gated": int(gated), "code": code, "imm": numbers,
        }  # fmt: skip
        pair = node.inputs[1:3] if gated else node.inputs[1:2]
        name = f"{weights.name.lower()}{f'g{group}' if group else ''}"
        key = (pair, name)
        if key not in self._packed:
            self._weights.append(pack_weight(pair, weights, group, name))
            self._packed[key] = len(self._weights) - 1
        operands: dict[str, View | Place | None] = {"x": view, "w": Place(Space.WEIGHTS, self._packed[key])}
        if node.attrs.get("bias"):
            operands["bias"] = self._constant(node.inputs[2], "vector", pack_vector)
        if node.attrs.get("residual"):
            operands["residual"] = self._dense(node.inputs[-1], node)
        operands["y"] = self._new(node.output, node.origin[0] if node.origin else "linear")
        self._add("matmul", operands, params, node, str(precision))

    def _rescore(self, node: Node) -> None:
        logits, x, w = node.inputs
        view, count = self._views[x], node.attrs["count"]
        assert isinstance(count, int)
        group = x.storage.group
        place = self._constant(w, f"w8g{group} by output", lambda value, _: pack_bytes(value, group))
        params: dict[str, Param] = {
            "n": node.output.width, "k": x.width, "group": group, "x_stride": view.stride,
            "count": min(count, node.output.width),
        }  # fmt: skip
        operands: dict[str, View | Place | None] = {"x": view, "w": place, "y": self._views[logits]}
        self._add("rescore", operands, params, node, f"the best {count} in {node.attrs['precision']}")
        self._views[node.output] = self._views[logits]

    def _dense(self, value: Value, node: Node) -> View:
        """The value's rows side by side; a slice is copied."""
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
        assert isinstance(tree, int | float | tuple)
        code, numbers = compile_tree(tree, len(inputs))
        views = [v for v in inputs if isinstance(v, View)]
        params: dict[str, Param] = {"rows": views[0].rows, "n": value.width, "code": code, "imm": numbers}
        for name, source in zip("abcd"[:MAX_INPUTS], inputs, strict=False):
            params[f"{name}_stride"] = source.stride if isinstance(source, View) else 0
        return params

    def _elementwise(self, node: Node) -> None:
        inputs: list[View | Place] = [
            self._constant(v, "vector", pack_vector) if v.constant else self._views[v] for v in node.inputs
        ]
        params = self._elementwise_params(node.attrs["tree"], inputs, node.output)
        operands: dict[str, View | Place | None] = dict(zip("abcd", inputs, strict=False))
        operands["y"] = self._new(node.output, node.origin[0])
        self._add("elementwise", operands, params, node)

    def _rms_norm(self, node: Node) -> None:
        x, w = node.inputs
        view = self._views[x]
        storage = node.output.storage
        n = x.shape[-1]
        assert isinstance(n, int)
        out = self._new(node.output, node.origin[0])
        format = _ROW_FORMAT[storage.kind]
        eps = node.attrs["eps"]
        assert isinstance(eps, float)
        params: dict[str, Param] = {
            "rows": view.rows, "runs": x.width // n, "n": n, "x_stride": view.stride,
            "y_stride": out.stride * 4 if format == RowFormat.F32 else out.stride,
            "format": format, "group": storage.group, "eps": eps,
        }  # fmt: skip
        self._add(
            "rms_norm", {"x": view, "w": self._constant(w, "vector", pack_vector), "y": out}, params, node, str(storage)
        )

    def _convert(self, node: Node) -> None:
        view = self._views[node.inputs[0]]
        storage = node.output.storage
        out = self._new(node.output, f"{storage}")
        params: dict[str, Param] = {
            "rows": view.rows, "n": node.output.width, "x_stride": view.stride, "y_stride": out.stride,
            "format": _ROW_FORMAT[storage.kind], "group": storage.group,
        }  # fmt: skip
        self._add("convert", {"x": view, "y": out}, params, node, str(storage))

    def _reshape(self, node: Node) -> None:
        self._views[node.output] = self._views[node.inputs[0]]

    def _slice(self, node: Node) -> None:
        view = self._views[node.inputs[0]]
        start = node.attrs["start"]
        assert isinstance(start, int)
        self._views[node.output] = replace(view, offset=view.offset + 4 * start)

    def _own(self, value: Value, node: Node) -> View:
        """A view that may be written: the value's own where this node alone reads it, else a copy."""
        at: Value = value
        while len(self._readers[at]) == 1:
            producer = self._producers[at]
            if producer.op == "slice":
                whole = [
                    (n.attrs["start"], n.attrs["stop"]) for n in self._readers[producer.inputs[0]] if n.op == "slice"
                ]
                if len(set(whole)) == len(whole) == len(self._readers[producer.inputs[0]]):
                    return self._views[value]
                break
            if producer.op != "reshape":
                return self._views[value]
            at = producer.inputs[0]
        return self._copy(value, node)

    def _rope(self, node: Node) -> None:
        x, table = node.inputs
        view = self._own(x, node)
        _, heads, size = x.shape
        assert isinstance(heads, int) and isinstance(size, int)
        params: dict[str, Param] = {
            "heads": heads, "kv_heads": 0, "head_dim": size, "q_stride": view.stride, "k_stride": 0, "v_stride": 0,
            "context": self._max_context, "layer": -1,
        }  # fmt: skip
        self._add("rope", {"q": view, "table": self._constant(table, "vector", pack_vector)}, params, node)
        self._views[node.output] = view

    def _attention(self, node: Node) -> None:
        q, k, v = node.inputs[:3]
        _, heads, size = q.shape
        kv_heads = k.shape[1]
        assert isinstance(heads, int) and isinstance(size, int) and isinstance(kv_heads, int)
        if self._kv not in (None, (kv_heads, size)):
            raise GraphError(
                f"attention layers of {self._kv} and {(kv_heads, size)} KV heads and head size",
                "the same in every layer", "KV pages of several shapes are not supported yet",
            )  # fmt: skip
        self._kv = (kv_heads, size)
        layer, scale = node.attrs["layer"], node.attrs["scale"]
        assert isinstance(layer, int) and isinstance(scale, float)
        self._layers = max(self._layers, layer + 1)
        rotated = node.op == "rope_attention"
        q_view = self._own(q, node) if rotated else self._views[q]
        k_view = self._own(k, node) if rotated else self._views[k]
        write: dict[str, View | Place | None] = {"k": k_view, "v": self._views[v]}
        if rotated:
            write |= {"q": q_view, "table": self._constant(node.inputs[3], "vector", pack_vector)}
        params: dict[str, Param] = {
            "heads": heads if rotated else 0, "kv_heads": kv_heads, "head_dim": size,
            "q_stride": q_view.stride if rotated else 0, "k_stride": k_view.stride,
            "v_stride": self._views[v].stride, "context": self._max_context, "layer": layer,
        }  # fmt: skip
        self._add("rope", write, params, node, "and KV write" if rotated else "KV write")
        out = self._new(node.output, node.origin[0])
        params = {
            "heads": heads, "kv_heads": kv_heads, "head_dim": size, "q_stride": q_view.stride, "layer": layer,
            "scale": scale,
        }  # fmt: skip
        self._add("attention", {"q": q_view, "y": out}, params, node, self._kv_format.name.lower())

    def _sampled_rows(self, node: Node) -> None:
        view = self._dense(node.inputs[0], node)
        params = {"n": node.output.width}
        self._add("gather_rows", {"x": view, "y": self._new(node.output, "sampled rows")}, params, node)
