"""Rotary embeddings in plain PyTorch (arXiv:2104.09864)."""

import torch
from torch import Tensor

from millrace.graph.types import Node
from millrace.kernels.rope.op import is_interleaved
from millrace.kernels.torch_operators import OperatorContext


def rotated(x: Tensor, angles: Tensor, *, interleaved: bool = False) -> Tensor:
    """x (T, H, D), angles (T, R): cosines, then sines -> (T, H, D), float32. interleaved: as in rope/ref.py"""
    cosine, sine = angles[:, None].chunk(2, -1)
    head, rest = x.float().split([angles.shape[1], x.shape[2] - angles.shape[1]], -1)
    a, b = (head[..., ::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    turned = a * cosine - b * sine, b * cosine + a * sine
    return torch.cat([torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1), rest], -1)


def _rope(node: Node, run: OperatorContext) -> Tensor:
    x, positions, table = (run.tensor(v) for v in node.inputs)
    return rotated(x, table[positions.long()], interleaved=is_interleaved(node)).to(run.dtype)


OPERATORS = {"rope": _rope}
