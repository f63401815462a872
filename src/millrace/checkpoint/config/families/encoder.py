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


ENCODERS = (
    _family("bert", "Bert", _BERT, "MaskedLM", "PreTraining"),
    _family("roberta", "Roberta", {**_ROBERTA, "vocab_size": 50265}, "MaskedLM"),
    _family("xlm-roberta", "XLMRoberta", _ROBERTA, "MaskedLM"),
    _family("camembert", "Camembert", _ROBERTA, "MaskedLM"),
)
