"""The declaration of transpose: see kernels/declare.py."""

from millrace.kernels.declare import MAX_RANK, Kernel, Operand

KERNEL = Kernel(
    "transpose",
    "y[i0, i1, ...] = x with its extents in another order: extent d of y is extent order[d] of x",
    (
        Operand("x", "in", "most(elements) * type_bytes(type)", "uint8_t"),
        Operand("y", "out", "most(elements) * type_bytes(type)", "uint8_t"),
    ),
    (f"size extents[{MAX_RANK}]", f"i32 order[{MAX_RANK}]", "i32 rank", "size elements", "i32 type"),
    ("rank > 0", f"rank <= {MAX_RANK}", "type >= 0", "type < 6"),
)
