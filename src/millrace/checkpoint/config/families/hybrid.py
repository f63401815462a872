"""Decoders of which some layers have no attention."""

from millrace.checkpoint.config.families.family import COMMON, ExpertScheme, ModelFamily

_LFM2 = "transformers' model does not read it"

HYBRID = (
    ModelFamily(
        "lfm2",
        "Lfm2ForCausalLM",
        {
            **{key: value for key, value in COMMON.items() if key not in ("rms_norm_eps", "hidden_act")},
            "vocab_size": 65536,
            "hidden_size": 2560,
            "intermediate_size": 12288,
            "num_key_value_heads": 8,
            "max_position_embeddings": 128000,
            "norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "tie_embedding": None,
            "block_ff_dim": None,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True,
            "full_attn_idxs": None,
        },
        # In the published files, but not used by transformers.
        {"block_use_swiglu": ((True,), _LFM2), "block_norm_eps": ((1e-5, None), _LFM2)},
        qk_norm="head",
        rope_theta=1e6,
    ),
    ModelFamily(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        {
            **{key: value for key, value in COMMON.items() if key not in ("rms_norm_eps", "hidden_act")},
            "vocab_size": 65536,
            "hidden_size": 2048,
            "intermediate_size": 7168,
            "num_key_value_heads": 8,
            "max_position_embeddings": 128000,
            "norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "tie_embedding": None,
            "conv_bias": False,
            "conv_L_cache": 3,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "use_expert_bias": True,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        },
        qk_norm="head",
        rope_theta=1e6,
        experts=ExpertScheme(layers="first_dense", scoring="sigmoid", epsilon=1e-6, bias="use_expert_bias"),
    ),
)
