"""The operator normalise."""

from millrace.graph.shape_rules import same_shape
from millrace.graph.types import Node
from millrace.kernels.normalise.ref import normalise
from millrace.kernels.operators import EvaluationContext, KernelOperator, ProgramWriter, StoredValue, float_attr


def _reference(node: Node, values: EvaluationContext) -> StoredValue:
    return values.stored(normalise(values.rows(node.inputs[0]), float_attr(node, "eps")), node)


def _lower(node: Node, writer: ProgramWriter) -> None:
    x = writer.view(node.inputs[0])
    params = {"rows": x.rows, "n": node.output.width, "x_stride": x.row_floats, "eps": float_attr(node, "eps")}
    writer.add("normalise", {"x": x, "y": writer.new(node.output, node.origin[0])}, params, node)


NORMALISE = KernelOperator(
    name="normalise", inputs=(1, 1), attrs=frozenset({"eps"}), shapes=same_shape, reference=_reference, lower=_lower,
    row_wise=True,
)  # fmt: skip
OPERATORS = (NORMALISE,)
