"""Encoders, which compute embeddings."""

from collections.abc import Mapping

from millrace.checkpoint.config.families.family import ModelFamily, Neutral

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

_ROBERTA = {**_BERT, "pad_token_id": 1}  # positions are counted from the row after it

_NOMIC: dict[str, object] = {
    **{key: value for key, value in _BERT.items() if key != "max_position_embeddings"},
    "vocab_size": 30528, "hidden_act": "silu", "max_position_embeddings": 2048, "rope_parameters": None,
    "rope_theta": None, "rope_scaling": None, "head_dim": None,
}  # fmt: skip
# source: configuration_hf_nomic_bert.py of nomic-ai/nomic-bert-2048, which extends GPT2Config
_NOMIC_KEYS = {
    "n_embd": "hidden_size", "n_inner": "intermediate_size", "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads", "n_positions": "max_position_embeddings", "layer_norm_epsilon": "layer_norm_eps",
    "activation_function": "hidden_act", "rotary_emb_base": "rope_theta",
}  # fmt: skip
_NOMIC_ONLY_AT: dict[str, Neutral] = {
    "rotary_emb_fraction": ((1.0, 1, None), "whole heads rotate"),
    "rotary_emb_interleaved": ((False, None), "a head's halves rotate against each other"),
    "rotary_scaling_factor": ((None,), "positions are not scaled"),
    "rotary_emb_scale_base": ((None,), "angles have no decay"),
    "causal": ((False, None), "an encoder attends to the whole text"),
    "prenorm": ((False, None), "norms come last, as in BERT"),
    "parallel_block": ((False, None), "the MLP follows the attention"),
    "use_rms_norm": ((False, None), "norms have a mean"),
    "scale_attn_weights": ((True, None), "scores are divided by the root of the head size"),
    "scale_attn_by_inverse_layer_idx": ((False, None), "all layers have one scale"),
    **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), ((False, None), "its matrices have no biases")),
    "num_experts": ((None, 0), "mixtures of experts are another family"),
}  # fmt: skip

_ONLY_AT: dict[str, Neutral] = {
    "position_embedding_type": (("absolute", None), "positions are embedded as they are counted"),
    "is_decoder": ((False, None), "an encoder attends to the whole text"),
}


def _family(name: str, prefix: str, defaults: Mapping[str, object], *heads: str) -> ModelFamily:
    """Return the family of `{prefix}Model`. heads: other classes of its checkpoints, `{prefix}For{head}`"""
    return ModelFamily(
        name, f"{prefix}Model", defaults, _ONLY_AT, is_encoder=True, also=tuple(f"{prefix}For{head}" for head in heads),
        cross_encoder=f"{prefix}ForSequenceClassification",
    )  # fmt: skip


_MPNET: dict[str, object] = {
    **{key: value for key, value in _BERT.items() if key != "type_vocab_size"},
    "vocab_size": 30527, "relative_attention_num_buckets": 32, "pad_token_id": 1,
}  # fmt: skip

ENCODERS = (
    _family("bert", "Bert", _BERT, "MaskedLM", "PreTraining"),
    _family("roberta", "Roberta", {**_ROBERTA, "vocab_size": 50265}, "MaskedLM"),
    _family("xlm-roberta", "XLMRoberta", _ROBERTA, "MaskedLM"),
    _family("camembert", "Camembert", _ROBERTA, "MaskedLM"),
    ModelFamily("mpnet", "MPNetModel", _MPNET, is_encoder=True, also=("MPNetForMaskedLM",)),
    ModelFamily(
        "nomic_bert",
        "NomicBertModel",
        _NOMIC,
        _NOMIC_ONLY_AT,
        is_encoder=True,
        rope_theta=1000.0,
        older_keys=_NOMIC_KEYS,
    ),
)
