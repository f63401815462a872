"""Short causal convolutions on a GPU, in Triton: the tokens' columns, then the state of each sequence.

Two kernels, because a sequence's slot may be the same before and after a step: the second one writes after every token
has been read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.kernels.short_conv.slots import SequenceSlots

BLOCK = 256  # columns per program


@triton.jit
def _row(x, states, back, begin, slot, x_row, column, inside, N: tl.constexpr, TAPS: tl.constexpr):
    """Load columns of the row at index `back` of the step: a token's, or the state's if it precedes the sequence."""
    at = tl.zeros_like(column) + back  # per column: the interpreter accepts no scalar mask
    slot_at = at * 0 + slot
    own = tl.load(x + at.to(tl.int64) * x_row + column, mask=inside & (at >= begin), other=0.0)
    line, is_kept = slot_at * (TAPS - 1) + at - begin + TAPS - 1, (at < begin) & (slot_at >= 0)
    return own + tl.load(states + line * N + column, mask=inside & is_kept, other=0.0)


@triton.jit
def convolve(
    x, w, bias, states, y, owner, starts, before, x_row,
    N: tl.constexpr, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK columns of one token. x (T, N) by its row stride, w (N, TAPS), bias (N,), y (T, N).

    states (slots, TAPS - 1, N) | owner, starts, before: as in SequenceSlots
    """
    token, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, sequence = column < N, tl.load(owner + token)
    begin, slot = tl.load(starts + sequence), tl.load(before + sequence).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0)
    for j in tl.static_range(TAPS):
        row = _row(x, states, token - (TAPS - 1) + j, begin, slot, x_row, column, inside, N, TAPS)
        total += row.to(tl.float32) * tl.load(w + column * TAPS + j, mask=inside, other=0.0)
    tl.store(y + token.to(tl.int64) * N + column, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def keep_rows(
    x, states, starts, before, behind, x_row, N: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program: BLOCK columns of the last TAPS - 1 rows of one sequence. Arguments as in `convolve`.

    The slot may be the one that is read: each row comes from a later one.
    """
    sequence, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, begin, end = column < N, tl.load(starts + sequence), tl.load(starts + sequence + 1)
    slot, target = tl.load(before + sequence).to(tl.int64), tl.load(behind + sequence).to(tl.int64)
    for j in tl.static_range(TAPS - 1):
        row = _row(x, states, end - (TAPS - 1) + j, begin, slot, x_row, column, inside, N, TAPS)
        tl.store(states + (target * (TAPS - 1) + j) * N + column, row, mask=inside)


def short_conv(x: Tensor, w: Tensor, bias: Tensor | None, slots: SequenceSlots, states: Tensor) -> Tensor:
    """x (T, N), w (N, 1, taps), bias (N,) -> (T, N), of x's type, as are states (slots, taps - 1, N)."""
    (T, N), taps, x = x.shape, w.shape[2], x.contiguous()
    y = torch.empty((T, N), dtype=x.dtype, device=x.device)
    shape = {"N": N, "TAPS": taps, "BLOCK": BLOCK, "enable_fp_fusion": True}
    blocks = triton.cdiv(N, BLOCK)
    convolve[(T, blocks)](
        x, w, w if bias is None else bias, states, y, slots.owner, slots.starts, slots.before, x.stride(0),
        HAS_BIAS=bias is not None, **shape,
    )  # fmt: skip
    keep_rows[(len(slots.before), blocks)](
        x, states, slots.starts, slots.before, slots.behind, x.stride(0), **shape
    )  # fmt: skip
    return y
