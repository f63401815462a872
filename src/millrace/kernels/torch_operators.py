"""The operators in PyTorch, by name: the tables OPERATORS of all kernels' torch_ref.py.

Matmuls take and return the engine's type; the residual stream, to which their results are added, stays float32.
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
    embeddings: Tensor | None  # as in StepInputs

    def tensor(self, value: Value) -> Tensor:
        """Return a constant, or a value as the node that computed it stored it."""

    def products(self, node: Node, bias: Tensor | None = None) -> list[Tensor]:
        """Multiply the node's rows, which may be quantized, with each of its matrices -> (M, N) of `dtype` each."""

    def matrix(self, value: Value) -> Matrix:
        """Return a value like `tensor`, for rows that may be quantized."""

    def coded_rows(self, x: Tensor, coding: RowQuantization) -> QuantizedRows:
        """Quantize x (R, K) of floats."""

    def added(self, node: Node, y: Tensor) -> Tensor:
        """Add y to the residual of a matmul, float32."""

    def gated(self, node: Node, halves: Sequence[Tensor]) -> Matrix:
        """Apply the expression of a gated matmul."""

    def normalised(self, x: Tensor, w: Tensor, eps: float) -> Tensor:
        """Normalize by the root mean square; of `dtype`."""

    def attended(self, node: Node, heads: tuple[Tensor, Tensor, Tensor], table: Tensor | None) -> Tensor:
        """Store keys and values, rotated if there is a table, and attend to all stored ones: (T, H, DV)."""

    def convolved(self, node: Node, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve with a sequence's last tokens, and store those that the next step needs: (T, N) of `dtype`."""

    def attended_whole(self, node: Node, heads: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Attend each token to all of its text: (T, H, DV)."""


TorchOperator = Callable[[Node, OperatorContext], Matrix | tuple[Tensor, ...]]


@cache
def torch_operators() -> Mapping[str, TorchOperator]:
    """Return the operators of all folders by name."""
    every = [item for _, module in discover("torch_ref") for item in getattr(module, "OPERATORS", {}).items()]
    by_name: dict[str, TorchOperator] = dict(every)
    assert len(by_name) == len(every), f"two of one name among {sorted(name for name, _ in every)}"
    return MappingProxyType(by_name)
