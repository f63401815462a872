"""Gathering rows in plain PyTorch."""

from torch import Tensor

from millrace.graph.types import Node
from millrace.kernels.torch_operators import OperatorContext


def _gather_rows(node: Node, run: OperatorContext) -> Tensor:
    x, rows = (run.tensor(v) for v in node.inputs)
    return x[rows]


OPERATORS = {"gather_rows": _gather_rows}
