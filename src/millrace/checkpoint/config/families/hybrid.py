"""Decoders of which some layers have no attention."""

from millrace.checkpoint.config.families.family import COMMON, ModelFamily

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
)
