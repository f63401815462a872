"""The declaration of matmul: see kernels/declare.py."""

from millrace.kernels.declare import (
    EXPRESSION,
    LEGAL_ROWS,
    MAX_EXPERTS,
    ROWS,
    Kernel,
    Knob,
    Operand,
    RowFormat,
    Scaling,
    WeightFormat,
)

_MATRICES = "(experts + (experts == 0))"

KERNEL = Kernel(
    "matmul",
    "y = epilogue(x @ w.T + bias) + residual; x and w in the formats of one numerics class",
    (
        Operand("x", "in", f"{ROWS} * x_stride", "uint8_t"),
        Operand("w", "weight", f"{_MATRICES} * matrix_bytes(weights, n, k, group, scaling)", "uint8_t"),
        Operand("bias", "weight?", f"{_MATRICES} * n * 4"),
        Operand("residual", "in?", f"{ROWS} * y_stride * 4"),
        Operand("starts", "in?", "(experts + 1) * 4", "int32_t"),
        Operand("y", "out", f"{ROWS} * y_stride * (4 - 2 * packed)"),
    ),
    (
        "i32 rows",
        "i32 n",
        "i32 k",
        "i32 group",  # inputs per scale of w
        "i32 x_group",  # inputs per scale of x
        "i32 format",
        "i32 weights",
        "i32 scaling",
        "i32 x_stride",
        "i32 y_stride",
        "i32 gated",
        "i32 packed",  # y is rows of bfloat16, for another matmul; y_stride counts its elements
        "i32 experts",  # as many matrices; each takes the rows from its start to the next one's. 0: one for all
        "i32 tiles",  # bfloat16 products are summed as by tdpbf16ps, not vdpbf16ps
        *EXPRESSION,
    ),
    (
        LEGAL_ROWS,
        "n > 0",
        "k > 0",
        "group >= 0",
        f"format >= {min(RowFormat)}",
        f"format <= {max(RowFormat)}",
        f"weights >= {min(WeightFormat)}",
        f"weights <= {max(WeightFormat)}",
        "gated >= 0",
        "gated <= 1",
        "experts >= 0",
        f"experts <= {MAX_EXPERTS}",
        "packed >= 0",
        "packed <= 1",
        "packed == 0 or n % 16 == 0",
        "tiles >= 0",
        "tiles <= 1",
        f"tiles == 0 or weights == {WeightFormat.BF16}",
        "gated == 0 or n % 32 == 0",
        "group % 4 == 0",
        "x_group == group or (x_group > 0 and x_group % 8 == 0 and group % x_group == 0)",
        f"x_group == group or format >= {RowFormat.Q8}",
        f"weights < {WeightFormat.W8} or weights > {WeightFormat.W4} or group > 0",
        f"weights < {WeightFormat.W8} or format >= {RowFormat.BF16}",
        f"weights != {WeightFormat.F32} or format == {RowFormat.F32}",
        f"weights != {WeightFormat.BF16} or format == {RowFormat.BF16}",
        f"weights != {WeightFormat.FP8} or format == {RowFormat.BF16}",
        f"weights == {WeightFormat.W8} or weights == {WeightFormat.W4} or group == 0",
        f"scaling >= {min(Scaling)}",
        f"scaling <= {max(Scaling)}",
        f"scaling == {Scaling.PLAIN} or weights == {WeightFormat.W8} or weights == {WeightFormat.W4}",
        f"scaling != {Scaling.LEVELS} or weights == {WeightFormat.W8}",
        f"scaling < {Scaling.LEVELS} or group == 16 or group == 32",
        "x_stride % 4 == 0",
        "x_stride >= row_bytes(format, k, x_group)",
        "gated == 1 or y_stride >= n",
        "gated == 0 or packed == 1 or up(y_stride, 16) * 2 == n",
        "gated == 0 or packed == 0 or y_stride * 2 >= n",
    ),
    (
        Knob("tile_rows", 64),  # most rows of one tile; with 8-bit activations, from 16 on: AMX tiles
        Knob("task_panels", 1 << 20),  # panels of 32 outputs per task of a worker
        Knob("ahead", 1 << 20),  # how many bytes ahead weights are prefetched
    ),
    scratch="byte_tiles_floats(format, weights, k, x_group)",
)
