"""Quantized matmuls of one to eight rows on a GPU, in Triton: for few users, who wait for all weights at each token.

Padded to the 16 rows of tensor cores they would be mostly zeros, and codes would pass through shared memory. Here one
row of E4M3 is multiplied without tensor cores; INT4 and INT8 weights take the side of 16 rows, with the few input rows
as eight columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.kernels.gpu_launch import after_those_before, asks_for, cdiv, lets_next_begin, overlapping
from millrace.kernels.matmul.coded import Matrix, QuantizedRows
from millrace.kernels.matmul.gpu_tiles import PREFETCH, Tile

WARP_K = 512  # for one row of E4M3: 16 neighbors per thread of a warp
WARP_BYTES = 128  # of each row of codes, per warp and iteration
BYTES_DEPTH = 64  # most inputs of an INT8 unit: words of four threads, 16 bytes each
# 16, with a unit of the last bit, in two 16-bit floats, and the place of the four bits after the first.
POWER_BF16, PLACES_BF16 = tl.constexpr(0x41804180), tl.constexpr(0x00780078)
POWER_FP16, PLACES_FP16 = tl.constexpr(0x4C004C00), tl.constexpr(0x03C003C0)
_BITS_BF16 = tl.constexpr("lop3.b32 $0, $1, 0x00780078, 0x41804180, 0xEA;")  # and, or
_BITS_FP16 = tl.constexpr("lop3.b32 $0, $1, 0x03C003C0, 0x4C004C00, 0xEA;")
# INT8 in bfloat16: the low seven bits after 128, and 256 minus 128 if negative; in float16 all after 1,024.
LOW_BF16, LOW_PLACES = tl.constexpr(0x43004300), tl.constexpr(0x007F007F)
TOP_BF16, TOP_PLACES = tl.constexpr(0x43804380), tl.constexpr(0x00800080)
BYTE_FP16, BYTE_PLACES = tl.constexpr(0x64806480), tl.constexpr(0x00FF00FF)
_LOW_BF16 = tl.constexpr("lop3.b32 $0, $1, 0x007F007F, 0x43004300, 0x6A;")  # and, xor
_TOP_BF16 = tl.constexpr("lop3.b32 $0, $1, 0x00800080, 0x43804380, 0x6A;")
_BYTE_FP16 = tl.constexpr("lop3.b32 $0, $1, 0x00FF00FF, 0x64806480, 0x6A;")


@triton.jit
def one_row(x, x_scales, w, w_scales, y, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PREFETCH: tl.constexpr,
            PDL: tl.constexpr):  # fmt: skip
    """One program: a row x (1, K) times BLOCK_N of w (N, K), both E4M3 with a scale per row; y (1, N).

    A thread has the same 16 neighbors of x and of each row of w (BLOCK_K is WARP_K per warp, otherwise registers would
    pass through shared memory), so that all its loads are in flight at once; every fourth product goes into one sum,
    and threads are summed at the end.
    """
    lets_next_begin(PDL)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column, place = column < N, tl.arange(0, BLOCK_K)[None, :]
    lines = w + column.to(tl.int64)[:, None] * K
    total = tl.zeros((BLOCK_N, BLOCK_K // 4), tl.float32)
    asks_for(w, tl.program_id(0) * BLOCK_N, N, K, BLOCK_N, PREFETCH, PDL)
    after_those_before(PDL)
    for first in range(0, K, BLOCK_K):
        at = first + place
        codes = tl.load(lines + at, mask=is_column[:, None] & (at < K), other=0.0)
        row = tl.load(x + at, mask=at < K, other=0.0)
        a, b, c, d = _in_four(codes.to(tl.float16).to(tl.float32))
        e, f, g, h = _in_four(row.to(tl.float16).to(tl.float32))
        total += a * e
        total += b * f
        total += c * g
        total += d * h
    scale = tl.load(w_scales + column, mask=is_column, other=0.0) * tl.load(x_scales)
    tl.store(y + column, (tl.sum(total, 1) * scale).to(y.dtype.element_ty), mask=is_column)


@triton.jit
def _in_four(x):
    """x (n, 4 k) -> every fourth column, starting at each of the first four."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 4, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit(do_not_specialize=["M"])  # it is only a bound
def few_rows_of_words(x, w, w_scales, minimums, y, M, N, K, w_row, groups, HALVES: tl.constexpr, GROUP: tl.constexpr,
                      ZERO: tl.constexpr, MINIMUMS: tl.constexpr, EVEN: tl.constexpr, DEPTH: tl.constexpr,
                      UNITS: tl.constexpr, WARPS: tl.constexpr, BLOCK_N: tl.constexpr, AHEAD: tl.constexpr,
                      PREFETCH: tl.constexpr, PLAIN: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One program: up to eight rows x (M, K) of 16-bit floats times BLOCK_N of w (N, K), INT4 or int8; y (M, N).

    A unit is DEPTH inputs that share a scale. A warp has UNITS adjacent units at a time for all columns, and each
    thread loads words of w where tensor cores need them: this permutes the inputs of a row, and x is permuted alike. So
    nothing passes through shared memory before the end, where warps are summed.
    An INT4 code is the last bits of 16 + code; the sum starts at -(16 + zero) times the sum of a unit's x, once for all
    columns, which subtracts 16 and the zero point. Any bits are valid codes, so no masks are needed. int8 is similar.

    HALVES: a word has eight codes, otherwise four | groups: scales per row of w, each of GROUP inputs; 0: a single one
    EVEN: all units are complete | PREFETCH: load the next units' words before multiplying the current ones
    PLAIN: for the interpreter
    """
    lets_next_begin(PDL)
    STEP: tl.constexpr = WARPS * UNITS * DEPTH
    EACH: tl.constexpr = 8 if HALVES else 4
    line = tl.arange(0, UNITS * WARPS * BLOCK_N)  # eight columns, warps, units, the next eight columns
    is_column = (_column(line, WARPS * UNITS, BLOCK_N) < N)[:, None]
    word = ((line // 8 % WARPS * UNITS + line // (8 * WARPS) % UNITS) * (DEPTH // EACH))[:, None]
    word += tl.arange(0, DEPTH // EACH)[None, :]
    lines = w.to(tl.pointer_type(tl.int32)) + word
    lines += _column(line, WARPS * UNITS, BLOCK_N).to(tl.int64)[:, None] * (w_row // 4)
    total = tl.zeros((UNITS * WARPS, BLOCK_N, 4, 2), tl.float32)
    asks_for(w, tl.program_id(0) * BLOCK_N, N, w_row, BLOCK_N, PREFETCH, PDL)
    after_those_before(PDL)
    words, scale, least = _prefetch(lines, word, is_column, w_scales, minimums, 0, N, K, groups, EACH, GROUP, MINIMUMS,
                                 EVEN, DEPTH, UNITS, WARPS, BLOCK_N)  # fmt: skip
    for first in range(0, K, STEP):
        these, by, plus = words, scale, least
        words, scale, least = _prefetch(lines, word, is_column, w_scales, minimums, first + (STEP if AHEAD else 0), N,
                                     K, groups, EACH, GROUP, MINIMUMS, EVEN, DEPTH, UNITS, WARPS, BLOCK_N)  # fmt: skip
        if not AHEAD:
            these, by, plus = words, scale, least
        tl.debug_barrier()  # otherwise the compiler loads rows of x first
        rows = _columns_of(x, first, M, K, HALVES, EVEN, DEPTH, UNITS, WARPS)
        behind: tl.constexpr = 16 + ZERO if HALVES else 384 if rows.dtype == tl.bfloat16 else 1152
        minus = tl.full((UNITS * WARPS, BLOCK_N, DEPTH), -behind, tl.float32).to(rows.dtype)
        minus = _times(minus, rows, None, PLAIN)
        if HALVES:
            result = _times(_halves(these, UNITS, WARPS, rows.dtype, PLAIN), rows, minus, PLAIN)
        else:
            result = _times(_bytes(these, UNITS, WARPS, rows.dtype, False, PLAIN), rows, minus, PLAIN)
            if rows.dtype == tl.bfloat16:
                result = _times(_bytes(these, UNITS, WARPS, rows.dtype, True, PLAIN), rows, result, PLAIN)
        result = tl.reshape(result, (UNITS * WARPS, BLOCK_N, 4, 2))
        if GROUP:
            result *= _by_columns(by, UNITS, WARPS, BLOCK_N)
        if MINIMUMS:
            of_minus = _by_columns(plus, UNITS, WARPS, BLOCK_N) * (-1 / behind)
            result += tl.reshape(minus, (UNITS * WARPS, BLOCK_N, 4, 2)) * of_minus
        total += result
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    product = tl.reshape(tl.sum(total, 0), (BLOCK_N, 8))
    if not GROUP:
        product *= tl.load(w_scales + column, mask=column < N, other=0.0).to(tl.float32)[:, None]
    row = tl.arange(0, 8)[None, :]
    tl.store(y + row * N + column[:, None], product.to(y.dtype.element_ty), mask=(row < M) & (column < N)[:, None])


@triton.jit
def _column(line, between, BLOCK_N: tl.constexpr):
    """Return which row of w a line is of: eight are adjacent, the next eight come `between` times eight later."""
    return tl.program_id(0) * BLOCK_N + line % 8 + line // (8 * between) * 8


@triton.jit
def _halves(words, UNITS: tl.constexpr, WARPS: tl.constexpr, dtype: tl.constexpr, PLAIN: tl.constexpr):
    """Convert words (eight columns x units x ..., DEPTH / 8) of eight INT4, the first the lowest, exactly.

    -> (units, columns, DEPTH) of 16 + code. Inputs in the order of `_columns_of`.
    """
    if dtype == tl.bfloat16:
        four = tl.join(tl.join(words << 3, words >> 1), tl.join(words >> 5, words >> 9))
        two = _unpack_pair(four, _BITS_BF16, PLACES_BF16, POWER_BF16, PLAIN)
    else:
        four = tl.join(tl.join(words << 6, words << 2), tl.join(words >> 2, words >> 6))
        two = _unpack_pair(four, _BITS_FP16, PLACES_FP16, POWER_FP16, PLAIN)
    eights: tl.constexpr = words.shape[0] // (8 * UNITS * WARPS)
    two = tl.reshape(two, (eights, UNITS * WARPS, 8, 4, words.shape[1] // 4, 2, 2, 2))
    two = tl.permute(two, (1, 0, 2, 4, 6, 5, 3, 7))
    return tl.reshape(two, (UNITS * WARPS, 8 * eights, 8 * words.shape[1])).to(dtype, bitcast=True)


@triton.jit
def _bytes(words, UNITS: tl.constexpr, WARPS: tl.constexpr, dtype: tl.constexpr, TOP: tl.constexpr,
           PLAIN: tl.constexpr):  # fmt: skip
    """Convert words of four int8, as `_halves`.

    The parts add up to 384 + code in bfloat16 (TOP: the part of their highest bits), and to 1,152 + code in float16.
    """
    both = tl.join(words, words >> 8)
    if dtype == tl.float16:
        two = _unpack_pair(both, _BYTE_FP16, BYTE_PLACES, BYTE_FP16, PLAIN)
    elif TOP:
        two = _unpack_pair(both, _TOP_BF16, TOP_PLACES, TOP_BF16, PLAIN)
    else:
        two = _unpack_pair(both, _LOW_BF16, LOW_PLACES, LOW_BF16, PLAIN)
    eights: tl.constexpr = words.shape[0] // (8 * UNITS * WARPS)
    two = tl.reshape(two, (eights, UNITS * WARPS, 8, 4, words.shape[1] // 4, 2, 2))
    two = tl.permute(two, (1, 0, 2, 4, 5, 3, 6))
    return tl.reshape(two, (UNITS * WARPS, 8 * eights, 4 * words.shape[1])).to(dtype, bitcast=True)


@triton.jit
def _unpack_pair(words, BITS: tl.constexpr, PLACES: tl.constexpr, POWER: tl.constexpr, PLAIN: tl.constexpr):
    """words -> (..., 2) int16, low and high: some of their bits in place, by the instruction BITS.

    It is declared to have effects because the layout for tensor cores depends on the joins that it hides.
    """
    two = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16))
    if PLAIN:
        two = (two & (PLACES & 0xFFFF)) ^ (POWER & 0xFFFF)  # as good as `or` for INT4, which has other bits
    else:
        two = tl.inline_asm_elementwise(BITS, "=r,r", [two], dtype=tl.int16, is_pure=False, pack=2)
    return two


@triton.jit
def _columns_of(x, first, M, K, HALVES: tl.constexpr, EVEN: tl.constexpr, DEPTH: tl.constexpr, UNITS: tl.constexpr,
                WARPS: tl.constexpr):  # fmt: skip
    """Load x (M, K) from `first` on -> (units, DEPTH, 8); the last row is repeated if there are fewer.

    A thread has inputs in eights: which eight, two bits of the index in it, thread of four, and the bit of a word's
    upper half.
    """
    of_thread: tl.constexpr = DEPTH // 32
    line, i = tl.arange(0, of_thread * UNITS * WARPS * 8), tl.arange(0, 32)
    unit = line // 8 % WARPS * UNITS + line // (8 * WARPS) % UNITS
    at = first + (unit * DEPTH + line // (8 * UNITS * WARPS) * 8)[:, None] + (i // 8 * (8 * of_thread) + i % 8)[None, :]
    row = tl.minimum(line % 8, M - 1)[:, None] * K
    rows = tl.load(x + row + at) if EVEN else tl.load(x + row + at, mask=at < K, other=0.0)
    rows = tl.reshape(rows, (of_thread, UNITS * WARPS, 8, 4, 2, 2, 2))
    rows = tl.permute(rows, (1, 0, 5, 6, 3, 4, 2) if HALVES else (1, 0, 4, 6, 3, 5, 2))
    return tl.reshape(rows, (UNITS * WARPS, DEPTH, 8))


@triton.jit
def _times(codes, rows, start, PLAIN: tl.constexpr):
    """Multiply; in float32 in the interpreter, which has no bfloat16 products."""
    if PLAIN:
        codes, rows = codes.to(tl.float32), rows.to(tl.float32)
    return tl.dot(codes, rows, start, input_precision="ieee" if PLAIN else None)


@triton.jit
def _prefetch(lines, word, is_column, w_scales, minimums, first, N, K, groups, EACH: tl.constexpr, GROUP: tl.constexpr,
           MINIMUMS: tl.constexpr, EVEN: tl.constexpr, DEPTH: tl.constexpr, UNITS: tl.constexpr, WARPS: tl.constexpr,
           BLOCK_N: tl.constexpr):  # fmt: skip
    """Load words from input `first` on, and scales and minimums if units have them; nothing beyond K."""
    inside = (
        first // EACH + word * (not EVEN) < K // EACH
    )  # not the number alone, of which the interpreter makes no mask
    words = tl.load(lines + first // EACH, mask=is_column & inside)
    scale, least = words, words
    if GROUP:
        scale = _of_units(w_scales, first, N, K, groups, GROUP, EVEN, DEPTH, UNITS, WARPS, BLOCK_N)
    if MINIMUMS:
        least = _of_units(minimums, first, N, K, groups, GROUP, EVEN, DEPTH, UNITS, WARPS, BLOCK_N)
    return words, scale, least


@triton.jit
def _of_units(scales, first, N, K, groups, GROUP: tl.constexpr, EVEN: tl.constexpr, DEPTH: tl.constexpr,
              UNITS: tl.constexpr, WARPS: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """scales (N, groups) -> as four threads have them for eight columns each: (columns x warps, 4 x units)."""
    line = tl.arange(0, WARPS * BLOCK_N)
    unit = first // DEPTH + (line // 8 % WARPS * UNITS)[:, None]
    which = (tl.arange(0, 4 * UNITS) % UNITS)[None, :]
    column = _column(line, WARPS, BLOCK_N)[:, None]
    group = unit + which if GROUP == DEPTH else (unit + which) * DEPTH // GROUP
    inside = (first + column * 0 if EVEN else (unit + which) * DEPTH) < K
    return tl.load(scales + column * groups + group, mask=(column < N) & inside, other=0.0)


@triton.jit
def _by_columns(of_units, UNITS: tl.constexpr, WARPS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The result of `_of_units` -> (units, columns, 4, 1) float32."""
    result = tl.reshape(of_units.to(tl.float32), (BLOCK_N // 8, WARPS, 8, 4, UNITS))
    return tl.reshape(tl.permute(result, (4, 1, 0, 2, 3)), (UNITS * WARPS, BLOCK_N, 4, 1))


def by_few_rows(x: Matrix, w: QuantizedRows, dtype: torch.dtype, tile: Tile, depth: int) -> Tensor:
    """Multiply -> (M, N) of `dtype`. depth: most inputs that share a scale, for words only"""
    rows = x.codes if isinstance(x, QuantizedRows) else x
    (m, k), (n, w_row), prefetch = rows.shape, w.codes.shape, PREFETCH if w.codes.shape[1] % 16 == 0 else 0
    assert 0 < m <= tile.rows, f"{m} rows by {tile}"
    y = torch.empty((m, n), dtype=dtype, device=rows.device)
    grid = (cdiv(n, tile.columns),)
    if isinstance(x, QuantizedRows):
        one_row[grid](
            rows.contiguous(), x.scales, w.codes, w.scales, y, n, k, BLOCK_N=tile.columns, BLOCK_K=WARP_K * tile.warps,
            PREFETCH=prefetch, **overlapping(rows.device), num_warps=tile.warps, num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip
        return y
    each, depth = (2, depth) if w.halves else (1, min(depth, BYTES_DEPTH))
    few_rows_of_words[grid](
        rows.contiguous(), w.codes, w.scales, w.scales if w.minimums is None else w.minimums, y, m, n, k,
        w_row, w.scales.shape[1], HALVES=w.halves, GROUP=group_of(w), ZERO=w.zero, MINIMUMS=w.minimums is not None,
        EVEN=k % (WARP_BYTES * each * tile.warps) == 0, DEPTH=depth, UNITS=WARP_BYTES * each // depth, WARPS=tile.warps,
        BLOCK_N=tile.columns, AHEAD=tile.stages > 1, PREFETCH=prefetch, PLAIN=triton.knobs.runtime.interpret,
        **overlapping(rows.device), num_warps=tile.warps, num_stages=1, maxnreg=registers(tile, w.halves, depth),
        enable_fp_fusion=True,
    )  # fmt: skip
    return y


def registers(tile: Tile, halves: bool, depth: int) -> int | None:
    """Return the most registers of a thread with which a multiprocessor has two programs of eight warps.

    None: no limit, if a thread's words are of several groups and pass through shared memory, which takes more.
    """
    return 65536 // (2 * 32 * tile.warps) if tile.warps == 8 and depth == (128 if halves else BYTES_DEPTH) else None


def group_of(w: QuantizedRows) -> int:
    """Return the group whose scales multiply sums of units; 0: one scale per row, applied at the end."""
    return 0 if w.group >= w.width and w.minimums is None else min(w.group, w.width)
