"""Reads the metadata of a GGUF file as a `ModelConfig`: each key is used, refused, or listed in a note."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from millrace.checkpoint.config.config_reader import HEAD_SIZES, head_fits, unread_keys
from millrace.checkpoint.config.declared_keys import GGUF_KEYS
from millrace.checkpoint.config.families.all_families import FAMILIES
from millrace.checkpoint.config.model_config import ModelConfig
from millrace.checkpoint.config.rope_config import RopeConfig
from millrace.checkpoint.gguf.reader import GgufFile, Value
from millrace.errors import CheckpointError

# Supported values of general.architecture, and the families' names. Mistral's files say llama.
ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3_text",
}  # fmt: skip
# llama.cpp recognizes the largest models by this: they scale attention by hidden_size / heads, not by head_dim.
_LARGEST = {"gemma2": 46, "gemma3": 62}  # layers
_EVERY = {"gemma2": 2, "gemma3": 6}  # layers, the last of which has no window; else all have it
_USED = frozenset(
    {
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scale_linear",
    }
)
# Keys that only these architectures read.
_USED_BY: Mapping[str, tuple[str, ...]] = {
    "gemma2": ("attn_logit_softcapping", "final_logit_softcapping"),
    "gemma3": ("final_logit_softcapping", "rope.freq_base_swa"),
}
# They do not affect the model's results; the last two only describe how a scaling, itself given, was derived.
_HARMLESS = frozenset(["tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.original_context_length"])
# They change the model's results, except at these values.
_ONLY_AT: Mapping[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "rope.freq_base_swa": (),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "use_parallel_residual": (False,),
    "pooling_type": (0,),
}
_FIX = "choose a file that llama.cpp's convert_hf_to_gguf.py wrote from a checkpoint of a supported family"


@dataclass(frozen=True, slots=True)
class MetadataKeys:
    """Typed access to a file's metadata; every method raises CheckpointError with the key and its value."""

    path: Path
    values: Mapping[str, Value]

    def wrong(self, key: str, expected: str, fix: str = _FIX) -> CheckpointError:
        value = self.values.get(key)
        shown = "missing" if value is None else repr(value)
        return CheckpointError(f"{self.path}: {key} is {shown}", expected, fix)

    def integer(self, key: str, missing: int | None = None, low: int = 1) -> int:
        value = self.values.get(key, missing)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**31:
            raise self.wrong(key, f"an integer of at least {low}")
        return value

    def number(self, key: str, missing: float | None = None) -> float:
        """Return a finite number above zero. Files store float32; the shortest decimal is the intended value (1e-5)."""
        value = self.values.get(key, missing)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-30 < value < 1e30:
            raise self.wrong(key, "a positive number that float32 can hold")
        return float(str(np.float32(value))) if isinstance(value, float) else float(value)

    def text(self, key: str, missing: str | None = None) -> str:
        value = self.values.get(key, missing)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def boolean(self, key: str, missing: bool) -> bool:
        value = self.values.get(key, missing)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def texts(self, key: str) -> list[str]:
        value = self.values.get(key)
        if not isinstance(value, list):
            raise self.wrong(key, "an array of strings")
        return value

    def token(self, name: str, n_tokens: int, missing: int | None = None) -> int | None:
        """Return the id `tokenizer.ggml.NAME_token_id`, or None if there is none."""
        key = f"tokenizer.ggml.{name}_token_id"
        value = self.values.get(key, missing)
        if value is None or value == 2**32 - 1:  # written by old converters for "none"
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < n_tokens:
            raise self.wrong(key, f"the id of one of {n_tokens} tokens")
        return value


def read_model(file: GgufFile, bos: int | None, eos: tuple[int, ...]) -> ModelConfig:
    """Return the model's configuration. bos, eos: ids from the tokenizer's keys. raises CheckpointError"""
    keys = MetadataKeys(file.path, file.metadata)
    arch = keys.text("general.architecture")
    notes = _check_keys(keys, arch)
    n_heads = keys.integer(f"{arch}.attention.head_count")
    n_kv_heads = keys.integer(f"{arch}.attention.head_count_kv", n_heads)
    if n_heads % n_kv_heads:
        raise keys.wrong(f"{arch}.attention.head_count_kv", f"a divisor of {arch}.attention.head_count {n_heads}")
    n_layers, family = keys.integer(f"{arch}.block_count"), ARCHITECTURES[arch]
    if n_layers > len(file.tensors):
        raise keys.wrong(f"{arch}.block_count", f"no more layers than the file has tensors, {len(file.tensors)}")
    hidden_size = keys.integer(f"{arch}.embedding_length")
    context = keys.integer(f"{arch}.context_length")
    head_dim, scale = _head_dim(keys, arch, hidden_size, n_heads), None
    if n_layers == _LARGEST.get(arch):
        scale = (hidden_size / n_heads) ** -0.5
    rope = _rope(keys, arch)
    return ModelConfig(
        architecture=FAMILIES[family].architecture, family=family, qk_norm=FAMILIES[family].qk_norm,
        hidden_size=hidden_size, intermediate_size=keys.integer(f"{arch}.feed_forward_length"),
        n_layers=n_layers, n_heads=n_heads, n_kv_heads=n_kv_heads,
        head_dim=head_dim, vocab_size=_vocab_size(file, keys, arch),
        max_context=context, norm_eps=keys.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        rope=rope, tie_embeddings="output.weight" not in file.tensors,
        attention_bias=arch == "qwen2" or "blk.0.attn_q.bias" in file.tensors,
        attention_output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        activation="gelu_tanh" if arch.startswith("gemma") else "silu",
        windows=_windows(keys, arch, n_layers), local_rope=_local_rope(keys, arch), attention_scale=scale,
        attention_softcap=_softcap(keys, arch, "attn_logit_softcapping", 50.0 if arch == "gemma2" else 0.0),
        logits_softcap=_softcap(keys, arch, "final_logit_softcapping", 30.0 if arch == "gemma2" else 0.0),
        dtype="float32", bos_token_id=bos, eos_token_ids=eos, notes=notes,
    )  # fmt: skip


def check_is_model(keys: MetadataKeys) -> None:
    """Refuse GGUF files that are no model: adapters, projectors, parts of split models. raises CheckpointError"""
    if keys.integer("split.count", 1) != 1:
        fix = "join its parts into one file: llama-gguf-split --merge FIRST_PART WHOLE"
        raise keys.wrong("split.count", "1 (a model in one file)", fix)
    if keys.text("general.type", "model") != "model":
        raise keys.wrong("general.type", "model", "name the model's own file")
    if keys.text("general.architecture") not in ARCHITECTURES:
        raise keys.wrong("general.architecture", "one of " + ", ".join(ARCHITECTURES), "choose a supported family")


def _check_keys(keys: MetadataKeys, arch: str) -> tuple[str, ...]:
    """Refuse a key that llama.cpp knows and that changes the results; return a note on the keys that it does not know.

    raises CheckpointError
    """
    prefix, used = f"{arch}.", {*_USED, *_USED_BY.get(arch, ())}
    unread: list[str] = []
    for key, value in keys.values.items():
        name = key.removeprefix(prefix)
        if not key.startswith(prefix) or name in used or name in _HARMLESS:
            continue
        neutral = _ONLY_AT.get(name, () if name in GGUF_KEYS else None)
        if neutral is None:
            unread.append(key)
        elif not any(type(value) is type(n) and value == n for n in neutral):
            expected = " or ".join(map(str, neutral)) + ": no other is supported" if neutral else "no such key"
            raise keys.wrong(key, expected, "choose another model")
    valid_keys = {prefix + name for name in (*used, *_ONLY_AT, *_HARMLESS)}
    return (unread_keys(str(keys.path), unread, valid_keys),) if unread else ()


def _head_dim(keys: MetadataKeys, arch: str, hidden_size: int, n_heads: int) -> int:
    head_dim = keys.integer(f"{arch}.attention.key_length", max(hidden_size // n_heads, 1))
    if f"{arch}.attention.key_length" not in keys.values and hidden_size % n_heads:
        raise keys.wrong(f"{arch}.embedding_length", f"a multiple of {n_heads} heads, or an attention.key_length")
    if not head_fits(head_dim):
        what = f"{arch}.embedding_length / {arch}.attention.head_count, or {arch}.attention.key_length,"
        raise CheckpointError(f"{keys.path}: {what} gives heads of {head_dim}", HEAD_SIZES, "choose another model")
    for name in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(f"{arch}.{name}", head_dim) != head_dim:
            raise keys.wrong(f"{arch}.{name}", f"{head_dim}, the size of a head", "choose another model")
    return head_dim


def _windows(keys: MetadataKeys, arch: str, n_layers: int) -> tuple[int, ...]:
    """Return each layer's window like llama.cpp: Gemma 2's default is 4,096; every n-th layer has full attention."""
    every, name = _EVERY.get(arch, n_layers + 1), f"{arch}.attention.sliding_window"
    window = keys.integer(name, 4096 if arch == "gemma2" else 0, low=0)
    if arch in _EVERY and window == 0 and name in keys.values:  # in other families, 0 means none in llama.cpp
        raise keys.wrong(name, "at least 1 token", "convert the checkpoint again")
    return tuple(window if (layer + 1) % every else 0 for layer in range(n_layers)) if window else ()


def _local_rope(keys: MetadataKeys, arch: str) -> RopeConfig | None:
    """Return the rotary embedding of Gemma 3's layers with a window."""
    name = f"{arch}.rope.freq_base_swa"
    return RopeConfig(theta=keys.number(name, 10_000.0)) if arch == "gemma3" else None


def _softcap(keys: MetadataKeys, arch: str, name: str, missing: float) -> float:
    """Return a soft cap, 0 if none. Only for families for which llama.cpp applies it; `_check_keys` refuses others."""
    value = keys.values.get(f"{arch}.{name}", missing)
    return 0.0 if value == 0 else keys.number(f"{arch}.{name}", missing)


def _vocab_size(file: GgufFile, keys: MetadataKeys, arch: str) -> int:
    """Return the number of rows of the embedding: it may be padded, which not every file states in its metadata."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2 or embedding.shape[0] >= 2**31:
        result = "missing" if embedding is None else str(embedding.shape)
        raise CheckpointError(f"{file.path}: token_embd.weight is {result}", "(vocabulary, hidden size)", _FIX)
    rows = embedding.shape[0]
    if keys.integer(f"{arch}.vocab_size", rows) != rows:
        raise keys.wrong(f"{arch}.vocab_size", f"{rows}, the rows of token_embd.weight")
    return rows


def _rope(keys: MetadataKeys, arch: str) -> RopeConfig:
    """Return the rotary embedding without `rope_freqs.weight`, which `rope_divisors` reads from the tensors."""
    theta = keys.number(f"{arch}.rope.freq_base", 10_000.0)
    kind = keys.text(f"{arch}.rope.scaling.type", "linear")  # llama.cpp's default
    if kind not in ("none", "linear"):
        raise keys.wrong(f"{arch}.rope.scaling.type", "none or linear", "choose a model without this scaling")
    old = keys.number(f"{arch}.rope.scale_linear", 1.0)  # the older name of the key
    factor = keys.number(f"{arch}.rope.scaling.factor", old)
    if factor < 1:
        raise keys.wrong(f"{arch}.rope.scaling.factor", "at least 1")
    if factor == 1 or kind == "none":
        return RopeConfig(theta=theta)
    return RopeConfig(theta=theta, kind="linear", factor=factor)
