"""Small random Hugging Face checkpoints of every family, written by transformers, in sizes that fit nothing evenly."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.vocabularies import save_byte_fallback, save_byte_level

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma")
ODD_SIZES: Mapping[str, object] = {
    "hidden_size": 320,
    "intermediate_size": 364,  # not a multiple of 128, nor of 8
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 1003,
    "max_position_embeddings": 512,
}
_OWN: Mapping[str, Mapping[str, object]] = {
    "llama": {"bos_token_id": 1, "eos_token_id": 2},
    "mistral": {"sliding_window": None},
    "qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen3": {"head_dim": 72, "rms_norm_eps": 1e-5},  # 5 * 72 is not hidden_size
    "gemma": {"head_dim": 72, "bos_token_id": 1, "eos_token_id": 2},  # as the tiny tokenizer has them
}


def random_checkpoint(
    folder: Path,
    family: str,
    seed: int = 0,
    *,
    dtype: str = "float32",
    max_shard_size: str = "2MB",
    old_spelling: bool = False,
    **overrides: object,
) -> Path:
    """Write config.json, sharded safetensors, generation_config.json and a tokenizer with a chat template; the folder.

    overrides: keys of the family's transformers configuration, over ODD_SIZES
    dtype: of the stored weights; the same seed gives the same weights up to its rounding
    old_spelling: config.json with rope_theta, rope_scaling and torch_dtype
    """
    import torch
    import transformers

    sizes = {**ODD_SIZES, **_OWN[family], **overrides}
    config = transformers.AutoConfig.for_model(family, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _randomise(model, seed, zero_centred_norms=family == "gemma")
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    if family.startswith("qwen"):
        save_byte_level(folder)
    else:
        save_byte_fallback(folder, decoder="keep" if family == "gemma" else "strip")
    if old_spelling:
        _rewrite(folder / "config.json")
    return folder


def _randomise(model: Any, seed: int, zero_centred_norms: bool) -> None:
    """Attention scores, activations and logits of a standard deviation of about 1 to 3, so that every term matters."""
    import torch

    rng = np.random.default_rng(seed)
    for name, parameter in sorted(model.named_parameters()):
        shape = tuple(parameter.shape)
        noise = rng.standard_normal(shape, dtype=np.float32)
        if name.endswith("norm.weight"):
            value = 0.2 * noise + (0.0 if zero_centred_norms else 1.0)
        elif name.endswith(".bias"):
            value = 0.3 * noise
        elif "embed_tokens" in name or "lm_head" in name:
            value = 0.15 * noise  # a normed row has length sqrt(hidden): logits of 0.15 * sqrt(320) = 2.7
        else:
            value = 1.2 * noise / np.sqrt(np.float32(shape[-1]))
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(np.asarray(value, np.float32)))


def _rewrite(path: Path) -> None:
    raw = json.loads(path.read_text())
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
    raw["torch_dtype"] = raw.pop("dtype")
    path.write_text(json.dumps(raw, indent=2))
