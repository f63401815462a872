"""Short convolutions in plain PyTorch."""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from millrace.graph.types import Node
from millrace.kernels.short_conv.slots import SequenceSlots
from millrace.kernels.torch_operators import OperatorContext


def short_conv(x: Tensor, w: Tensor, bias: Tensor | None, slots: SequenceSlots, states: Tensor) -> Tensor:
    """x (T, N), w (N, 1, taps), bias (N,) -> (T, N), of x's type; states (slots, taps - 1, N); by sequences."""
    y, taps = torch.empty_like(x), w.shape[2]
    starts, before, behind = slots.starts.tolist(), slots.before.tolist(), slots.behind.tolist()
    for s, (begin, end) in enumerate(pairwise(starts)):
        past = states[before[s]] if before[s] >= 0 else torch.zeros_like(states[0])
        rows = torch.cat([past, x[begin:end]])
        y[begin:end] = functional.conv1d(rows.float().T[None], w, bias, groups=x.shape[1])[0].T.to(x.dtype)
        states[behind[s]] = rows[len(rows) - taps + 1 :]
    return y


def _short_conv(node: Node, run: OperatorContext) -> Tensor:
    x, w = (run.tensor(v) for v in node.inputs[:2])
    return run.convolved(node, x, w, run.tensor(node.inputs[4]) if len(node.inputs) > 4 else None)


OPERATORS = {"short_conv": _short_conv}
