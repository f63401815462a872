"""The declaration of convert: see kernels/declare.py."""

from millrace.kernels.declare import LEGAL_HADAMARD, LEGAL_ROWS, ROWS, Kernel, Operand, RowFormat

KERNEL = Kernel(
    "convert",
    "y = x as bf16 or int8 groups, one scale amax/127 per group",
    (
        Operand("x", "in", f"{ROWS} * x_stride * 4"),
        Operand("y", "out", f"{ROWS} * y_stride", "uint8_t"),
    ),
    ("i32 rows", "i32 n", "i32 x_stride", "i32 y_stride", "i32 format", "i32 group"),
    (
        LEGAL_ROWS,
        "n > 0",
        "x_stride >= n",
        f"format >= {RowFormat.BF16}",
        f"format <= {max(RowFormat)}",
        "group >= 0",
        *LEGAL_HADAMARD,
        "y_stride % 4 == 0",
        "y_stride >= row_bytes(format, n, group)",
    ),
)
