"""What kernels/*/cuda.py compute, in plain PyTorch: for tensors of a CPU, and to hold the kernels against."""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from millrace.kernels.attention.paged import LayerPages, StepTables
from millrace.kernels.matmul.coded import Matrix


def rms_norm(x: Tensor, w: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x (..., N), w (N,) float32 -> (..., N) of `dtype`."""
    found = x.float()
    return (found * torch.rsqrt(found.square().mean(-1, keepdim=True) + eps) * w).to(dtype)


def product(x: Matrix, w: Matrix, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """x of M rows, w of N -> (M, N) of `dtype`, plus bias (N,). Where x is coded, w is."""
    if isinstance(w, Tensor):
        assert isinstance(x, Tensor), "coded rows meet coded weights"
        return functional.linear(x.to(dtype), w, bias)
    rows = x.float() if isinstance(x, Tensor) else x.dense()
    y = functional.linear(rows, w.dense()).to(dtype)
    return y if bias is None else y + bias


def keep_rotated(
    heads: tuple[Tensor, Tensor, Tensor], step: StepTables, table: Tensor | None, pages: LayerPages
) -> Tensor:  # fmt: skip
    """Writes a step's keys, rotated where there is a table (context, D), and its values; gives q (T, H, D), rotated."""
    q, k = (x if table is None else rotated(x, table[step.positions.long()]) for x in heads[:2])
    slots = step.slots.long()
    page, place = slots // pages.tokens, slots % pages.tokens
    pages.keys[page, :, place] = k.to(pages.keys.dtype)
    pages.values[page, :, place] = heads[2].to(pages.values.dtype)
    return q.to(pages.keys.dtype)


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
        keys, values = (x[table].transpose(1, 2).flatten(0, 1)[: last + 1] for x in (pages.keys, pages.values))
        sees = torch.arange(last + 1, device=q.device)[None] <= step.positions[begin:end, None]
        y[begin:end] = functional.scaled_dot_product_attention(
            q[begin:end].transpose(0, 1)[None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None],
            attn_mask=sees, scale=scale, enable_gqa=True,
        )[0].transpose(0, 1)  # fmt: skip
    return y
