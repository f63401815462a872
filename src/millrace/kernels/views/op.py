"""Operators that compute nothing: their outputs are views of their input."""

from dataclasses import replace

import numpy as np

from millrace.graph.dims import product
from millrace.graph.shape_rules import illegal
from millrace.graph.types import NUMPY, Attrs, DType, Inputs, Node, Shape
from millrace.kernels.operand_places import ELEMENT_BYTES
from millrace.kernels.operators import EvaluationContext, KernelOperator, ProgramWriter, StoredValue


def _reshape_shapes(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    (x,) = inputs
    shape = attrs["shape"]
    assert isinstance(shape, tuple)
    if product(shape) != x.elements:
        what = f"{list(x.shape)} to {list(shape)}, of {x.elements} and {product(shape)} elements"
        raise illegal("reshape", what, "as many elements")
    return (shape,)


def _reshape_reference(node: Node, values: EvaluationContext) -> StoredValue:
    stored = values.stored_value(node.inputs[0])
    assert isinstance(stored, np.ndarray), f"{node.inputs[0]} is packed"
    return stored.reshape(values.sized(node.output.shape))


def _same_dtype(inputs: Inputs, attrs: Attrs) -> tuple[DType, ...]:
    return (inputs[0].dtype,)


def _reshape_lower(node: Node, writer: ProgramWriter) -> None:
    (x,), y = node.inputs, node.output
    if y.rows == x.rows:
        return writer.share(y, writer.view(x))
    view = writer.dense(x, node)
    of_row = y.run * NUMPY[y.dtype].itemsize
    return writer.share(y, replace(view, rows=writer.extent(y.rows), row_bytes=of_row))


def _split_shapes(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    (x,) = inputs
    widths = attrs["widths"]
    assert isinstance(widths, tuple)
    if len(x.shape) != 2 or sum(widths) != x.width or min(widths) < 1:
        raise illegal("split", f"{list(x.shape)} into columns of {list(widths)}", "widths that add up to a matrix's")
    return tuple((x.shape[0], width) for width in widths)


def _split_reference(node: Node, values: EvaluationContext) -> tuple[StoredValue, ...]:
    ends = np.cumsum([v.width for v in node.outputs])
    return tuple(np.split(values.rows(node.inputs[0]), ends[:-1], axis=1))


def _split_lower(node: Node, writer: ProgramWriter) -> None:
    view = writer.view(node.inputs[0])
    at = view.offset
    for part in node.outputs:
        writer.share(part, replace(view, offset=at))
        at += ELEMENT_BYTES[view.storage.format] * part.width


RESHAPE = KernelOperator(
    name="reshape", inputs=(1, 1), attrs=frozenset({"shape", "storage"}), shapes=_reshape_shapes,
    dtypes=_same_dtype, reference=_reshape_reference, lower=_reshape_lower, is_view=True,
)  # fmt: skip
SPLIT = KernelOperator(
    name="split", inputs=(1, 1), attrs=frozenset({"widths"}), shapes=_split_shapes, reference=_split_reference,
    lower=_split_lower, is_view=True,
)  # fmt: skip
OPERATORS = (RESHAPE, SPLIT)
