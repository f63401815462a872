"""Tables for `read_config`: the keys that each family uses, and the keys that are refused or have no effect.

`declared_keys.py` has the keys that transformers' classes declare. A declared key that is in none of these tables is
refused unless it has its default value. An undeclared key has no effect in transformers and is listed in a note.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

Neutral = tuple[tuple[object, ...], str]  # the values at which a key has no effect, and what other values would change


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """A model family. `defaults` maps each key that is used to transformers' value if the key is missing.

    qk_norm: "head" if each query and key head is normalized, "full" if all heads are as one row, "" for neither
    rope_theta: base of the rotary embedding if config.json has none
    norm: of the residual stream, as in ModelConfig
    rotary_share: of each head that rotates if config.json does not say; interleaved: as in RopeConfig
    """

    name: str  # also config.json's model_type
    architecture: str
    defaults: Mapping[str, object]
    only_at: Mapping[str, Neutral] = field(default_factory=dict)
    is_encoder: bool = False  # it computes embeddings, not next tokens
    also: tuple[str, ...] = ()  # the same architecture with a head, which an encoder does not use
    qk_norm: str = ""
    rope_theta: float = 10_000.0
    norm: str = "rms"
    gated_mlp: bool = True
    parallel_residual: bool = False
    rotary_share: float = 1.0
    interleaved: bool = False


# source: models/*/configuration_*.py of transformers 5; null if transformers derives the value from other keys
_COMMON: dict[str, object] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": None,
    "layer_types": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN: dict[str, object] = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "bos_token_id": None,
    "eos_token_id": None,
}
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


def _without_rms(defaults: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in defaults.items() if key != "rms_norm_eps"}


_COHERE: dict[str, object] = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 5,
    "eos_token_id": 255001,
}
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
_ACTIVATION = "the activation of every Gemma, which hidden_activation says"
_LFM2 = "transformers' model does not read it"
_BIDIRECTIONAL: Neutral = ((None, False), "only causal attention is supported")
_BERT: dict[str, object] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}

FAMILIES: Mapping[str, ModelFamily] = {
    f.name: f
    for f in (
        ModelFamily(
            "llama",
            "LlamaForCausalLM",
            {
                **_COMMON,
                "vocab_size": 32000,
                "intermediate_size": 11008,
                "max_position_embeddings": 2048,
                "attention_bias": False,
                "mlp_bias": False,
            },
        ),
        ModelFamily(
            "mistral",
            "MistralForCausalLM",
            {
                **_COMMON,
                "vocab_size": 32000,
                "intermediate_size": 14336,
                "num_key_value_heads": 8,
                "max_position_embeddings": 131072,
                "sliding_window": 4096,
            },
        ),
        ModelFamily(
            "qwen2",
            "Qwen2ForCausalLM",
            {**_COMMON, **_QWEN},
        ),
        ModelFamily(
            "qwen3",
            "Qwen3ForCausalLM",
            {**_COMMON, **_QWEN, "head_dim": 128, "attention_bias": False},
            qk_norm="head",
        ),
        ModelFamily(
            "smollm3",
            "SmolLM3ForCausalLM",
            {
                **_COMMON,
                "vocab_size": 128256,
                "hidden_size": 2048,
                "intermediate_size": 11008,
                "num_hidden_layers": 36,
                "num_attention_heads": 16,
                "num_key_value_heads": 4,
                "max_position_embeddings": 32768,
                "tie_word_embeddings": True,
                "bos_token_id": 128000,
                "eos_token_id": 128001,
                "attention_bias": False,
                "mlp_bias": False,
                "use_sliding_window": False,
                "sliding_window": None,
                "no_rope_layers": None,
                "no_rope_layer_interval": 4,
            },
            rope_theta=2e6,
        ),
        ModelFamily(
            "granite",
            "GraniteForCausalLM",
            {
                **_COMMON,
                "vocab_size": 32000,
                "intermediate_size": 11008,
                "max_position_embeddings": 2048,
                "attention_bias": False,
                "mlp_bias": False,
                "embedding_multiplier": 1.0,
                "residual_multiplier": 1.0,
                "attention_multiplier": 1.0,
                "logits_scaling": 1.0,
            },
        ),
        ModelFamily(
            "stablelm",
            "StableLmForCausalLM",
            {
                **_without_rms(_COMMON),
                "vocab_size": 50304,
                "hidden_size": 2560,
                "intermediate_size": 6912,
                "num_key_value_heads": 32,
                "max_position_embeddings": 4096,
                "layer_norm_eps": 1e-5,
                "use_qkv_bias": False,
                "use_parallel_residual": False,
                "partial_rotary_factor": None,
                "bos_token_id": 0,
                "eos_token_id": 0,
            },
            {"qk_layernorm": ((False,), "norms of each head with weights of its own are not supported")},
            norm="layer",
            rotary_share=0.25,
        ),
        ModelFamily(
            "nemotron",
            "NemotronForCausalLM",
            {
                **_without_rms(_COMMON),
                "vocab_size": 256000,
                "hidden_size": 6144,
                "intermediate_size": 24576,
                "num_attention_heads": 48,
                "hidden_act": "relu2",
                "max_position_embeddings": 4096,
                "norm_eps": 1e-5,
                "attention_bias": False,
                "mlp_bias": False,
                "partial_rotary_factor": None,
                "bos_token_id": 2,
                "eos_token_id": 3,
            },
            norm="layer_offset",
            gated_mlp=False,
            rotary_share=0.5,
        ),
        ModelFamily(
            "starcoder2",
            "Starcoder2ForCausalLM",
            {
                **_without_rms(_COMMON),
                "vocab_size": 49152,
                "hidden_size": 3072,
                "intermediate_size": 12288,
                "num_hidden_layers": 30,
                "num_attention_heads": 24,
                "num_key_value_heads": 2,
                "hidden_act": "gelu_pytorch_tanh",
                "max_position_embeddings": 4096,
                "norm_epsilon": 1e-5,
                "sliding_window": None,
                "use_bias": True,
                "tie_word_embeddings": True,
                "bos_token_id": 50256,
                "eos_token_id": 50256,
            },
            norm="layer",
            gated_mlp=False,
        ),
        ModelFamily(
            "phi",
            "PhiForCausalLM",
            {
                **_without_rms(_COMMON),
                "vocab_size": 51200,
                "hidden_size": 2048,
                "intermediate_size": 8192,
                "num_hidden_layers": 24,
                "hidden_act": "gelu_new",
                "max_position_embeddings": 2048,
                "layer_norm_eps": 1e-5,
                "partial_rotary_factor": None,
            },
            {"qk_layernorm": ((False,), "norms of queries and keys are not supported in this family")},
            norm="layer",
            gated_mlp=False,
            parallel_residual=True,
            rotary_share=0.5,
        ),
        ModelFamily(
            "cohere",
            "CohereForCausalLM",
            {**_without_rms(_COMMON), **_COHERE},
            {"use_qk_norm": ((False, None), "norms of each head with weights of its own are not supported")},
            norm="layer_without_bias",
            parallel_residual=True,
            interleaved=True,
            rope_theta=500_000.0,
        ),
        ModelFamily(
            "cohere2",
            "Cohere2ForCausalLM",
            {**_without_rms(_COMMON), **_COHERE, "sliding_window": 4096, "sliding_window_pattern": 4},
            norm="layer_without_bias",
            parallel_residual=True,
            interleaved=True,
        ),
        ModelFamily(
            "ernie4_5",
            "Ernie4_5ForCausalLM",
            {
                **_COMMON,
                "vocab_size": 103424,
                "hidden_size": 1024,
                "intermediate_size": 3072,
                "num_hidden_layers": 18,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
                "head_dim": 128,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5,
                "tie_word_embeddings": True,
                "use_bias": False,
            },
            interleaved=True,
            rope_theta=500_000.0,
        ),
        ModelFamily(
            "glm",
            "GlmForCausalLM",
            {**_COMMON, **_GLM, "num_attention_heads": 32, "attention_bias": True},
            interleaved=True,
            rotary_share=0.5,
        ),
        ModelFamily(
            "glm4",
            "Glm4ForCausalLM",
            {**_COMMON, **_GLM, "attention_bias": True},
            interleaved=True,
            rotary_share=0.5,
        ),
        ModelFamily(
            "phi3",
            "Phi3ForCausalLM",
            {
                **_COMMON,
                "vocab_size": 32064,
                "hidden_size": 3072,
                "intermediate_size": 8192,
                "max_position_embeddings": 4096,
                "original_max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
                "partial_rotary_factor": None,
                "sliding_window": None,
                "eos_token_id": 32000,
            },
        ),
        ModelFamily("olmo2", "Olmo2ForCausalLM", {**_COMMON, **_OLMO}, qk_norm="full"),
        ModelFamily(
            "olmo3",
            "Olmo3ForCausalLM",
            {**_COMMON, **_OLMO, "sliding_window": 4096},
            qk_norm="full",
            rope_theta=500_000.0,
        ),
        ModelFamily(
            "exaone4",
            "Exaone4ForCausalLM",
            {
                **_COMMON,
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
        ModelFamily(
            "gemma",
            "GemmaForCausalLM",
            {**_COMMON, **_GEMMA},
            {"use_bidirectional_attention": _BIDIRECTIONAL},
        ),
        ModelFamily(
            "gemma2",
            "Gemma2ForCausalLM",
            {**_COMMON, **_LATER_GEMMA, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
            {"use_bidirectional_attention": _BIDIRECTIONAL, "hidden_act": (("gelu_pytorch_tanh", None), _ACTIVATION)},
        ),
        ModelFamily(
            "gemma3_text",
            "Gemma3ForCausalLM",
            {
                **_COMMON,
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
        ModelFamily(
            "lfm2",
            "Lfm2ForCausalLM",
            {
                **{key: value for key, value in _COMMON.items() if key not in ("rms_norm_eps", "hidden_act")},
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
            "bert",
            "BertModel",
            _BERT,
            {
                "position_embedding_type": (("absolute", None), "positions are embedded as they are counted"),
                "is_decoder": ((False, None), "an encoder attends to the whole text"),
            },
            is_encoder=True,
            also=("BertForMaskedLM", "BertForPreTraining"),
        ),
    )
}

# hidden_act -> the name of the formula; swish is silu, gelu_new is the tanh approximation written out
ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "squared_relu",
}
# For encoders, "gelu" is the exact function; in Gemma's files it is the tanh approximation.
ENCODER_ACTIVATIONS: Mapping[str, str] = {
    **ACTIVATIONS,
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# These do not affect the model's results at any value and are not worth a note: training settings, implementation
# choices, heads of other tasks, and metadata that transformers or its users write everywhere.
HARMLESS = _words(
    """
    _name_or_path name_or_path _commit_hash transformers_version auto_map tokenizer_class
    use_cache attention_dropout hidden_dropout residual_dropout embedding_dropout resid_pdrop embd_pdrop
    initializer_range pad_token_id unk_token_id sep_token_id cls_token_id
    decoder_start_token_id _attn_implementation attn_implementation _attn_implementation_autoset
    _attn_implementation_internal _experts_implementation experts_implementation _flash_attn_2_enabled use_flash_attn
    use_flash_attention_2 output_attentions output_hidden_states return_dict torchscript use_bfloat16 is_decoder
    chunk_size_feed_forward gradient_checkpointing id2label label2id num_labels problem_type task_specific_params
    finetuning_task tie_last_hidden_states max_length max_sequence_length is_llama_config transformers.js_config
    pretraining_tp tie_encoder_decoder cross_attention_hidden_size pruned_heads
    attention_probs_dropout_prob hidden_dropout_prob classifier_dropout directionality pooler_fc_size
    pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type output_past
    tie_word_embeddings bos_token_id eos_token_id is_matryoshka matryoshka_dimensions
    """  # pretraining_tp computes the same sums in slices; transformers 5 no longer reads it
    # an encoder has no head to tie and generates no text with bos and eos; decoders read these three keys
)

# Generation defaults that older versions of transformers stored in config.json; version 5 drops them.
GENERATION_KEYS = _words(
    "do_sample temperature top_k top_p min_p typical_p repetition_penalty min_length max_new_tokens num_beams "
    "no_repeat_ngram_size length_penalty early_stopping bad_words_ids num_return_sequences"
)

# transformers applies these to every family: they change the model's results, except at these values.
ONLY_AT: Mapping[str, Neutral] = {
    "quantization_config": ((None,), "of quantised folders only compressed-tensors are read, of decoders"),
    "compression_config": ((None,), "compressed checkpoints are not read yet"),
    "partial_rotary_factor": ((None, 1, 1.0), "RoPE turns whole heads"),
    "is_encoder_decoder": ((None, False), "models of two stacks are not supported"),
    "add_cross_attention": ((None, False), "models of two stacks are not supported"),
}
