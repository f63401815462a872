"""The weights as an OpenVINO model, written with its own operators in the shape in which its plugin fuses them.

A stateful decoder as optimum-intel exports them: KV caches are variables that a beam index gathers, attention is the
one operator, weights are compressed constants with their scales. The head sees only the last token of each sequence.
T tokens, B sequences, H query heads, K key/value heads, D head size, V vocabulary.
"""

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as op
from openvino.op.util import Variable, VariableInfo

from benchmarks.peers.weights import NamedWeights
from millrace.graph.types import Array

GROUPS = (128, 64, 32)  # inputs that share a scale: the largest that divides the row
Node = Any  # openvino has no types


def write_ir(path: Path, weights: NamedWeights, variant: str, *, every_token: bool = False) -> None:
    """`variant`: "f32", "int4" or "int4-asym": 4-bit groups, embedding and head in 8 bits by row, as nncf does it.

    every_token: has logits, not the last of each sequence alone, as a text is judged
    """
    unfinished = path.with_name(f"unfinished-{path.name}")
    ov.save_model(_Decoder(weights, variant).model(every_token), unfinished, compress_to_fp16=False)
    unfinished.with_suffix(".bin").rename(path.with_suffix(".bin"))
    unfinished.rename(path)


def group_of(row: int) -> int:
    """Of 4-bit weights; a row that no group divides is one group."""
    return next((g for g in GROUPS if row % g == 0), row)


class _Decoder:
    """Builds one model; the graph of each part is in a method of its own."""

    def __init__(self, weights: NamedWeights, variant: str) -> None:
        assert weights.config.rope.kind == "default", "no scaling of rotary positions is written here"
        self._w, self._c, self._variant = weights, weights.config, variant
        self._tokens = op.parameter([-1, -1], np.int64, name="input_ids")  # (B, T)
        self._positions = op.parameter([-1, -1], np.int64, name="position_ids")  # (B, T)
        self._beams = op.parameter([-1], np.int32, name="beam_idx")  # (B)
        self._batch = op.gather(op.shape_of(self._tokens), _ints(0, rank=1), _ints(0))
        self._sinks: list[Node] = []

    def model(self, every_token: bool) -> ov.Model:
        table = self._embedding("model.embed_tokens.weight")  # (V, hidden)
        x = op.gather(table, self._tokens, _ints(0))  # (B, T, hidden)
        rotation = self._rotation()
        for layer in range(self._c.n_layers):
            prefix = f"model.layers.{layer}."
            attended = self._attention(self._norm(x, prefix + "input_layernorm"), rotation, prefix + "self_attn.")
            x = op.add(x, attended)
            x = op.add(x, self._mlp(self._norm(x, prefix + "post_attention_layernorm"), prefix + "mlp."))
        if not every_token:
            end = _ints(np.iinfo(np.int64).max, rank=1)
            x = op.slice(x, _ints(-1, rank=1), end, _ints(1, rank=1), _ints(1, rank=1))
        head = table if self._c.tie_embeddings else self._embedding("lm_head.weight")
        logits = op.matmul(self._norm(x, "model.norm"), head, False, True)  # (B, 1 or T, V)
        logits.output(0).set_names({"logits"})
        inputs = [self._tokens, self._positions, self._beams]
        for parameter in inputs:
            parameter.output(0).set_names({parameter.friendly_name})
        return ov.Model([op.result(logits)], self._sinks, inputs, "decoder")

    def _attention(self, x: Node, rotation: tuple[Node, Node], prefix: str) -> Node:
        c = self._c
        q = _rotated(self._heads(x, prefix + "q_proj", c.n_heads), rotation, c.head_dim)  # (B, H, T, D)
        k = _rotated(self._heads(x, prefix + "k_proj", c.n_kv_heads), rotation, c.head_dim)
        v = self._heads(x, prefix + "v_proj", c.n_kv_heads)
        k, v = self._cached(k, prefix + "key"), self._cached(v, prefix + "value")  # (B, K, all so far, D)
        y = op.scaled_dot_product_attention(q, self._shared(k), self._shared(v), causal=True)
        y = op.reshape(op.transpose(y, _ints(0, 2, 1, 3)), _ints(0, 0, c.n_heads * c.head_dim), True)
        return self._linear(y, prefix + "o_proj")

    def _mlp(self, x: Node, prefix: str) -> Node:
        gated = op.multiply(op.swish(self._linear(x, prefix + "gate_proj")), self._linear(x, prefix + "up_proj"))
        return self._linear(gated, prefix + "down_proj")

    def _heads(self, x: Node, name: str, heads: int) -> Node:
        split = op.reshape(self._linear(x, name), _ints(0, 0, heads, self._c.head_dim), True)
        return op.transpose(split, _ints(0, 2, 1, 3))

    def _cached(self, x: Node, name: str) -> Node:
        """What the variable holds already, then x; the variable holds both afterwards."""
        c = self._c
        info = VariableInfo()
        info.data_shape = ov.PartialShape([-1, c.n_kv_heads, -1, c.head_dim])
        info.data_type, info.variable_id = ov.Type.f32, name
        variable = Variable(info)
        shape = op.concat([self._batch, _ints(c.n_kv_heads, rank=1), _ints(0, rank=1), _ints(c.head_dim, rank=1)], 0)
        past = op.read_value(op.broadcast(op.constant(np.float32(0)), shape), variable)
        grown = op.concat([op.gather(past, self._beams, _ints(0)), x], 2)
        self._sinks.append(op.assign(grown, variable))
        return grown

    def _shared(self, x: Node) -> Node:
        """(B, K, S, D) -> (B, H, S, D): each head of keys or values for all query heads that use it."""
        c = self._c
        repeats = c.n_heads // c.n_kv_heads
        if repeats == 1:
            return x
        size = op.shape_of(x)  # of x itself: the fusion allows no other user of what is unsqueezed
        ends = (op.gather(size, _ints(*axes), _ints(0)) for axes in ((0, 1), (2, 3)))
        wide = op.concat([next(ends), _ints(repeats, rank=1), next(ends)], 0)
        repeated = op.broadcast(op.unsqueeze(x, _ints(2)), wide, broadcast_spec="BIDIRECTIONAL")
        return op.reshape(repeated, _ints(0, c.n_heads, -1, c.head_dim), True)

    def _rotation(self) -> tuple[Node, Node]:
        """Cosines and sines (B, 1, T, D) of every position."""
        c = self._c
        frequencies = c.rope.theta ** (-np.arange(0, c.head_dim, 2, dtype=np.float64) / c.head_dim)
        column = op.constant(frequencies.astype(np.float32).reshape(1, -1, 1))
        column = op.broadcast(column, op.concat([self._batch, _ints(1, 1)], 0), broadcast_spec="BIDIRECTIONAL")
        positions = op.convert(op.unsqueeze(self._positions, _ints(1)), "f32")  # (B, 1, T)
        angles = op.transpose(op.matmul(column, positions, False, False), _ints(0, 2, 1))  # (B, T, D/2)
        both = op.concat([angles, angles], -1)
        return op.unsqueeze(op.cos(both), _ints(1)), op.unsqueeze(op.sin(both), _ints(1))

    def _norm(self, x: Node, name: str) -> Node:
        mean = op.reduce_mean(op.power(x, op.constant(np.float32(2))), _ints(-1, rank=1), True)
        root = op.sqrt(op.add(mean, op.constant(np.float32(self._c.norm_eps))))
        scaled = op.multiply(x, op.divide(op.constant(np.float32(1)), root))
        return op.multiply(scaled, op.constant(self._load(f"{name}.weight").reshape(1, 1, -1)))

    def _linear(self, x: Node, name: str) -> Node:
        w = self._load(f"{name}.weight")
        kinds = {"f32": op.constant, "int4": _int4, "int4-asym": _asymmetric_int4}
        y = op.matmul(x, kinds[self._variant](w), False, True)
        if f"{name}.bias" in self._w.shapes:
            y = op.add(y, op.constant(self._load(f"{name}.bias").reshape(1, 1, -1)))
        return y

    def _embedding(self, name: str) -> Node:
        w = self._load(name)
        return op.constant(w) if self._variant == "f32" else _int8(w)

    def _load(self, name: str) -> Array:
        return np.ascontiguousarray(self._w.load(name), np.float32)


def _rotated(x: Node, rotation: tuple[Node, Node], size: int) -> Node:
    """(B, heads, T, D): the halves of each head turned against each other."""
    cosines, sines = rotation
    end, one, axis = _ints(np.iinfo(np.int64).max, rank=1), _ints(1, rank=1), _ints(3, rank=1)
    low = op.slice(x, _ints(0, rank=1), _ints(size // 2, rank=1), one, axis)
    high = op.slice(x, _ints(size // 2, rank=1), end, one, axis)
    turned = op.concat([op.multiply(high, op.constant(np.float32(-1))), low], -1)
    return op.add(op.multiply(x, cosines), op.multiply(turned, sines))


def _int4(w: Array) -> Node:
    """(N, K) in 4 bits, -8..7, one float16 scale for each group of a row."""
    n, k = w.shape
    group = group_of(k)
    grouped = w.reshape(n, k // group, group)
    scales = (np.abs(grouped).max(axis=2, keepdims=True) / 7).astype(np.float16)
    codes = np.clip(np.rint(grouped / np.maximum(scales, np.float16(1e-7)).astype(np.float32)), -8, 7).astype(np.int8)
    wide = op.multiply(op.convert(_nibbles(codes.view(np.uint8) & 15, ov.Type.i4), "f16"), op.constant(scales))
    return op.convert(op.reshape(wide, _ints(n, k), False), "f32")


def _asymmetric_int4(w: Array) -> Node:
    """(N, K) in 4 bits, 0..15, one float16 scale and one 4-bit zero point for each group of a row."""
    n, k = w.shape
    group = group_of(k)
    grouped = w.reshape(n, k // group, group).astype(np.float32)
    low, high = np.minimum(grouped.min(2, keepdims=True), 0), np.maximum(grouped.max(2, keepdims=True), 0)
    scales = np.maximum((high - low) / 15, 1e-7).astype(np.float16)
    zeros = np.clip(np.rint(-low / scales.astype(np.float32)), 0, 15).astype(np.uint8)
    codes = np.clip(np.rint(grouped / scales.astype(np.float32)) + zeros, 0, 15).astype(np.uint8)
    shifted = op.subtract(*(op.convert(_nibbles(part, ov.Type.u4), "f16") for part in (codes, zeros)))
    return op.convert(op.reshape(op.multiply(shifted, op.constant(scales)), _ints(n, k), False), "f32")


def _nibbles(codes: NDArray[np.uint8], kind: ov.Type) -> Node:
    """A constant of 4-bit integers."""
    flat = codes.reshape(-1)
    flat = np.pad(flat, (0, flat.size % 2))
    stored = ov.Tensor(kind, ov.Shape(list(codes.shape)))  # owns its memory, unlike one made of an array
    stored.data.reshape(-1).view(np.uint8)[:] = (flat[0::2] | flat[1::2] << 4).astype(np.uint8)  # of a pair, low first
    return op.constant(stored)


def _int8(w: Array) -> Node:
    """(V, K) in 8 bits, one float16 scale a row."""
    scales = (np.abs(w).max(axis=1, keepdims=True) / 127).astype(np.float16)
    codes = np.clip(np.rint(w / scales.astype(np.float32)), -127, 127).astype(np.int8)
    return op.convert(op.multiply(op.convert(op.constant(codes), "f16"), op.constant(scales)), "f32")


def _ints(*values: int, rank: int | None = None) -> Node:
    """A constant of integers: a scalar for one value, unless its rank is given."""
    scalar = len(values) == 1 and rank is None
    return op.constant(np.array(values[0] if scalar else values, np.int64))
