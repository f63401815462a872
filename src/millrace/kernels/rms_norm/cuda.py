"""rms_norm on a GPU, in Triton, with the sum before it and the rounding behind it: a row is a program's."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.kernels.convert.cuda import e4m3, rounded
from millrace.kernels.matmul.coded import E4M3, CodedRows, Matrix


@triton.jit
def normalise(x, w, y, eps, N: tl.constexpr, WIDTH: tl.constexpr):
    """x, y (rows, N), w (N,); sums in float32. WIDTH: a power of two, at least N"""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = column < N
    value = tl.load(x + row * N + column, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 0) / N + eps)
    out = value * inverse * tl.load(w + column, mask=inside, other=0.0)
    tl.store(y + row * N + column, out.to(y.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, w: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x (..., N), w (N,) float32 -> (..., N) of `dtype`."""
    x = x.contiguous()
    n = x.shape[-1]
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    normalise[(x.numel() // n,)](x, w, y, eps, N=n, WIDTH=triton.next_power_of_2(n), enable_fp_fusion=True)
    return y


@triton.jit
def add_normalise(
    x, residual, w, total, y, scales, eps, N: tl.constexpr, WIDTH: tl.constexpr, CODED: tl.constexpr
):  # fmt: skip
    """x, y (rows, N), residual, total (rows, N) float32: total = residual + x, and y is that normalised by w (N,)

    CODED: y is of E4M3 with scales (rows,), of what the rows' 16 bits are: bfloat16's, of float32
    """
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = column < N
    ROW: tl.constexpr = tl.bfloat16 if x.dtype.element_ty == tl.float32 else x.dtype.element_ty
    value = tl.load(residual + row * N + column, mask=inside, other=0.0)
    value += tl.load(x + row * N + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + row * N + column, value, mask=inside)
    inverse = tl.rsqrt(tl.sum(value * value, 0) / N + eps)
    out = value * inverse * tl.load(w + column, mask=inside, other=0.0)
    if CODED:
        out, scale = e4m3(rounded(out, ROW))
        tl.store(scales + row, scale)
    tl.store(y + row * N + column, out.to(y.dtype.element_ty), mask=inside)


def add_norm(
    x: Tensor, residual: Tensor, w: Tensor, eps: float, dtype: torch.dtype, coded: bool
) -> tuple[Tensor, Matrix]:  # fmt: skip
    """x (M, N), residual (M, N) and w (N,) float32 -> their sum, float32, and that normalised, of `dtype`.

    coded: each row of it as E4M3 with its scale
    """
    x, residual = x.contiguous(), residual.contiguous()
    m, n = x.shape
    total = torch.empty_like(residual)
    y = torch.empty((m, n), dtype=E4M3 if coded else dtype, device=x.device)
    scales = torch.empty((m, 1), device=x.device)
    add_normalise[(m,)](x, residual, w, total, y, scales, eps, N=n, WIDTH=triton.next_power_of_2(n), CODED=coded,
                        enable_fp_fusion=True)  # fmt: skip
    return total, CodedRows(y, scales, n, n) if coded else y
