"""What kernels/*/cuda.py compute, in plain PyTorch: for tensors of a CPU, and to hold the kernels against."""

from millrace.kernels.attention.torch_ref import attention, coded, keep_rotated, text_attention
from millrace.kernels.convert.torch_ref import coded_rows
from millrace.kernels.elementwise.torch_ref import silu_mul
from millrace.kernels.matmul.torch_ref import product
from millrace.kernels.rms_norm.torch_ref import add_norm, rms_norm
from millrace.kernels.rope.torch_ref import rotated
from millrace.kernels.sample.torch_ref import best, draw, put
from millrace.kernels.short_conv.torch_ref import short_conv

__all__ = [
    "add_norm", "attention", "best", "coded", "coded_rows", "draw", "keep_rotated", "product", "put",
    "rms_norm", "rotated", "short_conv", "silu_mul", "text_attention",
]  # fmt: skip
