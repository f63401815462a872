"""Sampling in plain PyTorch."""

import torch
from torch import Tensor


def argmax(logits: Tensor, wrong: int) -> Tensor:
    """Map logits (R, V) -> (R,) int32: the most likely token, among equals the first; `wrong` if one is not finite."""
    return torch.where(logits.isfinite().all(1), logits.argmax(1), wrong).int()


def scatter_tokens(tokens: Tensor, at: Tensor, sampled: Tensor, rows: Tensor) -> None:
    """Set tokens[at] = sampled[rows], 0 for a failed draw; all int32, each place once."""
    tokens[at.long()] = sampled[rows.long()].clamp(min=0)


def draw(p: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor) -> Tensor:
    """p (R, V) float64, each row's largest 1; per row top_k int64, top_p, min_p and u float64 -> (R,) tokens.

    The token whose share of the kept ones contains u, ids ascending; kernels/sample/ref.py defines which are kept
    """
    V = p.shape[1]
    sorted_p, order = p.sort(dim=1, descending=True, stable=True)
    place = torch.arange(V, device=p.device)[None]
    allowed = (sorted_p >= min_p[:, None]) & ((top_k <= 0)[:, None] | (place < top_k[:, None]))
    mass = (sorted_p * allowed).cumsum(1)
    before = (mass - sorted_p * allowed) / mass[:, -1:]
    allowed &= (before < top_p[:, None] - 1e-12) | (top_p >= 1)[:, None] | (place == 0)
    left = torch.zeros_like(p).scatter(1, order, sorted_p * allowed)
    share = (left / left.sum(1, keepdim=True)).cumsum(1)
    falls = torch.searchsorted(share, u[:, None], right=True)[:, 0]
    return torch.minimum(falls, V - 1 - (left > 0).flip(1).int().argmax(1))
