"""The operator mean_rows."""

from millrace.graph.shape_rules import rows_of_matrix
from millrace.graph.types import Attrs, Inputs, Node, Shape
from millrace.kernels.mean_rows.ref import mean_rows
from millrace.kernels.operators import EvaluationContext, KernelOperator, ProgramWriter, StoredValue


def _shapes(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    return rows_of_matrix("mean_rows", inputs, "lengths")


def _reference(node: Node, values: EvaluationContext) -> StoredValue:
    x, lengths = node.inputs
    return values.stored(mean_rows(values.rows(x), values.numbers(lengths)), node)


def _lower(node: Node, writer: ProgramWriter) -> None:
    x, lengths = (writer.view(v) for v in node.inputs)
    params = {"rows": lengths.rows, "rows_from": x.rows, "n": node.output.width, "x_stride": x.row_floats}
    y = writer.new(node.output, "means")
    writer.add("mean_rows", {"x": x, "lengths": lengths, "y": y}, params, node)


MEAN_ROWS = KernelOperator(
    name="mean_rows", inputs=(2, 2), integers=frozenset({1}), shapes=_shapes, reference=_reference, lower=_lower
)
OPERATORS = (MEAN_ROWS,)
