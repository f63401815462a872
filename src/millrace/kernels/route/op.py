"""The operator route: chooses the experts of each row."""

from dataclasses import fields
from typing import Any

from millrace.checkpoint.config.routing import Routing
from millrace.graph.shape_rules import illegal
from millrace.graph.types import Attrs, DType, Inputs, Node, Shape
from millrace.kernels.declare import MAX_EXPERTS
from millrace.kernels.operand_places import Operands
from millrace.kernels.operators import EvaluationContext, KernelOperator, ProgramWriter, StoredValue, static_dim
from millrace.kernels.route.declare import MAX_CHOSEN, SCORINGS
from millrace.kernels.route.ref import route


def _routing(attrs: Attrs) -> Routing:
    values: dict[str, Any] = {name: value for name, value in attrs.items() if name in _ATTRS}
    return Routing(**values)


def _shapes(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    x, routing = inputs[0], _routing(attrs)
    if len(x.shape) != 2 or not isinstance(n := x.shape[1], int) or n > MAX_EXPERTS:
        raise illegal("route", f"logits {x}", f"[rows, experts], {MAX_EXPERTS} experts at most")
    if len(inputs) > 1 and (inputs[1].shape != (n,) or inputs[1].constant is None):
        raise illegal("route", f"bias {inputs[1]}", f"a constant [{n}]")
    groups, per_group = routing.groups, n // max(routing.groups, 1)
    if groups < 1 or n % groups or not 1 <= routing.chosen_groups <= groups or not 1 <= routing.group_best <= per_group:
        raise illegal("route", f"{n} experts in {groups} groups, {routing.chosen_groups} of them", "groups of one size")
    if not 1 <= routing.chosen <= min(MAX_CHOSEN, routing.chosen_groups * per_group):
        raise illegal("route", f"{routing.chosen} of {n} experts", f"1 to {MAX_CHOSEN}, in the groups that are open")
    if routing.scoring not in SCORINGS:
        raise illegal("route", f'scoring "{routing.scoring}"', f"one of {', '.join(SCORINGS)}")
    shape = (x.shape[0], routing.chosen)
    return shape, shape


def _dtypes(inputs: Inputs, attrs: Attrs) -> tuple[DType, ...]:
    for value in inputs:
        if value.dtype != DType.F32:
            raise illegal("route", f"an input {value}", "floats")
    return DType.F32, DType.I32


def _reference(node: Node, values: EvaluationContext) -> tuple[StoredValue, ...]:
    bias = values.rows(node.inputs[1]) if len(node.inputs) > 1 else None
    weights, experts = route(values.rows(node.inputs[0]), bias, _routing(node.attrs))
    return values.stored(weights, node), experts


def _lower(node: Node, writer: ProgramWriter) -> None:
    view, routing = writer.view(node.inputs[0]), _routing(node.attrs)
    params = {
        "rows": view.rows, "n": static_dim(node.inputs[0], 1), "x_stride": view.row_floats, "chosen": routing.chosen,
        "scoring": SCORINGS.index(routing.scoring), "normalise": int(routing.normalise), "groups": routing.groups,
        "chosen_groups": routing.chosen_groups, "group_best": routing.group_best, "scale": routing.scale,
        "epsilon": routing.epsilon,
    }  # fmt: skip
    weights, experts = node.outputs
    operands: Operands = {
        "x": view, "bias": writer.vector(node.inputs[1]) if len(node.inputs) > 1 else None,
        "weights": writer.new(weights, "weights of experts"), "experts": writer.new(experts, "experts"),
    }  # fmt: skip
    writer.add("route", operands, params, node, f"{routing.chosen} of {params['n']}, {routing.scoring}")


_ATTRS = frozenset(field.name for field in fields(Routing))
ROUTE = KernelOperator(
    name="route", inputs=(1, 2), attrs=_ATTRS, shapes=_shapes, dtypes=_dtypes, reference=_reference, lower=_lower
)
OPERATORS = (ROUTE,)
