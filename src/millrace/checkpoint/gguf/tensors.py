"""Tensors of a GGUF file, with the names and the row order of Hugging Face checkpoints.

In files of architecture llama, llama.cpp's RoPE rotates adjacent elements of a head, so its converter permutes the rows
of q and k: row 2i of a head is row i of the original, row 2i + 1 is row D/2 + i. This module reverses that. For Gemma
the converter adds 1 to the weights of norms; it is subtracted here, because the model adds it itself.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from millrace.checkpoint.config.layer_windows import LATER_GEMMAS
from millrace.checkpoint.config.model_config import ModelConfig
from millrace.checkpoint.files import read_span
from millrace.checkpoint.gguf.blocks import BlockType, in_codes
from millrace.checkpoint.gguf.reader import GgufFile, GgufTensor
from millrace.checkpoint.weights.quantized_matrix import QuantisedFormat, QuantisedMatrix, combined
from millrace.checkpoint.weights.safetensors import Array, TensorInfo, Tensors
from millrace.errors import CheckpointError, nearest

ROPE_FREQS = "rope_freqs.weight"
_SLAB = 1 << 18  # blocks dequantised at a time: bounds the memory used in addition to the output
_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of the file, and how the converter changed it."""

    type: BlockType
    heads: int | None = None  # heads whose rows were permuted
    plus_one: bool = False


class GgufTensors(Tensors):
    """Tensors of a GGUF file. `load` reads from the file on each call and returns exactly the values of the format."""

    def __init__(self, infos: dict[str, TensorInfo], file: GgufFile, stored: dict[str, _Stored]) -> None:
        super().__init__(infos, {file.path: file.state})
        self._stored = stored

    @classmethod
    def from_file(cls, file: GgufFile, config: ModelConfig) -> "GgufTensors":
        """Match tensors to the model. raises CheckpointError if one is missing, misshapen, or not part of the model"""
        infos: dict[str, TensorInfo] = {}
        stored: dict[str, _Stored] = {}
        expected = _expected_tensors(config)
        for gguf_name, (name, shape) in expected.items():
            tensor = file.tensors.get(gguf_name)
            if tensor is None:
                raise CheckpointError(
                    f"{file.path} has no tensor {gguf_name}",
                    f"a file of {len(expected)} tensors",
                    _download_hint(file.path),
                )
            if tensor.shape != shape:
                raise _misshapen(file, tensor, shape)
            infos[name] = TensorInfo(name, shape, tensor.type.dtype, file.path, tensor.nbytes, tensor.offset)
            stored[name] = _Stored(
                tensor.type,
                heads=_moved_heads(gguf_name, config),
                plus_one=config.family.startswith("gemma") and gguf_name.endswith("norm.weight"),
            )
        unused = sorted(set(file.tensors) - set(expected) - {ROPE_FREQS})
        if unused:
            raise CheckpointError(
                f"{file.path}: tensor {unused[0]} is not used by {config.architecture} ({len(unused)} such)",
                f"tensors that have their place in the model; {nearest(unused[0], expected)}",
                "choose another model: this one computes something else",
            )
        return cls(infos, file, stored)

    def load(self, name: str) -> Array:
        """Return a tensor in Hugging Face's row order: dtype as stored, float32, or float64 for exact Gemma norms."""
        return self._floats(name) if name in self._stored else super().load(name)

    def format(self, name: str) -> QuantisedFormat | None:
        """Return the format of the file's own integers; None for floats, and if the tensor is not a matrix."""
        stored = self._stored.get(name)
        return stored.type.format if stored and len(self[name].shape) == 2 else None

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


def rope_divisors(file: GgufFile, config: ModelConfig) -> tuple[float, ...]:
    """Return the divisors of the rotary frequencies (Llama 3.1 and later), or () if the file has no such tensor."""
    tensor = file.tensors.get(ROPE_FREQS)
    if tensor is None:
        return ()
    if tensor.shape != (config.head_dim // 2,) or tensor.type.name != "F32":
        raise _misshapen(file, tensor, (config.head_dim // 2,))
    values = read_span(file.path, file.state, tensor.offset, tensor.nbytes).view("<f4")
    if not (np.isfinite(values) & (values > 0)).all():
        raise CheckpointError(
            f"{file.path}: {ROPE_FREQS} has {values.min()}", "numbers above zero", _download_hint(file.path)
        )
    return tuple(values.tolist())


def _expected_tensors(c: ModelConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return name in the file -> name in a Hugging Face checkpoint, shape."""
    q, kv, hidden, inner = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim, c.hidden_size, c.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,), "attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden),
        "attn_output": (hidden, q), "ffn_norm": (hidden,), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }  # fmt: skip
    if c.family in LATER_GEMMAS:
        shapes |= {"post_attention_norm": (hidden,), "post_ffw_norm": (hidden,)}
    if c.family in ("qwen3", "gemma3_text"):
        shapes |= {"attn_q_norm": (c.head_dim,), "attn_k_norm": (c.head_dim,)}
    biased = {"attn_q", "attn_k", "attn_v"} if c.attention_bias else set()
    biased |= {"attn_output"} if c.attention_output_bias else set()
    biased |= {"ffn_gate", "ffn_up", "ffn_down"} if c.mlp_bias else set()
    expected: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd.weight": ("model.embed_tokens.weight", (c.vocab_size, hidden)),
        "output_norm.weight": ("model.norm.weight", (hidden,)),
    }
    if not c.tie_embeddings:
        expected["output.weight"] = ("lm_head.weight", (c.vocab_size, hidden))
    for layer in range(c.n_layers):
        for part, shape in shapes.items():
            own = "pre_feedforward_layernorm" if c.family in LATER_GEMMAS and part == "ffn_norm" else _MODULES[part]
            module = f"model.layers.{layer}.{own}"
            expected[f"blk.{layer}.{part}.weight"] = (f"{module}.weight", shape)
            if part in biased:
                expected[f"blk.{layer}.{part}.bias"] = (f"{module}.bias", shape[:1])
    return expected


def _moved_heads(gguf_name: str, c: ModelConfig) -> int | None:
    if c.family != "llama":
        return None
    return {"attn_q": c.n_heads, "attn_k": c.n_kv_heads}.get(gguf_name.split(".")[-2])


def _misshapen(file: GgufFile, tensor: GgufTensor, shape: tuple[int, ...]) -> CheckpointError:
    what = f"{file.path}: {tensor.name} is {tensor.shape} {tensor.type.name}"
    return CheckpointError(what, f"{shape}, by the file's metadata", _download_hint(file.path))


def _download_hint(path: Path) -> str:
    return f"download {path.name} again, or convert the original checkpoint with llama.cpp's convert_hf_to_gguf.py"
