"""The operators attention (causal, over a cache), rope_attention (with rotation) and full_attention."""

import math

import numpy as np
from numpy.typing import NDArray

from millrace.errors import GraphError
from millrace.graph.shape_rules import check_positions, illegal
from millrace.graph.types import Attrs, DType, Inputs, Node, Shape, Value, find
from millrace.kernels.attention.ref import ScoreRules, attention, distance_buckets
from millrace.kernels.convert.op import packs_elements
from millrace.kernels.declare import MAX_HEAD, MAX_PARAM, RowFormat
from millrace.kernels.matmul.pack import SlabTask, finite
from millrace.kernels.operand_places import Operands, PackedPlace, View, as_bytes, constant_of
from millrace.kernels.operators import (
    EvaluationContext,
    KernelOperator,
    Params,
    ProgramWriter,
    Rows,
    StoredValue,
    float_attr,
    int_attr,
    static_dim,
)
from millrace.kernels.precision import BF16_BY_TILES
from millrace.kernels.rope.op import rotated
from millrace.kernels.row_storage import storage_of


def _heads(op: str, inputs: Inputs) -> tuple[Shape, ...]:
    q, k, v, lengths = inputs
    ranks = {len(x.shape) for x in (q, k, v)}
    if ranks != {3} or k.shape[:2] != v.shape[:2] or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise illegal(op, f"q {q}, k {k}, v {v}", "q [T, H, D], k [T, K, D] and v [T, K, values' size]")
    if lengths.dtype != DType.I32 or len(lengths.shape) != 1:
        raise illegal(op, f"lengths {lengths}", "i32 [S], the tokens of each sequence")
    heads, kv_heads = static_dim(q, 1), static_dim(k, 1)
    if heads % kv_heads:
        raise illegal(op, f"{heads} query heads over {kv_heads} KV heads", "a multiple")
    for head in (static_dim(q, 2), static_dim(v, 2)):
        if head % 8 or head > MAX_HEAD:
            raise illegal(op, f"a head size of {head}", f"a multiple of 8, at most {MAX_HEAD}")
    return ((*q.shape[:2], v.shape[2]),)


def _shapes(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    q, k, v, positions, lengths = inputs[:5]
    check_positions("attention", positions, q)
    window = attrs.get("window", 1)
    if isinstance(window, bool) or not isinstance(window, int) or not 1 <= window <= MAX_PARAM:
        raise illegal("attention", f"a window of {window!r:.60}", "at least 1 token; leave it out to attend to all")
    softcap = attrs.get("softcap", 1.0)
    if isinstance(softcap, bool) or not isinstance(softcap, int | float) or not 0 < softcap < math.inf:
        raise illegal(
            "attention", f"a softcap of {softcap!r:.60}", "a number above 0; leave it out for scores as they are"
        )
    sinks = inputs[-1] if attrs.get("sinks") else None
    if sinks is not None and (sinks.constant is None or sinks.shape != q.shape[1:2]):
        raise illegal("attention", f"sinks {sinks}", f"a constant {list(q.shape[1:2])}, one for each query head")
    return _heads("attention", (q, k, v, lengths))


def _full_shapes(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    q, positions = inputs[0], attrs.get("positions")
    if len(inputs) == 5:
        buckets = inputs[4]
        if buckets.constant is None or len(buckets.shape) != 2 or buckets.shape[1] != q.shape[1]:
            raise illegal("full_attention", f"biases {buckets}", f"a constant [buckets, {q.shape[1]}]")
        if not isinstance(positions, int) or not 1 <= positions <= MAX_PARAM // 2:
            raise illegal("full_attention", f"biases for {positions!r:.60} positions", "a number of at least 1")
    return _heads("full_attention", inputs[:4])


def window_of(node: Node) -> int:
    """Return how many keys a row attends to, its own included; 0: all before it."""
    return int_attr(node, "window") if "window" in node.attrs else 0


def softcap_of(node: Node) -> float:
    """Return the soft cap of the scores; 0: none."""
    return float_attr(node, "softcap") if "softcap" in node.attrs else 0.0


def sinks_of(node: Node) -> Value | None:
    """Return the sink of each head: the last input, if the node has some."""
    return node.inputs[-1] if node.attrs.get("sinks") else None


def _reference(node: Node, values: EvaluationContext) -> StoredValue:
    v, positions, lengths = node.inputs[2:5]
    heads = [
        rotated(values, x, positions, node.inputs[5]) if node.operator is ROPE_ATTENTION else values.rows(x)
        for x in node.inputs[:2]
    ]
    q, k, v_rows = values.as_kept(heads[0], heads[1], values.rows(v))
    layer, window, scale = int_attr(node, "layer"), window_of(node), float_attr(node, "scale")
    rounded, sinks = values.bf16_weights, sinks_of(node)
    of_sinks = None if sinks is None else values.rows(sinks)
    y = np.zeros((*q.shape[:2], v_rows.shape[2]))
    at, places = 0, values.cache_positions(positions)
    for sequence, length in enumerate(values.numbers(lengths)):
        part = slice(at, at := at + int(length))
        first = int(places[part][0])
        keys, cached_values = values.remember(layer, window, sequence, first, k[part], v_rows[part])
        before = len(keys) - int(length)
        y[part] = attention(
            q[part], keys, cached_values, before, scale, ScoreRules(window, softcap_of(node), of_sinks),
            bf16_weights=rounded,
        )  # fmt: skip
    return values.stored(y, node)


def _full_reference(node: Node, values: EvaluationContext) -> StoredValue:
    lengths, scale = values.numbers(node.inputs[3]), float_attr(node, "scale")
    q, k, v = values.as_kept(*(values.rows(x) for x in node.inputs[:3]))
    rules = ScoreRules(distance_bias=None if len(node.inputs) < 5 else _by_distance(node, values.rows(node.inputs[4])))
    y, at = np.zeros((*q.shape[:2], v.shape[2])), 0
    for length in lengths:
        part = slice(at, at := at + int(length))
        y[part] = attention(q[part], k[part], v[part], None, scale, rules, bf16_weights=values.bf16_weights)
    return values.stored(y, node)


def _lower(node: Node, writer: ProgramWriter) -> None:
    q, k = node.inputs[:2]
    _check_step(writer, q, positions=node.inputs[3], lengths=node.inputs[4])
    if node.operator is ATTENTION:
        _attend(node, writer, (writer.view(q), writer.view(k)), {}, causal=True)
        return
    views = (writer.writable(q, node), writer.writable(k, node))
    positions, table = node.inputs[3], node.inputs[5]
    rotation: Operands = {"q": views[0], "positions": writer.view(positions), "table": writer.vector(table)}
    _attend(node, writer, views, rotation, causal=True, context=static_dim(table, 0))


def _full_lower(node: Node, writer: ProgramWriter) -> None:
    """Lower to attention over pages that last for one run, so that one kernel serves both kinds of attention."""
    q, k, _, lengths = node.inputs[:4]
    _check_step(writer, q, lengths=lengths)
    _attend(node, writer, (writer.view(q), writer.view(k)), {}, causal=False)


def _check_step(writer: ProgramWriter, q: Value, **operands: Value) -> None:
    """Check that the inputs are those of the step, by name, because the kernel reads positions and lengths from it.

    raises GraphError
    """
    graph, tokens = writer.graph, (q.shape[0], operands["lengths"].shape[0])
    wrong = [name for name, value in operands.items() if find(graph.inputs, name) is not value]
    if wrong or graph.symbols[:2] != tokens:
        what = " and ".join(f"the {name} {operands[name]}" for name in wrong or operands)
        raise GraphError(
            f"attention over sequences of {what}",
            " and ".join(f'the input "{name}"' for name in operands)
            + ", and inputs that name tokens first, then sequences",
            "name the inputs so, and pass them on as they are",
        )


def _attend(
    node: Node, writer: ProgramWriter, views: tuple[View, View], rotation: Operands, *, causal: bool, context: int = 1
) -> None:
    """Add two calls: one rotates and writes keys and values, the other attends to all.

    Of layers that share a cache only the first one writes.
    """
    (q, k), v = views, writer.view(node.inputs[2])
    heads, head_dim = static_dim(node.inputs[0], 1), static_dim(node.inputs[0], 2)
    kv_heads, value_dim = static_dim(node.inputs[2], 1), static_dim(node.inputs[2], 2)
    window = window_of(node)
    layer_cache = writer.written_cache(node) if causal else None
    cache = layer_cache or writer.cache(kv_heads, head_dim, value_dim, persistent=causal, window=window)
    shape: Params = {
        "rows": q.rows, "kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim, "q_stride": q.row_floats,
    }  # fmt: skip
    rotates = bool(rotation)
    write: Params = {
        **shape, "heads": heads if rotates else 0, "q_stride": q.row_floats if rotates else 0, "k_stride": k.row_floats,
        "v_stride": v.row_floats, "context": context, "rotary_dim": head_dim, "interleaved": 0,
    }  # fmt: skip
    assert not (layer_cache and rotates), "keys that several layers read are rotated by a call of their own"
    if layer_cache is None:
        writer.add("rope", {"k": k, "v": v, **rotation}, write, node, "and KV write" if rotates else "KV write", cache)
    if causal:
        writer.writes_cache(node, cache)
    storage = storage_of(node)
    y, packed = writer.new(node.output, node.origin[0], storage), storage.format == RowFormat.BF16
    tiles = writer.tiles and cache.format == "bf16"
    attend: Params = {
        **shape, "heads": heads, "packed": int(packed), "y_stride": y.row_elements,
        "causal": int(causal), "window": window, "tiles": int(tiles), "scale": float_attr(node, "scale"),
        "softcap": softcap_of(node),
        "bias_width": 2 * int_attr(node, "positions") if "positions" in node.attrs else 0,
    }  # fmt: skip
    note = (BF16_BY_TILES if tiles else cache.format) + (f", window of {window}" if window else "")
    sinks, buckets = (
        sinks_of(node),
        node.inputs[4] if node.operator is FULL_ATTENTION and len(node.inputs) > 4 else None,
    )
    operands: Operands = {
        "q": q, "sinks": None if sinks is None else writer.vector(sinks), "y": y,
        "distance_bias": None if buckets is None else writer.constant(
            (buckets,), f"by distance up to {node.attrs['positions']}", lambda: _pack_distances(node, buckets)
        ),
    }  # fmt: skip
    writer.add("attention", operands, attend, node, note, cache)


def _by_distance(node: Node, buckets: Rows) -> Rows:
    """Return the biases (H, 2 positions) of distances from -positions on, from those of buckets (buckets, H)."""
    positions = int_attr(node, "positions")
    result: Rows = buckets[distance_buckets(np.arange(-positions, positions), len(buckets))].T
    return result


def _pack_distances(node: Node, buckets: Value) -> PackedPlace:
    constant, shape = constant_of(buckets), (static_dim(buckets, 1), 2 * int_attr(node, "positions"))

    def pack(_: SlabTask) -> NDArray[np.uint8]:
        biases = finite(constant.load(), np.dtype(np.float32)).astype(np.float64)
        return as_bytes(_by_distance(node, biases).astype(np.float32))

    return PackedPlace("+".join(constant.origin), constant.origin, shape, "f32", 4 * shape[0] * shape[1], pack)


_ATTRS = frozenset({"layer", "scale", "storage", "window", "softcap", "sinks"})
ATTENTION = KernelOperator(
    name="attention", inputs=(5, 6), integers=frozenset({3, 4}), attrs=_ATTRS, shapes=_shapes,
    reference=_reference, lower=_lower, packs=packs_elements,
)  # fmt: skip
ROPE_ATTENTION = KernelOperator(
    name="rope_attention", inputs=(6, 7), integers=frozenset({3, 4}), attrs=_ATTRS, fused=True, shapes=_shapes,
    reference=_reference, lower=_lower, packs=packs_elements,
)  # fmt: skip
FULL_ATTENTION = KernelOperator(
    name="full_attention", inputs=(4, 5), integers=frozenset({3}), attrs=frozenset({"scale", "storage", "positions"}),
    shapes=_full_shapes, reference=_full_reference, lower=_full_lower, packs=packs_elements, whole_sequences=True,
)  # fmt: skip
OPERATORS = (ATTENTION, ROPE_ATTENTION, FULL_ATTENTION)
