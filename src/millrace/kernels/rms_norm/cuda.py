"""rms_norm on a GPU, in Triton, with the sum before it and the quantization after it: one program per row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.kernels.convert.cuda import as_row, coded_rows, empty_rows, is_made, keep, shape_of, tile
from millrace.kernels.gpu_launch import after_those_before, asks_for, lets_next_begin, overlapping
from millrace.kernels.matmul.coded import Matrix, RowQuantization


@triton.jit
def normalise(x, w, y, eps, N: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr):
    """x, y (rows, N), w (N,); sums in float32. WIDTH: a power of two, at least N"""
    lets_next_begin(PDL)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = column < N
    asks_for(w, row, 1, 4 * N, 1, 4 * WIDTH, PDL)  # by the first row's program, for all
    after_those_before(PDL)
    value = tl.load(x + row * N + column, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 0) / N + eps)
    out = value * inverse * tl.load(w + column, mask=inside, other=0.0)
    tl.store(y + row * N + column, out.to(y.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, w: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x (..., N), w (N,) float32 -> (..., N) of `dtype`."""
    x = x.contiguous()
    n = x.shape[-1]
    shape = shape_of(n, complete=True)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    normalise[(x.numel() // n,)](
        x, w, y, eps, N=n, WIDTH=shape.sizes["WIDTH"], **overlapping(x.device), num_warps=shape.warps,
        enable_fp_fusion=True,
    )  # fmt: skip
    return y


@triton.jit
def add_normalise(
    x, residual, w, total, y, scales, eps, N: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr, STAGES: tl.constexpr, CODED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x, y (rows, N), residual, total (rows, N) float32: total = residual + x, and y is its norm with w (N,)

    CODED: y is quantized, with scales (rows, groups). Tiles as in convert/cuda.py
    """
    lets_next_begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    place, inside = tile(0, N, GROUP, GROUPS, WIDTH)
    asks_for(w, row, 1, 4 * N, 1, 4 * GROUPS * WIDTH, PDL)
    after_those_before(PDL)
    value = tl.load(residual + row * N + place, mask=inside, other=0.0)
    value += tl.load(x + row * N + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + row * N + place, value, mask=inside)
    inverse = tl.rsqrt(tl.sum(tl.sum(value * value, 1), 0) / N + eps)
    out = value * inverse * tl.load(w + place, mask=inside, other=0.0)
    if CODED:
        out = as_row(out, x.dtype.element_ty, y.dtype.element_ty)
    keep(out, y, scales, row, 0, place, inside, N, GROUP, STAGES)


def add_norm(
    x: Tensor, residual: Tensor, w: Tensor, eps: float, dtype: torch.dtype, coding: RowQuantization | None
) -> tuple[Tensor, Matrix]:  # fmt: skip
    """x (M, N), residual (M, N) and w (N,) float32 -> their sum, float32, and its norm, of `dtype` or quantized."""
    x, residual = x.contiguous(), residual.contiguous()
    m, n = x.shape
    if coding and not is_made(coding, n):
        total, floats = add_norm(x, residual, w, eps, dtype, None)
        return total, coded_rows(floats, coding)
    total = torch.empty_like(residual)
    result = empty_rows(m, n, coding, x.device) if coding else torch.empty((m, n), dtype=dtype, device=x.device)
    y, scales = (result.codes, result.scales) if coding else (result, result)
    shape = shape_of(n, coding, complete=True)
    add_normalise[(m,)](
        x, residual, w, total, y, scales, eps, **shape.sizes, CODED=coding is not None, **overlapping(x.device),
        num_warps=shape.warps, enable_fp_fusion=True,
    )  # fmt: skip
    return total, result
