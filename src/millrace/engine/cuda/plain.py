"""What kernels/*/cuda.py compute, in plain PyTorch: for tensors of a CPU, and to hold the kernels against."""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from millrace.kernels.attention.paged import LayerPages, StepTables
from millrace.kernels.declare import NOTHING
from millrace.kernels.matmul.coded import LARGEST, CodedRows, Coding, Matrix, int8_rows, transformed
from millrace.kernels.matmul.gpu_tiles import RULES, Tiles


def rms_norm(x: Tensor, w: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x (..., N), w (N,) float32 -> (..., N) of `dtype`."""
    found = x.float()
    return (found * torch.rsqrt(found.square().mean(-1, keepdim=True) + eps) * w).to(dtype)


def add_norm(
    x: Tensor, residual: Tensor, w: Tensor, eps: float, dtype: torch.dtype, coding: Coding | None
) -> tuple[Tensor, Matrix]:  # fmt: skip
    """x (M, N), residual (M, N) and w (N,) float32 -> their sum, float32, and that normalised, of `dtype` or coded."""
    total = residual + x.float()
    return total, _as_wanted(rms_norm(total, w, eps, torch.float32), dtype, coding)


def silu_mul(gate: Tensor, up: Tensor, dtype: torch.dtype, coding: Coding | None) -> Matrix:
    """gate, up (M, N) -> silu(gate) * up of `dtype`, or coded."""
    return _as_wanted(functional.silu(gate.float()) * up.float(), dtype, coding)


def coded_rows(x: Tensor, coding: Coding) -> CodedRows:
    """x (R, K) of floats, coded."""
    return coding.rows(x)


def _as_wanted(y: Tensor, dtype: torch.dtype, coding: Coding | None) -> Matrix:
    """y float32 -> of `dtype`; codes are made of that, E4M3 of 16 bits: bfloat16's, of float32."""
    if coding is None:
        return y.to(dtype)
    return coding.rows(y.to(torch.bfloat16 if coding.e4m3 and dtype == torch.float32 else dtype))


def product(
    x: Matrix, w: Matrix, dtype: torch.dtype, bias: Tensor | None = None, tiles: Tiles = RULES
) -> Tensor:  # fmt: skip
    """x of M rows, w of N -> (M, N) of `dtype`, plus bias (N,). Where x is coded, w is. tiles: of no account here"""
    if isinstance(w, Tensor):
        assert isinstance(x, Tensor), "coded rows meet coded weights"
        return functional.linear(x.to(dtype), w, bias)
    rows = x.float() if isinstance(x, Tensor) else x.dense()
    y = functional.linear(rows, w.dense()).to(dtype)
    return y if bias is None else y + bias


def keep_rotated(
    heads: tuple[Tensor, Tensor, Tensor], step: StepTables, table: Tensor | None, pages: LayerPages, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """Writes a step's keys, rotated where there is a table (context, D), and its values.

    Gives q (T, H, D) of `dtype`, rotated; transformed as keys are, where they are
    """
    q, k = (x if table is None else rotated(x, table[step.positions.long()]) for x in heads[:2])
    if pages.transformed:
        q, k = (transformed(x.float().flatten(1), x.shape[2]).view(x.shape) for x in (q, k))
    slots = step.slots.long()
    page, place = slots // pages.tokens, slots % pages.tokens
    kept = (k, pages.keys, pages.key_scales), (heads[2], pages.values, pages.value_scales)
    for x, rows, scales in kept:
        if pages.coded:
            x, scales[page, :, place] = coded(x.float(), rows.dtype)
        rows[page, :, place] = x.to(rows.dtype)
    return q.to(dtype)


def coded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x (..., D) as pages of int8 or E4M3 hold it: codes, and a scale for each row; of E4M3 a power of two."""
    amax = x.abs().amax(-1)
    if dtype == torch.int8:
        rows = int8_rows(x.flatten(0, -2), 0)
        return rows.codes.view(x.shape), rows.scales.view(amax.shape)
    least = amax / LARGEST
    share, exponent = torch.frexp(least)
    above = torch.ldexp(torch.ones_like(least), exponent - (share == 0.5).int())
    scales = torch.where((least > NOTHING) & least.isfinite(), above, least * 0)  # no number where one is not finite
    codes = x / torch.where(scales > 0, scales, 1)[..., None]
    return codes.clamp(-LARGEST, LARGEST).to(dtype), scales


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """x (T, H, D), angles (T, D): cosines, then sines -> (T, H, D), float32."""
    cosine, sine = angles[:, None].chunk(2, -1)
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)


def attention(q: Tensor, step: StepTables, pages: LayerPages, scale: float) -> Tensor:
    """q (T, H, D) over the pages -> (T, H, DV), a sequence at a time."""
    y = torch.empty((*q.shape[:2], pages.values.shape[3]), dtype=q.dtype, device=q.device)
    starts, table_starts = step.starts.tolist(), step.table_starts.tolist()
    for s, (begin, end) in enumerate(pairwise(starts)):
        table = step.tables[table_starts[s] : table_starts[s + 1]].long()
        last = int(step.positions[end - 1])
        keys, values = (x.transpose(1, 2).flatten(0, 1)[: last + 1].to(q.dtype) for x in pages.floats(table))
        sees = torch.arange(last + 1, device=q.device)[None] <= step.positions[begin:end, None]
        y[begin:end] = functional.scaled_dot_product_attention(
            q[begin:end].transpose(0, 1)[None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None],
            attn_mask=sees, scale=scale, enable_gqa=True,
        )[0].transpose(0, 1)  # fmt: skip
    return y


def best(logits: Tensor, wrong: int) -> Tensor:
    """logits (R, V) -> (R,) int32: the likeliest token, of several the first; `wrong` where a logit is not finite."""
    return torch.where(logits.isfinite().all(1), logits.argmax(1), wrong).int()


def put(tokens: Tensor, at: Tensor, drawn: Tensor, rows: Tensor) -> None:
    """tokens[at] = drawn[rows], 0 where that is none; all int32, each place once"""
    tokens[at.long()] = drawn[rows.long()].clamp(min=0)


def draw(p: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor) -> Tensor:
    """p (R, V) float64, each row's largest 1; of each row top_k int64, top_p, min_p and u float64 -> (R,) tokens.

    That in whose share of what is kept u falls, ids ascending; kept is as kernels/sample/ref.py has it
    """
    V = p.shape[1]
    sorted_p, order = p.sort(dim=1, descending=True, stable=True)
    place = torch.arange(V, device=p.device)[None]
    kept = (sorted_p >= min_p[:, None]) & ((top_k <= 0)[:, None] | (place < top_k[:, None]))
    mass = (sorted_p * kept).cumsum(1)
    before = (mass - sorted_p * kept) / mass[:, -1:]
    kept &= (before < top_p[:, None] - 1e-12) | (top_p >= 1)[:, None] | (place == 0)
    left = torch.zeros_like(p).scatter(1, order, sorted_p * kept)
    share = (left / left.sum(1, keepdim=True)).cumsum(1)
    falls = torch.searchsorted(share, u[:, None], right=True)[:, 0]
    return torch.minimum(falls, V - 1 - (left > 0).flip(1).int().argmax(1))
