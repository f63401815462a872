"""The declaration of combine_experts: see kernels/declare.py."""

from millrace.kernels.declare import LEGAL_ROWS, ROWS, Kernel, Operand

KERNEL = Kernel(
    "combine_experts",
    "y[t] = the sum of weights[t, j] * x[places[t, j]] over j; NaN for a place beyond x",
    (
        Operand("x", "in", "most(rows_from) * x_stride * 4"),
        Operand("places", "in", f"{ROWS} * chosen * 4", "int32_t"),
        Operand("weights", "in", f"{ROWS} * chosen * 4"),
        Operand("y", "out", f"{ROWS} * n * 4"),
    ),
    ("i32 rows", "i32 rows_from", "i32 n", "i32 x_stride", "i32 chosen"),
    (LEGAL_ROWS, "rows_from >= 0", "n > 0", "x_stride >= n", "chosen > 0"),
)
