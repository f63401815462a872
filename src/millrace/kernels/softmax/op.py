"""The operator softmax, over the last dimension."""

import numpy as np

from millrace.graph.shape_rules import illegal
from millrace.graph.types import Attrs, Inputs, Node, Shape
from millrace.kernels.operators import EvaluationContext, KernelOperator, ProgramWriter, StoredValue


def _shapes(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    (x,) = inputs
    if not x.shape:
        raise illegal("softmax", f"x {x}", "at least one dimension")
    return (x.shape,)


def _reference(node: Node, values: EvaluationContext) -> StoredValue:
    x = values.rows(node.inputs[0])
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return values.stored(weights / weights.sum(axis=-1, keepdims=True), node)


def _lower(node: Node, writer: ProgramWriter) -> None:
    (x,) = node.inputs
    params = {"n": writer.extent(x.shape[-1]), "elements": writer.extent(x.elements)}
    writer.add("softmax", {"x": writer.dense(x, node), "y": writer.new(node.output, "softmax")}, params, node)


SOFTMAX = KernelOperator(name="softmax", inputs=(1, 1), shapes=_shapes, reference=_reference, lower=_lower)
OPERATORS = (SOFTMAX,)
