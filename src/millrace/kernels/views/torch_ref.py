"""Reshape and split in plain PyTorch."""

from torch import Tensor

from millrace.graph.types import Node
from millrace.kernels.operators import static_dim
from millrace.kernels.torch_operators import OperatorContext


def _reshape(node: Node, run: OperatorContext) -> Tensor:
    return run.tensor(node.inputs[0]).reshape(
        -1, *(static_dim(node.output, i) for i in range(1, len(node.output.shape)))
    )


def _split(node: Node, run: OperatorContext) -> tuple[Tensor, ...]:
    result: tuple[Tensor, ...] = run.tensor(node.inputs[0]).split_with_sizes([v.width for v in node.outputs], 1)
    return result


OPERATORS = {"reshape": _reshape, "split": _split}
