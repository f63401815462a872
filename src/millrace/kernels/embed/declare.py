"""The declaration of embed: see kernels/declare.py."""

from millrace.kernels.declare import LEGAL_ROWS, ROWS, Kernel, Operand

KERNEL = Kernel(
    "embed",
    "y[i] = table[ids[i]] * scale; NaN for an id beyond the table",
    (
        Operand("ids", "in", f"{ROWS} * 4", "int32_t"),
        Operand("table", "weight", "vocab * n * (4 + bf16 * -2)", "uint8_t"),
        Operand("y", "out", f"{ROWS} * n * 4"),
    ),
    ("i32 rows", "i32 n", "i32 vocab", "i32 bf16", "f32 scale"),
    (LEGAL_ROWS, "n > 0", "vocab > 0", "bf16 >= 0", "bf16 <= 1"),
)
