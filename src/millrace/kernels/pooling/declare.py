"""The declaration of pooling: see kernels/declare.py."""

from millrace.kernels.declare import MAX_PARAM, Kernel, Operand

MAX, MEAN, MEAN_INSIDE = 0, 1, 2  # kinds: maximum; mean of a window; mean of its part within the plane
_POSITIVE = ("kh", "kw", "stride_y", "stride_x", "dilation_y", "dilation_x")

KERNEL = Kernel(
    "pooling",
    "y[oy, ox] = the largest, or the mean, of x in a window of each plane",
    (
        Operand("x", "in", "most(x_elements) * 4"),
        Operand("y", "out", "most(y_elements) * 4"),
    ),
    (
        "size planes", "size h", "size w", "size oh", "size ow", "size x_elements", "size y_elements", "i32 kind",
        "i32 kh", "i32 kw",
        "i32 stride_y", "i32 stride_x", "i32 pad_y", "i32 pad_x", "i32 dilation_y", "i32 dilation_x",
    ),
    (
        *(f"{name} > 0" for name in _POSITIVE), f"kh * kw <= {MAX_PARAM}", "pad_y >= 0", "pad_x >= 0",
        f"kind >= {MAX}", f"kind <= {MEAN_INSIDE}",
    ),
)  # fmt: skip
