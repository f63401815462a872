"""SiLU x mul on a GPU, in Triton, and the product as E4M3: a row is a program's."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.kernels.convert.cuda import e4m3, rounded
from millrace.kernels.matmul.coded import E4M3, CodedRows, Matrix


@triton.jit
def gated(gate, up, y, scales, N: tl.constexpr, WIDTH: tl.constexpr, CODED: tl.constexpr):
    """gate, up, y (rows, N); in float32. WIDTH: a power of two, at least N

    CODED: y is of E4M3 with scales (rows,), of what the rows' 16 bits are: bfloat16's, of float32
    """
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = column < N
    ROW: tl.constexpr = tl.bfloat16 if gate.dtype.element_ty == tl.float32 else gate.dtype.element_ty
    a = tl.load(gate + row * N + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + row * N + column, mask=inside, other=0.0).to(tl.float32)
    out = a / (1 + tl.exp(-a)) * b
    if CODED:
        out, scale = e4m3(rounded(out, ROW))
        tl.store(scales + row, scale)
    tl.store(y + row * N + column, out.to(y.dtype.element_ty), mask=inside)


def warps(width: int) -> int:
    """Of a program that has a row of so many elements: 32 of each thread, two inputs of which fit into registers."""
    return min(max(width // 1024, 4), 32)


def silu_mul(gate: Tensor, up: Tensor, dtype: torch.dtype, coded: bool) -> Matrix:
    """gate, up (M, N) -> silu(gate) * up of `dtype`; coded: each row as E4M3 with its scale."""
    gate, up = gate.contiguous(), up.contiguous()
    m, n = gate.shape
    y = torch.empty((m, n), dtype=E4M3 if coded else dtype, device=gate.device)
    scales = torch.empty((m, 1), device=gate.device)
    width = triton.next_power_of_2(n)
    gated[(m,)](gate, up, y, scales, N=n, WIDTH=width, CODED=coded, num_warps=warps(width), enable_fp_fusion=True)
    return CodedRows(y, scales, n, n) if coded else y
