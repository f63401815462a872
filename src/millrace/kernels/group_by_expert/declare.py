"""The declaration of group_by_expert: see kernels/declare.py."""

from millrace.kernels.declare import LEGAL_ROWS, ROWS, Kernel, Operand

KERNEL = Kernel(
    "group_by_expert",
    "the (row, expert) pairs in the order of experts: each one's row, the place of each pair, each expert's first pair",
    (
        Operand("experts", "in", f"{ROWS} * chosen * 4", "int32_t"),
        Operand("row_of", "out", f"{ROWS} * chosen * 4", "int32_t"),
        Operand("places", "out", f"{ROWS} * chosen * 4", "int32_t"),
        Operand("starts", "out", "(n + 1) * 4", "int32_t"),
    ),
    ("i32 rows", "i32 chosen", "i32 n"),
    (LEGAL_ROWS, "chosen > 0", "n > 0"),
)
