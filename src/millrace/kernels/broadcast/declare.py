"""The declaration of broadcast: see kernels/declare.py."""

from millrace.kernels.declare import EXPRESSION, MAX_RANK, Kernel, Operand

_INPUTS = "abcd"
N_TYPES = 6  # numbered in kernels/layout.py

KERNEL = Kernel(
    "broadcast",
    "y = expression(a, b, c, d) of any types and rank; an operand lacks the extents that its mask has no bit of",
    (
        *(
            Operand(x, "in" if x == "a" else "in?", f"most({x}_elements) * type_bytes({x}_type)", "uint8_t")
            for x in _INPUTS
        ),
        Operand("y", "out", "most(elements) * type_bytes(y_type)", "uint8_t"),
    ),
    (
        f"size extents[{MAX_RANK}]", "i32 rank", "size elements", *(f"size {x}_elements" for x in _INPUTS),
        *(f"i32 {x}_mask" for x in _INPUTS), *(f"i32 {x}_type" for x in _INPUTS), "i32 y_type", "i32 whole",
        *EXPRESSION,
    ),
    (
        "rank >= 0", f"rank <= {MAX_RANK}",
        *(f"{x}_type >= 0" for x in (*_INPUTS, "y")), *(f"{x}_type < {N_TYPES}" for x in (*_INPUTS, "y")),
    ),
)  # fmt: skip
