"""Matmuls in plain PyTorch."""

import torch
from torch import Tensor
from torch.nn import functional

from millrace.graph.expressions import as_tree
from millrace.graph.types import Node
from millrace.kernels.elementwise.torch_ref import evaluate
from millrace.kernels.matmul.coded import Matrix
from millrace.kernels.matmul.gpu_tiles import RULES, Tiles
from millrace.kernels.torch_operators import OperatorContext


def product(
    x: Matrix, w: Matrix, dtype: torch.dtype, bias: Tensor | None = None, tiles: Tiles = RULES
) -> Tensor:  # fmt: skip
    """x of M rows, w of N -> (M, N) of `dtype`, plus bias (N,). If x is quantized, so is w. tiles: ignored"""
    if isinstance(w, Tensor):
        assert isinstance(x, Tensor), "coded rows meet coded weights"
        return functional.linear(x.to(dtype), w, bias)
    rows = x.float() if isinstance(x, Tensor) else x.dense()
    y = functional.linear(rows, w.dense()).to(dtype)
    return y if bias is None else y + bias


def _linear(node: Node, run: OperatorContext) -> Tensor:
    (y,) = run.products(node, run.tensor(node.inputs[2]) if node.attrs.get("bias") else None)
    if "tree" in node.attrs:
        y = evaluate(as_tree(node.attrs["tree"]), [y.float()]).to(run.dtype)
    return run.added(node, y) if node.attrs.get("residual") else y


def _gated_linear(node: Node, run: OperatorContext) -> Matrix:
    return run.gated(node, run.products(node))


OPERATORS = {"linear": _linear, "gated_linear": _gated_linear}
