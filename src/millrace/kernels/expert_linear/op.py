"""The operators expert_linear and expert_gated_linear: each expert's matmul with its own rows.

Rows are sorted by experts (kernels/group_by_expert): expert e has the rows from starts[e] to starts[e + 1].
"""

import numpy as np
from numpy.typing import NDArray

from millrace.graph.expressions import as_tree, evaluate
from millrace.graph.shape_rules import check_tree, illegal
from millrace.graph.types import Attrs, DType, Inputs, Node, Shape, Value
from millrace.kernels.convert.op import packs_elements
from millrace.kernels.convert.ref import Quantised
from millrace.kernels.declare import MAX_EXPERTS
from millrace.kernels.layout import up
from millrace.kernels.matmul.op import OPTIONS, add_product, matrices_of, multiply
from millrace.kernels.matmul.pack import SlabTask, finite, interleave_halves
from millrace.kernels.operand_places import PackedPlace, as_bytes, constant_of
from millrace.kernels.operators import (
    EvaluationContext,
    KernelOperator,
    ProgramWriter,
    Rows,
    StoredValue,
    static_dim,
)


def _shapes(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    return _shapes_of(inputs, attrs, 1)


def _gated_shapes(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    check_tree("expert_gated_linear", attrs, 2)
    return _shapes_of(inputs, attrs, 2)


def _shapes_of(inputs: Inputs, attrs: Attrs, n: int) -> tuple[Shape, ...]:
    (x, starts), matrices, biases = inputs[:2], inputs[2 : 2 + n], inputs[2 + n :]
    stacked = [w.constant is not None and len(w.constant.parts) == w.shape[0] for w in matrices]
    first = matrices[0].shape
    if len(x.shape) != 2 or len(first) != 3 or not all(stacked) or any(w.shape != first for w in matrices):
        raise illegal("expert_linear", f"x {x} and {list(matrices)}", "x [rows, K] and stacked constants [E, N, K]")
    experts, outputs, width = first
    if x.shape[1] != width or not isinstance(experts, int) or experts > MAX_EXPERTS:
        raise illegal("expert_linear", f"x {x} and {matrices[0]}", f"x [rows, K], {MAX_EXPERTS} experts at most")
    if starts.dtype != DType.I32 or starts.shape != (experts + 1,):
        raise illegal("expert_linear", f"starts {starts}", f"i32 [{experts + 1}]")
    if len(biases) != (n if attrs.get("bias") else 0) or any(b.shape != (experts, outputs) for b in biases):
        raise illegal("expert_linear", f"biases {list(biases)}", f"[{experts}, {outputs}]")
    return ((x.shape[0], outputs),)


def _products(node: Node, values: EvaluationContext, w: Value, bias: Value | None) -> Rows:
    """Return each expert's rows times its matrix, with its bias."""
    x, starts = values.stored_value(node.inputs[0]), values.numbers(node.inputs[1])
    n_rows = len(x.codes if isinstance(x, Quantised) else x)
    y, biases = np.zeros((n_rows, static_dim(w, 1))), None if bias is None else values.rows(bias)
    for e, part in enumerate(constant_of(w).parts):
        rows = slice(starts[e], starts[e + 1])
        if rows.start == rows.stop:
            continue
        own = Quantised(x.codes[rows], x.scales[rows], x.group, x.hadamard) if isinstance(x, Quantised) else x[rows]

        def load(e: int = e) -> Rows:
            matrix: Rows = values.rows(w)[e]
            return matrix

        y[rows] = multiply(values, node, own, part, load) + (0 if biases is None else biases[e])
    return y


def _reference(node: Node, values: EvaluationContext) -> StoredValue:
    (w,), biases = matrices_of(node), node.inputs[3:] or (None,)
    return values.stored(_products(node, values, w, biases[0]), node)


def _gated_reference(node: Node, values: EvaluationContext) -> StoredValue:
    biases = node.inputs[4:] or (None, None)
    halves = [_products(node, values, w, bias) for w, bias in zip(matrices_of(node), biases, strict=True)]
    return values.stored(evaluate(as_tree(node.attrs["tree"]), halves).astype(np.float64), node)


def _lower(node: Node, writer: ProgramWriter) -> None:
    matrices = matrices_of(node)
    biases = node.inputs[2 + len(matrices) :]
    bias = writer.constant(biases, "biases of experts", lambda: _pack_biases(biases)) if biases else None
    operands = {"starts": writer.view(node.inputs[1]), "bias": bias}
    add_product(node, writer, operands, experts=static_dim(matrices[0], 0))


def _pack_biases(biases: tuple[Value, ...]) -> PackedPlace:
    """Pack (E, N), interleaved like the rows of the matrices if there are two."""
    constants, (n_experts, n) = [constant_of(b) for b in biases], (static_dim(biases[0], 0), static_dim(biases[0], 1))
    width = 2 * up(n, 16) if len(biases) == 2 else n

    def pack(_: SlabTask) -> NDArray[np.uint8]:
        arrays = [finite(c.load(), np.dtype(np.float32)) for c in constants]
        if len(arrays) == 1:
            return as_bytes(arrays[0])
        return as_bytes(np.stack([interleave_halves(*(a[e][:, None] for a in arrays)) for e in range(n_experts)]))

    origin = tuple(o for c in constants for o in c.origin)
    return PackedPlace("+".join(origin), origin, (n_experts, width), "f32", n_experts * width * 4, pack)


EXPERT_LINEAR = KernelOperator(
    name="expert_linear", inputs=(3, 4), integers=frozenset({1}), attrs=OPTIONS | {"bias"}, shapes=_shapes,
    reference=_reference, lower=_lower,
)  # fmt: skip
EXPERT_GATED_LINEAR = KernelOperator(
    name="expert_gated_linear", inputs=(4, 6), integers=frozenset({1}), attrs=OPTIONS | {"bias", "tree", "storage"},
    fused=True, shapes=_gated_shapes, reference=_gated_reference, lower=_lower, packs=packs_elements,
)  # fmt: skip
OPERATORS = (EXPERT_LINEAR, EXPERT_GATED_LINEAR)
