"""The declaration of channel_affine: see kernels/declare.py."""

from millrace.kernels.declare import Kernel, Operand

KERNEL = Kernel(
    "channel_affine",
    "y = x * scale[c] + shift[c] in each plane c",
    (
        Operand("x", "in", "most(elements) * 4"),
        Operand("scale", "weight", "c * 4"),
        Operand("shift", "weight", "c * 4"),
        Operand("y", "out", "most(elements) * 4"),
    ),
    ("size plane", "size elements", "i32 c"),
    ("c > 0",),
)
