"""The operators that compute nothing: their outputs are other views of what their input wrote."""

from dataclasses import replace

import numpy as np

from millrace.graph.rules import illegal
from millrace.graph.types import Attrs, Inputs, Node, Shape, Value
from millrace.kernels.operators import Held, Runnable, Values, Writer, size
from millrace.kernels.places import ELEMENT_BYTES


def _reshape_shapes(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    (x,) = inputs
    shape = attrs["shape"]
    assert isinstance(shape, tuple)
    if Value(shape).width != x.width or shape[0] != x.shape[0]:
        raise illegal("reshape", f"{list(x.shape)} to {list(shape)}", "the same first dimension and as many elements")
    return (shape,)


def _reshape_reference(node: Node, values: Values) -> Held:
    sizes = [size(node.output, axis) for axis in range(1, len(node.output.shape))]
    return values.rows(node.inputs[0]).reshape(-1, *sizes)


def _reshape_lower(node: Node, writer: Writer) -> None:
    writer.share(node.output, writer.view(node.inputs[0]))


def _split_shapes(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    (x,) = inputs
    widths = attrs["widths"]
    assert isinstance(widths, tuple)
    if len(x.shape) != 2 or sum(widths) != x.width or min(widths) < 1:
        raise illegal("split", f"{list(x.shape)} into columns of {list(widths)}", "widths that add up to a matrix's")
    return tuple((x.shape[0], width) for width in widths)


def _split_reference(node: Node, values: Values) -> tuple[Held, ...]:
    ends = np.cumsum([v.width for v in node.outputs])
    return tuple(np.split(values.rows(node.inputs[0]), ends[:-1], axis=1))


def _split_lower(node: Node, writer: Writer) -> None:
    view = writer.view(node.inputs[0])
    at = view.offset
    for part in node.outputs:
        writer.share(part, replace(view, offset=at))
        at += ELEMENT_BYTES[view.storage.format] * part.width


RESHAPE = Runnable(
    name="reshape", inputs=(1, 1), attrs=frozenset({"shape", "storage"}), shapes=_reshape_shapes,
    reference=_reshape_reference, lower=_reshape_lower, is_view=True,
)  # fmt: skip
SPLIT = Runnable(
    name="split", inputs=(1, 1), attrs=frozenset({"widths"}), shapes=_split_shapes, reference=_split_reference,
    lower=_split_lower, is_view=True,
)  # fmt: skip
OPERATORS = (RESHAPE, SPLIT)
