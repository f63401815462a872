"""Normalising rows in plain PyTorch."""

from torch import Tensor
from torch.nn import functional

from millrace.graph.types import Node
from millrace.kernels.operators import number
from millrace.kernels.torch_operators import Run


def _normalise(node: Node, run: Run) -> Tensor:
    return functional.normalize(run.tensor(node.inputs[0]).float(), dim=-1, eps=number(node, "eps"))


OPERATORS = {"normalise": _normalise}
