"""A config.json of what was read: for checkpoints that came in another form."""

from millrace.checkpoint.config import ModelConfig
from millrace.checkpoint.config_keys import FAMILIES
from millrace.errors import CheckpointError

_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}


def written(config: ModelConfig) -> dict[str, object]:
    """Which `read_config` reads as the same. raises CheckpointError for what such a file cannot say"""
    rope = config.rope
    if rope.divisors:
        raise CheckpointError(
            "the model's rotary frequencies have divisors of their own (rope_freqs.weight)",
            "frequencies that a config.json describes", "name the original checkpoint instead of its GGUF",
        )  # fmt: skip
    scaled: dict[str, object] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        scaled["factor"] = rope.factor
    if rope.kind == "llama3":
        scaled |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
        scaled["original_max_position_embeddings"] = rope.original_max_positions
    said: dict[str, object] = {
        "architectures": [config.architecture], "model_type": config.family, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads, "num_key_value_heads": config.n_kv_heads, "head_dim": config.head_dim,
        "vocab_size": config.vocab_size, "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.norm_eps, "rope_parameters": scaled, "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": _ACTIVATIONS[config.activation], "dtype": config.dtype, "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
    }  # fmt: skip
    known = FAMILIES[config.family].defaults
    own = {
        "attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias, "sliding_window": None,
        "hidden_activation": said["hidden_act"], "use_sliding_window": False,
    }  # fmt: skip
    return said | {key: value for key, value in own.items() if key in known}
