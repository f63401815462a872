"""SiLU x mul on a GPU, in Triton, with results in the form that matmuls read."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.kernels.convert.cuda import as_row, coded_rows, empty_rows, is_made, keep, shape_of, tile
from millrace.kernels.gpu_launch import after_those_before, lets_next_begin, overlapping
from millrace.kernels.matmul.coded import Matrix, RowQuantization


@triton.jit
def gated(
    gate, up, y, scales, row_elements, N: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    STAGES: tl.constexpr, CODED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """gate, up (rows, N), with a row stride of `row_elements`; y (rows, N); computed in float32. Tiles as in
    convert/cuda.py

    CODED: y is quantized, with scales (rows, groups)
    """
    lets_next_begin(PDL)
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUPS
    place, inside = tile(first, N, GROUP, GROUPS, WIDTH)
    after_those_before(PDL)
    a = tl.load(gate + row * row_elements + place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + row * row_elements + place, mask=inside, other=0.0).to(tl.float32)
    out = a / (1 + tl.exp(-a)) * b
    if CODED:
        out = as_row(out, gate.dtype.element_ty, y.dtype.element_ty)
    keep(out, y, scales, row, first, place, inside, N, GROUP, STAGES)


def silu_mul(gate: Tensor, up: Tensor, dtype: torch.dtype, coding: RowQuantization | None) -> Matrix:
    """gate, up (M, N), which may be columns of one array -> silu(gate) * up of `dtype`, or quantized."""
    m, n = gate.shape
    if coding and not is_made(coding, n):
        floats = silu_mul(gate, up, dtype, None)
        return coded_rows(floats, coding)
    if gate.stride() != up.stride() or gate.stride(1) != 1:
        gate, up = gate.contiguous(), up.contiguous()
    result = empty_rows(m, n, coding, gate.device) if coding else torch.empty((m, n), dtype=dtype, device=gate.device)
    y, scales = (result.codes, result.scales) if coding else (result, result)
    shape = shape_of(n, coding)
    gated[m, shape.parts](
        gate, up, y, scales, gate.stride(0), **shape.sizes, CODED=coding is not None, **overlapping(gate.device),
        num_warps=shape.warps, enable_fp_fusion=True,
    )  # fmt: skip
    return result
