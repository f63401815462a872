"""Attention over pages and over whole texts in plain PyTorch."""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from millrace.graph.types import Node
from millrace.kernels.attention.paged import LayerPages, StepTables
from millrace.kernels.attention.texts import TextTables
from millrace.kernels.declare import ZERO_GROUP_THRESHOLD
from millrace.kernels.matmul.coded import LARGEST, int8_rows, transformed
from millrace.kernels.rope.torch_ref import rotated
from millrace.kernels.torch_operators import OperatorContext


def keep_rotated(
    heads: tuple[Tensor, Tensor, Tensor], step: StepTables, table: Tensor | None, pages: LayerPages, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """Write a step's keys and values; keys are rotated if there is a table (context, D).

    Return q (T, H, D) of `dtype`, rotated, and transformed if keys are
    """
    q, k = (x if table is None else rotated(x, table[step.rotary.long()]) for x in heads[:2])
    if pages.transformed:
        q, k = (transformed(x.float().flatten(1), x.shape[2]).view(x.shape) for x in (q, k))
    slots = step.slots.long()
    page, place = slots // pages.tokens, slots % pages.tokens
    caches = (k, pages.keys, pages.key_scales), (heads[2], pages.values, pages.value_scales)
    for x, rows, scales in caches:
        if pages.coded:
            x, scales[page, :, place] = coded(x.float(), rows.dtype)
        rows[page, :, place] = x.to(rows.dtype)
    return q.to(dtype)


def coded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize x (..., D) as int8 or E4M3 pages do: codes, and a scale per row; a power of two for E4M3."""
    amax = x.abs().amax(-1)
    if dtype == torch.int8:
        rows = int8_rows(x.flatten(0, -2), 0)
        return rows.codes.view(x.shape), rows.scales.view(amax.shape)
    least = amax / LARGEST
    share, exponent = torch.frexp(least)
    above = torch.ldexp(torch.ones_like(least), exponent - (share == 0.5).int())
    scales = torch.where(
        (least > ZERO_GROUP_THRESHOLD) & least.isfinite(), above, least * 0
    )  # NaN if an element is not finite
    codes = x / torch.where(scales > 0, scales, 1)[..., None]
    return codes.clamp(-LARGEST, LARGEST).to(dtype), scales


def attention(
    q: Tensor, step: StepTables, pages: LayerPages, scale: float, window: int = 0, softcap: float = 0.0
) -> Tensor:
    """Attend q (T, H, D) to the pages -> (T, H, DV), one sequence at a time. window, softcap: as in attention/ref.py"""
    y = torch.empty((*q.shape[:2], pages.values.shape[3]), dtype=q.dtype, device=q.device)
    starts, table_starts, first = step.starts.tolist(), step.table_starts.tolist(), step.first.tolist()
    for s, (begin, end) in enumerate(pairwise(starts)):
        table, before = step.tables[table_starts[s] : table_starts[s + 1]].long(), first[s] * pages.tokens
        at, last = step.positions[begin:end, None], int(step.positions[end - 1])
        oldest = max(0, int(step.positions[begin]) - window + 1) if window else 0
        part = slice(oldest - before, last + 1 - before)
        keys, values = (x.transpose(1, 2).flatten(0, 1)[part].to(q.dtype) for x in pages.floats(table))
        places = torch.arange(oldest, last + 1, device=q.device)[None]
        sees = (places <= at) & (places > at - window) if window else places <= at
        y[begin:end] = _attended(q[begin:end], keys, values, sees, scale, softcap)
    return y


def _attended(q: Tensor, k: Tensor, v: Tensor, sees: Tensor, scale: float, softcap: float) -> Tensor:
    """Attend q (T, H, D) to k (n, K, D), v (n, K, DV) where sees (T, n) -> (T, H, DV)."""
    if not softcap:
        return functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], attn_mask=sees, scale=scale,
            enable_gqa=True,
        )[0].transpose(0, 1)  # fmt: skip
    grouped = q.float().unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("tkgd,ukd->tkgu", grouped, k.float()) * (scale / softcap)
    weights = (scores.tanh() * softcap).masked_fill(~sees[:, None, None], float("-inf")).softmax(-1)
    return torch.einsum("tkgu,ukd->tkgd", weights, v.float()).flatten(1, 2).to(q.dtype)


def text_attention(heads: tuple[Tensor, Tensor, Tensor], texts: TextTables, scale: float) -> Tensor:
    """Attend q (T, H, D), k (T, K, D), v (T, K, DV) of whole texts -> (T, H, DV), one text at a time."""
    parts = (x.split(texts.starts.diff().tolist()) for x in heads)
    return torch.cat([
        functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], scale=scale, enable_gqa=True
        )[0].transpose(0, 1)
        for q, k, v in zip(*parts, strict=True)
    ])  # fmt: skip


def _attention(node: Node, run: OperatorContext) -> Tensor:
    q, k, v = (run.tensor(x) for x in node.inputs[:3])
    return run.attended(node, (q, k, v), run.tensor(node.inputs[5]) if node.op == "rope_attention" else None)


def _full_attention(node: Node, run: OperatorContext) -> Tensor:
    q, k, v, _ = (run.tensor(x) for x in node.inputs)
    return run.attended_whole(node, (q, k, v))


OPERATORS = {"attention": _attention, "rope_attention": _attention, "full_attention": _full_attention}
