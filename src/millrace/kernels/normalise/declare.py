"""The declaration of normalise: see kernels/declare.py."""

from millrace.kernels.declare import LEGAL_ROWS, ROWS, Kernel, Operand

KERNEL = Kernel(
    "normalise",
    "y = x / max(|x|, eps), row by row",
    (
        Operand("x", "in", f"{ROWS} * x_stride * 4"),
        Operand("y", "out", f"{ROWS} * n * 4"),
    ),
    ("i32 rows", "i32 n", "i32 x_stride", "f32 eps"),
    (LEGAL_ROWS, "n > 0", "x_stride >= n"),
)
