"""The operator rope: rotate heads by their positions."""

import numpy as np

from millrace.graph.shape_rules import check_positions, illegal
from millrace.graph.types import Attrs, Inputs, Node, Shape, Value
from millrace.kernels.operand_places import Operands
from millrace.kernels.operators import (
    EvaluationContext,
    KernelOperator,
    Params,
    ProgramWriter,
    Rows,
    StoredValue,
    static_dim,
)
from millrace.kernels.rope.ref import rope


def _shapes(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    x, positions, table = inputs
    if len(x.shape) != 3 or table.shape[1:] != x.shape[2:]:
        raise illegal(
            "rope", f"x {list(x.shape)} and table {list(table.shape)}", "x [T, heads, D] and table [context, D]"
        )
    check_positions("rope", positions, x)
    return (x.shape,)


def rotated(values: EvaluationContext, x: Value, positions: Value, table: Value) -> Rows:
    """Rotate x (T, H, D), and round as the kernel does."""
    y = rope(values.rows(x), values.numbers(positions), values.rows(table))
    return y.astype(np.float32).astype(np.float64)


def _reference(node: Node, values: EvaluationContext) -> StoredValue:
    return rotated(values, *node.inputs)


def _lower(node: Node, writer: ProgramWriter) -> None:
    x, positions, table = node.inputs
    view, without_cache = writer.writable(x, node), {"cache": 0, "layer": -1}
    params: Params = {
        "rows": view.rows, "heads": static_dim(x, 1), "kv_heads": 0,
        "head_dim": static_dim(x, 2), "value_dim": static_dim(x, 2),
        "q_stride": view.row_floats, "k_stride": 0, "v_stride": 0, "context": static_dim(table, 0), **without_cache,
    }  # fmt: skip
    operands: Operands = {"q": view, "positions": writer.view(positions), "table": writer.vector(table)}
    writer.add("rope", operands, params, node)
    writer.share(node.output, view)


ROPE = KernelOperator(
    name="rope", inputs=(3, 3), integers=frozenset({1}), shapes=_shapes, reference=_reference, lower=_lower
)
OPERATORS = (ROPE,)
