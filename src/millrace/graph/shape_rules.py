"""Common parts of operators' shape rules, and the lookup of operators by name."""

from collections.abc import Sequence

from millrace.errors import GraphError, nearest
from millrace.graph.expressions import faults
from millrace.graph.types import Attrs, Dim, DType, Inputs, Operator, Operators, Shape, Value


def illegal(op: str, what: str, expected: str) -> GraphError:
    return GraphError(f"{op}: {what}", expected, "change the model's forward(), or the pass that wrote this")


def find_operator(operators: Operators, name: str) -> Operator:
    """Return an operator that models may use. raises GraphError for an unknown name"""
    operator = operators.get(name)
    if operator is None or operator.fused:
        what = "is written by the compiler's passes only" if operator else "is no operator"
        names = [n for n, o in operators.items() if not o.fused]
        raise GraphError(
            f'"{name:.80}" {what}', nearest(name, names), "correct it, or write the operator (docs/extending)"
        )
    return operator


def same_shape(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    """Return the first input's shape."""
    return (inputs[0].shape,)


def broadcast_shape(op: str, shapes: Sequence[Shape]) -> Shape:
    """Broadcast by NumPy's rules: dimensions are compared from the last on, equal or one of them 1. raises GraphError

    A symbol is never broadcast, because it may not be 1; other operands of size 1 are broadcast to it.
    """
    rank = max(map(len, shapes))
    result: list[Dim] = [1] * rank
    for shape in shapes:
        for axis, d in enumerate(shape, rank - len(shape)):
            if result[axis] == 1:
                result[axis] = d
            elif d not in (1, result[axis]):
                what = f"operands of the shapes {', '.join(str(list(s)) for s in shapes)}"
                raise illegal(op, what, "equal shapes, or 1 where they differ")
    return tuple(result)


def rows_of_matrix(op: str, inputs: Inputs, index: str) -> tuple[Shape, ...]:
    """Return the shape of one row of a matrix per element of an i32 row; `index` names that row in errors."""
    x, each = inputs
    if len(x.shape) != 2 or each.dtype != DType.I32 or len(each.shape) != 1:
        raise illegal(op, f"x {x} and {index} {each}", f"x [T, width] and i32 {index}, one for each row that comes out")
    return ((each.shape[0], x.shape[1]),)


def check_tree(op: str, attrs: Attrs, n_inputs: int) -> None:
    """Check that the attribute `tree` is an expression of `n_inputs` inputs."""
    for what, expected in faults(attrs.get("tree"), n_inputs):
        raise illegal(op, what, expected)


def check_positions(op: str, positions: Value, x: Value) -> None:
    """Check that there is a position for each row of x."""
    if positions.dtype != DType.I32 or positions.shape != x.shape[:1]:
        raise illegal(op, f"x {x} and its positions {positions}", "i32, one for each of its rows")
