"""Layers shared by all families: linear, embedding, norm, rotary angles. Names follow the checkpoints'."""

import math

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.config.rope_config import RopeConfig
from millrace.model import ops
from millrace.model.module import Module, Parameter, Table
from millrace.model.tensor import Tensor


class Linear(Module):
    """y = x @ weight.T (+ bias); weight (n_out, n_in). precision: as in ops.linear"""

    def __init__(
        self, n_in: int, n_out: int, *, bias: bool = False, weight: Parameter | None = None, precision: str = ""
    ) -> None:
        self.weight = weight or Parameter(n_out, n_in)
        if bias:
            self.bias = Parameter(n_out)
        self._precision = precision

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, getattr(self, "bias", None), precision=self._precision)


class Embedding(Module):
    """`first_row`: the tensor's row of id 0; the rows before it are unused (RoBERTa's positions)."""

    def __init__(self, count: int, n: int, *, scale: float = 1.0, first_row: int = 0) -> None:
        self.weight = Parameter(count, n, first_row=first_row)
        self._scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        return ops.embedding(ids, self.weight, self._scale)


class RMSNorm(Module):
    """`offset` 1 for Gemma, whose checkpoints store weight - 1."""

    def __init__(self, n: int, eps: float, *, offset: float = 0.0) -> None:
        self.weight = Parameter(n)
        self._eps, self._offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if self._offset:
            weight = weight + self._offset
        return ops.rms_norm(x, weight, self._eps)


class LayerNorm(Module):
    """`offset` 1 for Nemotron, whose checkpoints store weight - 1; `bias`: False for Cohere."""

    def __init__(self, n: int, eps: float, *, offset: float = 0.0, bias: bool = True) -> None:
        self.weight = Parameter(n)
        self.bias = Parameter(n) if bias else Table((n,), lambda: np.zeros(n, np.float32))
        self._eps, self._offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if self._offset:
            weight = weight + self._offset
        return ops.layer_norm(x, weight, self.bias, self._eps)


class Conv2d(Module):
    """As torch.nn.Conv2d; weight (n_out, n_in / groups, kh, kw)."""

    def __init__(
        self, n_in: int, n_out: int, kernel: ops.Pair, *, stride: ops.Pair = 1, padding: ops.Pair = 0,
        dilation: ops.Pair = 1, groups: int = 1, bias: bool = True,
    ) -> None:  # fmt: skip
        size = (kernel, kernel) if isinstance(kernel, int) else kernel
        self.weight = Parameter(n_out, n_in // groups, *size)
        if bias:
            self.bias = Parameter(n_out)
        self._stride, self._padding, self._dilation, self._groups = stride, padding, dilation, groups

    def forward(self, x: Tensor) -> Tensor:
        bias = getattr(self, "bias", None)
        return ops.convolution(
            x, self.weight, bias, stride=self._stride, padding=self._padding, dilation=self._dilation,
            groups=self._groups,
        )  # fmt: skip


class BatchNorm2d(Module):
    """As torch.nn.BatchNorm2d, in evaluation mode."""

    def __init__(self, n: int, eps: float = 1e-5) -> None:
        self.weight, self.bias = Parameter(n), Parameter(n)
        self.running_mean, self.running_var = Parameter(n), Parameter(n)
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.batch_norm(x, self.weight, self.bias, self.running_mean, self.running_var, self._eps)


def rotary_table(rope: RopeConfig, head_dim: int, context: int) -> Table:
    """Return cosines of the pairs' angles, then sines (context, rotary_dim) float32; computed in float64."""
    width = rope.rotary_dim or head_dim
    return Table((context, width), lambda: rotary_angles(rope, width, context))


def rotary_angles(rope: RopeConfig, head_dim: int, context: int) -> NDArray[np.float32]:
    angles = np.outer(np.arange(context, dtype=np.float64), inverse_frequencies(rope, head_dim, context))
    return (rope.attention_factor * np.concatenate([np.cos(angles), np.sin(angles)], axis=1)).astype(np.float32)


def inverse_frequencies(rope: RopeConfig, head_dim: int, context: int = 0) -> NDArray[np.float64]:
    """Return radians per position (head_dim / 2,); arXiv:2104.09864, for llama3 the reference code of Llama 3.1.

    context: tokens of the engine's longest sequence, which `longrope` depends on
    """
    plain: NDArray[np.float64] = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.divisors:
        plain = plain / np.array(rope.divisors)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "longrope":
        assert rope.original_max_positions is not None, rope
        factors = rope.long_factors if context > rope.original_max_positions else rope.short_factors
        divided: NDArray[np.float64] = plain / np.array(factors)
        return divided
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, plain, head_dim)
    assert rope.kind == "llama3" and rope.original_max_positions is not None, rope
    wavelength = 2 * math.pi / plain
    long_wave = rope.original_max_positions / rope.low_freq_factor
    short_wave = rope.original_max_positions / rope.high_freq_factor
    span = rope.high_freq_factor - rope.low_freq_factor
    smooth = (rope.original_max_positions / wavelength - rope.low_freq_factor) / span
    between = (1 - smooth) * plain / rope.factor + smooth * plain
    stretched = np.where(wavelength > long_wave, plain / rope.factor, between)
    result: NDArray[np.float64] = np.where(wavelength < short_wave, plain, stretched)
    return result


def _yarn_frequencies(rope: RopeConfig, plain: NDArray[np.float64], head_dim: int) -> NDArray[np.float64]:
    """Divide the frequencies of few rotations in the original context by `factor` (arXiv:2309.00071, section 3.2)."""
    assert rope.original_max_positions is not None, rope

    def dimension(rotations: float) -> float:
        """Return the number of the frequency whose angle makes `rotations` rotations within the original context."""
        radians = rope.original_max_positions / (rotations * 2 * math.pi)  # type: ignore[operator]  # it is a number
        return head_dim * math.log(radians) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 if low == high else 0
    stretched = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)
    result: NDArray[np.float64] = plain / rope.factor * stretched + plain * (1 - stretched)
    return result
