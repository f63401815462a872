"""The operator rope: rotate heads, or the first numbers of each, by their positions."""

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
    sizes = table.shape[-1], x.shape[-1]
    fits = len(x.shape) == 3 and len(table.shape) == 2 and all(isinstance(size, int) for size in sizes)
    if not fits or static_dim(table, 1) % 2 or static_dim(table, 1) > static_dim(x, 2):
        raise illegal(
            "rope", f"x {list(x.shape)} and table {list(table.shape)}",
            "x [T, heads, D] and table [context, R], R even and at most D",
        )  # fmt: skip
    if not isinstance(attrs.get("interleaved", False), bool):
        raise illegal("rope", f"interleaved {attrs['interleaved']!r:.40}", "true or false")
    check_positions("rope", positions, x)
    return (x.shape,)


def is_interleaved(node: Node) -> bool:
    """Return whether neighboring numbers rotate against each other, instead of the two halves."""
    return bool(node.attrs.get("interleaved", False))


def rotated(values: EvaluationContext, x: Value, positions: Value, table: Value, *, interleaved: bool = False) -> Rows:
    """Rotate x (T, H, D), and round as the kernel does."""
    y = rope(values.rows(x), values.numbers(positions), values.rows(table), interleaved=interleaved)
    return y.astype(np.float32).astype(np.float64)


def _reference(node: Node, values: EvaluationContext) -> StoredValue:
    return rotated(values, *node.inputs, interleaved=is_interleaved(node))


def _lower(node: Node, writer: ProgramWriter) -> None:
    x, positions, table = node.inputs
    view, without_cache = writer.writable(x, node), {"cache": 0, "layer": -1}
    params: Params = {
        "rows": view.rows, "heads": static_dim(x, 1), "kv_heads": 0,
        "head_dim": static_dim(x, 2), "value_dim": static_dim(x, 2),
        "rotary_dim": static_dim(table, 1), "interleaved": int(is_interleaved(node)),
        "q_stride": view.row_floats, "k_stride": 0, "v_stride": 0, "context": static_dim(table, 0), **without_cache,
    }  # fmt: skip
    operands: Operands = {"q": view, "positions": writer.view(positions), "table": writer.vector(table)}
    writer.add("rope", operands, params, node)
    writer.share(node.output, view)


ROPE = KernelOperator(
    name="rope", inputs=(3, 3), integers=frozenset({1}), attrs=frozenset({"interleaved"}), shapes=_shapes,
    reference=_reference, lower=_lower,
)  # fmt: skip
OPERATORS = (ROPE,)
