"""Writes config.json from a ModelConfig, for checkpoints of other formats."""

from millrace.checkpoint.config.families.all_families import FAMILIES
from millrace.checkpoint.config.model_config import ModelConfig
from millrace.checkpoint.config.rope_config import RopeConfig
from millrace.errors import CheckpointError

_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "squared_relu": "relu2"}


def config_json(config: ModelConfig) -> dict[str, object]:
    """Return a config.json that `read_config` reads as the same config. raises CheckpointError if there is none"""
    if config.rope.divisors:
        raise CheckpointError(
            "the model's rotary frequencies have divisors of their own (rope_freqs.weight)",
            "frequencies that a config.json describes", "name the original checkpoint instead of its GGUF",
        )  # fmt: skip
    rope = _of_rope(config.rope)
    if config.local_rope is not None:
        rope = {"full_attention": rope, "sliding_attention": _of_rope(config.local_rope)}
    fields: dict[str, object] = {
        "architectures": [config.architecture], "model_type": config.family, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads, "num_key_value_heads": config.n_kv_heads, "head_dim": config.head_dim,
        "vocab_size": config.vocab_size, "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.norm_eps, "rope_parameters": rope, "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": _ACTIVATIONS[config.activation], "dtype": config.dtype, "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
    }  # fmt: skip
    defaults = FAMILIES[config.family].defaults
    own = {
        "attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias,
        "hidden_activation": fields["hidden_act"], **_of_windows(config),
        "query_pre_attn_scalar": round((config.attention_scale or config.head_dim**-0.5) ** -2),
        "attn_logit_softcapping": config.attention_softcap or None,
        "final_logit_softcapping": config.logits_softcap or None,
        "norm_eps": config.norm_eps, "conv_bias": config.conv_bias, "conv_L_cache": config.conv_taps,
        "block_auto_adjust_ff_dim": False,
    }  # fmt: skip
    if config.convolves:
        own["layer_types"] = ["conv" if convolves else "full_attention" for convolves in config.convolves]
    read = {"architectures", "model_type", "dtype", *defaults, *FAMILIES[config.family].only_at}
    return {key: value for key, value in {**fields, **own}.items() if key in read}


def _of_rope(rope: RopeConfig) -> dict[str, object]:
    fields: dict[str, object] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        fields["factor"] = rope.factor
    if rope.kind == "llama3":
        fields |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
        fields["original_max_position_embeddings"] = rope.original_max_positions
    return fields


def _of_windows(config: ModelConfig) -> dict[str, object]:
    """Return the keys for sliding windows. raises CheckpointError for several sizes, or a family without windows"""
    windows = {window for window in config.windows if window}
    fields: dict[str, object] = {"sliding_window": None, "use_sliding_window": False}
    if not windows:
        return fields
    defaults = FAMILIES[config.family].defaults
    all_or_named = 0 not in config.windows or "layer_types" in defaults
    if len(windows) > 1 or "sliding_window" not in defaults or not all_or_named:
        raise CheckpointError(
            f"layers of the {config.family} model have the windows {sorted(windows)}",
            "windows that a config.json of this family describes", "name the original checkpoint instead of its GGUF",
        )  # fmt: skip
    kinds = ["sliding_attention" if window else "full_attention" for window in config.windows]
    fields |= {"sliding_window": windows.pop(), "use_sliding_window": True, "max_window_layers": 0}
    return fields | ({"layer_types": kinds} if "layer_types" in defaults else {})
