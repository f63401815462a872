"""The declaration of short_conv: see kernels/declare.py."""

from millrace.kernels.declare import LEGAL_ROWS, ROWS, Kernel, Operand

MAX_TAPS = 8

KERNEL = Kernel(
    "short_conv",
    "y[t] = bias + sum of w[j] x[t - taps + 1 + j] in each column, over the rows of a sequence, and its state before",
    (
        Operand("x", "in", f"{ROWS} * x_stride * 4"),
        Operand("w", "weight", "taps * n * 4"),
        Operand("bias", "weight?", "n * 4"),
        Operand("y", "out", f"{ROWS} * n * 4"),
    ),
    ("i32 rows", "i32 n", "i32 x_stride", "i32 taps", "i32 state", "i32 layer"),
    (LEGAL_ROWS, "n > 0", "x_stride >= n", "taps > 1", f"taps <= {MAX_TAPS}", "state >= 0", "layer >= 0"),
)
