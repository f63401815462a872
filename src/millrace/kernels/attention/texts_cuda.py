"""Attention of whole texts on a GPU, in Triton: every token sees all of its text, and nothing is kept.

Texts are packed, so there is no padding. A program has some rows (tokens of one text x the query heads that share a KV
head); softmax is online over the text's keys (arXiv:1805.02867).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.kernels.attention.cuda import LOG2E, power_of_two
from millrace.kernels.attention.texts import TextTables

BLOCK_N = 64  # keys at a time


def warps(block_rows: int) -> int:
    """Return the warps of a program: with fewer, 64 rows of 128 columns spill their sums."""
    return 4 if block_rows <= 16 else 8


@triton.jit(do_not_specialize_on_alignment=("blocks", "starts"))  # both are at any offset in a packed array
def attend_texts(
    q, k, v, y, blocks, starts, scale, q_row, k_row, v_row,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DEEP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows of one text and one KV head.

    q (T, H, D), k (T, K, D), v (T, K, DV), each by its row stride | blocks (n, 2): a text, and the first of its rows
    y (T, H, DV) | DEEP, WIDTH: powers of two, at least D and DV
    """
    block, kv_head = tl.program_id(0), tl.program_id(1)
    group: tl.constexpr = H // K
    text, first = tl.load(blocks + 2 * block), tl.load(blocks + 2 * block + 1)
    begin = tl.load(starts + text).to(tl.int64)
    n = (tl.load(starts + text + 1) - begin).to(tl.int32)
    rows = first + tl.arange(0, BLOCK_M)
    token, head = rows // group, kv_head * group + rows % group
    mine = token < n
    deep, column, place = tl.arange(0, DEEP), tl.arange(0, WIDTH), tl.arange(0, BLOCK_N)
    is_deep, is_column = deep < D, column < DV
    query = tl.load(q + ((begin + token) * q_row + head * D)[:, None] + deep[None, :],
                    mask=mine[:, None] & is_deep[None, :], other=0.0)  # fmt: skip
    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    for at in range(0, n, BLOCK_N):
        is_key, line = at + place < n, begin + at + place
        key = tl.load(k + (line * k_row + kv_head * D)[:, None] + deep[None, :],
                      mask=is_key[:, None] & is_deep[None, :], other=0.0)  # fmt: skip
        value = tl.load(v + (line * v_row + kv_head * DV)[:, None] + column[None, :],
                        mask=is_key[:, None] & is_column[None, :], other=0.0)  # fmt: skip
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2E)
        score = tl.where(is_key[None, :], score, float("-inf"))
        top = tl.maximum(most, tl.max(score, 1))
        weight, keep = tl.exp2(score - top[:, None]), tl.exp2(most - top)
        total = total * keep + tl.sum(weight, 1)
        result = result * keep[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        most = top
    out = y + (((begin + token) * H + head) * DV)[:, None] + column[None, :]
    tl.store(out, (result / total[:, None]).to(y.dtype.element_ty), mask=mine[:, None] & is_column[None, :])


def text_attention(heads: tuple[Tensor, Tensor, Tensor], texts: TextTables, scale: float) -> Tensor:
    """q (T, H, D), k (T, K, D), v (T, K, DV), of one type, each row's heads one behind the other -> (T, H, DV)"""
    q, k, v = heads
    T, H, D = q.shape
    K, DV = v.shape[1:]
    y = torch.empty((T, H, DV), dtype=q.dtype, device=q.device)
    attend_texts[(len(texts.blocks), K)](
        q, k, v, y, texts.blocks, texts.starts, scale, q.stride(0), k.stride(0), v.stride(0), H=H, K=K, D=D, DV=DV,
        BLOCK_M=texts.block_rows, BLOCK_N=BLOCK_N, DEEP=power_of_two(D), WIDTH=power_of_two(DV),
        num_warps=warps(texts.block_rows), enable_fp_fusion=True,
    )  # fmt: skip
    return y
