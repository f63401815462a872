"""The operator short_conv: a causal depthwise convolution over few tokens; each sequence has a state."""

import numpy as np
from numpy.typing import NDArray

from millrace.errors import GraphError
from millrace.graph.shape_rules import illegal
from millrace.graph.types import Attrs, DType, Inputs, Node, Shape, Value, find
from millrace.kernels.matmul.pack import SlabTask, finite
from millrace.kernels.operand_places import Operands, PackedPlace, as_bytes, constant_of
from millrace.kernels.operators import (
    EvaluationContext,
    KernelOperator,
    ProgramWriter,
    StoredValue,
    int_attr,
    static_dim,
)
from millrace.kernels.short_conv.declare import MAX_TAPS
from millrace.kernels.short_conv.ref import short_conv


def _shapes(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    x, weight, positions, lengths = inputs[:4]
    if len(x.shape) != 2 or weight.constant is None or len(weight.shape) != 3 or weight.shape[:2] != (x.width, 1):
        raise illegal("short_conv", f"x {x} and weight {weight}", "x [T, N] and a constant [N, 1, taps]")
    if not 2 <= static_dim(weight, 2) <= MAX_TAPS:
        raise illegal("short_conv", f"a convolution over {weight.shape[2]} tokens", f"2 to {MAX_TAPS}")
    if len(inputs) > 4 and inputs[4].shape != (x.width,):
        raise illegal("short_conv", f"bias {inputs[4]}", f"[{x.width}]")
    if lengths.dtype != DType.I32 or len(lengths.shape) != 1:
        raise illegal("short_conv", f"lengths {lengths}", "i32 [S], the tokens of each sequence")
    if positions.dtype != DType.I32 or positions.shape != x.shape[:1]:
        raise illegal("short_conv", f"positions {positions}", f"i32 [{x.shape[0]}]")
    return (x.shape,)


def _reference(node: Node, values: EvaluationContext) -> StoredValue:
    x, weight, positions, lengths = node.inputs[:4]
    taps, rows = static_dim(weight, 2), values.rows(x)
    w = values.rows(weight)[:, 0]
    bias = values.rows(node.inputs[4]) if len(node.inputs) > 4 else None
    y, at, places = np.zeros(rows.shape), 0, values.cache_positions(positions)
    for sequence, length in enumerate(values.numbers(lengths)):
        part = slice(at, at := at + int(length))
        past = values.past_rows(int_attr(node, "layer"), sequence, int(places[part][0]), rows[part], taps - 1)
        y[part] = short_conv(np.concatenate([past, rows[part]]), w, bias)
    return values.stored(y, node)


def _lower(node: Node, writer: ProgramWriter) -> None:
    x, weight, positions, lengths = node.inputs[:4]
    if find(writer.graph.inputs, "positions") is not positions or find(writer.graph.inputs, "lengths") is not lengths:
        raise GraphError(
            "a short convolution over other positions or lengths than the step's",
            'the inputs "positions" and "lengths"', "name the inputs so, and pass them on as they are",
        )  # fmt: skip
    view, taps, n = writer.view(x), static_dim(weight, 2), x.width
    state = writer.state((taps - 1) * n)
    params = {"rows": view.rows, "n": n, "x_stride": view.row_floats, "taps": taps}
    operands: Operands = {
        "x": view, "w": writer.constant((weight,), "taps", lambda: _taps(weight)),
        "bias": writer.vector(node.inputs[4]) if len(node.inputs) > 4 else None,
        "y": writer.new(node.output, "convolved"),
    }  # fmt: skip
    writer.add("short_conv", operands, params, node, f"over {taps} tokens", state=state)


def _taps(weight: Value) -> PackedPlace:
    """Pack [N, 1, taps] as (taps, N) float32."""
    constant, shape = constant_of(weight), (static_dim(weight, 2), static_dim(weight, 0))

    def pack(_: SlabTask) -> NDArray[np.uint8]:
        return as_bytes(finite(constant.load(), np.dtype(np.float32))[:, 0].T)

    return PackedPlace("+".join(constant.origin), constant.origin, shape, "f32", shape[0] * shape[1] * 4, pack)


SHORT_CONV = KernelOperator(
    name="short_conv", inputs=(4, 5), integers=frozenset({2, 3}), attrs=frozenset({"layer"}), shapes=_shapes,
    reference=_reference, lower=_lower,
)  # fmt: skip
OPERATORS = (SHORT_CONV,)
