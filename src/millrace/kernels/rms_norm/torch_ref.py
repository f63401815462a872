"""The RMS norm in plain PyTorch."""

import torch
from torch import Tensor

from millrace.graph.types import Node
from millrace.kernels.convert.torch_ref import to_dtype
from millrace.kernels.matmul.coded import Matrix, RowQuantization
from millrace.kernels.operators import float_attr
from millrace.kernels.torch_operators import OperatorContext


def rms_norm(x: Tensor, w: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x (..., N), w (N,) float32 -> (..., N) of `dtype`."""
    result = x.float()
    return (result * torch.rsqrt(result.square().mean(-1, keepdim=True) + eps) * w).to(dtype)


def add_norm(
    x: Tensor, residual: Tensor, w: Tensor, eps: float, dtype: torch.dtype, coding: RowQuantization | None
) -> tuple[Tensor, Matrix]:  # fmt: skip
    """x (M, N), residual (M, N) and w (N,) float32 -> their sum, float32, and its norm, of `dtype` or quantized."""
    total = residual + x.float()
    return total, to_dtype(rms_norm(total, w, eps, torch.float32), dtype, coding)


def _rms_norm(node: Node, run: OperatorContext) -> Tensor:
    x, w = (run.tensor(v) for v in node.inputs)
    return run.normalised(x, w, float_attr(node, "eps"))


OPERATORS = {"rms_norm": _rms_norm}
