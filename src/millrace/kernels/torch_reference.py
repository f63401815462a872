"""The functions of kernels/*/cuda.py in plain PyTorch: for CPU tensors, and as the reference in tests."""

from millrace.kernels.attention.torch_ref import attention, coded, keep_rotated, text_attention
from millrace.kernels.convert.torch_ref import coded_rows
from millrace.kernels.elementwise.torch_ref import silu_mul
from millrace.kernels.matmul.torch_ref import product
from millrace.kernels.rms_norm.torch_ref import add_norm, rms_norm
from millrace.kernels.rope.torch_ref import rotated
from millrace.kernels.sample.torch_ref import argmax, draw, scatter_tokens
from millrace.kernels.short_conv.torch_ref import short_conv

__all__ = [
    "add_norm",
    "argmax",
    "attention",
    "coded",
    "coded_rows",
    "draw",
    "keep_rotated",
    "product",
    "rms_norm",
    "rotated",
    "scatter_tokens",
    "short_conv",
    "silu_mul",
    "text_attention",
]  # fmt: skip
