"""The operator transpose: reorder a value's dimensions."""

from typing import cast

import numpy as np

from millrace.graph.shape_rules import illegal
from millrace.graph.types import Attrs, DType, Inputs, Node, Shape
from millrace.kernels.broadcast.op import check_rank
from millrace.kernels.layout import TYPES
from millrace.kernels.operand_places import Operands
from millrace.kernels.operators import EvaluationContext, KernelOperator, Params, ProgramWriter, StoredValue


def _order(attrs: Attrs) -> tuple[int, ...]:
    return cast(tuple[int, ...], attrs["order"])


def _shapes(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    (x,), order = inputs, attrs["order"]
    if not isinstance(order, tuple) or sorted(map(str, order)) != sorted(map(str, range(len(x.shape)))):
        raise illegal("transpose", f"{x} in the order {order!r:.80}", f"each of 0 to {len(x.shape) - 1} once")
    check_rank("transpose", x)
    return (tuple(x.shape[axis] for axis in order),)


def _dtypes(inputs: Inputs, attrs: Attrs) -> tuple[DType, ...]:
    return (inputs[0].dtype,)


def _reference(node: Node, values: EvaluationContext) -> StoredValue:
    stored = values.stored_value(node.inputs[0])
    assert isinstance(stored, np.ndarray), f"{node.inputs[0]} is packed"
    return stored.transpose(_order(node.attrs))


def _lower(node: Node, writer: ProgramWriter) -> None:
    (x,), order = node.inputs, _order(node.attrs)
    if not order:
        return writer.share(node.output, writer.view(x))
    params: Params = {
        "extents": [writer.extent(d) for d in x.shape], "order": list(order), "rank": len(order),
        "elements": writer.extent(x.elements), "type": TYPES.index(x.dtype),
    }  # fmt: skip
    operands: Operands = {"x": writer.dense(x, node), "y": writer.new(node.output, "transposed")}
    return writer.add("transpose", operands, params, node, ", ".join(map(str, order)))


TRANSPOSE = KernelOperator(
    name="transpose", inputs=(1, 1), attrs=frozenset({"order"}), shapes=_shapes, dtypes=_dtypes, reference=_reference,
    lower=_lower,
)  # fmt: skip
OPERATORS = (TRANSPOSE,)
