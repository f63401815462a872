"""The operators linear and gated_linear: a matmul with weights, and its epilogue."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.weights.quantized_matrix import QuantisedFormat, QuantisedMatrix
from millrace.graph.expressions import Tree, as_tree, evaluate
from millrace.graph.shape_rules import check_tree, illegal
from millrace.graph.types import Attrs, Constant, Inputs, Node, Shape, Value
from millrace.kernels.convert.op import packs_elements
from millrace.kernels.convert.ref import Quantised
from millrace.kernels.declare import RowFormat, Scaling, WeightFormat
from millrace.kernels.expression import compile_tree
from millrace.kernels.layout import matrix_bytes, up
from millrace.kernels.matmul import ref as products
from millrace.kernels.matmul.pack import (
    SlabTask,
    interleave_codes,
    pack_codes,
    pack_matrix,
    rounded_codes,
    rounded_e4m3,
    scaling_of,
    stored_codes,
)
from millrace.kernels.operand_places import OperandPlace, PackedPlace, View, constant_of
from millrace.kernels.operators import (
    EvaluationContext,
    KernelOperator,
    Params,
    ProgramWriter,
    Rows,
    StoredValue,
    int_attr,
    static_dim,
)
from millrace.kernels.precision import BF16_BY_TILES, HADAMARD, SCALING_WORDS, Precision
from millrace.kernels.row_storage import Storage, storage_of

PRODUCTS = ("linear", "gated_linear")
EXPERT_PRODUCTS = ("expert_linear", "expert_gated_linear")
SILU_MUL: Tree = ("mul", ("mul", 0, ("sigmoid", 0)), 1)
BITS = {WeightFormat.W8: 8, WeightFormat.W4: 4, WeightFormat.FP8: 8}  # of the codes that a checkpoint may have


def _shapes(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    x, w = inputs[:2]
    if len(x.shape) != 2 or len(w.shape) != 2 or x.shape[1] != w.shape[1]:
        raise illegal("linear", f"x {list(x.shape)} and w {list(w.shape)}", "x [rows, K] and w [N, K]")
    out: Shape = (x.shape[0], w.shape[0])
    if attrs.get("bias"):
        bias = inputs[2]
        if bias.shape != (w.shape[0],):
            raise illegal("linear", f"bias {list(bias.shape)} for w {list(w.shape)}", "bias [N]")
    if attrs.get("residual") and inputs[-1].shape != out:
        raise illegal("linear", f"residual {list(inputs[-1].shape)}", f"the shape of the result, {list(out)}")
    check_tree("linear", {"tree": attrs.get("tree", 0)}, 1)
    return (out,)


def _gated_shapes(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    x, gate, up = inputs
    check_tree("gated_linear", attrs, 2)
    if gate.shape != up.shape or len(gate.shape) != 2 or x.shape[1:] != gate.shape[1:]:
        raise illegal("gated_linear", f"x {x}, gate {gate}, up {up}", "x [rows, K], gate and up [N, K]")
    return ((x.shape[0], gate.shape[0]),)


def precision_of(node: Node) -> Precision:
    precision = node.attrs["precision"]
    assert isinstance(precision, Precision)
    return precision


def group_of(node: Node) -> int:
    """Return how many inputs share a scale in a matmul's weights; 0: no scales."""
    return int_attr(node, "group") if "group" in node.attrs else 0


def matrix_size(value: Value) -> tuple[int, int]:
    """Return rows and width of a constant."""
    return static_dim(value, 0), static_dim(value, 1)


def transform_of(rows: Node | None) -> int:
    """Return the transformed groups of the input rows, and so of the weights; 0: none. rows: their node"""
    return storage_of(rows).hadamard_group if rows else 0


def is_silu_mul(node: Node) -> bool:
    return node.op == "gated_linear" and as_tree(node.attrs["tree"]) == SILU_MUL


def matrices_of(node: Node) -> tuple[Value, ...]:
    """Return the weights of a matmul, or both of a gated one; of experts, each stacked."""
    first = 2 if node.op in EXPERT_PRODUCTS else 1
    return node.inputs[first : first + (2 if "gated" in node.op else 1)]


def product(values: EvaluationContext, node: Node, w: Value) -> Rows:
    """Return the node's first input times w.T, in its numerics class."""
    return multiply(values, node, values.stored_value(node.inputs[0]), w.constant, lambda: values.rows(w))


def multiply(
    values: EvaluationContext, node: Node, x: StoredValue, constant: Constant | None, load: Callable[[], Rows]
) -> Rows:
    """Return rows x times w.T in a matmul's numerics class. constant, load: of w, which may be computed"""
    precision, group = precision_of(node), group_of(node)
    if isinstance(x, Quantised):
        return products.matmul_q8(x, codes_of(constant, load, precision.bits, group, x.hadamard_group))
    rows = x.astype(np.float64, copy=False)
    if precision.coded:
        of = products.matmul_e4m3 if values.meets_fp8(node) else products.matmul_a16
        return of(rows, codes_of(constant, load, precision.bits, group))
    weights = load().astype(np.float32).astype(np.float64)
    y = products.matmul_bf16(rows, weights) if precision == Precision.BF16 else products.matmul(rows, weights)
    return y.astype(np.float64)


def codes_of(
    constant: Constant | None, load: Callable[[], NDArray[Any]], bits: int, group: int, hadamard_group: int = 0
) -> QuantisedMatrix:
    """Return the checkpoint's own codes, or quantize what `load` returns. group 0: E4M3

    hadamard_group: of the transformed input rows; 0: they are not transformed
    """
    if constant and constant.transformed and hadamard_group:
        return constant.transformed(bits, group, hadamard_group)
    stored = stored_codes([constant], bits, group) if constant and not hadamard_group else None
    if stored:
        return stored[0]
    return rounded_codes(load(), bits, group, hadamard_group) if group else rounded_e4m3(load())


def _reference(node: Node, values: EvaluationContext) -> StoredValue:
    y = product(values, node, node.inputs[1])
    if node.attrs.get("bias"):
        y = y + values.rows(node.inputs[2])
    y = evaluate(as_tree(node.attrs.get("tree", 0)), [y]).astype(np.float64)
    if node.attrs.get("residual"):
        y = y + values.rows(node.inputs[-1])
    return values.stored(y, node)


def _gated_reference(node: Node, values: EvaluationContext) -> StoredValue:
    halves = [product(values, node, w) for w in matrices_of(node)]
    return values.stored(evaluate(as_tree(node.attrs["tree"]), halves).astype(np.float64), node)


@dataclass(frozen=True, slots=True)
class Packing:
    """How a matmul's matrix is packed.

    hadamard_group: of the transformed input rows; scaling: of its codes
    """

    format: WeightFormat
    group: int
    hadamard_group: int
    scaling: Scaling

    @property
    def bits(self) -> int:
        """Bits of its codes; 0: it has none."""
        return BITS.get(self.format, 0)

    @property
    def codes(self) -> QuantisedFormat | None:
        """The format of its codes in a checkpoint; None: it has none, or they are of transformed weights."""
        if not self.bits or self.hadamard_group:
            return None
        minimums, two_levels = self.scaling % 2 == 1, self.scaling >= Scaling.LEVELS
        return QuantisedFormat(self.bits, self.group, minimums, two_levels, self.format == WeightFormat.FP8)


def packing_of(node: Node, rows: Storage) -> Packing:
    """Return the packing of a matmul with such input rows."""
    format, group, own = precision_of(node).weights, group_of(node), Scaling.PLAIN
    if format in BITS and not rows.hadamard_group:
        constants = [constant_of(v) for v in matrices_of(node)]
        own = scaling_of([part for c in constants for part in c.parts or (c,)], BITS[format], group)
    return Packing(format, group, rows.hadamard_group, own)


def _pack(values: tuple[Value, ...], packing: Packing, name: str) -> PackedPlace:
    """Pack a matrix into panels; two matrices are interleaved as gate and up; stacked matrices one after another."""
    constants = [constant_of(v) for v in values]
    parts, (n, k) = [c.parts for c in constants], [d for d in values[0].shape[-2:] if isinstance(d, int)]
    rows = 2 * up(n, 16) if len(constants) == 2 else n
    nbytes = matrix_bytes(packing.format, rows, k, packing.group, packing.scaling)
    stack = list(zip(*parts, strict=True)) if parts[0] else []

    def pack(run: SlabTask) -> NDArray[np.uint8]:
        if not stack:
            return _pack_panels(constants, packing, run)
        out = np.empty(len(stack) * nbytes, np.uint8)
        for i, matrices in enumerate(stack):
            out[i * nbytes : (i + 1) * nbytes] = _pack_panels(matrices, packing, run)
        return out

    origin, of_stack = tuple(o for c in constants for o in c.origin), (len(stack),) if stack else ()
    return PackedPlace("+".join(origin), origin, (*of_stack, rows, k), name, nbytes * max(len(stack), 1), pack)


def _pack_panels(constants: Sequence[Constant], packing: Packing, run: SlabTask) -> NDArray[np.uint8]:
    format, group = packing.format, packing.group
    codes = stored_codes(constants, packing.bits, group) if packing.bits and not packing.hadamard_group else None
    if codes:
        return pack_codes(interleave_codes(*codes) if len(codes) == 2 else codes[0], format, run)
    w, *rest = [c.load() for c in constants]
    up_ = rest[0] if rest else None
    return pack_matrix(w, format, group, packing.hadamard_group, up_=up_, run=run)  # type: ignore[arg-type]


def _packs(node: Node, storage: Storage) -> bool:
    return packs_elements(node, storage) and not node.attrs.get("residual")  # which it would have to read as floats


def _lower(node: Node, writer: ProgramWriter) -> None:
    operands: dict[str, View | OperandPlace | None] = {}
    if node.attrs.get("bias"):
        operands["bias"] = writer.vector(node.inputs[2])
    if node.attrs.get("residual"):
        operands["residual"] = writer.dense(node.inputs[-1], node)
    add_product(node, writer, operands)


def add_product(
    node: Node, writer: ProgramWriter, operands: Mapping[str, View | OperandPlace | None], experts: int = 0
) -> None:
    """Add the call of a matmul. operands: those besides x, w and y. experts: number of stacked matrices, if they are"""
    x, precision = node.inputs[0], precision_of(node)
    view, weights = writer.view(x), precision.weights
    matrices, group, width = matrices_of(node), group_of(node), node.output.width
    gated = len(matrices) == 2
    tiles, storage = writer.tiles and precision == Precision.BF16, storage_of(node)
    code: list[int] = []
    numbers: list[float] = []
    if "tree" in node.attrs:
        code, numbers = compile_tree(as_tree(node.attrs["tree"]), 2 if gated else 1)
    how = packing_of(node, view.storage)
    params: Params = {
        "rows": view.rows, "n": 2 * up(width, 16) if gated else width, "k": x.width, "group": group,
        "x_group": view.storage.group, "format": view.storage.format, "weights": weights, "scaling": how.scaling,
        "x_stride": view.row_bytes, "gated": int(gated), "packed": int(storage.format == RowFormat.BF16),
        "tiles": int(tiles), "code": code, "imm": numbers, "experts": experts,
    }  # fmt: skip
    words = HADAMARD if view.storage.hadamard else SCALING_WORDS[how.scaling]
    name = f"{weights.name.lower()}{f'g{group}' if group else ''}{f' {words}' if words else ''}"
    place = writer.constant(matrices, f"panels of {name}", partial(_pack, matrices, how, name))
    y = writer.new(node.output, node.origin[0] if node.origin else "linear", storage)
    params["y_stride"] = y.row_elements
    all_operands = {"x": view, "w": place, **operands, "y": y}
    writer.add("matmul", all_operands, params, node, BF16_BY_TILES if tiles else str(precision))


OPTIONS = frozenset({"precision", "x_group", "group"})  # set by passes; the first two also by users

LINEAR = KernelOperator(
    name="linear", inputs=(2, 4), attrs=OPTIONS | {"bias", "residual", "tree", "storage"}, shapes=_shapes,
    reference=_reference, lower=_lower, packs=_packs,
)  # fmt: skip
GATED_LINEAR = KernelOperator(
    name="gated_linear", inputs=(3, 3), attrs=OPTIONS | {"tree", "storage"}, fused=True,
    shapes=_gated_shapes, reference=_gated_reference, lower=_lower, packs=_packs,
)  # fmt: skip
OPERATORS = (LINEAR, GATED_LINEAR)
