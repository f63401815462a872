"""The operator elementwise: an expression of up to four values, element by element."""

import numpy as np

from millrace.graph.rules import check_tree, illegal
from millrace.graph.trees import as_tree, evaluate
from millrace.graph.types import Attrs, Inputs, Node, Shape
from millrace.kernels.declare import MAX_INPUTS
from millrace.kernels.expression import compile_tree
from millrace.kernels.operators import Held, Params, Runnable, Values, Writer
from millrace.kernels.places import Place, View


def _shapes(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    check_tree("elementwise", attrs, len(inputs))
    whole = next((v for v in inputs if not v.constant), inputs[0])
    for v in inputs:
        row = v.constant is not None and len(whole.shape) == 2 and v.shape == whole.shape[1:]
        if v.shape != whole.shape and not row:
            raise illegal(
                "elementwise",
                f"operands {[list(v.shape) for v in inputs]}",
                "equal shapes, or a constant row for a matrix",
            )
    return (whole.shape,)


def _reference(node: Node, values: Values) -> Held:
    inputs = [values.rows(v) for v in node.inputs]
    return values.stored(evaluate(as_tree(node.attrs["tree"]), inputs).astype(np.float64), node)


def expression_params(tree: object, inputs: list[View | Place], width: int) -> Params:
    """Of the kernel; `inputs` are its operands a, b, c, d, a Place being one row for all."""
    code, numbers = compile_tree(as_tree(tree), len(inputs))
    views = [v for v in inputs if isinstance(v, View)]
    params: Params = {"rows": views[0].rows, "n": width, "code": code, "imm": numbers}
    for name, source in zip("abcd"[:MAX_INPUTS], inputs, strict=False):
        params[f"{name}_stride"] = source.row_floats if isinstance(source, View) else 0
    return params


def _lower(node: Node, writer: Writer) -> None:
    inputs = [writer.vector(v) if v.constant else writer.view(v) for v in node.inputs]
    params = expression_params(node.attrs["tree"], inputs, node.output.width)
    operands: dict[str, View | Place | None] = dict(zip("abcd", inputs, strict=False))
    operands["y"] = writer.new(node.output, node.origin[0])
    writer.add("elementwise", operands, params, node)


ELEMENTWISE = Runnable(
    name="elementwise", inputs=(1, MAX_INPUTS), attrs=frozenset({"tree"}), shapes=_shapes, reference=_reference,
    lower=_lower,
)  # fmt: skip
OPERATORS = (ELEMENTWISE,)
