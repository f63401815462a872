"""What an executor on a GPU runs, by the names of engine/cuda/plain.py."""

from millrace.kernels.attention.cuda import attention, keep_rotated
from millrace.kernels.matmul.cuda import product
from millrace.kernels.rms_norm.cuda import rms_norm

__all__ = ["attention", "keep_rotated", "product", "rms_norm"]
