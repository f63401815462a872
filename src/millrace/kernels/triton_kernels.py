"""The kernels of a GPU executor, under the names of kernels/torch_reference.py."""

from millrace.kernels.attention.cuda import attention, keep_rotated
from millrace.kernels.attention.texts_cuda import text_attention
from millrace.kernels.convert.cuda import coded_rows
from millrace.kernels.elementwise.cuda import silu_mul
from millrace.kernels.matmul.cuda import product
from millrace.kernels.rms_norm.cuda import add_norm, rms_norm
from millrace.kernels.sample.cuda import argmax, draw, scatter_tokens
from millrace.kernels.short_conv.cuda import short_conv

__all__ = [
    "add_norm",
    "argmax",
    "attention",
    "coded_rows",
    "draw",
    "keep_rotated",
    "product",
    "rms_norm",
    "scatter_tokens",
    "short_conv",
    "silu_mul",
    "text_attention",
]  # fmt: skip
