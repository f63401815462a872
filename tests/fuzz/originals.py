"""Small good files, of which the targets make bad ones."""

import json
from pathlib import Path

import numpy as np
import safetensors.numpy

from millrace.checkpoint.config.encoder_config import read_encoder
from millrace.model.bert import BertSentences
from tests.support.vocabularies import save_byte_fallback, save_word_pieces

TRAINED, WIDTH, INNER, HEADS, KV_HEADS, SIZE, LAYERS = 320, 64, 96, 4, 2, 16, 1
VOCABULARY = TRAINED + 2  # two are added, for chats
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": WIDTH,
    "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": SIZE, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "dtype": "float32",
    "bos_token_id": 1, "eos_token_id": [2], "initializer_range": 0.02, "transformers_version": "5.0.0",
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip
GENERATION = {
    "do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1, "eos_token_id": [2],
    "bos_token_id": 1, "num_beams": 1, "max_length": 100,
}  # fmt: skip


BERT = {
    "architectures": ["BertModel"], "model_type": "bert", "vocab_size": VOCABULARY, "hidden_size": WIDTH,
    "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_act": "gelu",
    "max_position_embeddings": 64, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "dtype": "float32",
    "position_embedding_type": "absolute", "hidden_dropout_prob": 0.1, "pad_token_id": 0,
}  # fmt: skip
SENTENCES: dict[str, object] = {
    "modules.json": [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate([("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")])
    ],
    "1_Pooling/config.json": {"word_embedding_dimension": WIDTH, "pooling_mode_mean_tokens": True},
    "sentence_bert_config.json": {"max_seq_length": 32, "do_lower_case": False},
    "config_sentence_transformers.json": {"prompts": {"query": "query: "}, "default_prompt_name": None},
}


def tensors(width: int, inner: int, size: int) -> dict[str, "np.ndarray[tuple[int, ...], np.dtype[np.float32]]"]:
    rng, q, kv = np.random.default_rng(1), HEADS * size, KV_HEADS * size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, width), "lm_head.weight": (VOCABULARY, width),
        "model.norm.weight": (width,),
    }  # fmt: skip
    for i in range(LAYERS):
        layer = {
            "input_layernorm": (width,), "post_attention_layernorm": (width,), "self_attn.q_proj": (q, width),
            "self_attn.k_proj": (kv, width), "self_attn.v_proj": (kv, width), "self_attn.o_proj": (width, q),
            "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner),
        }  # fmt: skip
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return {name: rng.standard_normal(shape, np.float32) * np.float32(0.1) for name, shape in shapes.items()}


def write_encoder(folder: Path) -> Path:
    """A BERT of one layer with a WordPiece tokenizer, as sentence-transformers keeps it."""
    save_word_pieces(folder)
    for name, value in {"config.json": BERT, **SENTENCES}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(value))
    rng, shapes = np.random.default_rng(1), {n: p.shape for n, p in BertSentences(read_encoder(BERT)).parameters()}
    arrays = {n: rng.standard_normal([int(str(d)) for d in shape]).astype(np.float32) for n, shape in shapes.items()}
    safetensors.numpy.save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_checkpoint(folder: Path, width: int = WIDTH, inner: int = INNER, size: int = SIZE) -> Path:
    """A model of one layer with a byte-fallback tokenizer and a chat template. size: of a head"""
    save_byte_fallback(folder, TRAINED)
    sizes = {"hidden_size": width, "intermediate_size": inner, "head_dim": size}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **sizes}))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    safetensors.numpy.save_file(tensors(width, inner, size), folder / "model.safetensors", {"format": "pt"})
    return folder
