"""The declaration of convolution: see kernels/declare.py."""

from millrace.kernels.declare import MAX_PARAM, Kernel, Operand

_POSITIVE = ("c", "n", "kh", "kw", "groups", "stride_y", "stride_x", "dilation_y", "dilation_x")
_SMALL = ("groups * n", "c * kh", "c * kh * kw")  # each keeps the size of `k` far from overflow

KERNEL = Kernel(
    "convolution",
    "y[o, oy, ox] = bias[o] + sum of k[o, c, ky, kx] x[c, oy stride - pad + ky dilation, ox ...] over a row's planes",
    (
        Operand("x", "in", "most(x_elements) * 4"),
        Operand("k", "weight", "groups * up(n, 16) * c * kh * kw * 4"),
        Operand("bias", "weight", "groups * up(n, 16) * 4"),
        Operand("y", "out", "most(y_elements) * 4"),
    ),
    (
        "size images", "size h", "size w", "size oh", "size ow", "size x_elements", "size y_elements", "i32 groups",
        "i32 c", "i32 n", "i32 kh", "i32 kw", "i32 stride_y", "i32 stride_x", "i32 pad_y", "i32 pad_x",
        "i32 dilation_y", "i32 dilation_x",
    ),
    (
        *(f"{name} > 0" for name in _POSITIVE), *(f"{product} <= {MAX_PARAM}" for product in _SMALL), "pad_y >= 0",
        "pad_x >= 0",
    ),
)  # fmt: skip
