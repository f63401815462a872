"""The operator cast, and the lowering of element-wise expressions of any types and shapes to the kernel broadcast."""

from collections.abc import Sequence

from millrace.errors import nearest
from millrace.graph.expression_types import is_integer
from millrace.graph.expressions import Tree
from millrace.graph.shape_rules import illegal, same_shape
from millrace.graph.types import NUMPY, Attrs, Dim, DType, Inputs, Node, Shape, Value
from millrace.kernels.broadcast.ref import as_type
from millrace.kernels.declare import MAX_RANK
from millrace.kernels.expression import compile_tree
from millrace.kernels.layout import TYPES
from millrace.kernels.operand_places import OperandPlace, View, pack_array
from millrace.kernels.operators import EvaluationContext, KernelOperator, Params, ProgramWriter, StoredValue


def lower_broadcast(node: Node, writer: ProgramWriter, tree: Tree) -> None:
    """Lower y = tree(inputs), of any types and shapes, to one call."""
    y, types = node.output, [v.dtype for v in node.inputs]
    check_rank(node.op, y)
    code, numbers = compile_tree(tree, len(node.inputs))
    params: Params = {
        "extents": [writer.extent(d) for d in y.shape] or [writer.extent(1)], "rank": len(y.shape),
        "elements": writer.extent(y.elements), "y_type": TYPES.index(y.dtype), "whole": int(is_integer(tree, types)),
        "code": code, "imm": numbers,
    }  # fmt: skip
    operands: dict[str, View | OperandPlace | None] = {}
    for name, value in zip("abcd", node.inputs, strict=False):
        operands[name] = constant(value, writer) if value.constant else writer.dense(value, node)
        params[f"{name}_elements"] = writer.extent(value.elements)
        params[f"{name}_mask"] = _mask(value.shape, len(y.shape))
        params[f"{name}_type"] = TYPES.index(value.dtype)
    for name in "abcd"[len(node.inputs) :]:
        params[f"{name}_elements"] = params["elements"]
    operands["y"] = writer.new(y, node.origin[0] if node.origin else node.op)
    writer.add("broadcast", operands, params, node, "" if y.dtype == DType.F32 else y.dtype)


def check_rank(op: str, value: Value) -> None:
    """Check the number of dimensions. raises GraphError if kernels do not support it"""
    if len(value.shape) > MAX_RANK:
        raise illegal(op, f"a value of {len(value.shape)} dimensions", f"at most {MAX_RANK}")


def constant(value: Value, writer: ProgramWriter) -> OperandPlace:
    """Pack a constant in its own type."""
    return writer.constant((value,), f"as {value.dtype}", lambda: pack_array(value, NUMPY[value.dtype], value.dtype))


def _mask(shape: Sequence[Dim], rank: int) -> int:
    """Return a mask of the dimensions along which a value is not broadcast, as bits of a result of this rank."""
    return sum(1 << axis for axis, d in enumerate(shape, rank - len(shape)) if d != 1)


def _dtypes(inputs: Inputs, attrs: Attrs) -> tuple[DType, ...]:
    dtype = attrs["dtype"]
    if dtype not in list(DType):
        raise illegal("cast", f"to {dtype!r:.80}", nearest(str(dtype)[:80], [str(d) for d in DType]))
    return (DType(str(dtype)),)


def _shapes(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    return same_shape(inputs, attrs)


def _reference(node: Node, values: EvaluationContext) -> StoredValue:
    (x,) = node.inputs
    return as_type(values.rows(x) if x.dtype.is_float else values.integers(x), node.output.dtype)


CAST = KernelOperator(
    name="cast", inputs=(1, 1), attrs=frozenset({"dtype"}), shapes=_shapes, dtypes=_dtypes, reference=_reference,
    lower=lambda node, writer: lower_broadcast(node, writer, 0),
)  # fmt: skip
OPERATORS = (CAST,)
