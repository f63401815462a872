"""The declaration of attention: see kernels/declare.py."""

from millrace.kernels.declare import LEGAL_ROWS, MAX_HEAD, ROWS, Kernel, Knob, Operand

KERNEL = Kernel(
    "attention",
    "y = softmax(q k^T * scale) v over a sequence's keys at positions up to its own, or the last of them, or all,"
    " from a cache's pages",
    (
        Operand("q", "in", f"{ROWS} * q_stride * 4"),
        Operand("sinks", "weight?", "heads * 4"),
        Operand("distance_bias", "weight?", "heads * bias_width * 4"),
        Operand("y", "out", f"{ROWS} * y_stride * (4 - 2 * packed)"),
    ),
    (
        "i32 rows",
        "i32 heads",
        "i32 kv_heads",
        "i32 head_dim",
        "i32 value_dim",
        "i32 q_stride",
        "i32 y_stride",  # elements
        "i32 packed",  # y is rows of bfloat16, for a matmul
        "i32 cache",
        "i32 layer",
        "i32 causal",
        "i32 window",  # keys that a row attends to, its own included; 0: all before it
        "i32 bias_width",  # distances from -bias_width / 2 on that have a bias; 0: there is none
        "i32 tiles",  # over bfloat16 keys and values: products are summed as by tdpbf16ps
        "f32 scale",
        "f32 softcap",  # scores become softcap * tanh(score / softcap); 0: unchanged
    ),
    (
        LEGAL_ROWS,
        "value_dim > 0",
        f"value_dim <= {MAX_HEAD}",
        "cache >= 0",
        "causal >= 0",
        "causal <= 1",
        "window >= 0",
        "bias_width >= 0",
        "y_stride >= heads * value_dim",
        "packed >= 0",
        "packed <= 1",
        "tiles >= 0",
        "tiles <= 1",
        "heads > 0",
        "kv_heads > 0",
        "heads % kv_heads == 0",
        "head_dim > 0",
        "head_dim % 8 == 0",
        "layer >= 0",
        "q_stride >= heads * head_dim",
        f"head_dim <= {MAX_HEAD}",
    ),
    (
        Knob("worker_tasks", 64),  # least number per worker, by splitting long contexts at their spans
        Knob("task_rows", 16),  # most rows of a tile: tokens x query heads of one KV head
        Knob("first_level", 1),  # prefetch keys and values to the first cache level instead of the second
    ),
    scratch_type="AttentionTile",
)
