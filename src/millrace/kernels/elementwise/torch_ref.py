"""Element-wise expressions in plain PyTorch."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from millrace.graph.expressions import Tree, as_tree
from millrace.graph.types import DType, Node
from millrace.kernels.convert.torch_ref import to_dtype
from millrace.kernels.matmul.coded import Matrix, RowQuantization
from millrace.kernels.torch_operators import OperatorContext

_UNARY: Mapping[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg, "exp": torch.exp, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "erf": torch.erf,
    "sqrt": torch.sqrt, "abs": torch.abs,
}  # fmt: skip
_BINARY: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "max": torch.maximum, "min": torch.minimum,
}  # fmt: skip


def evaluate(tree: Tree, inputs: Sequence[Tensor]) -> Tensor:
    """Evaluate a tree, as defined in graph/expressions.py."""
    if isinstance(tree, int):
        return inputs[tree]
    if isinstance(tree, float):
        return torch.full((), tree, dtype=inputs[0].dtype, device=inputs[0].device)  # no copy: graphs capture none
    operation, operands = str(tree[0]), [evaluate(as_tree(t), inputs) for t in tree[1:]]
    return _UNARY[operation](*operands) if operation in _UNARY else _BINARY[operation](*operands)


def unsupported(node: Node) -> str:
    """Return the operation or type of an elementwise node that `evaluate` does not have; "" if it has all."""
    for value in (*node.inputs, node.output):
        if value.dtype != DType.F32:
            return f"arithmetic of {value.dtype}"
    return _unknown_operation(as_tree(node.attrs["tree"]))


def _unknown_operation(tree: Tree) -> str:
    if not isinstance(tree, tuple):
        return ""
    if (operation := str(tree[0])) not in _UNARY and operation not in _BINARY:
        return operation
    return next(filter(None, map(_unknown_operation, map(as_tree, tree[1:]))), "")


def silu_mul(gate: Tensor, up: Tensor, dtype: torch.dtype, coding: RowQuantization | None) -> Matrix:
    """gate, up (M, N) -> silu(gate) * up of `dtype`, or quantized."""
    return to_dtype(functional.silu(gate.float()) * up.float(), dtype, coding)


def _elementwise(node: Node, run: OperatorContext) -> Tensor:
    inputs = [run.tensor(v) for v in node.inputs]
    result = evaluate(as_tree(node.attrs["tree"]), [x.float() for x in inputs])
    return result if any(x.dtype == torch.float32 for x in inputs) else result.to(run.dtype)


OPERATORS = {"elementwise": _elementwise}
