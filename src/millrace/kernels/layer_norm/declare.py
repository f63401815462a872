"""The declaration of layer_norm: see kernels/declare.py."""

from millrace.kernels.declare import LEGAL_HADAMARD, LEGAL_ROWS, ROWS, Kernel, Operand, RowFormat

KERNEL = Kernel(
    "layer_norm",
    "y = (x - mean(x)) / sqrt(variance(x) + eps) * w + b, stored as f32, bf16 or int8 groups",
    (
        Operand("x", "in", f"{ROWS} * x_stride * 4"),
        Operand("w", "weight", "n * 4"),
        Operand("b", "weight", "n * 4"),
        Operand("y", "out", f"{ROWS} * y_stride", "uint8_t"),
    ),
    ("i32 rows", "i32 n", "i32 x_stride", "i32 y_stride", "i32 format", "i32 group", "f32 eps"),
    (
        LEGAL_ROWS,
        "n > 0",
        "x_stride >= n",
        f"format >= {min(RowFormat)}",
        f"format <= {max(RowFormat)}",
        "group >= 0",
        *LEGAL_HADAMARD,
        "y_stride % 4 == 0",
        "y_stride >= row_bytes(format, n, group)",
    ),
    scratch="n",  # a row before it is packed
)
