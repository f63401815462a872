"""Encoders, which compute embeddings."""

from millrace.checkpoint.config.families.family import ModelFamily

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


ENCODERS = (
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
