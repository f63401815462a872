"""Sizes of a decoder of any family that determine memory and time, from its `config.json`.

Supports more families than engines run (`model_config.py` reads those completely), because hardware is sized before a
checkpoint is available.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from millrace.checkpoint.config.config_reader import ConfigKeys, ConfigReader, Raw, wrong
from millrace.checkpoint.config.families.all_families import FAMILIES
from millrace.errors import CheckpointError, ConfigError, sanitize
from millrace.settings import read_bounded, reject_duplicate_keys

_MAX_BYTES = 1 << 20  # of a config.json
_MOST = 1 << 24  # largest size in it
SIZES = ("n_layers", "hidden", "n_heads", "n_kv_heads", "head_dim", "ffn", "vocab", "max_context")

# Keys of architectures whose memory and time differ from attention in every layer.
_NOT_MODELLED = {
    "kv_lora_rank": "keys and values are compressed (MLA), which is not modelled",
    **dict.fromkeys(("hybrid_override_pattern", "layers_block_type", "attn_layer_period", "mamba_d_state", "ssm_cfg"),
                    "layers without attention are not modelled"),
    "conv_L_cache": "convolution layers are not modelled",
}  # fmt: skip
_SOME_LAYERS = ("gemma2", "gemma3", "gemma3_text", "gpt_oss", "cohere2")  # only some of their layers have a window
_NOT_GATED = ("falcon", "RefinedWeb", "mpt", "gpt2", "nemotron", "opt")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSizes:
    """Sizes of a decoder. raises ConfigError if they contradict each other

    experts: per layer (0: dense), of which a token uses `experts_active`
    shared: width of the shared experts; window: attention window of all layers, if smaller than the context
    """

    name: str
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int  # of one expert, if there are experts
    vocab: int
    max_context: int
    gated: bool = True  # three matrices in a feed-forward layer, otherwise two
    experts: int = 0
    experts_active: int = 0
    shared: int = 0
    window: int | None = None
    tied: bool = False  # the head is the embedding table

    def __post_init__(self) -> None:
        for name in SIZES:
            if not 0 < getattr(self, name) <= _MOST:
                raise ConfigError(f"{self.name}: {name} is {getattr(self, name)}", f"1 to {_MOST}", "correct it")
        if not 0 <= self.shared <= _MOST or not (self.window is None or 0 < self.window <= _MOST):
            raise ConfigError(f"{self.name}: {self.shared} for shared experts, a window of {self.window}",
                              f"at most {_MOST} each", "correct the configuration")  # fmt: skip
        if self.n_kv_heads > self.n_heads:
            raise ConfigError(f"{self.name}: {self.n_kv_heads} heads of keys and values for {self.n_heads} of queries",
                              "no more than these", "correct the configuration")  # fmt: skip
        if not 0 <= self.experts_active <= self.experts <= 4096 or (self.experts > 0) != (self.experts_active > 0):
            raise ConfigError(
                f"{self.name}: a token visits {self.experts_active} of {self.experts} experts",
                "at least one, and no more than there are", "correct the configuration",
            )  # fmt: skip


def read_config_file(path: Path) -> Mapping[str, object]:
    """Read a config.json that need not belong to a checkpoint. raises ConfigError"""
    try:
        data = read_bounded(path, _MAX_BYTES)
        config = json.loads(data, object_pairs_hook=reject_duplicate_keys) if len(data) <= _MAX_BYTES else None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", "a config.json", "check the path") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {sanitize(str(error))}", "a config.json", "check the file") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no configuration", f"a JSON object of at most {_MAX_BYTES} bytes", "check it")
    return config


def read_sizes(raw: Raw, name: str) -> DecoderSizes:
    """Read the sizes under the names that families use.

    raises CheckpointError, also if the estimate would be wrong; ConfigError like DecoderSizes
    """
    inner = raw.get("text_config")
    if inner is not None:  # the decoder of a vision-language model
        if not isinstance(inner, dict):
            raise wrong("text_config", inner, "an object", source=name)
        raw = {**raw, **inner}
    for key, why in _NOT_MODELLED.items():
        if raw.get(key):
            raise CheckpointError(f"{name}: {key}: {why}", "attention with its keys and values in every layer",
                                  "take the preset or config.json of a model alike, which has that")  # fmt: skip
    family = FAMILIES.get(str(raw.get("model_type")))
    keys = ConfigKeys(raw, source=name) if family is None else ConfigReader(raw, family, source=name)
    hidden = _size(keys, "hidden_size", "n_embd", "d_model")
    n_heads = _size(keys, "num_attention_heads", "n_head", "n_heads")
    n_kv = _size(keys, "num_key_value_heads", "num_kv_heads", "n_head_kv", default=n_heads)
    experts = _count(keys, "num_local_experts", "num_experts", "n_routed_experts")
    ffn = _size(keys, "intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", default=4 * hidden)
    of_expert = _size(keys, "moe_intermediate_size", default=ffn) if experts else ffn
    each = _count(keys, "n_shared_experts") * of_expert
    shared = _count(keys, "shared_expert_intermediate_size", default=each)
    return DecoderSizes(
        name=name, n_layers=_size(keys, "num_hidden_layers", "n_layer", "n_layers"), hidden=hidden, n_heads=n_heads,
        n_kv_heads=1 if keys.boolean("multi_query", False) and "num_kv_heads" not in raw else n_kv,
        head_dim=_size(keys, "head_dim", default=max(1, hidden // n_heads)), ffn=of_expert,
        vocab=_size(keys, "vocab_size"),
        max_context=_size(keys, "max_position_embeddings", "n_positions", "max_seq_len", default=2048),
        gated=keys.name("model_type") not in _NOT_GATED,
        experts=experts, experts_active=_count(keys, "num_experts_per_tok") if experts else 0,
        shared=shared if experts else 0, window=_window(keys), tied=keys.boolean("tie_word_embeddings", False),
    )  # fmt: skip


def _size(keys: ConfigKeys, *names: str, default: int | None = None) -> int:
    return keys.first_int(*names, default=default, high=_MOST)


def _count(keys: ConfigKeys, *names: str, default: int = 0) -> int:
    return keys.first_int(*names, default=default, low=0, high=_MOST)


def _window(keys: ConfigKeys) -> int | None:
    """Return the window of all layers. If only some layers have one, None: the plan then overestimates rather than
    underestimates."""
    if not keys.boolean("use_sliding_window", True):
        return None
    window = _size(keys, "sliding_window", default=0)
    some = any(kind != "sliding_attention" for kind in keys.names("layer_types"))
    some = some or _has_pattern(keys) or keys.name("model_type") in _SOME_LAYERS
    return window if window and not some else None


def _has_pattern(keys: ConfigKeys) -> bool:
    """Return whether layers alternate: a period, or a letter per layer ("LLLG")."""
    letters = keys.get("sliding_window_pattern")
    return (isinstance(letters, str) and letters.isalpha()) or _size(keys, "sliding_window_pattern", default=0) > 0
