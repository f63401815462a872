"""The operator batch_norm: each channel scaled and shifted by constants."""

import numpy as np
from numpy.typing import NDArray

from millrace.graph.dims import product
from millrace.graph.shape_rules import illegal
from millrace.graph.types import Attrs, Inputs, Node, Shape
from millrace.kernels.channel_affine.ref import scale_and_shift
from millrace.kernels.matmul.pack import SlabTask, finite
from millrace.kernels.operand_places import Operands, PackedPlace, as_bytes, constant_of
from millrace.kernels.operators import (
    EvaluationContext,
    KernelOperator,
    ProgramWriter,
    StoredValue,
    float_attr,
    static_dim,
)

_F32 = np.dtype(np.float32)


def _shapes(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    x, *constants = inputs
    if len(x.shape) < 2 or any(c.constant is None or c.shape != x.shape[1:2] for c in constants):
        what = f"x {x} and {', '.join(map(str, constants))}"
        raise illegal("batch_norm", what, "x [N, C, ...] and constants [C]: weight, bias, mean and variance")
    return (x.shape,)


def _reference(node: Node, values: EvaluationContext) -> StoredValue:
    x, channels = values.rows(node.inputs[0]), static_dim(node.inputs[0], 1)
    weight, bias, mean, variance = (values.rows(v) for v in node.inputs[1:])
    scale, shift = scale_and_shift(weight, bias, mean, variance, float_attr(node, "eps"))
    planes = x.reshape(len(x), channels, -1)
    return values.stored((planes * scale[:, None] + shift[:, None]).reshape(x.shape), node)


def _lower(node: Node, writer: ProgramWriter) -> None:
    x, *constants = node.inputs
    eps, channels = float_attr(node, "eps"), static_dim(x, 1)

    def packed(which: int, name: str) -> PackedPlace:
        origin = tuple(name for c in constants for name in constant_of(c).origin)

        def pack(_: SlabTask) -> NDArray[np.uint8]:
            weight, bias, mean, variance = (constant_of(c).load().astype(np.float64) for c in constants)
            result = scale_and_shift(weight, bias, mean, variance, eps)[which]
            return as_bytes(finite(result, _F32))

        return PackedPlace(f"{'+'.join(origin)} {name}", origin, (channels,), "f32", channels * 4, pack)

    operands: Operands = {
        "x": writer.dense(x, node),
        "scale": writer.constant(tuple(constants), f"scale, eps {eps}", lambda: packed(0, "scale")),
        "shift": writer.constant(tuple(constants), f"shift, eps {eps}", lambda: packed(1, "shift")),
        "y": writer.new(node.output, node.origin[0]),
    }  # fmt: skip
    params = {
        "c": channels, "plane": writer.extent(product(x.shape[2:])), "elements": writer.extent(x.elements),
    }  # fmt: skip
    writer.add("channel_affine", operands, params, node, "batch norm")


BATCH_NORM = KernelOperator(
    name="batch_norm", inputs=(5, 5), attrs=frozenset({"eps"}), shapes=_shapes, reference=_reference, lower=_lower
)
OPERATORS = (BATCH_NORM,)
