"""Normalization of rows in plain PyTorch."""

from torch import Tensor
from torch.nn import functional

from millrace.graph.types import Node
from millrace.kernels.operators import float_attr
from millrace.kernels.torch_operators import OperatorContext


def _normalise(node: Node, run: OperatorContext) -> Tensor:
    return functional.normalize(run.tensor(node.inputs[0]).float(), dim=-1, eps=float_attr(node, "eps"))


OPERATORS = {"normalise": _normalise}
