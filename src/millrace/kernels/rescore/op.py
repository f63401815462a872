"""The operator rescore: compute the `count` largest logits again as x @ w.T in another precision."""

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.weights.quantized_matrix import QuantisedMatrix
from millrace.graph.shape_rules import illegal
from millrace.graph.types import Attrs, Constant, Inputs, Node, Shape, Value
from millrace.kernels.convert.ref import Quantised
from millrace.kernels.layout import byte_row_bytes
from millrace.kernels.matmul.op import precision_of
from millrace.kernels.matmul.pack import SlabTask, rounded_codes
from millrace.kernels.operand_places import Operands, PackedPlace, constant_of
from millrace.kernels.operators import (
    EvaluationContext,
    KernelOperator,
    Params,
    ProgramWriter,
    StoredValue,
    int_attr,
    static_dim,
)
from millrace.kernels.precision import HADAMARD
from millrace.kernels.rescore.pack import pack_byte_rows
from millrace.kernels.rescore.ref import rescore


def _shapes(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    logits, x, w = inputs
    if logits.shape != (x.shape[0], w.shape[0]) or x.shape[1:] != w.shape[1:]:
        raise illegal("rescore", f"logits {logits}, x {x}, w {w}", "logits [R, N], x [R, K] and w [N, K]")
    return (logits.shape,)


def _reference(node: Node, values: EvaluationContext) -> StoredValue:
    logits, x, w = node.inputs
    packed = values.stored_value(x)
    assert isinstance(packed, Quantised), x
    codes = _byte_codes(constant_of(w), packed.hadamard_group)
    return values.stored(rescore(values.rows(logits), packed, codes, int_attr(node, "count")), node)


def _byte_codes(constant: Constant, group: int) -> QuantisedMatrix:
    """Quantize for rows transformed in these groups: a head that keeps its codes is not computed in two steps."""
    assert group, "rows that are not transformed"
    return rounded_codes(constant.load().astype(np.float32), 8, group, group)


def _pack(w: Value, group: int, name: str) -> PackedPlace:
    """Pack a matrix of 8-bit codes, output by output."""
    constant, n, k = constant_of(w), static_dim(w, 0), static_dim(w, 1)

    def pack(_: SlabTask) -> NDArray[np.uint8]:
        return pack_byte_rows(_byte_codes(constant, group))

    return PackedPlace("+".join(constant.origin), constant.origin, (n, k), name, n * byte_row_bytes(k, group), pack)


def _lower(node: Node, writer: ProgramWriter) -> None:
    logits, x, w = node.inputs
    view, y, count, width = writer.view(x), writer.view(logits), int_attr(node, "count"), node.output.width
    group = view.storage.hadamard_group
    name = f"w8g{group} {HADAMARD} by output"
    place = writer.constant((w,), name, lambda: _pack(w, group, name))
    params: Params = {
        "rows": view.rows, "n": width, "k": x.width, "group": group, "x_stride": view.row_bytes,
        "count": min(count, width),
    }  # fmt: skip
    operands: Operands = {"x": view, "w": place, "y": y}
    writer.add("rescore", operands, params, node, f"the best {count} in {precision_of(node)}")
    writer.share(node.output, y)


RESCORE = KernelOperator(
    name="rescore", inputs=(3, 3), attrs=frozenset({"precision", "count"}), fused=True, shapes=_shapes,
    reference=_reference, lower=_lower,
)  # fmt: skip
OPERATORS = (RESCORE,)
