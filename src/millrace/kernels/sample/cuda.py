"""Sampling on a GPU, in Triton: the most likely token, and draws without sorting the vocabulary. One program per row.

top_k and top_p keep all tokens above some probability, and the first few, by ids, of those that have exactly this one.
That probability is searched by its bits, which order nonnegative numbers like integers: each pass over the row sums up
what is above a guess, and the next guess is between two probabilities that occur. It takes a few tens of passes over a
row in the multiprocessor's cache, for any distribution; only the number of passes depends on the data.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.kernels.gpu_launch import after_those_before, cdiv, lets_next_begin, overlapping

BLOCK = 2048  # tokens at a time
WARPS = 8
BEST_BLOCK, BEST_WARPS = 8192, 16  # of the most likely token: one pass, so as many loads in flight as possible
_ONE = tl.constexpr(0x3FF0000000000000)  # the bits of 1.0, the largest probability
_SLACK = tl.constexpr(1e-12)  # tolerance of sums compared with top_p, as in ref.py


@triton.jit
def best_rows(logits, tokens, wrong, V, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """logits (R, V) -> tokens (R,) int32: where the largest is, among equals the first; `wrong` if one is not finite"""
    lets_next_begin(PDL)
    row = tl.program_id(0)
    logits += row.to(tl.int64) * V
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    where = tl.zeros((BLOCK,), tl.int32)
    spoilt = tl.zeros((BLOCK,), tl.int32)
    after_those_before(PDL)
    for first in range(0, V, BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(logits + at, mask=at < V, other=float("-inf")).to(tl.float32)
        is_number = tl.abs(value) < float("inf")
        spoilt |= ((at < V) & (is_number == 0)).to(tl.int32)
        where = tl.where(value > most, at, where)
        most = tl.maximum(most, value)
    result = tl.min(tl.where(most == tl.max(most, 0), where, V), 0)
    tl.store(tokens + row, tl.where(tl.max(spoilt, 0) > 0, wrong, result))


def argmax(logits: Tensor, wrong: int) -> Tensor:
    """Map logits (R, V) of any float type -> (R,) int32: the most likely token; `wrong` if a logit is not finite.

    Among equals it is the first one.
    """
    logits = logits.contiguous()
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    best_rows[(rows,)](
        logits, tokens, wrong, vocab, BLOCK=min(BEST_BLOCK, triton.next_power_of_2(vocab)),
        **overlapping(logits.device), num_warps=BEST_WARPS, enable_fp_fusion=True,
    )  # fmt: skip
    return tokens


# Compiled once for any number of tokens and any alignment in a step's inputs.
@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=["at", "sampled", "rows"])
def put_tokens(tokens, at, sampled, rows, N, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Set tokens[at] = sampled[rows] (N,), 0 for a failed draw, which is negative."""
    lets_next_begin(PDL)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    after_those_before(PDL)
    row = tl.load(rows + i, mask=i < N, other=0)
    token = tl.load(sampled + row, mask=i < N, other=0)
    tl.store(tokens + tl.load(at + i, mask=i < N, other=0), tl.maximum(token, 0), mask=i < N)


def scatter_tokens(tokens: Tensor, at: Tensor, sampled: Tensor, rows: Tensor) -> None:
    """Set tokens[at] = sampled[rows], 0 for a failed draw; all int32, each place once."""
    n = len(at)
    put_tokens[(cdiv(n, 128),)](
        tokens, at, sampled, rows, n, BLOCK=128, **overlapping(tokens.device), enable_fp_fusion=True
    )


@triton.jit
def _keys(p, at, V):
    """Return the bits of the tokens' probabilities; below all others beyond the last token."""
    return tl.load(p + at, mask=at < V, other=-1.0).to(tl.int64, bitcast=True)


@triton.jit
def _above(p, V, key, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sum or the number of keys from `key` on; the least of these keys, and the greatest below them."""
    weight = tl.zeros((BLOCK,), tl.float64)
    least = tl.full((BLOCK,), _ONE + 1, tl.int64)
    most = tl.full((BLOCK,), -1, tl.int64)
    for first in range(0, V, BLOCK):
        keys = _keys(p, first + tl.arange(0, BLOCK), V)
        above = keys >= key
        value = keys.to(tl.float64, bitcast=True)
        weight += tl.where(above, 1.0 if COUNTS else value, 0.0)
        least = tl.minimum(least, tl.where(above, keys, _ONE + 1))
        most = tl.maximum(most, tl.where(above, -1, keys))
    return tl.sum(weight, 0), tl.min(least, 0), tl.max(most, 0)


@triton.jit
def _greatest(p, V, low, want, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the greatest key from which on there is at least `want`, which is positive; true for `low`."""
    high = tl.full((), _ONE + 1, tl.int64)
    while high - low > 1:
        middle = low + (high - low) // 2
        weight, least, most = _above(p, V, middle, COUNTS, BLOCK)
        enough = weight >= want
        low = tl.where(enough, least, low)
        high = tl.where(enough, high, most + 1)
    return low


@triton.jit
def _walk(p, V, key, ties, mark, BLOCK: tl.constexpr):
    """Walk by ids over what is kept: all above `key`, and the first `ties` equal to it.

    Return their sum; the first token at which the running sum exceeds `mark`, or V; the last kept token.
    """
    total = tl.zeros((), tl.float64)
    equal = tl.zeros((), tl.int64)
    result = tl.full((), 0, tl.int32) + V
    last = tl.zeros((), tl.int32)
    for first in range(0, V, BLOCK):
        at = first + tl.arange(0, BLOCK)
        keys = _keys(p, at, V)
        same = (keys == key).to(tl.int64)
        before = equal + tl.cumsum(same, 0) - same
        allowed = (keys > key) | ((same > 0) & (before < ties))
        value = tl.where(allowed, keys.to(tl.float64, bitcast=True), 0.0)
        sums = total + tl.cumsum(value, 0)
        result = tl.minimum(result, tl.min(tl.where((value > 0) & (sums > mark), at, V), 0))
        last = tl.maximum(last, tl.max(tl.where(value > 0, at, 0), 0))
        total += tl.sum(value, 0)
        equal += tl.sum(same, 0)
    return total, result, last


@triton.jit
def draw_rows(p, top_k, top_p, min_p, u, tokens, V, BLOCK: tl.constexpr):
    """p (R, V) float64 from 0 to 1, the largest 1; per row top_k, 0 for all, top_p, min_p and u in [0, 1)

    tokens (R,) int64: the one whose share of what is kept contains u, ids ascending
    """
    row = tl.program_id(0)
    p += row.to(tl.int64) * V
    least = tl.load(min_p + row)
    key = tl.where(least > 0, least, 0.0).to(tl.int64, bitcast=True)
    count, _, _ = _above(p, V, key, True, BLOCK)
    k, share = tl.load(top_k + row), tl.load(top_p + row)
    ties = tl.full((), 0, tl.int64) + V
    if (k > 0) & (k < count):
        key = _greatest(p, V, key, k.to(tl.float64), True, BLOCK)
        more, _, _ = _above(p, V, key + 1, True, BLOCK)
        ties = k - more.to(tl.int64)
    if share < 1:
        full, _, _ = _walk(p, V, key, ties, 2.0, BLOCK)
        want = tl.maximum(share - _SLACK, _SLACK) * full
        low = key
        key = _greatest(p, V, low, want, False, BLOCK)
        more, _, _ = _above(p, V, key + 1, False, BLOCK)
        value = key.to(tl.float64, bitcast=True)
        needed = tl.maximum(tl.ceil((want - more) / tl.maximum(value, 1e-300)), 1.0)
        needed = tl.minimum(needed, V.to(tl.float64)).to(tl.int64)
        ties = tl.where(key == low, tl.minimum(ties, needed), needed)
    full, _, _ = _walk(p, V, key, ties, 2.0 * V, BLOCK)
    _, result, last = _walk(p, V, key, ties, tl.load(u + row) * full, BLOCK)
    tl.store(tokens + row, tl.minimum(result, last).to(tl.int64))


def draw(p: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor) -> Tensor:
    """p (R, V) float64, each row's largest 1; per row top_k int64, top_p, min_p and u float64 -> (R,) tokens."""
    p = p.contiguous()
    rows, vocab = p.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=p.device)
    draw_rows[(rows,)](
        p,
        top_k,
        top_p,
        min_p,
        u,
        tokens,
        vocab,
        BLOCK=min(BLOCK, triton.next_power_of_2(vocab)),
        num_warps=WARPS,
        enable_fp_fusion=False,  # each operation is rounded separately, like the reference's
    )
    return tokens
