"""Decoders with norms after their sublayers, and GLM, which shares GLM-4's keys."""

from millrace.checkpoint.config.families.family import COMMON, ModelFamily

_GLM: dict[str, object] = {
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": None,
    "bos_token_id": None,
    "eos_token_id": [151329, 151336, 151338],
}
_OLMO: dict[str, object] = {
    "vocab_size": 50304,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "bos_token_id": None,
    "eos_token_id": 50279,
}

POST_NORM = (
    ModelFamily(
        "glm",
        "GlmForCausalLM",
        {**COMMON, **_GLM, "num_attention_heads": 32, "attention_bias": True},
        interleaved=True,
        rotary_share=0.5,
    ),
    ModelFamily(
        "glm4",
        "Glm4ForCausalLM",
        {**COMMON, **_GLM, "attention_bias": True},
        interleaved=True,
        rotary_share=0.5,
    ),
    ModelFamily("olmo2", "Olmo2ForCausalLM", {**COMMON, **_OLMO}, qk_norm="full"),
    ModelFamily(
        "olmo3",
        "Olmo3ForCausalLM",
        {**COMMON, **_OLMO, "sliding_window": 4096},
        qk_norm="full",
        rope_theta=500_000.0,
    ),
    ModelFamily(
        "exaone4",
        "Exaone4ForCausalLM",
        {
            **COMMON,
            "vocab_size": 102400,
            "intermediate_size": 16384,
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 0,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        qk_norm="head",
    ),
)
