"""The declaration of softmax: see kernels/declare.py."""

from millrace.kernels.declare import Kernel, Operand

KERNEL = Kernel(
    "softmax",
    "y = exp(x - max(x)) / sum(exp(x - max(x))) in each row of n",
    (Operand("x", "in", "most(elements) * 4"), Operand("y", "out", "most(elements) * 4")),
    ("size n", "size elements"),
)
