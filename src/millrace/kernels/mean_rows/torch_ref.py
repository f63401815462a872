"""The mean of rows in plain PyTorch."""

import torch
from torch import Tensor

from millrace.graph.types import Node
from millrace.kernels.torch_operators import OperatorContext


def _mean_rows(node: Node, run: OperatorContext) -> Tensor:
    """Of each text's rows. Nothing waits to see whether the lengths are right: they are those of the rows."""
    x, lengths = (run.tensor(v) for v in node.inputs)
    return torch.segment_reduce(x.float(), "mean", lengths=lengths.long(), axis=0, unsafe=True)


OPERATORS = {"mean_rows": _mean_rows}
