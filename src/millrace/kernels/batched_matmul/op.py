"""The operator batched_matmul: products of two computed matrices."""

from millrace.graph.shape_rules import illegal
from millrace.graph.types import Attrs, Inputs, Node, Shape
from millrace.kernels.operators import EvaluationContext, KernelOperator, ProgramWriter, StoredValue


def _shapes(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    x, w = inputs
    ranked = len(x.shape) >= 2 and len(w.shape) >= 2 and (w.shape[:-2] == x.shape[:-2] or len(w.shape) == 2)
    if not ranked or x.shape[-1] != w.shape[-2] or w.constant or x.constant:
        expected = "x [..., M, K] and w [..., K, N] of as many matrices, or of one; neither is a constant"
        raise illegal("batched_matmul", f"x {x} and w {w}", expected)
    return ((*x.shape[:-1], w.shape[-1]),)


def _reference(node: Node, values: EvaluationContext) -> StoredValue:
    x, w = (values.rows(v) for v in node.inputs)
    return values.stored(x @ w, node)


def _lower(node: Node, writer: ProgramWriter) -> None:
    (x, w), y = node.inputs, node.output
    sizes = {"m": y.shape[-2], "k": x.shape[-1], "n": y.shape[-1]}
    sizes |= {"x_elements": x.elements, "w_elements": w.elements, "elements": y.elements}
    operands = {"x": writer.dense(x, node), "w": writer.dense(w, node), "y": writer.new(y, "products")}
    writer.add("batched_matmul", operands, {name: writer.extent(d) for name, d in sizes.items()}, node)


BATCHED_MATMUL = KernelOperator(
    name="batched_matmul", inputs=(2, 2), shapes=_shapes, reference=_reference, lower=_lower
)
OPERATORS = (BATCHED_MATMUL,)
