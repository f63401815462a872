"""Quantized matmuls on a GPU, in Triton, for few rows, whose time is that of reading the weights once.

For many rows of 16-bit floats, weights are converted to floats first, and cuBLAS multiplies; many rows of E4M3 use
cuBLASLt. Rows of int8 are multiplied with integers, however many they are.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from millrace.kernels.gpu_launch import after_those_before, asks_for, cdiv, lets_next_begin, overlapping
from millrace.kernels.layout import SLAB
from millrace.kernels.matmul.coded import E4M3, Matrix, QuantizedRows
from millrace.kernels.matmul.cuda_few import by_few_rows
from millrace.kernels.matmul.gpu_tiles import EIGHT, MANY_ROWS, PREFETCH, RULES, Tile, Tiles, rows_of

BLOCK_K = 128  # most inputs per iteration
# Powers of two whose last bit is 1, and the bits of two of them, in 16-bit floats.
UNITS_BF16, BITS_BF16 = tl.constexpr(128), tl.constexpr(0x43004300)
UNITS_FP16, BITS_FP16 = tl.constexpr(1024), tl.constexpr(0x64006400)


@triton.jit(do_not_specialize=["M"])  # it is only a bound
def coded_product(x, x_scales, w, w_scales, minimums, y, M, N, K, w_row, X_GROUP: tl.constexpr, GROUP: tl.constexpr,
                  CODED_X: tl.constexpr, HALVES: tl.constexpr, ZERO: tl.constexpr, MINIMUMS: tl.constexpr,
                  COMPLETE: tl.constexpr, WORDS: tl.constexpr, EVEN: tl.constexpr,
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                  PREFETCH: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One program: BLOCK_M rows of x (M, K) times BLOCK_N of w (N, K), as in QuantizedRows; y (M, N).

    CODED_X: x has scales (M, groups of it); otherwise it is 16-bit floats. Codes are converted to these, too, so that
    products are exact (E4M3 with E4M3 in float16), or are multiplied as int8. BLOCK_K divides both groups, which are 0
    if a row is one. COMPLETE: each row has one scale, applied to its sum at the end | WORDS: load INT4 eight at a time
    EVEN: BLOCK_K divides K, so that the loop needs no masks
    w_row: bytes of a row of codes; the compiler specializes on multiples of 16; otherwise PREFETCH is 0
    """
    lets_next_begin(PDL)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = row < M, column < N
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    each: tl.constexpr = 2 if HALVES else 1  # codes per byte
    wide = column.to(tl.int64) * w_row
    asks_for(w, tl.program_id(0) * BLOCK_N, N, w_row, BLOCK_N, PREFETCH, PDL)
    after_those_before(PDL)
    for first in range(0, K, BLOCK_K):
        place = first + tl.arange(0, BLOCK_K)
        is_place = (place < K)[None]
        rows = tl.load(x + row[:, None] * K + place[None], mask=is_row[:, None] if EVEN else is_row[:, None] & is_place,
                       other=0.0)  # fmt: skip
        if WORDS:
            at = first // 8 + tl.arange(0, BLOCK_K // 8)
            inside = is_column[:, None] if EVEN else is_column[:, None] & (at < w_row // 4)[None]
            words = tl.load(w.to(tl.pointer_type(tl.int32)) + wide[:, None] // 4 + at[None], mask=inside, other=0)
            part = tl.dot(rows, tl.trans(_of_words(words, ZERO, rows.dtype)))
        else:
            at = first // each + tl.arange(0, BLOCK_K // each)
            inside = is_column[None] if EVEN else is_column[None] & (at < w_row)[:, None]
            codes = tl.load(w + wide[None] + at[:, None], mask=inside, other=0.0)
            if HALVES:
                even, odd = tl.split(tl.reshape(rows, (BLOCK_M, BLOCK_K // 2, 2)))
                low, high = (codes & 15).to(tl.int8) - ZERO, (codes >> 4).to(tl.int8) - ZERO
                part = _dot(even, low) + _dot(odd, high)
            else:
                part = _dot(rows, codes)
        if COMPLETE:
            total += part
        else:
            scale = tl.load(w_scales + _group(column, first, K, GROUP), mask=is_column, other=0.0)
            result = part.to(tl.float32) * scale.to(tl.float32)[None]
            if MINIMUMS:
                sums = tl.sum(rows.to(tl.float32), 1)
                least = tl.load(minimums + _group(column, first, K, GROUP), mask=is_column, other=0.0)
                result += sums[:, None] * least.to(tl.float32)[None]
            if CODED_X:
                result *= tl.load(x_scales + _group(row, first, K, X_GROUP), mask=is_row, other=0.0)[:, None]
            total += result
    if COMPLETE:
        total *= tl.load(w_scales + column, mask=is_column, other=0.0).to(tl.float32)[None]
        if CODED_X:
            total *= tl.load(x_scales + row, mask=is_row, other=0.0)[:, None]
    tl.store(y + row[:, None].to(tl.int64) * N + column[None], total.to(y.dtype.element_ty),
             mask=is_row[:, None] & is_column[None])  # fmt: skip


@triton.jit
def _of_words(words, ZERO: tl.constexpr, dtype: tl.constexpr):
    """Convert words (n, m) of eight INT4, the first the lowest -> codes (n, 8 m) of 16 bits, exactly.

    Two at a time become the last bits of a power of two with unit 1, which is then subtracted: some 10 instructions for
    eight; byte by byte it takes 40.
    """
    power: tl.constexpr = BITS_BF16 if dtype == tl.bfloat16 else BITS_FP16
    unit: tl.constexpr = UNITS_BF16 if dtype == tl.bfloat16 else UNITS_FP16
    a, b = (words & 0x000F000F) | power, ((words >> 4) & 0x000F000F) | power  # INT4 0 and 4, 1 and 5
    c, d = ((words >> 8) & 0x000F000F) | power, ((words >> 12) & 0x000F000F) | power
    first = tl.join(tl.join(a.to(tl.int16), c.to(tl.int16)), tl.join(b.to(tl.int16), d.to(tl.int16)))
    second = tl.join(tl.join((a >> 16).to(tl.int16), (c >> 16).to(tl.int16)),
                     tl.join((b >> 16).to(tl.int16), (d >> 16).to(tl.int16)))  # fmt: skip
    result = tl.reshape(tl.permute(tl.join(first, second), (0, 1, 4, 2, 3)), (words.shape[0], 8 * words.shape[1]))
    return result.to(dtype, bitcast=True) - (unit + ZERO)


@triton.jit
def _group(row, first, K, GROUP: tl.constexpr):
    """Return the index of a group among those of all rows. A constant, which saves a division in the loop."""
    if GROUP == 0:
        return row
    else:
        return row * tl.cdiv(K, GROUP) + first // GROUP


@triton.jit
def _dot(left, right):
    if left.dtype == tl.int8:
        result = tl.dot(left, right.to(tl.int8), out_dtype=tl.int32)
    elif left.dtype == tl.float8e4nv:
        result = tl.dot(left.to(tl.float16), right.to(tl.float16))
    elif right.dtype == tl.float8e4nv:
        result = tl.dot(left, right.to(tl.float16).to(left.dtype))
    else:
        result = tl.dot(left, right.to(left.dtype))
    return result


def product(
    x: Matrix, w: Matrix, dtype: torch.dtype, bias: Tensor | None = None, tiles: Tiles = RULES
) -> Tensor:  # fmt: skip
    """x of M rows, w of N -> (M, N) of `dtype`, plus bias (N,). If x is quantized, so is w."""
    if isinstance(w, QuantizedRows):
        y = _coded(x, w, dtype, tiles)
        return y if bias is None else y + bias
    assert isinstance(x, Tensor), "coded rows meet coded weights"
    return functional.linear(x.to(dtype), w, bias)


def _coded(x: Matrix, w: QuantizedRows, dtype: torch.dtype, tiles: Tiles) -> Tensor:
    if goes_by_kernel(x, w, dtype):
        return by_kernel(x, w, dtype, tiles.select_tile(x, w))
    if isinstance(x, Tensor):
        return _as_floats(x, w, dtype)
    return scaled_mm(x, w) if scaled_mm_takes(x, w, dtype) else _as_floats(x.dense(), w, dtype)


def goes_by_kernel(x: Matrix, w: QuantizedRows, dtype: torch.dtype) -> bool:
    """Return whether `coded_product` computes it."""
    if not block_k(x, w):
        return False
    return rows_of(x) < MANY_ROWS if isinstance(x, Tensor) else not scaled_mm_takes(x, w, dtype)


def _as_floats(x: Tensor, w: QuantizedRows, dtype: torch.dtype) -> Tensor:
    """Convert the weights to floats of x's type, SLAB codes at a time, and multiply."""
    n, rows = len(w.codes), max(1, SLAB // w.width)
    y = torch.empty((len(x), n), dtype=dtype, device=x.device)
    for first in range(0, n, rows):
        y[:, first : first + rows] = functional.linear(x, w.some(first, first + rows).dense().to(x.dtype))
    return y


def block_k(x: Matrix, w: QuantizedRows) -> int:
    """Return the inputs per iteration of `coded_product`; 0: it does not support such groups."""
    integers = isinstance(x, QuantizedRows) and x.codes.dtype == torch.int8
    return _block_k(integers, w.halves, _parts(x), _parts(w))


@cache
def _block_k(integers: bool, halves: bool, *groups: int) -> int:
    least = (32 if integers else 16) * (2 if halves else 1)  # of a tensor core's product
    depth = min([BLOCK_K, *(group & -group for group in groups if group)])
    return depth if depth >= least else 0


def by_kernel(x: Matrix, w: QuantizedRows, dtype: torch.dtype, tile: Tile) -> Tensor:
    depth = block_k(x, w)
    if tile.rows <= EIGHT:
        return by_few_rows(x, w, dtype, tile, depth)
    rows, scales = (x.codes, x.scales) if isinstance(x, QuantizedRows) else (x, w.scales)
    (m, k), (n, w_row) = rows.shape, w.codes.shape
    y = torch.empty((m, n), dtype=dtype, device=rows.device)
    prefetch = PREFETCH if w_row % 16 == 0 else 0
    coded_product[cdiv(n, tile.columns), cdiv(m, tile.rows)](
        rows.contiguous(), scales, w.codes, w.scales, w.scales if w.minimums is None else w.minimums, y, m, n, k,
        w_row, X_GROUP=_parts(x), GROUP=_parts(w), CODED_X=isinstance(x, QuantizedRows), HALVES=w.halves,
        ZERO=w.zero, MINIMUMS=w.minimums is not None, COMPLETE=is_whole(x, w), WORDS=by_words(x, w),
        EVEN=k % depth == 0, BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=depth, PREFETCH=prefetch,
        **overlapping(rows.device), num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
    )  # fmt: skip
    return y


def _parts(x: Matrix) -> int:
    """Return how many neighbors share a scale; 0: the whole row."""
    return x.group if isinstance(x, QuantizedRows) and x.group < x.width else 0


def by_words(x: Matrix, w: QuantizedRows) -> bool:
    """Return whether INT4 is converted to 16-bit floats eight at a time: rows of whole 4-byte words, 16-bit inputs."""
    return w.halves and w.width % 8 == 0 and isinstance(x, Tensor)


def is_whole(x: Matrix, w: QuantizedRows) -> bool:
    """Return whether products are floats, with one scale per row; integers are exact as far as int32."""
    exact = isinstance(x, QuantizedRows) and x.codes.dtype == torch.int8
    return not (_parts(x) or _parts(w) or exact or w.minimums is not None)


def scaled_mm_takes(x: QuantizedRows, w: QuantizedRows, dtype: torch.dtype) -> bool:
    """Return whether cuBLASLt takes them: many rows of E4M3, in multiples of 16, with bfloat16 results."""
    many = rows_of(x) >= MANY_ROWS and dtype == torch.bfloat16
    return many and x.codes.dtype == w.codes.dtype == E4M3 and x.width % 16 == rows_of(w) % 16 == 0


def scaled_mm(x: QuantizedRows, w: QuantizedRows) -> Tensor:
    """Multiply to bfloat16, with fast accumulation, which keeps some 14 bits of each partial sum."""
    return torch._scaled_mm(
        x.codes, w.codes.t(), scale_a=x.scales, scale_b=w.scales.t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )
