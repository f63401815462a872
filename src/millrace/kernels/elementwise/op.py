"""The operator elementwise: an expression of up to four values, element by element, broadcast as in NumPy."""

import numpy as np

from millrace.graph.dims import product
from millrace.graph.expression_types import is_integer, type_of
from millrace.graph.expressions import as_tree, evaluate
from millrace.graph.shape_rules import broadcast_shape, check_tree
from millrace.graph.types import Attrs, DType, Inputs, Node, Shape
from millrace.kernels.broadcast.op import lower_broadcast
from millrace.kernels.declare import MAX_INPUTS
from millrace.kernels.expression import compile_tree, needs_broadcast
from millrace.kernels.operand_places import OperandPlace, View
from millrace.kernels.operators import EvaluationContext, KernelOperator, Params, ProgramWriter, StoredValue


def _shapes(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    check_tree("elementwise", attrs, len(inputs))
    return (broadcast_shape("elementwise", [v.shape for v in inputs]),)


def _dtypes(inputs: Inputs, attrs: Attrs) -> tuple[DType, ...]:
    tree, types = as_tree(attrs["tree"]), [v.dtype for v in inputs]
    is_integer(tree, types)
    return (type_of(tree, types),)


def _reference(node: Node, values: EvaluationContext) -> StoredValue:
    tree = as_tree(node.attrs["tree"])
    integer = is_integer(tree, [v.dtype for v in node.inputs])
    result = evaluate(tree, [values.integers(v) if integer else values.rows(v) for v in node.inputs])
    return values.stored(np.broadcast_to(result, values.sized(node.output.shape)), node)


def expression_params(tree: object, inputs: list[View | OperandPlace], width: int) -> Params:
    """Return the kernel's parameters. inputs: its operands a, b, c, d; an OperandPlace is one row for all"""
    code, numbers = compile_tree(as_tree(tree), len(inputs))
    views = [v for v in inputs if isinstance(v, View)]
    params: Params = {"rows": views[0].rows, "n": width, "code": code, "imm": numbers}
    for name, source in zip("abcd"[:MAX_INPUTS], inputs, strict=False):
        params[f"{name}_stride"] = source.row_floats if isinstance(source, View) else 0
    return params


def _lower(node: Node, writer: ProgramWriter) -> None:
    if not _in_rows(node):
        return lower_broadcast(node, writer, as_tree(node.attrs["tree"]))
    inputs = [writer.vector(v) if v.constant else writer.view(v) for v in node.inputs]
    params = expression_params(node.attrs["tree"], inputs, node.output.width)
    operands: dict[str, View | OperandPlace | None] = dict(zip("abcd", inputs, strict=False))
    operands["y"] = writer.new(node.output, node.origin[0])
    return writer.add("elementwise", operands, params, node)


def _in_rows(node: Node) -> bool:
    """Return whether all values are float rows of one width: matrices of equal shape, and constant rows."""
    shape = node.output.shape
    if not shape or isinstance(shape[0], int) or not isinstance(product(shape[1:]), int):
        return False
    if any(v.dtype != DType.F32 for v in (*node.inputs, node.output)) or all(v.constant for v in node.inputs):
        return False
    if any(v.shape != (shape[1:] if v.constant else shape) for v in node.inputs):
        return False
    return not needs_broadcast(compile_tree(as_tree(node.attrs["tree"]), len(node.inputs))[0])


ELEMENTWISE = KernelOperator(
    name="elementwise", inputs=(1, MAX_INPUTS), attrs=frozenset({"tree"}), shapes=_shapes, dtypes=_dtypes,
    reference=_reference, lower=_lower,
)  # fmt: skip
OPERATORS = (ELEMENTWISE,)
