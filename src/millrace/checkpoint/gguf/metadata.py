"""Reads the metadata of a GGUF file as a `ModelConfig`, with the defaults that llama.cpp has."""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from millrace.checkpoint.config.config_reader import HEAD_SIZES, head_fits
from millrace.checkpoint.config.families.all_families import FAMILIES
from millrace.checkpoint.config.families.family import ModelFamily
from millrace.checkpoint.config.model_config import MAX_TAPS, ModelConfig
from millrace.checkpoint.config.rope_config import RopeConfig
from millrace.checkpoint.gguf.architectures import ARCHITECTURES, WITH_EXPERTS, WITH_WINDOWS
from millrace.checkpoint.gguf.expert_metadata import read_experts
from millrace.checkpoint.gguf.metadata_keys import MetadataKeys, check_keys
from millrace.checkpoint.gguf.reader import GgufFile
from millrace.checkpoint.gguf.rope_metadata import read_rope
from millrace.errors import CheckpointError

# llama.cpp recognizes the largest models by this: they scale attention by hidden_size / heads, not by head_dim.
_LARGEST = {"gemma2": 46, "gemma3": 62}  # layers
_EXAONE_32B = 64  # layers of the EXAONE 4 that has windows, which its first files do not state
# Of how many layers the last has no window, if the file does not list them; in other families all layers have it.
_FULL_ATTENTION_INTERVAL = {"gemma2": 2, "gemma3": 6, "olmo2": 4, "exaone4": 4, "cohere2": 4}
_NO_ROPE_EVERY = 4  # layers of SmolLM3
_ACTIVATIONS = {"nemotron": "squared_relu", "starcoder2": "gelu_tanh", "phi2": "gelu_tanh"}
_IGNORED_WINDOWS = ("phi3", "phimoe")  # llama.cpp reads their windows, but does not use them
_PHIMOE = (
    "llama.cpp computes Phi-3.5-MoE with other norms and weights of experts than the original model; here it is "
    "computed like the original"
)


def read_model(file: GgufFile, bos: int | None, eos: tuple[int, ...]) -> ModelConfig:
    """Return the model's configuration. bos, eos: ids from the tokenizer's keys. raises CheckpointError"""
    keys = MetadataKeys(file.path, file.metadata)
    arch = keys.text("general.architecture")
    notes = check_keys(keys, arch)
    family = FAMILIES[_family(keys, arch)]
    n_layers = keys.integer(f"{arch}.block_count")
    if n_layers > len(file.tensors):
        raise keys.wrong(f"{arch}.block_count", f"no more layers than the file has tensors, {len(file.tensors)}")
    if nextn := keys.integer(f"{arch}.nextn_predict_layers", 0, low=0):
        if nextn >= n_layers:
            raise keys.wrong(f"{arch}.nextn_predict_layers", f"less than {arch}.block_count {n_layers}")
        notes += (f"the last {nextn} of {n_layers} layers predict several tokens at once: they are not used",)
        n_layers -= nextn
    n_heads, n_kv_heads, convolutions = _heads(keys, arch, n_layers)
    hidden_size, context = keys.integer(f"{arch}.embedding_length"), keys.integer(f"{arch}.context_length")
    head_dim = _head_dim(keys, arch, hidden_size, n_heads)
    windows = _windows(keys, arch, n_layers)
    if arch in _IGNORED_WINDOWS and 0 < max(windows, default=0) < context:
        notes += (f"llama.cpp does not use {arch}.attention.sliding_window; here it is used, as in the original",)
    notes += (_PHIMOE,) if arch == "phimoe" else ()
    return ModelConfig(
        architecture=family.architecture, family=family.name, qk_norm=_qk_norm(file, family),
        hidden_size=hidden_size, intermediate_size=keys.integer(f"{arch}.feed_forward_length"),
        n_layers=n_layers, n_heads=n_heads, n_kv_heads=n_kv_heads,
        head_dim=head_dim, vocab_size=_vocab_size(file, keys, arch), max_context=context,
        norm_eps=_eps(keys, arch, family),
        rope=replace(
            read_rope(file, keys, arch, context, _rotary_width(keys, arch, family, head_dim)),
            interleaved=family.interleaved,
        ),
        tie_embeddings="output.weight" not in file.tensors,
        activation="gelu_tanh" if arch.startswith("gemma") else _ACTIVATIONS.get(arch, "silu"),
        windows=windows, local_rope=_local_rope(keys, arch, family),
        rotates=_rotates(arch, n_layers, windows),
        attention_scale=_attention_scale(keys, arch, hidden_size / n_heads, head_dim),
        attention_softcap=_softcap(keys, arch, "attn_logit_softcapping", 50.0 if arch == "gemma2" else 0.0),
        logits_softcap=_softcap(keys, arch, "final_logit_softcapping", 30.0 if arch == "gemma2" else 0.0),
        **_multipliers(keys, arch), **_biases(file, arch), **convolutions,
        norm=family.norm, gated_mlp=family.gated_mlp, head_bias=family.name in ("phi", "phimoe"),
        parallel_residual=family.parallel_residual
        or (arch == "stablelm" and "blk.0.ffn_norm.weight" not in file.tensors),
        experts=read_experts(keys, arch, family, n_layers),
        dtype="float32", bos_token_id=bos, eos_token_ids=eos, notes=notes,
    )  # fmt: skip


def _family(keys: MetadataKeys, arch: str) -> str:
    """Return the family's name; for some architectures it depends on the presence of experts or windows."""
    if arch in WITH_EXPERTS and keys.integer(f"{arch}.expert_count", 0, low=0):
        return WITH_EXPERTS[arch]
    if arch in WITH_WINDOWS and keys.integer(f"{arch}.attention.sliding_window", 0, low=0):
        return WITH_WINDOWS[arch]
    return ARCHITECTURES[arch]


def _heads(keys: MetadataKeys, arch: str, n_layers: int) -> tuple[int, int, dict[str, Any]]:
    """Return the numbers of query and key heads, and the fields for LFM2's convolutions: layers without key heads."""
    n_heads, name = keys.integer(f"{arch}.attention.head_count"), f"{arch}.attention.head_count_kv"
    fields: dict[str, Any] = {}
    if arch == "lfm2":
        value = keys.values.get(name)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu" or len(value) != n_layers:
            raise keys.wrong(name, f"an array of {n_layers} integers, 0 for layers that are convolutions")
        counts = value.tolist()
        if len(set(counts) - {0}) != 1 or not 0 <= min(counts) <= max(counts) < 2**31:
            raise keys.wrong(name, "the same number of heads in all layers with attention")
        n_kv_heads, taps = max(counts), keys.integer(f"{arch}.shortconv.l_cache", low=2)
        if taps > MAX_TAPS:
            raise keys.wrong(f"{arch}.shortconv.l_cache", f"2 to {MAX_TAPS}: no kernel takes others")
        fields = {"convolves": tuple(count == 0 for count in counts), "conv_taps": taps}
    else:
        n_kv_heads = keys.integer(name, n_heads)
    if n_heads % n_kv_heads:
        raise keys.wrong(name, f"a divisor of {arch}.attention.head_count {n_heads}")
    return n_heads, n_kv_heads, fields


def _biases(file: GgufFile, arch: str) -> dict[str, Any]:
    """Return which matrices have a bias: LFM2's first layer has no attention."""
    has_qkv = "blk.0.attn_q.bias" in file.tensors or "blk.0.attn_qkv.bias" in file.tensors
    return {
        "attention_bias": arch == "qwen2" or has_qkv, "attention_output_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }  # fmt: skip


def _qk_norm(file: GgufFile, family: ModelFamily) -> str:
    """Return the norm of queries and keys, which in GLM-4.5's family the larger models have."""
    if family.name == "glm4_moe":
        return "head" if "blk.0.attn_q_norm.weight" in file.tensors else ""
    return family.qk_norm


def _eps(keys: MetadataKeys, arch: str, family: ModelFamily) -> float:
    layer_norm = family.norm != "rms" and arch != "phimoe"  # whose files have the other key
    return keys.number(f"{arch}.attention.layer_norm_{'' if layer_norm else 'rms_'}epsilon")


def _head_dim(keys: MetadataKeys, arch: str, hidden_size: int, n_heads: int) -> int:
    head_dim = keys.integer(f"{arch}.attention.key_length", max(hidden_size // n_heads, 1))
    if f"{arch}.attention.key_length" not in keys.values and hidden_size % n_heads:
        raise keys.wrong(f"{arch}.embedding_length", f"a multiple of {n_heads} heads, or an attention.key_length")
    if not head_fits(head_dim):
        keys_text = f"{arch}.embedding_length / {arch}.attention.head_count, or {arch}.attention.key_length,"
        raise CheckpointError(f"{keys.path}: {keys_text} gives heads of {head_dim}", HEAD_SIZES, "choose another model")
    if keys.integer(f"{arch}.attention.value_length", head_dim) != head_dim:
        raise keys.wrong(f"{arch}.attention.value_length", f"{head_dim}, the size of a head", "choose another model")
    return head_dim


def _rotary_width(keys: MetadataKeys, arch: str, family: ModelFamily, head_dim: int) -> int:
    """Return how much of a head rotates; 0 for the whole head."""
    name = f"{arch}.rope.dimension_count"
    width = keys.integer(name, head_dim)
    if width == head_dim:
        return 0
    if "partial_rotary_factor" not in family.defaults:
        raise keys.wrong(name, f"{head_dim}, the size of a head", "choose another model")
    if width > head_dim or width % 2:
        raise keys.wrong(name, f"an even number, at most {head_dim}, the size of a head")
    return width


def _windows(keys: MetadataKeys, arch: str, n_layers: int) -> tuple[int, ...]:
    """Return each layer's window like llama.cpp: Gemma 2's default is 4,096; every n-th layer has full attention."""
    interval, name = _FULL_ATTENTION_INTERVAL.get(arch, n_layers + 1), f"{arch}.attention.sliding_window"
    missing = 4096 if arch == "gemma2" or (arch, n_layers) == ("exaone4", _EXAONE_32B) else 0
    window = keys.integer(name, None if arch == "cohere2" else missing, low=0)
    if arch in ("gemma2", "gemma3", "cohere2") and window == 0 and name in keys.values:  # elsewhere 0 means none
        raise keys.wrong(name, "at least 1 token", "convert the checkpoint again")
    if window and arch == "lfm2":
        raise keys.wrong(name, "0: no other is supported", "choose another model")
    if not window:
        return ()
    pattern = f"{arch}.attention.sliding_window_pattern"
    if isinstance(keys.values.get(pattern), np.ndarray):
        has_window = keys.flags(pattern, n_layers)
    else:
        interval = keys.integer(pattern, interval)
        has_window = tuple((layer + 1) % interval != 0 for layer in range(n_layers))
    return tuple(window if has else 0 for has in has_window)


def _rotates(arch: str, n_layers: int, windows: tuple[int, ...]) -> tuple[bool, ...]:
    """Return whether each layer has rotary positions; () if all have."""
    if arch in ("cohere2", "exaone4") and windows:
        return tuple(window > 0 for window in windows)
    if arch == "smollm3" and n_layers >= _NO_ROPE_EVERY:
        return tuple((layer + 1) % _NO_ROPE_EVERY != 0 for layer in range(n_layers))
    return ()


def _local_rope(keys: MetadataKeys, arch: str, family: ModelFamily) -> RopeConfig | None:
    """Return the rotary embedding of layers with a window, where they have their own: no scaling applies to it."""
    if arch != "gemma3" and family.name != "olmo3":
        return None
    missing = 10_000.0 if arch == "gemma3" else keys.number(f"{arch}.rope.freq_base", 10_000.0)
    return RopeConfig(theta=keys.number(f"{arch}.rope.freq_base_swa", missing))


def _attention_scale(keys: MetadataKeys, arch: str, width: float, head_dim: int) -> float | None:
    """Return the multiplier of scores; None for the usual one. width: the hidden size per head"""
    usual: float = head_dim**-0.5
    scale = keys.optional_number(f"{arch}.attention.scale", usual)
    if keys.integer(f"{arch}.block_count") == _LARGEST.get(arch):
        return float(width**-0.5)
    return None if math.isclose(scale, usual, rel_tol=1e-7) else scale


def _softcap(keys: MetadataKeys, arch: str, name: str, missing: float) -> float:
    """Return a soft cap, 0 if none. Only for families for which llama.cpp applies it; `check_keys` refuses others."""
    value = keys.values.get(f"{arch}.{name}", missing)
    return 0.0 if value == 0 else keys.number(f"{arch}.{name}", missing)


def _multipliers(keys: MetadataKeys, arch: str) -> dict[str, Any]:
    """Return the multipliers of embeddings, of the residual stream and of logits; Granite divides its logits."""
    logits = keys.optional_number(f"{arch}.logit_scale", 1.0)
    if arch.startswith("granite") and keys.values.get(f"{arch}.rope.scaling.finetuned", True) is not True:
        raise keys.wrong(f"{arch}.rope.scaling.finetuned", "true: no model without rotary positions is supported")
    return {
        "embedding_multiplier": keys.optional_number(f"{arch}.embedding_scale", 1.0),
        "residual_multiplier": keys.optional_number(f"{arch}.residual_scale", 1.0),
        "logits_multiplier": 1.0 / logits if arch.startswith("granite") else logits,
    }


def _vocab_size(file: GgufFile, keys: MetadataKeys, arch: str) -> int:
    """Return the number of rows of the embedding: it may be padded, which not every file states in its metadata."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2 or embedding.shape[0] >= 2**31:
        result = "missing" if embedding is None else str(embedding.shape)
        raise CheckpointError(
            f"{file.path}: token_embd.weight is {result}", "(vocabulary, hidden size)", "download the file again"
        )
    rows = embedding.shape[0]
    if keys.integer(f"{arch}.vocab_size", rows) != rows:
        raise keys.wrong(f"{arch}.vocab_size", f"{rows}, the rows of token_embd.weight")
    return rows
