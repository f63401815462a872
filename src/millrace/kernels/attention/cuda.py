"""Attention over pages on a GPU, in Triton: keys and values are rotated and written, then attended to in splits.

Pages of one layer lie as (P, K, PAGE, D), so that a tile of keys is a page: one look-up, one contiguous read. A
program has up to BLOCK_M rows (tokens of one sequence x the query heads that share a KV head) and its split of the
pages; softmax goes along (arXiv:1805.02867), and what splits found is merged by a second kernel (arXiv:2311.01282,
"Flash-Decoding"). Keys beyond a sequence's last token of this step are never read: they may be anything.

Pages of int8 and of E4M3 have a scale for each token and head, as attention/ref.py means them: a key's meets its score,
a value's its weight, and the codes are multiplied as floats of the queries' type, exactly.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.kernels.attention.paged import LayerPages, StepTables
from millrace.kernels.convert.cuda import NOTHING, codes

LOG2E = tl.constexpr(1.4426950408889634)
# A step's tables lie one behind the other, at whatever place: compiled once for all of them, not for each that is met.
TABLES = "positions", "slots", "blocks", "starts", "tables", "table_starts"


@triton.jit(do_not_specialize_on_alignment=TABLES)
def rotate_and_keep(
    q, k, v, positions, table, slots, rotated, keys, values, key_scales, value_scales, q_row, k_row, v_row,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, ROTATES: tl.constexpr,
    HALF: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: one head of one token. q (T, H, D), k (T, K, D), v (T, K, DV), each with its own row stride.

    slots (T,): page x PAGE + place; HALF, WIDTH: powers of two, at least D / 2 and DV
    STAGES: of a Hadamard transform of q and k, log2(D) where D is a power of two; 0: there is none
    """
    token, head = tl.program_id(0), tl.program_id(1)
    half, column = tl.arange(0, HALF), tl.arange(0, WIDTH)
    inside = half < D // 2
    source = q + token * q_row + head * D if head < H else k + token * k_row + (head - H) * D
    a = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + D // 2 + half, mask=inside, other=0.0).to(tl.float32)
    if ROTATES:
        angles = table + tl.load(positions + token) * D + half
        cosine, sine = tl.load(angles, mask=inside, other=0.0), tl.load(angles + D // 2, mask=inside, other=0.0)
        a, b = a * cosine - b * sine, b * cosine + a * sine
    for _ in tl.static_range(STAGES):  # the highest bit of an element's place is summed over, and becomes the lowest
        a, b = tl.split(tl.trans(tl.reshape(tl.join(a + b, a - b), (2, HALF))))
    if STAGES > 0:
        a, b = a * (1 / D**0.5), b * (1 / D**0.5)
    if head < H:
        target = rotated + (token * H + head) * D + half
        tl.store(target, a.to(rotated.dtype.element_ty), mask=inside)
        tl.store(target + D // 2, b.to(rotated.dtype.element_ty), mask=inside)
    else:
        slot, kv_head = tl.load(slots + token).to(tl.int64), head - H
        line = ((slot // PAGE) * K + kv_head) * PAGE + slot % PAGE
        first, second = a, b
        kept = tl.load(v + token * v_row + kv_head * DV + column, mask=column < DV, other=0.0)
        if keys.dtype.element_ty.primitive_bitwidth == 8:
            kept = kept.to(tl.float32)
            most = tl.maximum(tl.max(tl.abs(a), 0), tl.max(tl.abs(b), 0)) + tl.sum(a * 0.0, 0) + tl.sum(b * 0.0, 0)
            scale, inverse = _scale(most, keys.dtype.element_ty)
            tl.store(key_scales + line, scale)
            first = codes(first * inverse, keys.dtype.element_ty)
            second = codes(second * inverse, keys.dtype.element_ty)
            scale, inverse = _scale(tl.max(tl.abs(kept), 0) + tl.sum(kept * 0.0, 0), keys.dtype.element_ty)
            tl.store(value_scales + line, scale)
            kept = codes(kept * inverse, keys.dtype.element_ty)
        tl.store(values + line * DV + column, kept.to(values.dtype.element_ty), mask=column < DV)
        tl.store(keys + line * D + half, first.to(keys.dtype.element_ty), mask=inside)
        tl.store(keys + line * D + D // 2 + half, second.to(keys.dtype.element_ty), mask=inside)


@triton.jit
def _scale(most, dtype: tl.constexpr):
    """Of the largest magnitude, which is no number where an element is not finite: the scale, and what undoes it."""
    if dtype == tl.int8:
        is_nothing, scale = most <= NOTHING, most / 127
        inverse = 127 / tl.where(is_nothing, 1.0, most)
    else:  # the least power of two that takes it below 448
        least = most / 448
        is_nothing = least <= NOTHING
        scale = ((least.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where(least == least, scale, least)
        inverse = 1 / tl.where(is_nothing, 1.0, scale)
    return tl.where(is_nothing, 0.0, scale), tl.where(is_nothing, 0.0, inverse)


@triton.jit(do_not_specialize_on_alignment=TABLES)
def attend(
    q, keys, values, key_scales, value_scales, y, partial, blocks, starts, positions, tables, table_starts, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, DEEP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows of one KV head, and one split of their pages.

    q (T, H, D) | blocks (n, 2): a sequence, and the first of its rows | y (T, H, DV), with one split
    partial (T, H, SPLITS, DV + 2), with several: what a split sums, its largest score (of base 2), its weights' sum
    """
    block, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = H // K
    CODED: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth == 8
    sequence, first = tl.load(blocks + 2 * block), tl.load(blocks + 2 * block + 1)
    begin = tl.load(starts + sequence)
    n = tl.load(starts + sequence + 1) - begin
    at = tl.load(positions + begin)
    rows = first + tl.arange(0, BLOCK_M)
    token, head = rows // group, kv_head * group + rows % group
    mine = token < n
    last = at + tl.minimum((first + BLOCK_M - 1) // group, n - 1)
    pages = last // PAGE + 1
    each = tl.cdiv(pages, SPLITS)
    deep, column, place = tl.arange(0, DEEP), tl.arange(0, WIDTH), tl.arange(0, PAGE)
    row = (begin + token) * H + head
    query = tl.load(q + row[:, None] * D + deep[None, :], mask=mine[:, None] & (deep < D)[None, :], other=0.0)
    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    found = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    table = tables + tl.load(table_starts + sequence)
    for i in range(split * each, tl.minimum((split + 1) * each, pages)):
        lines = (tl.load(table + i).to(tl.int64) * K + kv_head) * PAGE + place
        is_kept = i * PAGE + place <= last
        key = tl.load(keys + lines[:, None] * D + deep[None, :], mask=is_kept[:, None] & (deep < D)[None, :], other=0.0)
        value = tl.load(
            values + lines[:, None] * DV + column[None, :], mask=is_kept[:, None] & (column < DV)[None, :], other=0.0
        )
        key, value = _floats(key, query.dtype), _floats(value, query.dtype)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2E)
        if CODED:
            score *= tl.load(key_scales + lines, mask=is_kept, other=0.0)[None, :]
        sees = (i * PAGE + place)[None, :] <= (at + token)[:, None]
        score = tl.where(sees, score, float("-inf"))
        top = tl.maximum(most, tl.max(score, 1))
        base = tl.where(top == float("-inf"), 0.0, top)  # of rows that see nothing so far
        weight, keep = tl.exp2(score - base[:, None]), tl.exp2(most - base)
        total = total * keep + tl.sum(weight, 1)
        if CODED:
            weight *= tl.load(value_scales + lines, mask=is_kept, other=0.0)[None, :]
        found = found * keep[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        most = top
    writes = mine[:, None] & (column < DV)[None, :]
    if SPLITS == 1:
        tl.store(y + row[:, None] * DV + column[None, :], (found / total[:, None]).to(y.dtype.element_ty), mask=writes)
    else:
        out = partial + (row * SPLITS + split) * (DV + 2)
        tl.store(out[:, None] + column[None, :], found, mask=writes)
        tl.store(out + DV, most, mask=mine)
        tl.store(out + DV + 1, total, mask=mine)


@triton.jit
def _floats(x, dtype: tl.constexpr):
    if x.dtype == tl.float8e4nv:
        x = x.to(tl.float16)
    return x.to(dtype)


@triton.jit
def merge(partial, y, DV: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr):
    """One program: a row of y (rows, DV), of partial (rows, SPLITS, DV + 2). SPLITS: a power of two."""
    row, column, split = tl.program_id(0), tl.arange(0, WIDTH), tl.arange(0, SPLITS)
    parts = partial + (row * SPLITS + split) * (DV + 2)
    most = tl.load(parts + DV)
    keep = tl.exp2(most - tl.max(most, 0))  # the first split has seen a key, at least
    total = tl.sum(tl.load(parts + DV + 1) * keep, 0)
    found = tl.load(parts[:, None] + column[None, :], mask=(column < DV)[None, :], other=0.0)
    y_row = tl.sum(found * keep[:, None], 0) / total
    tl.store(y + row * DV + column, y_row.to(y.dtype.element_ty), mask=column < DV)


def power_of_two(n: int, least: int = 16) -> int:
    """The next one, at least `least`: of tensor cores' tiles."""
    return max(least, 1 << (n - 1).bit_length())


def warps(block_rows: int) -> int:
    """Of a program of `attend`: with fewer, 64 rows of 128 columns spill their sums."""
    return 4 if block_rows <= 16 else 8


def keep_rotated(
    heads: tuple[Tensor, Tensor, Tensor], step: StepTables, table: Tensor | None, pages: LayerPages, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """Writes a step's keys, rotated where there is a table (context, D), and its values.

    Gives q (T, H, D) of `dtype`, rotated; transformed as keys are, where they are: then D is a power of two
    """
    q, k, v = heads
    T, H, D = q.shape
    K, DV = v.shape[1:]
    y = torch.empty((T, H, D), dtype=dtype, device=q.device)
    rotate_and_keep[(T, H + K)](
        q, k, v, step.positions, q if table is None else table, step.slots, y, pages.keys, pages.values,
        pages.key_scales, pages.value_scales, q.stride(0), k.stride(0), v.stride(0), H=H, K=K, D=D, DV=DV,
        PAGE=pages.tokens, ROTATES=table is not None, HALF=power_of_two(D // 2, 4), WIDTH=power_of_two(DV),
        STAGES=D.bit_length() - 1 if pages.transformed else 0, enable_fp_fusion=True,
    )  # fmt: skip
    return y


def attention(q: Tensor, step: StepTables, pages: LayerPages, scale: float) -> Tensor:
    """q (T, H, D) over the pages -> (T, H, DV), of q's type."""
    T, H, D = q.shape
    K, DV, splits = pages.values.shape[1], pages.values.shape[3], step.splits
    y = torch.empty((T, H, DV), dtype=q.dtype, device=q.device)
    partial = y if splits == 1 else torch.empty((T, H, splits, DV + 2), dtype=torch.float32, device=q.device)
    width = power_of_two(DV)
    attend[(len(step.blocks), K, splits)](
        q, pages.keys, pages.values, pages.key_scales, pages.value_scales, y, partial, step.blocks, step.starts,
        step.positions, step.tables, step.table_starts, scale, H=H, K=K, D=D, DV=DV, PAGE=pages.tokens, SPLITS=splits,
        BLOCK_M=step.block_rows, DEEP=power_of_two(D), WIDTH=width, num_warps=warps(step.block_rows),
        enable_fp_fusion=True,
    )  # fmt: skip
    if splits > 1:
        merge[(T * H,)](partial, y, DV=DV, SPLITS=splits, WIDTH=width, enable_fp_fusion=True)
    return y
