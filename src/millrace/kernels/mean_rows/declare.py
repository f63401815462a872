"""The declaration of mean_rows: see kernels/declare.py."""

from millrace.kernels.declare import LEGAL_ROWS, ROWS, Kernel, Operand

KERNEL = Kernel(
    "mean_rows",
    "y[s] = the mean of the lengths[s] rows of x that come behind those of the sequences before",
    (
        Operand("x", "in", "most(rows_from) * x_stride * 4"),
        Operand("lengths", "in", f"{ROWS} * 4", "int32_t"),
        Operand("y", "out", f"{ROWS} * n * 4"),
    ),
    ("i32 rows", "i32 rows_from", "i32 n", "i32 x_stride"),
    (LEGAL_ROWS, "rows_from >= 0", "n > 0", "x_stride >= n"),
)
