"""The declaration of rope: see kernels/declare.py."""

from millrace.kernels.declare import LEGAL_ROWS, MAX_HEAD, ROWS, Kernel, Operand

KERNEL = Kernel(
    "rope",
    "rotate q and k (halves d and d + D/2) by their positions, in place; write k and v into the pages of a cache",
    (
        Operand("q", "inout?", f"{ROWS} * q_stride * 4"),
        Operand("k", "inout?", f"{ROWS} * k_stride * 4"),
        Operand("v", "in?", f"{ROWS} * v_stride * 4"),
        Operand("positions", "in?", f"{ROWS} * 4", "int32_t"),
        Operand("table", "weight?", "context * head_dim * 4"),
    ),
    (
        "i32 rows",
        "i32 heads",
        "i32 kv_heads",
        "i32 head_dim",
        "i32 value_dim",
        "i32 q_stride",
        "i32 k_stride",
        "i32 v_stride",
        "i32 context",
        "i32 cache",
        "i32 layer",
    ),
    (
        LEGAL_ROWS,
        "heads >= 0",
        "kv_heads >= 0",
        "head_dim > 0",
        "head_dim % 8 == 0",
        f"head_dim <= {MAX_HEAD}",
        "value_dim > 0 or layer < 0",
        f"value_dim <= {MAX_HEAD}",
        "context > 0",
        "cache >= 0",
        "layer >= 0 - 1",
        "q_stride >= heads * head_dim",
        "k_stride >= kv_heads * head_dim",
        "v_stride >= kv_heads * value_dim or layer < 0",
    ),
)
