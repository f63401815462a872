"""The declaration of elementwise: see kernels/declare.py."""

from millrace.kernels.declare import EXPRESSION, LEGAL_ROWS, ROWS, Kernel, Operand

KERNEL = Kernel(
    "elementwise",
    "y = expression(a, b, c, d), a small program over registers; an operand is a matrix or one row for all",
    (
        Operand("a", "in", f"(({ROWS} - 1) * a_stride + n) * 4"),
        Operand("b", "in?", f"(({ROWS} - 1) * b_stride + n) * 4"),
        Operand("c", "in?", f"(({ROWS} - 1) * c_stride + n) * 4"),
        Operand("d", "in?", f"(({ROWS} - 1) * d_stride + n) * 4"),
        Operand("y", "out", f"{ROWS} * n * 4"),
    ),
    ("i32 rows", "i32 n", "i32 a_stride", "i32 b_stride", "i32 c_stride", "i32 d_stride", *EXPRESSION),
    (
        LEGAL_ROWS,
        "n > 0",
        "a_stride == 0 or a_stride >= n",
        "b_stride == 0 or b_stride >= n",
        "c_stride == 0 or c_stride >= n",
        "d_stride == 0 or d_stride >= n",
    ),
)
