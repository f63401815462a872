"""Tensors of GPT-OSS's experts, which are stacked, as one tensor for each expert and matrix.

In a layer's `mlp.experts`, E experts, F the width of an expert, H of the model:

    gate_up_proj_blocks  uint8 (E, 2 F, H / 32, 16), of two FP4 codes a byte, the lower half first
    gate_up_proj_scales  uint8 (E, 2 F, H / 32), exponents of 2, plus 127
    gate_up_proj         or, not quantized, floats (E, H, 2 F)
    gate_up_proj_bias    (E, 2 F)
    down_proj_*          the same with (E, H, F / 32, 16), (E, F, H) and (E, H)

Even rows of gate_up_proj are the gate's, odd ones are those of up. An FP4 code (E2M1) stands for 0, 0.5, 1, 1.5, 2, 3,
4 or 6, with a sign: half of an integer, so the matrix is exactly 8-bit integers in groups of 32.
source: OCP Microscaling Formats (MX) 1.0, section 5.3.3
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.config.model_config import ModelConfig
from millrace.checkpoint.files import read_span
from millrace.checkpoint.weights.quantized_matrix import QuantisedFormat, QuantisedMatrix
from millrace.checkpoint.weights.safetensors import DTYPES, Array, TensorInfo, Tensors
from millrace.errors import CheckpointError

GROUP = 32
FORMAT = QuantisedFormat(8, GROUP)
NAMES = {"U8": "uint8"}  # in addition to floating-point types
_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # twice what a code stands for
_LOWEST, _HIGHEST = 127 - 23, 127 + 16  # exponents of scales whose halves float16 holds exactly
_PARTS = {"gate_proj": ("gate_up_proj", slice(0, None, 2)), "up_proj": ("gate_up_proj", slice(1, None, 2)),
          "down_proj": ("down_proj", slice(None))}  # fmt: skip
_AGAIN = "download or copy the checkpoint again"


@dataclass(frozen=True, slots=True)
class _Slice:
    """Where an expert's matrix or bias lies: in a stack, rows of its part; blocks: the stack has codes."""

    stack: str
    expert: int
    rows: slice
    blocks: bool
    transposed: bool


class StackedExpertTensors(Tensors):
    """Tensors of a GPT-OSS folder: `stored` returns FP4 codes as integers, `load` floats."""

    def __init__(self, infos: dict[str, TensorInfo], parts: Tensors, slices: dict[str, _Slice]) -> None:
        super().__init__(infos, parts.states)
        self._parts, self._slices = parts, slices

    @classmethod
    def from_folder(cls, folder: Path, config: ModelConfig) -> "StackedExpertTensors":
        """Open a folder; reads headers alone. raises CheckpointError"""
        return cls.from_tensors(Tensors.open(folder, NAMES), config)

    @classmethod
    def from_tensors(cls, parts: Tensors, config: ModelConfig) -> "StackedExpertTensors":
        assert config.experts is not None, config
        infos: dict[str, TensorInfo] = {}
        slices: dict[str, _Slice] = {}
        used: set[str] = set()
        for layer in range(config.n_layers):
            prefix = f"model.layers.{layer}.mlp.experts."
            for matrix, (stack, rows) in _PARTS.items():
                used |= _add_matrix(parts, config, prefix, matrix, stack, rows, infos, slices)
        for name, info in parts.items():
            if name in used:
                continue
            if info.dtype == "uint8":
                raise CheckpointError(
                    f"{name} ({info.dtype}) belongs to no expert", "blocks and scales of experts", _AGAIN
                )
            infos[name] = info
        return cls(infos, parts, slices)

    @property
    def notes(self) -> tuple[str, ...]:
        return self._parts.notes

    def load(self, name: str) -> Array:
        """Return a tensor as floats; of FP4 codes float32, exactly."""
        part = self._slices.get(name)
        if part is None:
            return self._parts.load(name)
        if part.blocks:
            codes, exponents = self._codes(name, part)
            scales = np.exp2(exponents.astype(np.float32) - 128)
            return (codes.reshape(*scales.shape, GROUP) * scales[:, :, None]).reshape(codes.shape)
        rows = self._expert_part(part.stack, part.expert)
        return np.ascontiguousarray((rows.T if part.transposed else rows)[part.rows])

    def format(self, name: str) -> QuantisedFormat | None:
        part = self._slices.get(name)
        return FORMAT if part and part.blocks else None

    def stored(self, name: str, bits: int, group: int) -> QuantisedMatrix | None:
        """Return the codes as integers if `bits` and `group` hold them.

        raises CheckpointError for a scale that float16 does not hold
        """
        part = self._slices.get(name)
        if part is None or not part.blocks or (bits, group) != (FORMAT.bits, FORMAT.group):
            return None
        codes, exponents = self._codes(name, part)
        if exponents.min() < _LOWEST or exponents.max() > _HIGHEST:
            wrong = int(exponents.min() if exponents.min() < _LOWEST else exponents.max())
            raise CheckpointError(
                f"{part.stack} has a scale of 2^{wrong - 127}",
                f"2^{_LOWEST - 127} to 2^{_HIGHEST - 127}, for integers", "build with --precision bf16",
            )  # fmt: skip
        return QuantisedMatrix(codes, np.exp2(exponents.astype(np.float32) - 128).astype(np.float16), GROUP, bits)

    def activation_bits(self, name: str) -> int:
        return 16

    def _codes(self, name: str, part: _Slice) -> tuple[NDArray[np.int8], NDArray[np.uint8]]:
        """Return twice what the codes stand for (N, K), and the exponents (N, K / 32) plus 127."""
        blocks = self._expert_part(f"{part.stack}_blocks", part.expert)[part.rows]
        exponents = self._expert_part(f"{part.stack}_scales", part.expert)[part.rows]
        if (exponents == 255).any():
            raise CheckpointError(f"{part.stack}_scales has a scale of 255, which is not a number", "0 to 254", _AGAIN)
        codes = np.empty((*blocks.shape, 2), np.int8)
        codes[..., 0], codes[..., 1] = _DOUBLED[blocks & 15], _DOUBLED[blocks >> 4]
        return codes.reshape(self[name].shape), exponents

    def _expert_part(self, stack: str, expert: int) -> Array:
        """Read an expert's part of a stack."""
        info = self._parts[stack]
        nbytes = info.nbytes // info.shape[0]
        own = replace(info, shape=info.shape[1:], nbytes=nbytes, offset=info.offset + expert * nbytes)
        data = read_span(own.file, self.states[own.file], own.offset, own.nbytes)
        values: Array = data.view(DTYPES[info.dtype]).reshape(own.shape)
        return values


def _add_matrix(
    parts: Tensors, config: ModelConfig, prefix: str, matrix: str, stack: str, rows: slice,
    infos: dict[str, TensorInfo], slices: dict[str, _Slice],
) -> set[str]:  # fmt: skip
    """Add an expert's matrix and bias for all experts; return the names of the stored tensors."""
    experts, hidden = config.experts, config.hidden_size
    assert experts is not None
    n_rows, n_inputs = (hidden, experts.size) if matrix == "down_proj" else (2 * experts.size, hidden)
    name, blocks = prefix + stack, f"{prefix}{stack}_blocks" in parts
    expected: dict[str, tuple[int, ...]] = {f"{name}_bias": (experts.count, n_rows)}
    if blocks:
        expected |= {
            f"{name}_blocks": (experts.count, n_rows, n_inputs // GROUP, GROUP // 2),
            f"{name}_scales": (experts.count, n_rows, n_inputs // GROUP),
        }
        if n_inputs % GROUP:
            raise CheckpointError(f"{name}_blocks beside {n_inputs} inputs", f"a multiple of {GROUP}", _AGAIN)
    else:
        expected[name] = (experts.count, n_inputs, n_rows)
    for tensor, shape in expected.items():
        if tensor not in parts:
            raise CheckpointError(f'the checkpoint has no tensor "{tensor}"', "all stacks of experts", _AGAIN)
        if parts[tensor].shape != shape:
            raise CheckpointError(
                f"{tensor} is {parts[tensor].shape}", f"{shape}, by config.json",
                "check that config.json belongs to these weights",
            )  # fmt: skip
    own_rows = len(range(n_rows)[rows])
    first = parts[f"{name}_blocks" if blocks else name]
    dtype, size = "mxfp4" if blocks else first.dtype, first.nbytes // experts.count * own_rows // n_rows
    for expert in range(experts.count):
        own = f"{prefix}{expert}.{matrix}"
        infos[f"{own}.weight"] = TensorInfo(
            f"{own}.weight", (own_rows, n_inputs), dtype, first.file, size, first.offset
        )
        slices[f"{own}.weight"] = _Slice(name, expert, rows, blocks, transposed=not blocks)
        bias = parts[f"{name}_bias"]
        infos[f"{own}.bias"] = replace(bias, name=f"{own}.bias", shape=(own_rows,), nbytes=bias.nbytes // experts.count)
        slices[f"{own}.bias"] = _Slice(f"{name}_bias", expert, rows, blocks=False, transposed=False)
    return set(expected)
