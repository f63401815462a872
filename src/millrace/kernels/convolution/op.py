"""The operator convolution, in two dimensions, with stride, padding, dilation and groups."""

from typing import cast

import numpy as np
from numpy.typing import NDArray

from millrace.graph.dims import window_count
from millrace.graph.shape_rules import illegal
from millrace.graph.types import Attrs, Inputs, Node, Shape, Value
from millrace.kernels.convolution.ref import convolution
from millrace.kernels.layout import up
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

LANES = 16
_F32 = np.dtype(np.float32)
Pair = tuple[int, int]


def pair(attrs: Attrs, name: str) -> Pair:
    """Return an attribute of height and width."""
    return cast(Pair, attrs[name])


def window_counts(op: str, planes: Value, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair = (1, 1)) -> Shape:
    """Return the number of windows along height and width, the last two dimensions. raises GraphError if none fits"""
    result = tuple(window_count(planes.shape[2 + i], kernel[i], stride[i], padding[i], dilation[i]) for i in range(2))
    if any(isinstance(n, int) and n < 1 for n in result):
        what = f"a kernel of {list(kernel)} on planes of {list(planes.shape[2:])}"
        raise illegal(op, what, "a kernel that fits into the padded input")
    return result


def _shapes(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    x, weight = inputs[:2]
    groups = cast(int, attrs["groups"])
    if len(x.shape) != 4 or weight.constant is None or len(weight.shape) != 4:
        raise illegal(
            "convolution", f"x {x} and weight {weight}", "x [N, C, H, W] and a constant [O, C / groups, kh, kw]"
        )
    outputs, channels = static_dim(weight, 0), static_dim(x, 1)
    if groups < 1 or channels != static_dim(weight, 1) * groups or outputs % groups:
        what = f"{channels} channels, weight {list(weight.shape)}, {groups} groups"
        raise illegal("convolution", what, "channels of weight times groups, and outputs that are a multiple of groups")
    if len(inputs) > 2 and inputs[2].shape != (outputs,):
        raise illegal("convolution", f"bias {inputs[2]}", f"[{outputs}]")
    stride, padding, dilation = (pair(attrs, name) for name in ("stride", "padding", "dilation"))
    if min(*stride, *dilation) < 1 or min(padding) < 0:
        raise illegal("convolution", f"stride {stride}, padding {padding}, dilation {dilation}", "1, 0 and 1 at least")
    result = window_counts("convolution", x, (static_dim(weight, 2), static_dim(weight, 3)), stride, padding, dilation)
    return ((x.shape[0], outputs, *result),)


def _reference(node: Node, values: EvaluationContext) -> StoredValue:
    x, weight = node.inputs[:2]
    bias = values.rows(node.inputs[2]) if len(node.inputs) > 2 else None
    stride, padding, dilation = (pair(node.attrs, name) for name in ("stride", "padding", "dilation"))
    y = convolution(values.rows(x), values.rows(weight), bias, stride, padding, dilation, int_attr(node, "groups"))
    return values.stored(y, node)


def _lower(node: Node, writer: ProgramWriter) -> None:
    x, weight = node.inputs[:2]
    groups = int_attr(node, "groups")
    params = {
        "images": writer.extent(x.shape[0]), **plane_sizes(x, node.output, writer), "groups": groups,
        "c": static_dim(weight, 1), "n": static_dim(weight, 0) // groups,
        "kh": static_dim(weight, 2), "kw": static_dim(weight, 3),
    }  # fmt: skip
    for name, short in (("stride", "stride"), ("padding", "pad"), ("dilation", "dilation")):
        params[f"{short}_y"], params[f"{short}_x"] = pair(node.attrs, name)
    constants = (weight, node.inputs[2]) if len(node.inputs) > 2 else (weight,)
    operands: Operands = {
        "x": writer.dense(x, node), "k": writer.constant((weight,), f"taps of {groups}", lambda: _taps(weight, groups)),
        "bias": writer.constant(constants, f"bias of {groups}", lambda: _bias(constants, groups)),
        "y": writer.new(node.output, node.origin[0]),
    }  # fmt: skip
    writer.add("convolution", operands, params, node, f"{params['kh']} x {params['kw']}")


def plane_sizes(x: Value, y: Value, writer: ProgramWriter) -> dict[str, int]:
    """Return the sizes that kernels of planes take."""
    dims = {"h": x.shape[2], "w": x.shape[3], "oh": y.shape[2], "ow": y.shape[3]}
    dims |= {"x_elements": x.elements, "y_elements": y.elements}
    return {name: writer.extent(d) for name, d in dims.items()}


def _taps(weight: Value, groups: int) -> PackedPlace:
    """Pack [O, channels, kh, kw] as (groups, outputs / 16, channels, kh, kw, 16), outputs of a group padded to 16."""
    constant, (outputs, *taps) = constant_of(weight), (static_dim(weight, i) for i in range(4))
    each = outputs // groups
    blocks = up(each, LANES) // LANES
    shape = (groups, blocks, *taps, LANES)

    def pack(_: SlabTask) -> NDArray[np.uint8]:
        result = np.zeros((groups, blocks * LANES, *taps), _F32)
        result[:, :each] = finite(constant.load(), _F32).reshape(groups, each, *taps)
        return as_bytes(np.moveaxis(result.reshape(groups, blocks, LANES, *taps), 2, -1))

    return PackedPlace("+".join(constant.origin), constant.origin, shape, "f32", int(np.prod(shape)) * 4, pack)


def _bias(constants: tuple[Value, ...], groups: int) -> PackedPlace:
    """Pack the bias (groups, outputs padded to 16); zeros if there is none."""
    outputs, origin = static_dim(constants[0], 0), constant_of(constants[-1]).origin
    each = outputs // groups
    shape = (groups, up(each, LANES))

    def pack(_: SlabTask) -> NDArray[np.uint8]:
        result = np.zeros(shape, _F32)
        if len(constants) > 1:
            result[:, :each] = finite(constant_of(constants[1]).load(), _F32).reshape(groups, each)
        return as_bytes(result)

    return PackedPlace("+".join(origin) + " bias", origin, shape, "f32", shape[0] * shape[1] * 4, pack)


CONVOLUTION = KernelOperator(
    name="convolution", inputs=(2, 3), attrs=frozenset({"stride", "padding", "dilation", "groups"}), shapes=_shapes,
    reference=_reference, lower=_lower,
)  # fmt: skip
OPERATORS = (CONVOLUTION,)
