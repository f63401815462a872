"""Quantization of rows to 8 bits on a GPU, in Triton: a kernel of its own, and functions that other kernels use.

A program has a row, or a part of one, as a tile (GROUPS, WIDTH): each line has GROUP neighbors that share a scale,
padded with 0. A row with one scale is one line; if nothing needs a whole row, several programs share it.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.kernels import declare
from millrace.kernels.gpu_launch import after_those_before, cdiv, lets_next_begin, overlapping
from millrace.kernels.matmul.coded import E4M3, QuantizedRows, RowQuantization

ZERO_GROUP_THRESHOLD = tl.constexpr(declare.ZERO_GROUP_THRESHOLD)
LARGEST = tl.constexpr(448.0)  # the largest E4M3 number
PART = 2048  # elements per program, of rows that may be shared
ROUNDS = tl.constexpr(1.5 * 2**23)  # added to a small float32 and subtracted again: rounds half to even


@triton.jit
def codes(x, dtype: tl.constexpr):
    """Round before the cast, which then is exact: Triton's interpreter rounds differently."""
    unit = 1.0
    if dtype != tl.int8:  # three mantissa bits, for magnitudes of at least 2^-6
        power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        unit = tl.maximum(power, 2.0**-6) / 8
    rounds = ROUNDS * unit
    return ((x + rounds) - rounds).to(dtype)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Round float32 to 16 bits, half to even: the cast of Triton's interpreter truncates bfloat16."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)
    else:
        x = x.to(dtype).to(tl.float32)
    return x


@triton.jit
def as_row(x, dtype: tl.constexpr, kind: tl.constexpr):
    """Round float32 as rows of `dtype` before quantization: E4M3 is made from 16 bits, INT8 from any type."""
    if dtype != tl.float32:
        x = rounded(x, dtype)
    elif kind == tl.float8e4nv:
        x = rounded(x, tl.bfloat16)
    return x


@triton.jit
def tile(first, N: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Return where the tile's elements are in a row, from its group `first` on, and which exist."""
    within = tl.arange(0, WIDTH)[None, :]
    place = (first + tl.arange(0, GROUPS)[:, None]) * GROUP + within
    return place, (within < GROUP) & (place < N)


@triton.jit
def keep(x, y, scales, row, first, place, inside, N: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr):
    """Store a tile x of a row, float32, in y (rows, N); quantized with scales (rows, groups) if y is.

    The codes are those of matmul/coded.py, bit for bit, except for the order of a transform's sums
    """
    kind: tl.constexpr = y.dtype.element_ty
    if kind == tl.int8 or kind == tl.float8e4nv:
        if STAGES > 0:
            x = _transformed(x, STAGES)
        x, scale = _coded(x, kind)
        groups: tl.constexpr = (N + GROUP - 1) // GROUP
        group = first + tl.arange(0, x.shape[0])
        tl.store(scales + row * groups + group, scale, mask=group < groups)
    tl.store(y + row * N + place, x.to(kind), mask=inside)


@triton.jit
def _transformed(x, STAGES: tl.constexpr):
    """Multiply each line of x (GROUPS, WIDTH) by the Hadamard matrix of its size, 2^STAGES.

    Each stage sums over the highest bit of an element's index, which becomes the lowest
    """
    GROUPS: tl.constexpr = x.shape[0]
    HALF: tl.constexpr = x.shape[1] // 2
    a, b = tl.split(tl.permute(tl.reshape(x, (GROUPS, 2, HALF)), (0, 2, 1)))
    for _ in tl.static_range(STAGES):
        a, b = tl.split(tl.permute(tl.reshape(tl.join(a + b, a - b), (GROUPS, 2, HALF)), (0, 2, 1)))
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (GROUPS, 2 * HALF)) * (1 / (2 * HALF) ** 0.5)


@triton.jit
def _coded(x, kind: tl.constexpr):
    """Quantize x (GROUPS, WIDTH) float32: codes, and a scale per line, which is NaN if an element is not finite.

    Divisions are rounded once, like PyTorch's on a CPU. The clamp also separates a product from the following sum,
    which would be rounded once together, where PyTorch rounds twice.
    """
    most = tl.max(tl.abs(x), 1) + tl.sum(x * 0.0, 1)
    largest: tl.constexpr = 127.0 if kind == tl.int8 else LARGEST
    limit, one = tl.full(most.shape, largest, tl.float32), tl.full(most.shape, 1.0, tl.float32)
    scale = tl.div_rn(most, limit)
    if kind == tl.int8:
        inverse = tl.where(
            most > ZERO_GROUP_THRESHOLD, tl.div_rn(limit, tl.where(most > ZERO_GROUP_THRESHOLD, most, 1.0)), 0.0
        )
        scale = tl.where(most <= ZERO_GROUP_THRESHOLD, 0.0, scale)
    else:
        inverse = tl.where(
            scale > ZERO_GROUP_THRESHOLD, tl.div_rn(one, tl.where(scale > ZERO_GROUP_THRESHOLD, scale, 1.0)), 0.0
        )
    result = tl.minimum(tl.maximum(x * inverse[:, None], -largest), largest)
    return codes(tl.where((most == most)[:, None], result, 0.0), kind), scale


@triton.jit
def code_rows(
    x, y, scales, N: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Quantize x (rows, N) of floats -> y (rows, N) of codes, with scales (rows, groups)."""
    lets_next_begin(PDL)
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUPS
    place, inside = tile(first, N, GROUP, GROUPS, WIDTH)
    after_those_before(PDL)
    value = tl.load(x + row * N + place, mask=inside, other=0.0).to(tl.float32)
    keep(value, y, scales, row, first, place, inside, N, GROUP, STAGES)


@dataclass(frozen=True, slots=True)
class RowShape:
    """The tiles of rows: `sizes` as kernel arguments, number of programs per row, and the warps of each."""

    sizes: dict[str, int]
    parts: int
    warps: int


@cache
def shape_of(n: int, coding: RowQuantization | None = None, *, complete: bool = False) -> RowShape:
    """Return the tiles of rows of n elements. coding: one that `is_made`; None: floats; complete: one program per row

    A thread has 32 elements, two inputs of which fit into its registers; with a transform 16.
    """
    coded, stages = coding is not None and (coding.group or n), 0
    group = coded or (n if complete else min(n, PART))
    width, groups = triton.next_power_of_2(group), cdiv(n, group)
    lines = triton.next_power_of_2(groups)
    if not complete:
        lines = min(lines, max(PART // width, 1))
    if coding is not None and coding.transform:
        stages = width.bit_length() - 1
    warps = min(max(lines * width // (512 if stages else 1024), 4), 32)
    sizes = {"N": n, "GROUP": group, "GROUPS": lines, "WIDTH": width, "STAGES": stages}
    return RowShape(sizes, cdiv(groups, lines), warps)


def is_made(coding: RowQuantization, n: int) -> bool:
    """Return whether kernels can quantize rows of n elements so: transformed groups must be whole powers of two."""
    if not coding.transform:
        return True
    group = coding.group or n
    return n % group == 0 and group & group - 1 == 0 and 1 < group <= declare.HADAMARD_BLOCK


def empty_rows(rows: int, n: int, coding: RowQuantization, device: torch.device) -> QuantizedRows:
    """Allocate the codes and scales of `rows` rows."""
    group = coding.group or n
    codes = torch.empty((rows, n), dtype=E4M3 if coding.e4m3 else torch.int8, device=device)
    return QuantizedRows(codes, torch.empty((rows, cdiv(n, group)), device=device), n, group)


def coded_rows(x: Tensor, coding: RowQuantization) -> QuantizedRows:
    """Quantize x (R, K) of floats, as `coding.rows`."""
    rows, n = x.shape
    if not is_made(coding, n):
        return coding.rows(x)
    x, y, shape = x.contiguous(), empty_rows(rows, n, coding, x.device), shape_of(n, coding)
    code_rows[rows, shape.parts](
        x, y.codes, y.scales, **shape.sizes, **overlapping(x.device), num_warps=shape.warps, enable_fp_fusion=True
    )
    return y
