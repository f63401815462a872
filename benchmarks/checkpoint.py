"""Checkpoints of random weights, as Hugging Face lays them out: for what starts from a folder."""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from benchmarks.shapes import SHAPES, random_source
from millrace.checkpoint.config.model_config import ModelConfig
from millrace.compile.random_weights import source_of
from millrace.kernels.convert.ref import to_bf16

CONTEXT = 2048
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
POOL = 1 << 22  # elements that are drawn once, where what weights say does not matter at all
BYTES = {"BF16": 2, "F8_E4M3": 1}
_PER_CHANNEL = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
_PER_TOKEN = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
FP8 = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": _PER_CHANNEL, "input_activations": _PER_TOKEN},
    },
    "ignore": ["lm_head"],
}  # fmt: skip


def write_checkpoint(shape: str, folder: Path) -> None:
    """config.json, one file of safetensors in bfloat16, a tokenizer of bytes and a template that adds nothing."""
    config, source = SHAPES[shape], random_source(shape, CONTEXT)
    sizes = {n: s for n, s in source.weights.shapes.items() if not (config.tie_embeddings and n == "lm_head.weight")}
    _write_texts(folder, _config(config, CONTEXT))
    with (folder / "model.safetensors").open("wb") as out:
        _write_header(out, {name: ("BF16", size) for name, size in sizes.items()})
        for name in sizes:
            rounded = to_bf16(source.weights.load(name).astype(np.float32))
            out.write((rounded.view(np.uint32) >> 16).astype(np.uint16).tobytes())


def write_fp8_checkpoint(config: ModelConfig, folder: Path) -> None:
    """As a compressor writes one: layers in E4M3 with a scale for each row, the rest in bfloat16. Its weights are few
    drawn ones again and again: it is for starts, not for answers."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, size in source_of(config).weights.shapes.items():
        coded = len(size) == 2 and ".layers." in name
        tensors[name] = ("F8_E4M3" if coded else "BF16", size)
        if coded:
            tensors[f"{name}_scale"] = ("BF16", (size[0], 1))
    rng = np.random.default_rng(0)
    pools = {
        "F8_E4M3": (rng.standard_normal(POOL, np.float32) * 100).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn),
        "BF16": (rng.standard_normal(POOL, np.float32) * 0.02).astype(ml_dtypes.bfloat16),
        "one": np.ones(POOL, ml_dtypes.bfloat16), "scale": np.full(POOL, 2e-4, ml_dtypes.bfloat16),
    }  # fmt: skip
    _write_texts(folder, {**_config(config, config.max_context), "quantization_config": FP8})
    with (folder / "model.safetensors").open("wb") as out:
        _write_header(out, tensors)
        for name, (kind, size) in tensors.items():
            pool = "one" if name.endswith("norm.weight") else "scale" if name.endswith("_scale") else kind
            for part in _again(pools[pool], math.prod(size)):
                out.write(part.tobytes())


def _again(pool: NDArray[Any], n: int) -> Iterator[NDArray[Any]]:
    """n elements, from the pool's beginning each time."""
    for at in range(0, n, len(pool)):
        yield pool[: n - at]


def _write_texts(folder: Path, config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(config["vocab_size"])))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))


def _write_header(out: BinaryIO, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Of a safetensors file. tensors: type and sizes by name, as they will follow"""
    header, at = {}, 0
    for name, (kind, size) in tensors.items():
        end = at + BYTES[kind] * math.prod(size)
        header[name] = {"dtype": kind, "shape": list(size), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    out.write(struct.pack("<Q", len(text)) + text)


def _config(c: ModelConfig, context: int) -> dict[str, Any]:
    return {
        "architectures": [c.architecture], "model_type": c.family, "hidden_size": c.hidden_size, "torch_dtype": c.dtype,
        "intermediate_size": c.intermediate_size, "num_hidden_layers": c.n_layers, "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads, "vocab_size": c.vocab_size, "max_position_embeddings": context,
        "rms_norm_eps": c.norm_eps, "rope_theta": c.rope.theta, "tie_word_embeddings": c.tie_embeddings,
        "hidden_act": c.activation, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def _tokenizer(n: int) -> dict[str, Any]:
    """One token a byte; the others are never met."""
    from tokenizers.pre_tokenizers import ByteLevel

    names = [*sorted(ByteLevel.alphabet()), *(f"<{i}>" for i in range(n))][:n]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {name: i for i, name in enumerate(names)}, "merges": []},
    }  # fmt: skip
