"""The embedding in plain PyTorch."""

import torch
from torch import Tensor
from torch.nn import functional

from millrace.graph.types import Node
from millrace.kernels.operators import float_attr
from millrace.kernels.torch_operators import OperatorContext


def _embedding(node: Node, run: OperatorContext) -> Tensor:
    (ids, table), rows = (run.tensor(v) for v in node.inputs), run.embeddings
    result = functional.embedding(ids if rows is None else ids.clamp(min=0), table).float()
    if (scale := float_attr(node, "scale")) != 1:
        result = result * scale
    if rows is None:
        return result
    return torch.where(ids[:, None] < 0, rows[(-1 - ids).clamp(min=0)], result)


OPERATORS = {"embedding": _embedding}
