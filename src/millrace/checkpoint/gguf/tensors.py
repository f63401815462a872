"""Tensors of a GGUF file, with the names and the row order of Hugging Face checkpoints.

In files of some architectures, llama among them, llama.cpp's RoPE rotates adjacent elements of a head, so its converter
permutes the rows of q and k: row 2i of a head is row i of the original, row 2i + 1 is row D/2 + i. This module reverses
that. For Gemma and Nemotron the converter adds 1 to the weights of norms; it is subtracted here, because the model adds
it itself. The matrices of all experts are one tensor of the file; each is presented as a tensor of its own.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from millrace.checkpoint.config.model_config import ModelConfig
from millrace.checkpoint.gguf.blocks import BlockType, in_codes, is_exact_in_codes
from millrace.checkpoint.gguf.reader import GgufFile
from millrace.checkpoint.gguf.rope_tensors import ROPE_TENSORS, download_hint, misshapen
from millrace.checkpoint.gguf.tensor_map import expected_tensors
from millrace.checkpoint.weights.quantized_matrix import QuantisedFormat, QuantisedMatrix, combined
from millrace.checkpoint.weights.safetensors import Array, TensorInfo, Tensors
from millrace.errors import CheckpointError, nearest

_SLAB = 1 << 18  # blocks dequantised at a time: bounds the memory used in addition to the output


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of the file, and how the converter changed it."""

    type: BlockType
    heads: int | None = None  # heads whose rows were permuted
    plus_one: bool = False


class GgufTensors(Tensors):
    """Tensors of a GGUF file. `load` reads from the file on each call and returns exactly the values of the format."""

    def __init__(self, infos: dict[str, TensorInfo], file: GgufFile, stored: dict[str, _Stored]) -> None:
        super().__init__(infos, file.states)
        self._stored = stored
        self._are_exact: dict[str, bool] = {}  # whether the codes of a tensor in MXFP4 are exact, once it was read

    @classmethod
    def from_file(cls, file: GgufFile, config: ModelConfig) -> "GgufTensors":
        """Match tensors to the model. raises CheckpointError if one is missing, misshapen, or not part of the model"""
        infos: dict[str, TensorInfo] = {}
        stored: dict[str, _Stored] = {}
        expected = expected_tensors(config, file.tensors.keys())
        for entry in expected:
            tensor = file.tensors.get(entry.name)
            if tensor is None:
                raise CheckpointError(
                    f"{file.path} has no tensor {entry.name}",
                    f"a file of {len(expected)} tensors",
                    download_hint(file.path),
                )
            if _without_ones(tensor.shape) != _without_ones(entry.shape):
                raise misshapen(file, tensor, entry.shape)
            offset = tensor.offset
            for parameter in entry.parameters:
                nbytes = math.prod(parameter.shape) // tensor.type.weights * tensor.type.nbytes
                infos[parameter.name] = TensorInfo(
                    parameter.name, parameter.shape, tensor.type.dtype, tensor.file, nbytes, offset
                )
                stored[parameter.name] = _Stored(tensor.type, parameter.heads, entry.plus_one)
                offset += nbytes
        _check_unused(file, config, [tensor.name for tensor in expected])
        return cls(infos, file, stored)

    def load(self, name: str) -> Array:
        """Return a tensor in Hugging Face's row order: dtype as stored, float32, or float64 for exact Gemma norms."""
        return self._floats(name) if name in self._stored else super().load(name)

    def format(self, name: str) -> QuantisedFormat | None:
        """Return the format of the file's own integers; None for floats, and if the tensor is not a matrix."""
        stored = self._stored.get(name)
        if stored is None or stored.type.format is None or len(self[name].shape) != 2:
            return None
        if stored.type.name != "MXFP4":
            return stored.type.format
        if name not in self._are_exact:
            self._are_exact[name] = is_exact_in_codes(stored.type, self._blocks(name))
        return stored.type.format if self._are_exact[name] else None

    def stored(self, name: str, bits: int, group: int) -> QuantisedMatrix | None:
        """Return the file's own codes and scales if `bits` and `group` can represent them exactly."""
        stored_format = self.format(name)
        if stored_format is None or stored_format.bits > bits or stored_format.group != group:
            return None
        blocks, rows = self._blocks(name), self[name].shape[0]
        slabs = [in_codes(self._stored[name].type, blocks[i : i + _SLAB]) for i in range(0, len(blocks), _SLAB)]
        matrix = replace(combined(slabs, np.concatenate), bits=bits)
        return matrix.map_rows(lambda array: self._reordered(name, array.reshape(rows, -1)))

    def activation_bits(self, name: str) -> int:
        """Return the activation bits that llama.cpp uses."""
        return 8

    def _blocks(self, name: str) -> Array:
        return self._data(self[name]).view(self._stored[name].type.layout)

    def _floats(self, name: str) -> Array:
        kind, info = self._stored[name].type, self[name]
        blocks = self._blocks(name)
        if kind.dequantise is None:
            values: Array = blocks.reshape(info.shape)
        else:
            matrix = np.empty((len(blocks), kind.weights), np.float32)
            with np.errstate(all="ignore"):  # scales may be infinite; then the weights are, too
                for i in range(0, len(blocks), _SLAB):
                    matrix[i : i + _SLAB] = kind.dequantise(blocks[i : i + _SLAB])
            values = matrix.reshape(info.shape)
        if self._stored[name].plus_one:
            return values.astype(np.float64) - 1
        return self._reordered(name, values)

    def _reordered(self, name: str, rows: Array) -> Array:
        """(N, ...) rows in the file's order -> rows in the original's order."""
        heads = self._stored[name].heads
        if heads is None:
            return rows
        pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1)  # head, i, half
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without leading dimensions of 1: files do not distinguish a vector from one row."""
    first = next((at for at, size in enumerate(shape) if size != 1), len(shape))
    return shape[first:]


def _check_unused(file: GgufFile, config: ModelConfig, expected: list[str]) -> None:
    """Refuse a file with tensors that the model does not use. raises CheckpointError"""
    unused = sorted(set(file.tensors) - {*expected, *ROPE_TENSORS})
    unused = [name for name in unused if not _is_of_later_layer(name, config.n_layers)]
    if unused:
        raise CheckpointError(
            f"{file.path}: tensor {unused[0]} is not used by {config.architecture} ({len(unused)} such)",
            f"tensors that have their place in the model; {nearest(unused[0], expected)}",
            "choose another model: this one computes something else",
        )


def _is_of_later_layer(name: str, n_layers: int) -> bool:
    """Return whether a tensor belongs to layers after the last, which predict several tokens at once."""
    block, _, rest = name.removeprefix("blk.").partition(".")
    return name.startswith("blk.") and bool(rest) and block.isdecimal() and int(block) >= n_layers
