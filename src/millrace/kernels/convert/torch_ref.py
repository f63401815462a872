"""Conversions of rows in plain PyTorch."""

import torch
from torch import Tensor

from millrace.graph.types import Node
from millrace.kernels.matmul.coded import Matrix, QuantizedRows, RowQuantization, coding_of
from millrace.kernels.row_storage import storage_of
from millrace.kernels.torch_operators import OperatorContext


def coded_rows(x: Tensor, coding: RowQuantization) -> QuantizedRows:
    """Quantize x (R, K) of floats."""
    return coding.rows(x)


def to_dtype(y: Tensor, dtype: torch.dtype, coding: RowQuantization | None) -> Matrix:
    """Convert y float32 to `dtype`, or quantize it; E4M3 is made from 16 bits: bfloat16 of float32."""
    if coding is None:
        return y.to(dtype)
    return coding.rows(y.to(torch.bfloat16 if coding.e4m3 and dtype == torch.float32 else dtype))


def _convert(node: Node, run: OperatorContext) -> Matrix:
    """Return rows in the form in which matmuls read them: 16-bit floats of the engine's type, or int8."""
    x, storage = run.matrix(node.inputs[0]), storage_of(node)
    if isinstance(x, QuantizedRows):
        return x  # written so by its producer, if only such matmuls read it
    if (coding := coding_of(storage)) is not None:
        return run.coded_rows(x.flatten(1), coding)
    return x.to(torch.bfloat16 if run.dtype == torch.float32 else run.dtype)


OPERATORS = {"convert": _convert}
