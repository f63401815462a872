"""The operator layer_norm."""

from millrace.graph.shape_rules import illegal
from millrace.graph.types import Attrs, Inputs, Node, Shape
from millrace.kernels.convert.op import packing_params, packs_rows
from millrace.kernels.layer_norm.ref import layer_norm
from millrace.kernels.operand_places import Operands
from millrace.kernels.operators import EvaluationContext, KernelOperator, ProgramWriter, StoredValue, float_attr
from millrace.kernels.row_storage import storage_of


def _shapes(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    x, w, b = inputs
    if len(x.shape) != 2 or not w.shape == b.shape == x.shape[1:]:
        raise illegal(
            "layer_norm", f"x {list(x.shape)}, weight {list(w.shape)}, bias {list(b.shape)}",
            "x [rows, N], weight [N] and bias [N]",
        )  # fmt: skip
    return (x.shape,)


def _reference(node: Node, values: EvaluationContext) -> StoredValue:
    x, w, b = (values.rows(v) for v in node.inputs)
    return values.stored(layer_norm(x, w, b, float_attr(node, "eps")), node)


def _lower(node: Node, writer: ProgramWriter) -> None:
    x, w, b = node.inputs
    view = writer.view(x)
    y = writer.new(node.output, node.origin[0], storage_of(node))
    operands: Operands = {"x": view, "w": writer.vector(w), "b": writer.vector(b), "y": y}
    params = {**packing_params(view, y, x.width), "eps": float_attr(node, "eps")}
    writer.add("layer_norm", operands, params, node, str(y.storage))


LAYER_NORM = KernelOperator(
    name="layer_norm", inputs=(3, 3), attrs=frozenset({"eps", "storage"}), shapes=_shapes, reference=_reference,
    lower=_lower, packs=packs_rows, row_wise=True,
)  # fmt: skip
OPERATORS = (LAYER_NORM,)
