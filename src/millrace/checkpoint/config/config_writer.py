"""Writes config.json from a ModelConfig, for checkpoints of other formats."""

import math

from millrace.checkpoint.config.expert_config import ExpertConfig
from millrace.checkpoint.config.families.all_families import FAMILIES
from millrace.checkpoint.config.families.family import ExpertScheme
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
    family = FAMILIES[config.family]
    rope = _of_rope(config, config.rope)
    if config.local_rope is not None:
        rope = {"full_attention": rope, "sliding_attention": _of_rope(config, config.local_rope)}
    fields: dict[str, object] = {
        "architectures": [config.architecture], "model_type": config.family, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads, "num_key_value_heads": config.n_kv_heads, "head_dim": config.head_dim,
        "vocab_size": config.vocab_size, "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.norm_eps, "rope_parameters": rope, "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": _ACTIVATIONS[config.activation], "dtype": config.dtype, "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
    }  # fmt: skip
    own = {
        "attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias, "use_bias": config.attention_bias,
        "use_qkv_bias": config.attention_bias, "lm_head_bias": config.head_bias,
        "use_qk_norm": config.qk_norm == "head", "use_parallel_residual": config.parallel_residual,
        "hidden_activation": fields["hidden_act"], **_of_windows(config),
        "query_pre_attn_scalar": round((config.attention_scale or config.head_dim**-0.5) ** -2),
        "attn_logit_softcapping": config.attention_softcap or None,
        "final_logit_softcapping": config.logits_softcap or None,
        "norm_eps": config.norm_eps, "layer_norm_eps": config.norm_eps, "norm_epsilon": config.norm_eps,
        "conv_bias": config.conv_bias, "conv_L_cache": config.conv_taps, "block_auto_adjust_ff_dim": False,
        "original_max_position_embeddings": config.rope.original_max_positions or config.max_context,
        **_of_multipliers(config),
    }  # fmt: skip
    if config.convolves:
        own["layer_types"] = ["conv" if convolves else "full_attention" for convolves in config.convolves]
    if config.rotates:
        own["no_rope_layers"] = [int(rotates) for rotates in config.rotates]
    elif config.family == "smollm3":
        own["no_rope_layers"] = [1] * config.n_layers
    if config.experts is not None:
        assert family.experts is not None, family
        own |= _of_experts(config.experts, family.experts)
    read = {"architectures", "model_type", "dtype", *family.defaults, *family.only_at}
    return {key: value for key, value in {**fields, **own}.items() if key in read}


def _of_rope(config: ModelConfig, rope: RopeConfig) -> dict[str, object]:
    fields: dict[str, object] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if "partial_rotary_factor" in FAMILIES[config.family].defaults:
        fields["partial_rotary_factor"] = _share(rope.rotary_dim or config.head_dim, config.head_dim)
    if rope.kind in ("linear", "llama3", "yarn"):
        fields["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn", "longrope"):
        fields["original_max_position_embeddings"] = rope.original_max_positions
    if rope.kind == "llama3":
        fields |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        fields |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
    if rope.kind == "longrope":
        fields |= {"short_factor": list(rope.short_factors), "long_factor": list(rope.long_factors)}
    if rope.kind in ("yarn", "longrope"):
        fields["attention_factor"] = rope.attention_factor
    return fields


def _share(width: int, head_dim: int) -> float:
    """Return the share of a head that gives `width` when it is multiplied by head_dim and cut to an integer."""
    share = width / head_dim
    return share if int(head_dim * share) == width else math.nextafter(share, 2)


def _of_multipliers(config: ModelConfig) -> dict[str, object]:
    """Return the keys for multipliers: Granite's logits are divided, others' multiplied."""
    divisor = 1.0 / config.logits_multiplier
    exact = (divisor, math.nextafter(divisor, 0), math.nextafter(divisor, math.inf))
    return {
        "embedding_multiplier": config.embedding_multiplier, "residual_multiplier": config.residual_multiplier,
        "attention_multiplier": config.attention_scale or config.head_dim**-0.5,
        "logit_scale": config.logits_multiplier,
        "logits_scaling": next((x for x in exact if 1.0 / x == config.logits_multiplier), divisor),
    }  # fmt: skip


def _of_experts(experts: ExpertConfig, scheme: ExpertScheme) -> dict[str, object]:
    """Return the keys for experts, of all families."""
    routing, first = experts.routing, experts.layers.index(True)
    fields: dict[str, object] = {
        scheme.count: experts.count, scheme.chosen: routing.chosen, scheme.size: experts.size,
        "norm_topk_prob": routing.normalise, "routed_scaling_factor": routing.scale, "n_group": routing.groups,
        "topk_group": routing.chosen_groups, "first_k_dense_replace": first, "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, has in enumerate(experts.layers) if not has],
        "router_jitter_noise": routing.epsilon / 2,
    }  # fmt: skip
    if scheme.layers == "ernie":
        steps = range(1, len(experts.layers) + 1)
        interval = [[at >= first and (at + 1) % step == 0 for at in range(len(experts.layers))] for step in steps]
        fields |= {"moe_layer_start_index": first, "moe_layer_end_index": -1}
        fields["moe_layer_interval"] = interval.index(list(experts.layers)) + 1
    if scheme.shared:
        is_width = scheme.shared.endswith("_size")
        if not is_width and experts.shared_size % experts.size:
            raise CheckpointError(
                f"the shared MLP has a width of {experts.shared_size}, an expert one of {experts.size}",
                "a multiple, as config.json counts shared experts", "name the original checkpoint instead of its GGUF",
            )  # fmt: skip
        fields[scheme.shared] = experts.shared_size if is_width else experts.shared_size // experts.size
    if isinstance(scheme.bias, str):
        fields[scheme.bias] = experts.selection_bias
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
