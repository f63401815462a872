"""The operator combine_experts: the weighted sum of what a row's experts give."""

from millrace.graph.shape_rules import illegal
from millrace.graph.types import Attrs, Inputs, Node, Shape
from millrace.kernels.combine_experts.ref import combine_experts
from millrace.kernels.operators import EvaluationContext, KernelOperator, ProgramWriter, StoredValue, static_dim


def _shapes(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    x, places, weights = inputs
    if len(x.shape) != 2 or len(places.shape) != 2 or places.shape != weights.shape:
        expected = "x [pairs, width], places and weights [rows, experts of a row]"
        raise illegal("combine_experts", f"x {x}, places {places}, weights {weights}", expected)
    return ((places.shape[0], x.shape[1]),)


def _reference(node: Node, values: EvaluationContext) -> StoredValue:
    x, places, weights = node.inputs
    return values.stored(combine_experts(values.rows(x), values.numbers(places), values.rows(weights)), node)


def _lower(node: Node, writer: ProgramWriter) -> None:
    x, places, weights = (writer.view(v) for v in node.inputs)
    params = {
        "rows": places.rows, "rows_from": x.rows, "n": node.output.width, "x_stride": x.row_floats,
        "chosen": static_dim(node.inputs[1], 1),
    }  # fmt: skip
    y = writer.new(node.output, "sums of experts")
    writer.add("combine_experts", {"x": x, "places": places, "weights": weights, "y": y}, params, node)


COMBINE_EXPERTS = KernelOperator(
    name="combine_experts", inputs=(3, 3), integers=frozenset({1}), shapes=_shapes, reference=_reference, lower=_lower
)
OPERATORS = (COMBINE_EXPERTS,)
