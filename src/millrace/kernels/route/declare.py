"""The declaration of route: see kernels/declare.py."""

from millrace.kernels.declare import LEGAL_ROWS, MAX_EXPERTS, ROWS, Kernel, Operand

MAX_CHOSEN = 64  # experts of a row
SCORINGS = ("softmax", "sigmoid", "sparsemixer")  # numbered in this order

KERNEL = Kernel(
    "route",
    "the experts of each row, by their scores from its logits x, and their weights",
    (
        Operand("x", "in", f"{ROWS} * x_stride * 4"),
        Operand("bias", "weight?", "n * 4"),
        Operand("weights", "out", f"{ROWS} * chosen * 4"),
        Operand("experts", "out", f"{ROWS} * chosen * 4", "int32_t"),
    ),
    (
        "i32 rows",
        "i32 n",
        "i32 x_stride",
        "i32 chosen",
        "i32 scoring",
        "i32 normalise",
        "i32 groups",
        "i32 chosen_groups",
        "i32 group_best",  # a group's score is the sum of so many of its best scores
        "f32 scale",
        "f32 epsilon",  # added to the sum that weights are divided by; of sparsemixer, the width of its band
    ),
    (
        LEGAL_ROWS,
        "n > 0",
        f"n <= {MAX_EXPERTS}",
        "x_stride >= n",
        "chosen > 0",
        f"chosen <= {MAX_CHOSEN}",
        "chosen <= n",
        "scoring >= 0",
        f"scoring < {len(SCORINGS)}",
        "normalise >= 0",
        "normalise <= 1",
        "groups > 0",
        "groups <= n",
        "n % groups == 0",
        "chosen_groups > 0",
        "chosen_groups <= groups",
        "chosen_groups * n >= chosen * groups",
        "group_best > 0",
        "group_best * groups <= n",
    ),
    scratch="2 * n",
)
