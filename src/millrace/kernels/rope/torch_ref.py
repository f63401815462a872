"""Rotary embeddings in plain PyTorch (arXiv:2104.09864)."""

import torch
from torch import Tensor

from millrace.graph.types import Node
from millrace.kernels.torch_operators import OperatorContext


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """x (T, H, D), angles (T, D): cosines, then sines -> (T, H, D), float32."""
    cosine, sine = angles[:, None].chunk(2, -1)
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)


def _rope(node: Node, run: OperatorContext) -> Tensor:
    x, positions, table = (run.tensor(v) for v in node.inputs)
    return rotated(x, table[positions.long()]).to(run.dtype)


OPERATORS = {"rope": _rope}
