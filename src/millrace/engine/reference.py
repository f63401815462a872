"""The reference executor: interprets a graph, before or after any pass, in NumPy.

Computes in float64 and rounds where a kernel would store. Slow and plain: it says what is right, and the tests hold the
native executor against it. Sampling is the native one's, in float64.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.quantised import QuantisedMatrix
from millrace.engine.executor import ExecutorLimits, IntArray, StepInputs, StepOutputs
from millrace.engine.native import KvFormat
from millrace.graph.types import Graph, Node, S, Storage, Value
from millrace.kernels.attention.ref import attention, to_int8, to_int16
from millrace.kernels.convert.ref import Quantised, to_bf16, to_q8
from millrace.kernels.expression import Tree, evaluate
from millrace.kernels.matmul import ref as products
from millrace.kernels.matmul.quantise import quantise_matrix, stored_codes
from millrace.kernels.precision import Precision
from millrace.kernels.rescore.ref import largest
from millrace.kernels.rms_norm.ref import rms_norm
from millrace.kernels.rope.ref import rope
from millrace.kernels.sample.ref import draw, penalised, probabilities, uniform

Rows = NDArray[np.float64]
Held = Rows | Quantised


@dataclass(slots=True)
class _Pages:
    """Keys and values of one attention layer, as they are stored: (pages, tokens of a page, heads, head size)."""

    keys: Rows
    values: Rows


class ReferenceExecutor:
    """kv: how keys and values are kept. bf16_table: the embedding table is rounded, as in engines other than FP32."""

    def __init__(self, graph: Graph, limits: ExecutorLimits, *, kv: KvFormat, bf16_table: bool) -> None:
        self._graph, self.limits, self._kv, self._bf16_table = graph, limits, kv, bf16_table
        self.constants = {v: v.constant.load().astype(np.float64) for v in graph.constants() if v.constant}
        self._pages: dict[int, _Pages] = {}
        self._values: dict[Value, Held] = {}
        self._rules: dict[str, Callable[[Node, StepInputs], Held]] = {
            "embedding": self._embedding, "linear": self._linear, "gated_linear": self._gated_linear,
            "elementwise": self._elementwise, "rms_norm": self._rms_norm, "convert": self._convert,
            "reshape": self._reshape, "slice": self._slice, "rope": self._rope, "attention": self._attention,
            "rope_attention": self._attention, "sampled_rows": self._sampled_rows, "rescore": self._rescore,
        }  # fmt: skip

    def run(self, step: StepInputs) -> StepOutputs:
        logits = self.logits(step)
        rows = step.sampling
        top = max(int(rows["n_top"].max()), 0) if len(rows) else 0
        out = StepOutputs(
            tokens=np.zeros(len(rows), np.int32), logprobs=np.zeros(len(rows), np.float32),
            ranks=np.zeros(len(rows), np.int32), top_ids=np.zeros((len(rows), top), np.int32),
            top_logprobs=np.zeros((len(rows), top), np.float32),
        )  # fmt: skip
        for r in range(len(rows)):
            self._sample(r, logits[r], step, out)
        return out

    def logits(self, step: StepInputs) -> Rows:
        """(R, V) for the sampled rows, after keys and values were stored."""
        self._values.clear()
        for node in self._graph.nodes:
            self._values[node.output] = self._rules[node.op](node, step)
        return self._rows(self._graph.output)

    def close(self) -> None:
        self._pages.clear()

    # --- values

    def _rows(self, value: Value) -> Rows:
        held = self.constants[value] if value.constant else self._values[value]
        assert isinstance(held, np.ndarray), f"{value} is packed"
        return held

    def _stored(self, x: Rows, storage: Storage) -> Held:
        """Rounded as the kernel writes it."""
        rounded = x.astype(np.float32)
        if storage.kind == "q8":
            return to_q8(rounded, storage.group)
        return (to_bf16(rounded) if storage.kind == "bf16" else rounded).astype(np.float64)

    # --- one method per operator

    def _embedding(self, node: Node, step: StepInputs) -> Held:
        scale = node.attrs["scale"]
        assert isinstance(scale, float)
        table = self._rows(node.inputs[1])
        rows = table[step.tokens]
        stored = to_bf16(rows).astype(np.float64) if self._bf16_table else rows
        return self._stored(stored * scale, node.output.storage)

    def _product(self, x: Value, w: Value, precision: object) -> Rows:
        assert isinstance(precision, Precision)
        held = self._values[x]
        if precision.quantised:
            codes = self._codes(w, precision.bits, x.storage.group)
            return products.matmul_q8(held, codes) if isinstance(held, Quantised) else products.matmul_a16(held, codes)
        assert not isinstance(held, Quantised), x
        whole = self._rows(w).astype(np.float32).astype(np.float64)
        y = products.matmul_bf16(held, whole) if precision == Precision.BF16 else products.matmul(held, whole)
        return y.astype(np.float64)

    def _codes(self, w: Value, bits: int, group: int) -> QuantisedMatrix:
        stored = stored_codes([w.constant], bits, group) if w.constant else None
        return stored[0] if stored else quantise_matrix(self._rows(w).astype(np.float32), bits, group)

    def _linear(self, node: Node, step: StepInputs) -> Held:
        y = self._product(node.inputs[0], node.inputs[1], node.attrs["precision"])
        if node.attrs.get("bias"):
            y = y + self._rows(node.inputs[2])
        if node.attrs.get("residual"):
            y = y + self._rows(node.inputs[-1])
        return self._stored(y, node.output.storage)

    def _rescore(self, node: Node, step: StepInputs) -> Held:
        logits, x, w = node.inputs
        count = node.attrs["count"]
        assert isinstance(count, int)
        again = self._product(x, w, node.attrs["precision"])
        y = self._rows(logits)
        return self._stored(np.where(largest(y, count), again, y), node.output.storage)

    def _gated_linear(self, node: Node, step: StepInputs) -> Held:
        x, gate, up = node.inputs
        halves = [self._product(x, w, node.attrs["precision"]) for w in (gate, up)]
        return self._stored(evaluate(_tree(node), halves).astype(np.float64), node.output.storage)

    def _elementwise(self, node: Node, step: StepInputs) -> Held:
        inputs = [self._rows(v) for v in node.inputs]
        return self._stored(evaluate(_tree(node), inputs).astype(np.float64), node.output.storage)

    def _rms_norm(self, node: Node, step: StepInputs) -> Held:
        eps = node.attrs["eps"]
        assert isinstance(eps, float)
        y = rms_norm(self._rows(node.inputs[0]), self._rows(node.inputs[1]), eps)
        return self._stored(y.astype(np.float64), node.output.storage)

    def _convert(self, node: Node, step: StepInputs) -> Held:
        return self._stored(self._rows(node.inputs[0]), node.output.storage)

    def _reshape(self, node: Node, step: StepInputs) -> Held:
        sizes = [d for d in node.output.shape[1:] if isinstance(d, int)]
        return self._rows(node.inputs[0]).reshape(-1, *sizes)

    def _slice(self, node: Node, step: StepInputs) -> Held:
        start, stop = node.attrs["start"], node.attrs["stop"]
        assert isinstance(start, int) and isinstance(stop, int)
        return self._rows(node.inputs[0])[:, start:stop]

    def _rope(self, node: Node, step: StepInputs) -> Held:
        return self._rotated(node.inputs[0], node.inputs[1], step)

    def _rotated(self, x: Value, table: Value, step: StepInputs) -> Rows:
        y = rope(self._rows(x), step.positions, self._rows(table))
        return y.astype(np.float32).astype(np.float64)

    def _attention(self, node: Node, step: StepInputs) -> Held:
        q, k, v = (self._rows(x) for x in node.inputs[:3])
        if node.op == "rope_attention":
            q, k = (self._rotated(x, node.inputs[3], step) for x in node.inputs[:2])
        if self._kv == KvFormat.BF16:
            q, k, v = (to_bf16(x).astype(np.float64) for x in (q, k, v))
        elif self._kv == KvFormat.INT8:
            q, k, v = (code(x).astype(np.float64) for code, x in ((to_int16, q), (to_int8, k), (to_int8, v)))
        layer, scale = node.attrs["layer"], node.attrs["scale"]
        assert isinstance(layer, int) and isinstance(scale, float)
        pages = self._pages.setdefault(layer, self._empty(k.shape[1:]))
        y = np.zeros_like(q)
        for s in range(len(step.starts) - 1):
            part = slice(step.starts[s], step.starts[s + 1])
            table = step.pages[step.page_starts[s] : step.page_starts[s + 1]]
            y[part] = self._attend(q[part], k[part], v[part], pages, table, int(step.positions[part][0]), scale)
        return self._stored(y, node.output.storage)

    def _attend(self, q: Rows, k: Rows, v: Rows, pages: _Pages, table: IntArray, first: int, scale: float) -> Rows:
        """Stores one sequence's new keys and values in its pages, then attends to all of them."""
        size, last = self.limits.page_tokens, first + len(k)
        places = np.arange(first, last)
        pages.keys[table[places // size], places % size] = k
        pages.values[table[places // size], places % size] = v
        flat = (-1, *k.shape[1:])
        keys, values = (a[table].reshape(flat)[:last] for a in (pages.keys, pages.values))
        return attention(q, keys, values, first, scale, bf16_weights=self._kv == KvFormat.BF16).astype(np.float64)

    def _empty(self, shape: tuple[int, ...]) -> _Pages:
        whole = (self.limits.n_pages, self.limits.page_tokens, *shape)
        return _Pages(np.zeros(whole), np.zeros(whole))

    def _sampled_rows(self, node: Node, step: StepInputs) -> Held:
        assert node.output.shape[0] is S
        last = step.starts[step.sampling["sequence"].astype(np.int64) + 1] - 1
        rows: Rows = self._rows(node.inputs[0])[last]
        return rows

    # --- sampling

    def _sample(self, r: int, logits: Rows, step: StepInputs, out: StepOutputs) -> None:
        row = step.sampling[r]
        if not np.isfinite(logits).all():
            out.tokens[r] = -1
            return
        logp = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        adjusted = logits.copy()
        biases = slice(row["bias_start"], row["bias_start"] + row["bias_count"])
        adjusted[step.bias_ids[biases]] += step.bias_values[biases]
        start, prompt, output = (int(row[n]) for n in ("history_start", "history_prompt", "history_output"))
        history = step.history[start : start + prompt + output]
        adjusted = penalised(
            adjusted, history[:prompt], history[prompt:], float(row["repetition_penalty"]),
            float(row["presence_penalty"]), float(row["frequency_penalty"]),
        )  # fmt: skip
        token = int(adjusted.argmax())
        if row["temperature"] >= 1e-5:
            p = probabilities(
                adjusted, float(row["temperature"]), int(row["top_k"]), float(row["top_p"]), float(row["min_p"])
            )
            token = draw(p, uniform(int(row["seed"]), int(row["choice"]), int(row["position"])))
        out.tokens[r], out.logprobs[r] = token, logp[token]
        out.ranks[r] = 1 + int((logits > logits[token]).sum())
        best = np.lexsort((np.arange(len(logits)), -logits))[: max(int(row["n_top"]), 0)]
        out.top_ids[r, : len(best)], out.top_logprobs[r, : len(best)] = best, logp[best]


def _tree(node: Node) -> Tree:
    tree = node.attrs["tree"]
    assert isinstance(tree, int | float | tuple)
    return tree
