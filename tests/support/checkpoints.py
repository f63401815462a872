"""Small random Hugging Face checkpoints of every family, written by transformers, in sizes that fit nothing evenly."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.vocabularies import (
    save_byte_fallback,
    save_byte_level,
    save_roberta,
    save_word_pieces,
    save_xlm_roberta,
)

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "lfm2")
ODD_SIZES: Mapping[str, object] = {
    "hidden_size": 320,
    "intermediate_size": 364,  # not a multiple of 128, nor of 8
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 1003,
    "max_position_embeddings": 512,
}
BERT_SIZES: Mapping[str, object] = {
    "vocab_size": 403,
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 130,
}
_IDS: Mapping[str, object] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}  # of the tiny tokenizer
_EXPERTS: Mapping[str, object] = {"num_local_experts": 6, "num_experts_per_tok": 2}
_OWN: Mapping[str, Mapping[str, object]] = {
    "llama": {"bos_token_id": 1, "eos_token_id": 2},
    "mistral": {"sliding_window": None},
    "qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen3": {"head_dim": 72, "rms_norm_eps": 1e-5},  # 5 * 72 is not hidden_size
    "gemma": {"head_dim": 72, "bos_token_id": 1, "eos_token_id": 2},  # as the tiny tokenizer has them
    "gemma2": {
        **{"head_dim": 72, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 33, "query_pre_attn_scalar": 50},
        **{"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},  # so low that they matter
    },
    "gemma3_text": {
        **{"head_dim": 72, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 33, "query_pre_attn_scalar": 50},
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "lfm2": {
        **{"layer_types": ["conv", "full_attention"], "norm_eps": 1e-5, "conv_bias": True, "conv_L_cache": 4},
        **{"block_auto_adjust_ff_dim": False, "bos_token_id": 1, "eos_token_id": 2},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "smollm3": {**_IDS, "no_rope_layers": [1, 0]},
    "granite": {
        **_IDS, "embedding_multiplier": 3.0, "residual_multiplier": 0.22, "attention_multiplier": 0.05,
        "logits_scaling": 1.7,
    },
    "olmo2": _IDS,  # also of docs/extending/family.md
    "olmo3": {
        **_IDS, "sliding_window": 33, "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn", "factor": 8.0, "rope_theta": 5e5, "original_max_position_embeddings": 64,
                "attention_factor": 1.2,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        },
    },
    "exaone4": {
        **_IDS, "sliding_window": 33, "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64, "rope_theta": 1e6,
        },
    },
    "stablelm": {**_IDS, "use_qkv_bias": True, "partial_rotary_factor": 0.25},
    "nemotron": {**_IDS, "head_dim": 72, "partial_rotary_factor": 0.5, "attention_bias": True, "mlp_bias": True},
    "starcoder2": {**_IDS, "sliding_window": 100},
    "phi": {**_IDS, "partial_rotary_factor": 0.375},
    "phi3": {
        **_IDS, "sliding_window": 100, "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
            "short_factor": [1.0 + i / 50 for i in range(24)], "long_factor": [1.0 + i / 5 for i in range(24)],
        },
    },
    "ernie4_5": {**_IDS, "use_bias": True},
    "glm": _IDS,
    "glm4": {**_IDS, "attention_bias": True},
    "cohere": {**_IDS, "logit_scale": 0.3, "attention_bias": True},
    "cohere2": {
        **_IDS, "logit_scale": 0.3, "sliding_window": 33, "layer_types": ["sliding_attention", "full_attention"],
    },
    "mixtral": {**_IDS, **_EXPERTS, "intermediate_size": 76, "sliding_window": 33},
    "qwen2_moe": {
        **_EXPERTS, "num_experts": 6, "moe_intermediate_size": 76, "shared_expert_intermediate_size": 52,
        "num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": False,
    },
    "qwen3_moe": {
        **_EXPERTS, "head_dim": 72, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 76,
        "norm_topk_prob": True,
    },
    "olmoe": {**_IDS, **_EXPERTS, "num_experts": 6, "intermediate_size": 76},
    "granitemoe": {
        **_IDS, **_EXPERTS, "intermediate_size": 76, "embedding_multiplier": 3.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.05, "logits_scaling": 1.7,
    },
    "phimoe": {**_IDS, **_EXPERTS, "intermediate_size": 76, "attention_bias": True, "lm_head_bias": True},
    "ernie4_5_moe": {
        **_IDS, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 76, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1, "moe_layer_end_index": -1,
    },
    "glm4_moe": {
        **_IDS, "num_experts_per_tok": 2, "n_routed_experts": 6, "moe_intermediate_size": 76, "use_qk_norm": True,
        "routed_scaling_factor": 1.7, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1,
    },
    "lfm2_moe": {
        "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "norm_eps": 1e-5, "conv_L_cache": 4,
        "bos_token_id": 1, "eos_token_id": 2, "num_dense_layers": 1, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 76, "routed_scaling_factor": 1.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "gpt_oss": {
        "bos_token_id": 1, "eos_token_id": 2, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 33,
        "intermediate_size": 76, "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": {
            "rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 64, "rope_theta": 150000.0,
        },
    },
}  # fmt: skip
# Families whose layers are those above in other arrangements; tests of kernels and passes take FAMILIES.
LATER_FAMILIES = (
    "smollm3", "granite", "olmo2", "olmo3", "exaone4", "stablelm", "nemotron", "starcoder2", "phi", "phi3", "cohere",
    "cohere2", "ernie4_5", "glm", "glm4",
)  # fmt: skip
EXPERT_FAMILIES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "phimoe", "ernie4_5_moe", "glm4_moe",
    "lfm2_moe", "gpt_oss",
)  # fmt: skip


def random_checkpoint(
    folder: Path,
    family: str,
    seed: int = 0,
    *,
    dtype: str = "float32",
    max_shard_size: str = "2MB",
    old_spelling: bool = False,
    **overrides: object,
) -> Path:
    """Write config.json, sharded safetensors, generation_config.json and a tokenizer with a chat template; the folder.

    overrides: keys of the family's transformers configuration, over ODD_SIZES
    dtype: of the stored weights; the same seed gives the same weights up to its rounding
    old_spelling: config.json with rope_theta, rope_scaling and torch_dtype
    """
    import torch
    import transformers

    sizes = {**ODD_SIZES, **_OWN[family], **overrides}
    config = transformers.AutoConfig.for_model(family, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _randomise(model, seed, zero_centred_norms=family.startswith("gemma"))
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    if family.startswith("qwen"):
        save_byte_level(folder)
    else:
        save_byte_fallback(folder, decoder="keep" if family.startswith("gemma") else "strip")
    if old_spelling:
        _rewrite(folder / "config.json")
    return folder


ENCODERS: Mapping[str, Callable[..., None]] = {
    "bert": save_word_pieces, "roberta": save_roberta, "xlm-roberta": save_xlm_roberta, "camembert": save_xlm_roberta,
    "nomic_bert": save_word_pieces, "mpnet": save_roberta,
}  # fmt: skip
MODULES = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}


def random_encoder(
    folder: Path, seed: int = 0, *, family: str = "bert", pooling: str | None = "mean", normalised: bool = True,
    dtype: str = "float32", tokenizer: Mapping[str, object] | None = None, **overrides: object,
) -> Path:  # fmt: skip
    """Write a BERT, or an encoder of a similar family, as sentence-transformers saves one; the folder.

    pooling: None leaves the folder without modules.json; tokenizer: keys of tokenizer_config.json
    overrides: keys of the family's transformers configuration
    """
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(family, **{**BERT_SIZES, **overrides})
    model = transformers.AutoModel.from_config(config)
    _randomise(model, seed, zero_centred_norms=False)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    ENCODERS[family](folder, **(tokenizer or {}))
    if pooling is not None:
        write_modules(folder, ("Transformer", "Pooling", *(("Normalize",) if normalised else ())))
        said = {
            "word_embedding_dimension": config.hidden_size,
            f"pooling_mode_{pooling}{'_token' if pooling == 'cls' else '_tokens'}": True,
        }
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(said))
        (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 100, "do_lower_case": false}')
    return folder


def random_cross_encoder(
    folder: Path, seed: int = 0, *, family: str = "bert", activation: str | None = None, **overrides: object
) -> Path:
    """Write a cross-encoder, as sentence-transformers 4 saves one; the folder.

    activation: of torch.nn; None: nothing is said. overrides: keys of the family's transformers configuration
    """
    import transformers

    own = {} if family == "bert" else {"type_vocab_size": 1, "max_position_embeddings": 132}
    config = transformers.AutoConfig.for_model(family, num_labels=1, **{**BERT_SIZES, **own, **overrides})
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    _randomise(model, seed, zero_centred_norms=False)
    model.save_pretrained(folder)
    ENCODERS[family](folder)
    if activation is not None:
        raw = json.loads((folder / "config.json").read_text())
        module = "linear" if activation == "Identity" else "activation"
        raw["sentence_transformers"] = {"activation_fn": f"torch.nn.modules.{module}.{activation}", "version": "4.0.1"}
        (folder / "config.json").write_text(json.dumps(raw))
    return folder


def write_modules(folder: Path, names: Sequence[str]) -> None:
    modules = [
        {"idx": i, "name": str(i), "path": MODULES.get(name, name), "type": f"sentence_transformers.models.{name}"}
        for i, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))


def _randomise(model: Any, seed: int, zero_centred_norms: bool) -> None:
    """Attention scores, activations and logits of a standard deviation of about 1 to 3, so that every term matters."""
    import torch

    rng = np.random.default_rng(seed)
    biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("_bias")]  # of experts
    for name, parameter in sorted([*model.named_parameters(), *biases]):
        shape = tuple(parameter.shape)
        noise = rng.standard_normal(shape, dtype=np.float32)
        if name.lower().endswith("norm.weight"):
            value = 0.2 * noise + (0.0 if zero_centred_norms else 1.0)
        elif name.endswith(("bias", ".sinks")):
            value = 0.3 * noise
        elif "embed" in name or "lm_head" in name:
            value = 0.15 * noise  # a normed row has length sqrt(hidden): logits of 0.15 * sqrt(320) = 2.7
        else:
            value = 1.2 * noise / np.sqrt(np.float32(shape[-1]))
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(np.asarray(value, np.float32)))


def _rewrite(path: Path) -> None:
    raw = json.loads(path.read_text())
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
    raw["torch_dtype"] = raw.pop("dtype")
    path.write_text(json.dumps(raw, indent=2))
