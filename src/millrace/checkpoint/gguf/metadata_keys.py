"""Typed access to the metadata of GGUF files, and a check of every key: used, refused, or listed in a note."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from millrace.checkpoint.config.config_reader import unread_keys
from millrace.checkpoint.config.declared_keys import GGUF_KEYS
from millrace.checkpoint.gguf.architectures import ARCHITECTURES
from millrace.checkpoint.gguf.reader import Value
from millrace.errors import CheckpointError

_USED = frozenset({
    "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon", "attention.sliding_window", "rope.dimension_count", "rope.freq_base",
    "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear", "rope.scaling.original_context_length",
    "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
})  # fmt: skip
_EXPERTS = ("expert_count", "expert_used_count")
_PATTERN = ("attention.sliding_window_pattern",)
_GRANITE = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale", "rope.scaling.finetuned")
# Keys that only these architectures read.
_USED_BY: Mapping[str, tuple[str, ...]] = {
    "llama": _EXPERTS,
    "gemma2": (*_PATTERN, "attn_logit_softcapping", "final_logit_softcapping"),
    "gemma3": (*_PATTERN, "final_logit_softcapping", "rope.freq_base_swa"),
    "olmo2": (*_PATTERN, "rope.freq_base_swa"),
    "exaone4": (*_PATTERN, "nextn_predict_layers"),
    "cohere2": (*_PATTERN, "logit_scale"),
    "command-r": ("logit_scale",),
    "granite": _GRANITE,
    "granitemoe": (*_GRANITE, *_EXPERTS),
    "glm4": ("nextn_predict_layers",),
    "lfm2": ("shortconv.l_cache",),
    "olmoe": _EXPERTS,
    "phimoe": _EXPERTS,
    "qwen2moe": (*_EXPERTS, "expert_feed_forward_length", "expert_shared_feed_forward_length"),
    "qwen3moe": (*_EXPERTS, "expert_feed_forward_length"),
    "ernie4_5-moe": (
        *_EXPERTS, "expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_shared_count",
        "leading_dense_block_count", "interleave_moe_layer_step",
    ),
    "glm4moe": (
        *_EXPERTS, "expert_feed_forward_length", "expert_shared_count", "leading_dense_block_count",
        "expert_gating_func", "expert_weights_norm", "expert_weights_scale", "expert_group_count",
        "expert_group_used_count", "nextn_predict_layers",
    ),
}  # fmt: skip
# They do not affect the model's results; llama.cpp reads from the tensors whether the residual is parallel.
_HARMLESS = frozenset(["tensor_data_layout", "rope.scaling.finetuned", "use_parallel_residual"])
# They change the model's results, except at these values.
_ONLY_AT: Mapping[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_weights_scale": (0.0, 1.0),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "rope.freq_base_swa": (),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
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

    def optional_number(self, key: str, missing: float) -> float:
        """Return a finite number above zero; `missing` if the key is missing or 0, as for llama.cpp's multipliers."""
        return self.number(key) if self.values.get(key, 0) != 0 else missing

    def flags(self, key: str, count: int) -> tuple[bool, ...]:
        """Return an array of `count` bools."""
        value = self.values.get(key)
        if not isinstance(value, np.ndarray) or value.dtype.kind != "b" or len(value) != count:
            raise self.wrong(key, f"an array of {count} values that are true or false")
        return tuple(value.tolist())

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


def check_is_model(keys: MetadataKeys) -> None:
    """Refuse GGUF files that are no model: adapters and projectors. raises CheckpointError"""
    if keys.text("general.type", "model") != "model":
        raise keys.wrong("general.type", "model", "name the model's own file")
    if keys.text("general.architecture") not in ARCHITECTURES:
        raise keys.wrong("general.architecture", "one of " + ", ".join(ARCHITECTURES), "choose a supported family")


def check_keys(keys: MetadataKeys, arch: str) -> tuple[str, ...]:
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
