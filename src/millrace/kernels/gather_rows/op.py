"""The operator gather_rows."""

from millrace.graph.shape_rules import rows_of_matrix
from millrace.graph.types import Attrs, Inputs, Node, Shape
from millrace.kernels.operators import EvaluationContext, KernelOperator, ProgramWriter, StoredValue


def _shapes(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    return rows_of_matrix("gather_rows", inputs, "rows")


def _reference(node: Node, values: EvaluationContext) -> StoredValue:
    return values.rows(node.inputs[0])[values.numbers(node.inputs[1])]


def _lower(node: Node, writer: ProgramWriter) -> None:
    x, index = (writer.view(v) for v in node.inputs)
    params = {"rows": index.rows, "rows_from": x.rows, "n": node.output.width, "x_stride": x.row_floats}
    y = writer.new(node.output, "gathered rows")
    writer.add("gather_rows", {"x": x, "index": index, "y": y}, params, node)


GATHER_ROWS = KernelOperator(
    name="gather_rows", inputs=(2, 2), integers=frozenset({1}), shapes=_shapes, reference=_reference, lower=_lower
)
OPERATORS = (GATHER_ROWS,)
