"""Quantized rows on a GPU: weights of INT8, INT4 and E4M3, and their 8-bit activations."""

from dataclasses import dataclass, replace
from functools import cache
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from millrace.checkpoint.weights.quantized_matrix import QuantisedMatrix
from millrace.kernels.declare import ZERO_GROUP_THRESHOLD, RowFormat
from millrace.kernels.matmul.pack import hadamard
from millrace.kernels.row_storage import Storage

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # the largest E4M3 number


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """R rows of `width` elements: an element is its code times its group's scale, plus its group's minimum.

    codes: (R, width) int8 or E4M3; with four bits (R, ceil(width / 2)) uint8 of code + zero, even elements in the low
    half
    scales: (R, G) float32, or float16 as in checkpoints; minimums: the same; None: there are none
    group: neighbors in a row that share a scale; the last group may be shorter
    """

    codes: Tensor
    scales: Tensor
    width: int
    group: int
    minimums: Tensor | None = None
    zero: int = 0

    @property
    def halves(self) -> bool:
        """Whether a byte has two codes."""
        return bool(self.codes.dtype == torch.uint8)

    def dense(self) -> Tensor:
        """Return the elements (R, width) float32."""
        codes = self.codes
        if self.halves:
            codes = torch.stack([codes & 15, codes >> 4], 2).flatten(1)[:, : self.width].to(torch.int8) - self.zero
        result = codes.float() * self._wide(self.scales)
        return result if self.minimums is None else result + self._wide(self.minimums)

    def some(self, first: int, end: int) -> "QuantizedRows":
        """Return some rows as views."""
        minimums = None if self.minimums is None else self.minimums[first:end]
        return replace(self, codes=self.codes[first:end], scales=self.scales[first:end], minimums=minimums)

    def _wide(self, of_groups: Tensor) -> Tensor:
        return of_groups.float().repeat_interleave(self.group, 1)[:, : self.width]


Matrix: TypeAlias = Tensor | QuantizedRows  # rows of floats, or quantized


@dataclass(frozen=True, slots=True)
class RowQuantization:
    """The quantization of a matmul's input rows: E4M3, with a scale per row, or INT8.

    group: of INT8, 0 for whole rows; transform: multiply its groups by a Hadamard matrix first
    """

    e4m3: bool
    group: int = 0
    transform: bool = False

    def rows(self, x: Tensor) -> QuantizedRows:
        """Quantize x (R, K), in plain PyTorch."""
        return e4m3_rows(x) if self.e4m3 else int8_rows(x, self.group, transform=self.transform)


AS_E4M3 = RowQuantization(e4m3=True)


def weights(matrix: QuantisedMatrix) -> QuantizedRows:
    """Convert a checkpoint's or engine's matrix exactly, in host memory; views if the layout allows."""
    codes, width, zero = matrix.codes, matrix.codes.shape[1], 0
    if matrix.bits == 4:
        zero = 0 if matrix.minimums is not None else 8
        even = np.pad(codes + np.int8(zero), ((0, 0), (0, width % 2))).view(np.uint8)
        codes = even[:, ::2] | even[:, 1::2] << np.uint8(4)
    data = torch.from_numpy(np.ascontiguousarray(codes))
    two_levels = matrix.scale_levels is not None  # a float16 times an int8 is a float32
    scales, minimums = matrix.scales, matrix.minimums
    if two_levels:
        scales = matrix.group_scales().astype(np.float32)
        minimums = None if minimums is None else matrix.group_minimums().astype(np.float32)
    return QuantizedRows(
        data.view(E4M3) if matrix.e4m3 else data, torch.from_numpy(scales), width, matrix.group or width,
        None if minimums is None else torch.from_numpy(minimums), zero,
    )  # fmt: skip


def e4m3_rows(x: Tensor) -> QuantizedRows:
    """Quantize x (R, K) as kernels/convert/ref.py: each row's largest magnitude becomes E4M3's largest number.

    If an element is not finite, neither is its row's scale
    """
    result = x.float()
    scales = result.abs().amax(1, keepdim=True) / LARGEST
    inverse = torch.where(scales > ZERO_GROUP_THRESHOLD, 1 / scales, 0)
    codes = torch.where(scales.isfinite(), (result * inverse).clamp(-LARGEST, LARGEST), 0)
    return QuantizedRows(codes.to(E4M3), scales, x.shape[1], x.shape[1])


def int8_rows(x: Tensor, group: int, *, transform: bool = False) -> QuantizedRows:
    """Quantize x (R, K) as kernels/convert/ref.py: each group's largest magnitude becomes 127. group 0: the whole row

    transform: multiply each group by a Hadamard matrix first. If an element is not finite, neither is its group's scale
    """
    width = x.shape[1]
    size = group or width
    result = transformed(x.float(), size) if transform else x.float()
    padded = torch.nn.functional.pad(result, (0, -width % size)).unflatten(1, (-1, size))
    amax = padded.abs().amax(2)
    inverse = torch.where(
        amax > ZERO_GROUP_THRESHOLD, torch.full_like(amax, 127) / amax, 0
    )  # `127 / amax` is rounded twice
    codes = (padded * inverse[:, :, None]).round().nan_to_num(0).to(torch.int8).flatten(1)[:, :width].contiguous()
    return QuantizedRows(codes, torch.where(amax <= ZERO_GROUP_THRESHOLD, 0, amax / 127), width, size)


def transformed(x: Tensor, group: int) -> Tensor:
    """Multiply each group of x (R, K) float32 by its Hadamard matrix, as kernels/matmul/pack.py but for rounding."""
    n_full = x.shape[1] // group * group
    parts = [x[:, :n_full].unflatten(1, (-1, group)) @ _matrix(group, x.device)] if n_full else []
    if n_full < x.shape[1]:
        parts.append((x[:, n_full:] @ _matrix(x.shape[1] - n_full, x.device))[:, None])
    return torch.cat([part.flatten(1) for part in parts], 1)


@cache
def _matrix(size: int, device: torch.device) -> Tensor:
    return torch.from_numpy(hadamard(np.eye(size, dtype=np.float32), size)).to(device)


def coding_of(storage: Storage) -> RowQuantization | None:
    """Return the quantization of a conversion to INT8 rows; None: it gives 16 bits, which may become E4M3 later."""
    if storage.format == RowFormat.BF16:
        return None
    return RowQuantization(e4m3=False, group=storage.group, transform=storage.hadamard)
