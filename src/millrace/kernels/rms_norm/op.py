"""The operator rms_norm."""

from millrace.graph.shape_rules import illegal
from millrace.graph.types import Attrs, Inputs, Node, Shape
from millrace.kernels.convert.op import packing_params, packs_rows
from millrace.kernels.operators import (
    EvaluationContext,
    KernelOperator,
    ProgramWriter,
    StoredValue,
    float_attr,
    static_dim,
)
from millrace.kernels.rms_norm.ref import rms_norm
from millrace.kernels.row_storage import storage_of


def _shapes(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    x, w = inputs
    if w.shape != x.shape[-1:]:
        raise illegal(
            "rms_norm", f"x {list(x.shape)} and weight {list(w.shape)}", "a weight as long as x's last dimension"
        )
    return (x.shape,)


def _reference(node: Node, values: EvaluationContext) -> StoredValue:
    x, w = (values.rows(v) for v in node.inputs)
    return values.stored(rms_norm(x, w, float_attr(node, "eps")), node)


def _lower(node: Node, writer: ProgramWriter) -> None:
    x, w = node.inputs
    n, view = static_dim(x, -1), writer.view(x)
    y = writer.new(node.output, node.origin[0], storage_of(node))
    params = {**packing_params(view, y, n), "runs": x.width // n, "eps": float_attr(node, "eps")}
    writer.add("rms_norm", {"x": view, "w": writer.vector(w), "y": y}, params, node, str(y.storage))


RMS_NORM = KernelOperator(
    name="rms_norm", inputs=(2, 2), attrs=frozenset({"eps", "storage"}), shapes=_shapes, reference=_reference,
    lower=_lower, packs=packs_rows, row_wise=True,
)  # fmt: skip
OPERATORS = (RMS_NORM,)
