"""The operator group_by_expert: sorts the pairs of a row and one of its experts by experts."""

from millrace.graph.dims import product
from millrace.graph.shape_rules import illegal
from millrace.graph.types import Attrs, DType, Inputs, Node, Shape
from millrace.kernels.group_by_expert.ref import group_by_expert
from millrace.kernels.operators import (
    EvaluationContext,
    KernelOperator,
    ProgramWriter,
    StoredValue,
    int_attr,
    static_dim,
)


def _shapes(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    (experts,) = inputs
    n = attrs.get("experts")
    if len(experts.shape) != 2 or not isinstance(experts.shape[1], int) or not isinstance(n, int) or n < 1:
        raise illegal("group_by_expert", f"{experts} of {n} experts", "i32 [rows, experts of a row]")
    return (product(experts.shape),), experts.shape, (n + 1,)


def _dtypes(inputs: Inputs, attrs: Attrs) -> tuple[DType, ...]:
    if inputs[0].dtype != DType.I32:
        raise illegal("group_by_expert", f"{inputs[0]}", "i32 numbers of experts")
    return DType.I32, DType.I32, DType.I32


def _reference(node: Node, values: EvaluationContext) -> tuple[StoredValue, ...]:
    return group_by_expert(values.numbers(node.inputs[0]), int_attr(node, "experts"))


def _lower(node: Node, writer: ProgramWriter) -> None:
    experts, chosen = writer.view(node.inputs[0]), static_dim(node.inputs[0], 1)
    row_of, places, starts = node.outputs
    operands = {
        "experts": experts, "row_of": writer.new(row_of, "rows of experts"),
        "places": writer.new(places, "places among them"), "starts": writer.new(starts, "first rows of experts"),
    }  # fmt: skip
    params = {"rows": experts.rows, "chosen": chosen, "n": int_attr(node, "experts")}
    writer.add("group_by_expert", operands, params, node)


GROUP_BY_EXPERT = KernelOperator(
    name="group_by_expert", inputs=(1, 1), attrs=frozenset({"experts"}), shapes=_shapes, dtypes=_dtypes,
    reference=_reference, lower=_lower,
)  # fmt: skip
OPERATORS = (GROUP_BY_EXPERT,)
