"""The declaration of batched_matmul: see kernels/declare.py."""

from millrace.kernels.declare import Kernel, Operand

KERNEL = Kernel(
    "batched_matmul",
    "y[b] = x[b] @ w[b], or x[b] @ w of one matrix for all b",
    (
        Operand("x", "in", "most(x_elements) * 4"),
        Operand("w", "in", "most(w_elements) * 4"),
        Operand("y", "out", "most(elements) * 4"),
    ),
    ("size m", "size k", "size n", "size x_elements", "size w_elements", "size elements"),
)
