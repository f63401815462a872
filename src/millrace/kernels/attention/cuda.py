"""Attention over pages on a GPU, in Triton: keys are rotated, keys and values stored, then attended to in parts.

Pages of one layer are (P, K, PAGE, D), so that a tile of keys is a page: one lookup, one contiguous read. A program has
up to BLOCK_M rows (tokens of one sequence x the query heads that share a KV head) and their pages, or a part of them,
as the host has partitioned the step. Softmax is online (arXiv:1805.02867), and the results of parts are merged by a
second kernel (arXiv:2311.01282, "Flash-Decoding"). Keys after a sequence's last token of this step are never read:
they may be anything.

Pages of int8 and E4M3 have a scale per token and head, as in attention/ref.py: a key's multiplies its score, a value's
its weight, and the codes are multiplied as floats, exactly.
"""

from collections.abc import Mapping
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.kernels.attention.paged import AttentionWork, LayerPages, StepTables
from millrace.kernels.convert.cuda import ZERO_GROUP_THRESHOLD, codes
from millrace.kernels.gpu_launch import after_those_before, lets_next_begin, overlapping

KEEP_WARPS = 1  # per program of `rotate_and_keep`: a head is small, and 32 such programs fit on a multiprocessor
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def rotate_and_keep(
    q, k, v, positions, table, slots, rotated, keys, values, key_scales, value_scales, q_row, k_row, v_row,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, ROTATES: tl.constexpr,
    HALF: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one head of one token. q (T, H, D), k (T, K, D), v (T, K, DV), each with its own row stride.

    slots (T,): page x PAGE + place; HALF, WIDTH: powers of two, at least D / 2 and DV
    STAGES: of a Hadamard transform of q and k, log2(D) where D is a power of two; 0: no transform
    """
    lets_next_begin(PDL)
    after_those_before(PDL)
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
    for _ in tl.static_range(STAGES):  # sums over the highest bit of an element's index, which becomes the lowest
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
        stored = tl.load(v + token * v_row + kv_head * DV + column, mask=column < DV, other=0.0)
        if keys.dtype.element_ty.primitive_bitwidth == 8:
            stored = stored.to(tl.float32)
            peak = tl.maximum(tl.max(tl.abs(a), 0), tl.max(tl.abs(b), 0)) + tl.sum(a * 0.0, 0) + tl.sum(b * 0.0, 0)
            scale, inverse = _scale(peak, keys.dtype.element_ty)
            tl.store(key_scales + line, scale)
            first = codes(first * inverse, keys.dtype.element_ty)
            second = codes(second * inverse, keys.dtype.element_ty)
            scale, inverse = _scale(tl.max(tl.abs(stored), 0) + tl.sum(stored * 0.0, 0), keys.dtype.element_ty)
            tl.store(value_scales + line, scale)
            stored = codes(stored * inverse, keys.dtype.element_ty)
        tl.store(values + line * DV + column, stored.to(values.dtype.element_ty), mask=column < DV)
        tl.store(keys + line * D + half, first.to(keys.dtype.element_ty), mask=inside)
        tl.store(keys + line * D + D // 2 + half, second.to(keys.dtype.element_ty), mask=inside)


@triton.jit
def _scale(amax, dtype: tl.constexpr):
    """Return the scale for a largest magnitude, and its inverse; NaN if an element is not finite."""
    if dtype == tl.int8:
        is_nothing, scale = amax <= ZERO_GROUP_THRESHOLD, amax / 127
        inverse = 127 / tl.where(is_nothing, 1.0, amax)
    else:  # the least power of two that brings it to 448 or less
        least = amax / 448
        is_nothing = least <= ZERO_GROUP_THRESHOLD
        scale = ((least.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where(least == least, scale, least)
        inverse = 1 / tl.where(is_nothing, 1.0, scale)
    return tl.where(is_nothing, 0.0, scale), tl.where(is_nothing, 0.0, inverse)


@triton.jit
def attend(
    q, keys, values, key_scales, value_scales, y, found_in, sums_in, work, tables, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr,
    DEEP: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr, WINDOW: tl.constexpr = 0, SOFTCAP: tl.constexpr = 0.0,
):  # fmt: skip
    """One program: BLOCK_M rows of one KV head, and their pages or a part of these. q (T, H, D), y (T, H, DV).

    WINDOW: keys that a row attends to; 0: all | SOFTCAP: of scores; 0: none
    work, tables: see paged.py::AttentionWork and StepTables | found_in (parts, K, BLOCK_M, DV), sums_in (parts, K,
    BLOCK_M, 2): a part's sum; its largest score (in base 2) and the sum of its weights
    """
    lets_next_begin(PDL)
    after_those_before(PDL)
    item, kv_head, group = work + 8 * tl.program_id(0), tl.program_id(1), H // K
    table, here, end, part = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    if here == end:  # padding of a bucket's list
        return
    begin, n, at, first = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6), tl.load(item + 7)
    rows = first + tl.arange(0, BLOCK_M)
    token, head = rows // group, kv_head * group + rows % group
    mine, deep = token < n, tl.arange(0, DEEP)
    row = (begin + token) * H + head
    query = tl.load(q + row[:, None] * D + deep[None, :], mask=mine[:, None] & (deep < D)[None, :], other=0.0)
    query, factor = _ready(query, scale, keys.dtype.element_ty)
    inner = factor
    if SOFTCAP > 0:  # then scores are hyperbolic tangents
        inner, factor = factor / (LOG2E * SOFTCAP), tl.full([BLOCK_M], LOG2E * SOFTCAP, tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    CODED_HALVES: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth == 8 and query.dtype == tl.float16
    unit = tl.full([], -80.0 if CODED_HALVES else 0.0, tl.float32)
    last, sees = at + tl.minimum((first + BLOCK_M - 1) // group, n - 1), at + token
    gone = at + first // group - WINDOW  # the last key that no row sees, if there is a window
    HAS_TWO_EDGES: tl.constexpr = BLOCK_M > 16 and WINDOW > 0
    if BLOCK_M > 16:  # pages of which every row sees every key need no masks
        seen_by_all, seen_from = tl.minimum(tl.maximum((at + first // group + 1) // PAGE, here), end), here
        if HAS_TWO_EDGES:
            seen_from = tl.minimum(tl.maximum(tl.maximum(last - WINDOW + PAGE, 0) // PAGE, here), seen_by_all)
        for i in range(seen_from, seen_by_all):
            result, peak, total, unit = _take(
                tables + table, i, kv_head, result, peak, total, unit, query, factor, inner, sees, last, gone, keys,
                values, key_scales, value_scales, K, D, DV, PAGE, DEEP, WIDTH, False, WINDOW, SOFTCAP,
            )  # fmt: skip
        if HAS_TWO_EDGES:
            end -= seen_by_all - seen_from
        else:
            here = seen_by_all
    for k in range(here, end):
        i = tl.where(k < seen_from, k, k + seen_by_all - seen_from) if HAS_TWO_EDGES else k
        result, peak, total, unit = _take(
            tables + table, i, kv_head, result, peak, total, unit, query, factor, inner, sees, last, gone, keys, values,
            key_scales, value_scales, K, D, DV, PAGE, DEEP, WIDTH, True, WINDOW, SOFTCAP,
        )  # fmt: skip
    if values.dtype.element_ty == tl.float8e4nv and _by_words(tl.float8e4nv, query.dtype, BLOCK_M, WIDTH, True):
        result *= 256
    place = (part * K + kv_head) * BLOCK_M + tl.arange(0, BLOCK_M)
    _write(result, total, peak * factor + unit, part, place, row, mine, y, found_in, sums_in, DV, WIDTH, WINDOW)


@triton.jit
def _write(
    result, total, peak, part, place, row, mine, y, found_in, sums_in, DV: tl.constexpr, WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Write the rows that are `mine`: their output, or one part's sums, at `place`."""
    column = tl.arange(0, WIDTH)
    writes = mine[:, None] & (column < DV)[None, :]
    if WINDOW > 0:  # rows after the sequence's last may see nothing
        total = tl.where(total == 0, 1.0, total)
    if part < 0:
        tl.store(y + row[:, None] * DV + column[None, :], (result / total[:, None]).to(y.dtype.element_ty), mask=writes)
    else:
        tl.store(found_in + place[:, None] * DV + column[None, :], result, mask=writes)
        tl.store(sums_in + 2 * place, peak, mask=mine)
        tl.store(sums_in + 2 * place + 1, total, mask=mine)


@triton.jit
def _ready(query, scale, stored_dtype: tl.constexpr):
    """Return the queries as they are multiplied with keys, and the positive factor from a row's products to base-2
    scores.

    E4M3 is converted to float16 by one instruction, to bfloat16 by four, one of them slow; INT8 by words. So bfloat16
    queries of such keys become float16, too, scaled by a power of two per row: exact, except for elements below 2^-32
    of a row's largest. Elements that are not finite stay so.
    """
    result = query.to(tl.float32) * tl.where(scale < 0, -1.0, 1.0)
    factor = tl.full([query.shape[0]], LOG2E, tl.float32) * tl.abs(scale)
    if _dot_fp16(stored_dtype, query.dtype, query.shape[0]):
        exponent = tl.maximum(tl.max(result.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1) >> 23, 27)
        result *= ((269 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]  # the largest: from 2^15 to 65,280
        factor *= ((exponent - 15) << 23).to(tl.float32, bitcast=True)
        return result.to(tl.float16), tl.maximum(factor, ZERO_GROUP_THRESHOLD)
    else:
        return result.to(query.dtype), tl.maximum(factor, ZERO_GROUP_THRESHOLD)


@triton.jit
def _take(
    table, i, kv_head, result, peak, total, unit, query, factor, inner, sees, last, gone, keys, values, key_scales,
    value_scales, K: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, DEEP: tl.constexpr,
    WIDTH: tl.constexpr, EDGE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Attend to the sequence's page i. EDGE: some row does not see some of its keys.

    unit: the power of two by which sums are scaled, that of the largest value scale so far
    """
    CODED: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth == 8
    HALVES: tl.constexpr = query.dtype == tl.float16
    place = tl.arange(0, PAGE)
    line, first = (tl.load(table + i).to(tl.int64) * K + kv_head) * PAGE, i * PAGE
    lines, is_kept = line + place, first + place <= last
    if WINDOW > 0:
        is_kept = is_kept & (first + place > gone)
    key = _floats(keys, lines, is_kept, D, DEEP, EDGE, query, False)
    value = _floats(values, lines, is_kept, DV, WIDTH, EDGE, query, True)
    score = tl.dot(query, tl.trans(key), input_precision="ieee")
    if CODED:
        score *= _scales(key_scales, lines, is_kept, EDGE)[None, :]
    if SOFTCAP > 0:
        small = tl.exp2(tl.abs(score) * (inner * (-2 * LOG2E))[:, None])
        score = (1 - small) / (1 + small) * tl.where(score < 0, -1.0, 1.0)
    if EDGE:
        score = tl.where((first + place)[None, :] <= sees[:, None], score, float("-inf"))
        if WINDOW > 0:
            score = tl.where((first + place)[None, :] > sees[:, None] - WINDOW, score, float("-inf"))
    top = tl.maximum(peak, tl.max(score, 1))
    base = tl.where(top == float("-inf"), 0.0, top)  # for rows that see nothing so far
    shift, wider = base * factor, unit
    if CODED:
        scales = _scales(value_scales, lines, is_kept, EDGE)
    if HALVES:  # float16 has no smaller numbers: scaled weights are below 2^15, the largest from 2^14
        if CODED:
            wider = tl.maximum(unit, (tl.max(scales, 0).to(tl.int32, bitcast=True) >> 23) - 127.0)
        shift += wider - 14
    weight, keep = (
        tl.exp2(score * factor[:, None] - shift[:, None]),
        tl.exp2((peak - base) * factor + (unit - wider)),
    )
    total = total * keep + tl.sum(weight, 1)
    if CODED:
        weight *= scales[None, :]
    result = tl.dot(weight.to(value.dtype), value, result * keep[:, None], input_precision="ieee")
    return result, top, total, wider


@triton.jit
def _lines(rows, lines, is_kept, N: tl.constexpr, WIDTH: tl.constexpr, EDGE: tl.constexpr):
    """Load (lines, WIDTH): the stored ones; others may be anything, and are not read."""
    column = tl.arange(0, WIDTH)
    at = rows + lines[:, None] * N + column[None, :]
    if EDGE:
        return tl.load(at, mask=is_kept[:, None] & (column < N)[None, :], other=0.0)
    elif N < WIDTH:
        return tl.load(at, mask=(column < N)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.constexpr_function
def _dot_fp16(stored, dtype, rows):
    return dtype == tl.bfloat16 and (stored == tl.float8e4nv or (stored == tl.int8 and rows <= 16))


@triton.constexpr_function
def _by_words(stored, dtype, rows, width, are_values):
    """Return which codes are loaded four at a time, if few rows need them.

    Values: Triton reads them byte by byte from shared memory, in the order of tensor cores; types that it cannot move
    through a conversion go there as float16. INT8 keys: no fast instruction converts them to floats; wide ones do not
    fit into shared memory
    """
    return dtype == tl.float16 and rows <= 16 and (are_values or (stored == tl.int8 and width <= 128))


@triton.jit
def _floats(
    rows, lines, is_kept, N: tl.constexpr, WIDTH: tl.constexpr, EDGE: tl.constexpr, query, ARE_VALUES: tl.constexpr
):  # fmt: skip
    """Return (lines, WIDTH) in the query's type; E4M3 by words, divided by 256."""
    stored: tl.constexpr = rows.dtype.element_ty
    if stored.primitive_bitwidth == 8 and _by_words(stored, query.dtype, query.shape[0], WIDTH, ARE_VALUES):
        words = _lines(rows.to(tl.pointer_type(tl.int32)), lines, is_kept, N // 4, WIDTH // 4, EDGE)
        if stored == tl.int8:  # 1024 + 128 + the code, in float16
            even, odd = (words & 0x00FF00FF) ^ 0x64806480, ((words >> 8) & 0x00FF00FF) ^ 0x64806480
        else:  # another exponent bias; NaN codes become numbers, but their scales are NaN
            even = ((words << 8) & -0x7FFF8000) | ((words << 7) & 0x3F803F80)
            odd = (words & -0x7FFF8000) | ((words >> 1) & 0x3F803F80)
        pairs = tl.join(tl.join(even.to(tl.int16), (even >> 16).to(tl.int16)),
                        tl.join(odd.to(tl.int16), (odd >> 16).to(tl.int16)))  # fmt: skip
        x = tl.reshape(pairs, (lines.shape[0], WIDTH)).to(tl.float16, bitcast=True)
        if stored == tl.int8:
            x -= 1152
        return x
    else:
        x = _lines(rows, lines, is_kept, N, WIDTH, EDGE)
        if stored == tl.float8e4nv:
            x = x.to(tl.float16)
        return x.to(query.dtype)


@triton.jit
def _scales(scales, lines, is_kept, EDGE: tl.constexpr):
    if EDGE:
        return tl.load(scales + lines, mask=is_kept, other=0.0)
    else:
        return tl.load(scales + lines)


@triton.jit
def merge(
    found_in, sums_in, y, merges, block_rows, H: tl.constexpr, K: tl.constexpr, DV: tl.constexpr,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a row of a block with at most PARTS parts. merges: see paged.py::AttentionWork

    One kernel for all blocks, so that prompts need not wait for another compilation.
    """
    lets_next_begin(PDL)
    after_those_before(PDL)
    item, kv_head, place = merges + 5 * tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_part, parts, begin, n, first = (tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3),
                                          tl.load(item + 4))  # fmt: skip
    group, part, column = H // K, tl.arange(0, PARTS), tl.arange(0, WIDTH)
    token, head = (first + place) // group, kv_head * group + (first + place) % group
    if (parts == 0) | (token >= n):
        return
    at, is_part = ((first_part + part) * K + kv_head) * block_rows + place, part < parts
    peak = tl.load(sums_in + 2 * at, mask=is_part, other=float("-inf"))
    keep = tl.exp2(peak - tl.max(peak, 0))  # the first part, at least, has seen a key
    total = tl.sum(tl.load(sums_in + 2 * at + 1, mask=is_part, other=0.0) * keep, 0)
    inside = is_part[:, None] & (column < DV)[None, :]
    result = tl.load(found_in + at[:, None] * DV + column[None, :], mask=inside, other=0.0)
    y_row = tl.sum(result * keep[:, None], 0) / total
    tl.store(y + ((begin + token) * H + head) * DV + column, y_row.to(y.dtype.element_ty), mask=column < DV)


def power_of_two(n: int, least: int = 16) -> int:
    """Return the next power of two, at least `least`, as tensor cores' tiles need."""
    return max(least, 1 << (n - 1).bit_length())


def compiled_for(block_rows: int, head: int, element: int, from_hopper: bool) -> dict[str, int]:
    """Return the warps of `attend`, and the stages of its loop. head: the larger of key and value size; element: bytes

    With 5 stages two pages are in flight while one is summed (the table lookup has its own), which few rows wait for;
    with 3 stages one is, with 1 none. More do not fit: a program has 99 KiB on an L4, 227 KiB on an H200.
    """
    if block_rows <= 16:
        return {"num_warps": 4, "num_stages": 5 if head <= 128 and element <= 2 else 3}
    return {"num_warps": 8, "num_stages": 3 if from_hopper or head * element <= 256 else 1}


def keep_rotated(
    heads: tuple[Tensor, Tensor, Tensor], step: StepTables, table: Tensor | None, pages: LayerPages, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """Write a step's keys and values; keys are rotated if there is a table (context, D).

    Return q (T, H, D) of `dtype`, rotated, and transformed if keys are: then D is a power of two
    """
    q, k, v = heads
    T, H, D = q.shape
    K, DV = v.shape[1:]
    y = torch.empty((T, H, D), dtype=dtype, device=q.device)
    rotate_and_keep[(T, H + K)](
        q, k, v, step.rotary, q if table is None else table, step.slots, y, pages.keys, pages.values,
        pages.key_scales, pages.value_scales, q.stride(0), k.stride(0), v.stride(0), H=H, K=K, D=D, DV=DV,
        PAGE=pages.tokens, ROTATES=table is not None, HALF=power_of_two(D // 2, 4), WIDTH=power_of_two(DV),
        STAGES=D.bit_length() - 1 if pages.transformed else 0, enable_fp_fusion=True, num_warps=KEEP_WARPS,
        **overlapping(q.device),
    )  # fmt: skip
    return y


def attention(
    q: Tensor, step: StepTables, pages: LayerPages, scale: float, window: int = 0, softcap: float = 0.0
) -> Tensor:
    """Attend q (T, H, D) to the pages -> (T, H, DV), of q's type. window, softcap: as in attention/ref.py"""
    y = torch.empty((*q.shape[:2], pages.values.shape[3]), dtype=q.dtype, device=q.device)
    for work in step.work:
        _attend(q, y, step.tables, work, pages, scale, {"WINDOW": window, "SOFTCAP": softcap})
    return y


@cache
def _from_hopper(device: torch.device) -> bool:
    """Return whether it is a Hopper or later; in the interpreter nothing is compiled."""
    return device.type == "cuda" and bool(torch.cuda.get_device_capability(device) >= (9, 0))


def _attend(
    q: Tensor,
    y: Tensor,
    tables: Tensor,
    work: AttentionWork,
    pages: LayerPages,
    scale: float,
    sight: Mapping[str, float],
) -> None:
    """Launch `attend` and `merge`. sight: constants of the model, so that no step compiles the kernel again"""
    (_, H, D), K, DV = q.shape, pages.values.shape[1], y.shape[2]
    result = torch.empty((work.parts, K, work.rows, DV), device=q.device)
    sums = torch.empty((work.parts, K, work.rows, 2), device=q.device)
    width = power_of_two(DV)
    attend[(len(work.items), K)](
        q, pages.keys, pages.values, pages.key_scales, pages.value_scales, y, result, sums, work.items, tables, scale,
        H=H, K=K, D=D, DV=DV, PAGE=pages.tokens, BLOCK_M=work.rows, DEEP=power_of_two(D), WIDTH=width,
        enable_fp_fusion=True, **sight, **overlapping(q.device),
        **compiled_for(work.rows, max(D, DV), pages.keys.itemsize, _from_hopper(q.device)),
    )  # fmt: skip
    if len(work.merges):
        merge[(len(work.merges), K, work.max_rows)](
            result, sums, y, work.merges, work.rows, H=H, K=K, DV=DV, PARTS=work.max_parts, WIDTH=width,
            enable_fp_fusion=True, **overlapping(q.device),
        )  # fmt: skip
