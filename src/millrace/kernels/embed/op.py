"""The operator embedding."""

import ml_dtypes
import numpy as np

from millrace.graph.shape_rules import illegal
from millrace.graph.types import Attrs, DType, Inputs, Node, Shape
from millrace.kernels.convert.ref import to_bf16
from millrace.kernels.operand_places import pack_array
from millrace.kernels.operators import (
    EvaluationContext,
    KernelOperator,
    ProgramWriter,
    StoredValue,
    float_attr,
    static_dim,
)

_DTYPES = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}


def _shapes(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    ids, table = inputs
    if ids.dtype != DType.I32 or len(ids.shape) != 1 or len(table.shape) != 2:
        raise illegal("embedding", f"inputs {ids}, {table}", "i32 ids [n] and a table [vocabulary, width]")
    return ((*ids.shape, table.shape[1]),)


def _reference(node: Node, values: EvaluationContext) -> StoredValue:
    ids, table = node.inputs
    numbers = values.numbers(ids)
    rows = values.rows(table)[np.maximum(numbers, 0)]
    scaled = (to_bf16(rows).astype(np.float64) if values.bf16_table else rows) * float_attr(node, "scale")
    if values.embeddings is not None:
        scaled = np.where(numbers[:, None] < 0, values.embeddings[np.maximum(-1 - numbers, 0)], scaled)
    return values.stored(scaled, node)


def _lower(node: Node, writer: ProgramWriter) -> None:
    ids, table = node.inputs
    view, kind = writer.view(ids), writer.table_format
    params = {
        "rows": view.rows, "n": static_dim(table, 1), "vocab": static_dim(table, 0), "bf16": int(kind == "bf16"),
        "scale": float_attr(node, "scale"),
    }  # fmt: skip
    place = writer.constant((table,), f"table of {kind}", lambda: pack_array(table, _DTYPES[kind], kind))
    y = writer.new(node.output, "embedding")
    writer.add("embed", {"ids": view, "table": place, "y": y}, params, node, kind)


EMBEDDING = KernelOperator(
    name="embedding",
    inputs=(2, 2),
    integers=frozenset({0}),
    attrs=frozenset({"scale"}),
    shapes=_shapes,
    reference=_reference,
    lower=_lower,
)
OPERATORS = (EMBEDDING,)
