"""The Gemma families."""

from millrace.checkpoint.config.families.family import COMMON, ModelFamily, Neutral

_GEMMA: dict[str, object] = {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": None,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
# Since Gemma 2: sliding windows in some layers, a norm also after each sublayer, and an explicit attention scale.
_LATER_GEMMA: dict[str, object] = {
    **{key: value for key, value in _GEMMA.items() if key not in ("hidden_act", "hidden_activation")},
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


_ACTIVATION = "the activation of every Gemma, which hidden_activation says"
_BIDIRECTIONAL: Neutral = ((None, False), "only causal attention is supported")

GEMMA = (
    ModelFamily(
        "gemma",
        "GemmaForCausalLM",
        {**COMMON, **_GEMMA},
        {"use_bidirectional_attention": _BIDIRECTIONAL},
    ),
    ModelFamily(
        "gemma2",
        "Gemma2ForCausalLM",
        {**COMMON, **_LATER_GEMMA, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        {"use_bidirectional_attention": _BIDIRECTIONAL, "hidden_act": (("gelu_pytorch_tanh", None), _ACTIVATION)},
    ),
    ModelFamily(
        "gemma3_text",
        "Gemma3ForCausalLM",
        {
            **COMMON,
            **_LATER_GEMMA,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "final_logit_softcapping": None,
            "sliding_window_pattern": 6,
            "_sliding_window_pattern": None,  # transformers writes it next to layer_types, but does not read it
            "rope_local_base_freq": None,
        },
        {
            "use_bidirectional_attention": _BIDIRECTIONAL,
            "attn_logit_softcapping": ((None,), "transformers does not apply it"),
            "hidden_act": (("gelu_pytorch_tanh", None), _ACTIVATION),
        },
        qk_norm="head",
        rope_theta=1e6,
    ),
)
