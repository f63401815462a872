"""The declaration of rescore: see kernels/declare.py."""

from millrace.kernels.declare import LEGAL_ROWS, ROWS, Kernel, Operand, RowFormat

KERNEL = Kernel(
    "rescore",
    "the `count` largest logits of each sampled row again, from 8-bit weights",
    (
        Operand("x", "in", f"{ROWS} * x_stride", "uint8_t"),
        Operand("w", "weight", "n * byte_row_bytes(k, group)", "uint8_t"),
        Operand("y", "inout", f"{ROWS} * n * 4"),
    ),
    ("i32 rows", "i32 n", "i32 k", "i32 group", "i32 x_stride", "i32 count"),
    (
        LEGAL_ROWS,
        "n > 0",
        "k > 0",
        "group > 0",
        "group % 4 == 0",
        "count > 0",
        "x_stride % 4 == 0",
        f"x_stride >= row_bytes({RowFormat.Q8}, k, group)",
    ),
    scratch="n * 2 + n / 64 + 64",  # candidates
)
