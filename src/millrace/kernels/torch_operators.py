"""What each operator computes in PyTorch, by its name: the tables OPERATORS of all kernels' torch_ref.py.

Products take and give the engine's type; what they are added to, the residual stream, stays float32.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from millrace.graph.types import Node, Value
from millrace.kernels.catalogue import discover
from millrace.kernels.matmul.coded import Matrix, QuantizedRows, RowQuantization


class OperatorContext(Protocol):
    """One step through a graph."""

    dtype: torch.dtype
    embeddings: Tensor | None  # as StepInputs'

    def tensor(self, value: Value) -> Tensor:
        """Of a constant, or as the node that computed it left it."""

    def products(self, node: Node, bias: Tensor | None = None) -> list[Tensor]:
        """Its rows, which may be coded, times each of its matrices, each (M, N) of `dtype`."""

    def matrix(self, value: Value) -> Matrix:
        """As `tensor`, of rows that may be coded."""

    def coded_rows(self, x: Tensor, coding: RowQuantization) -> QuantizedRows:
        """x (R, K) of floats, coded."""

    def added(self, node: Node, y: Tensor) -> Tensor:
        """What a product with a residual gives: y added to that, float32."""

    def gated(self, node: Node, halves: Sequence[Tensor]) -> Matrix:
        """By the tree of a gated product."""

    def normalised(self, x: Tensor, w: Tensor, eps: float) -> Tensor:
        """By its root mean square; of `dtype`."""

    def attended(self, node: Node, heads: tuple[Tensor, Tensor, Tensor], table: Tensor | None) -> Tensor:
        """Keeps keys and values, rotated where there is a table, and attends to all that is kept: (T, H, DV)."""

    def convolved(self, node: Node, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        """Over a sequence's last tokens, of which it keeps those that the next step needs: (T, N) of `dtype`."""

    def attended_whole(self, node: Node, heads: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Each token to all of its text: (T, H, DV)."""


TorchOperator = Callable[[Node, OperatorContext], Matrix | tuple[Tensor, ...]]


@cache
def torch_operators() -> Mapping[str, TorchOperator]:
    """Of all folders, by name."""
    every = [item for _, module in discover("torch_ref") for item in getattr(module, "OPERATORS", {}).items()]
    by_name: dict[str, TorchOperator] = dict(every)
    assert len(by_name) == len(every), f"two of one name among {sorted(name for name, _ in every)}"
    return MappingProxyType(by_name)
