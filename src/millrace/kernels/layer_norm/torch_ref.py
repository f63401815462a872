"""The layer norm in plain PyTorch."""

from torch import Tensor
from torch.nn import functional

from millrace.graph.types import Node
from millrace.kernels.operators import float_attr
from millrace.kernels.torch_operators import OperatorContext


def _layer_norm(node: Node, run: OperatorContext) -> Tensor:
    """float32, because it is added to later."""
    x, w, bias = (run.tensor(v) for v in node.inputs)
    return functional.layer_norm(x.float(), (x.shape[-1],), w, bias, float_attr(node, "eps"))


OPERATORS = {"layer_norm": _layer_norm}
