"""Rows as 8 bits on a GPU, in Triton: what kernels that make them have in common."""

import triton
import triton.language as tl

from millrace.kernels import declare

NOTHING = tl.constexpr(declare.NOTHING)
LARGEST = tl.constexpr(448.0)  # that E4M3 has
ROUNDS = tl.constexpr(1.5 * 2**23)  # added to a small float32 and taken away again: half to even


@triton.jit
def codes(x, dtype: tl.constexpr):
    """Rounded before the cast, which then is exact: Triton's interpreter has one of its own."""
    unit = 1.0
    if dtype != tl.int8:  # three bits behind the first, of what is at least 2^-6
        power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        unit = tl.maximum(power, 2.0**-6) / 8
    rounds = ROUNDS * unit
    return ((x + rounds) - rounds).to(dtype)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 as 16 bits have it, half to even: a cast in Triton's interpreter cuts bfloat16 off."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)
    else:
        x = x.to(dtype).to(tl.float32)
    return x


@triton.jit
def e4m3(x):
    """Codes of a row, and its scale, as matmul/coded.py::e4m3_rows has them; x: float32, 0 behind the row's end."""
    scale = (tl.max(tl.abs(x), 0) + tl.sum(x * 0.0, 0)) / LARGEST  # no number where an element is not finite
    inverse = tl.where(scale > NOTHING, 1 / scale, 0.0)
    inside = tl.minimum(tl.maximum(x * inverse, -LARGEST), LARGEST)
    return codes(tl.where(scale == scale, inside, 0.0), tl.float8e4nv), scale
