"""The layer norm in plain PyTorch."""

from torch import Tensor
from torch.nn import functional

from millrace.graph.types import Node
from millrace.kernels.operators import number
from millrace.kernels.torch_operators import Run


def _layer_norm(node: Node, run: Run) -> Tensor:
    """float32, as what is added to it later."""
    x, w, bias = (run.tensor(v) for v in node.inputs)
    return functional.layer_norm(x.float(), (x.shape[-1],), w, bias, number(node, "eps"))


OPERATORS = {"layer_norm": _layer_norm}
