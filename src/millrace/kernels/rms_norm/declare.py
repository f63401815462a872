"""The declaration of rms_norm: see kernels/declare.py."""

from millrace.kernels.declare import LEGAL_HADAMARD, LEGAL_ROWS, ROWS, Kernel, Operand, RowFormat

KERNEL = Kernel(
    "rms_norm",
    "y = x / sqrt(mean(x^2) + eps) * w over each run of n, stored as f32, bf16 or int8 groups",
    (
        Operand("x", "in", f"{ROWS} * x_stride * 4"),
        Operand("w", "weight", "n * 4"),
        Operand("y", "out", f"{ROWS} * y_stride", "uint8_t"),
    ),
    ("i32 rows", "i32 runs", "i32 n", "i32 x_stride", "i32 y_stride", "i32 format", "i32 group", "f32 eps"),
    (
        LEGAL_ROWS,
        "n > 0",
        "runs > 0",
        "x_stride >= runs * n",
        f"format >= {min(RowFormat)}",
        f"format <= {max(RowFormat)}",
        f"format == {RowFormat.F32} or runs == 1",
        "group >= 0",
        *LEGAL_HADAMARD,
        "y_stride % 4 == 0",
        f"format != {RowFormat.F32} or y_stride >= runs * n * 4",
        f"format == {RowFormat.F32} or y_stride >= row_bytes(format, n, group)",
    ),
    scratch="runs * n",  # a row before it is packed
)
