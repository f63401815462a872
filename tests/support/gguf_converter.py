"""Checkpoints of the later families as llama.cpp's convert_hf_to_gguf.py writes them.

Independent of Millrace's reader: names are those of `gguf.tensor_mapping`, keys and changes of tensors follow the
converter's classes (conversion/*.py of llama.cpp), and config.json is read as it is.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors import safe_open

from tests.support.gguf_files import Edit, KindOf, add_tensor, add_tokenizer

Array = np.ndarray[Any, np.dtype[Any]]
Raw = Mapping[str, Any]
_A = gguf.MODEL_ARCH
ARCHITECTURES: Mapping[str, gguf.MODEL_ARCH] = {
    "mixtral": _A.LLAMA, "qwen2_moe": _A.QWEN2MOE, "qwen3_moe": _A.QWEN3MOE, "olmoe": _A.OLMOE,
    "granitemoe": _A.GRANITE_MOE, "phimoe": _A.PHIMOE, "ernie4_5_moe": _A.ERNIE4_5_MOE, "glm4_moe": _A.GLM4_MOE,
    "granite": _A.GRANITE, "smollm3": _A.SMOLLM3, "olmo2": _A.OLMO2, "olmo3": _A.OLMO2, "exaone4": _A.EXAONE4,
    "stablelm": _A.STABLELM, "nemotron": _A.NEMOTRON, "starcoder2": _A.STARCODER2, "phi": _A.PHI2, "phi3": _A.PHI3,
    "cohere": _A.COMMAND_R, "cohere2": _A.COHERE2, "ernie4_5": _A.ERNIE4_5, "glm": _A.CHATGLM, "glm4": _A.GLM4,
    "lfm2": _A.LFM2,
}  # fmt: skip
# What files of a family can say; elsewhere llama.cpp fixes it, so the checkpoints must have it so.
_YARN = {"rope_type": "yarn", "factor": 8.0, "rope_theta": 5e5, "original_max_position_embeddings": 64}
OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "mixtral": {"sliding_window": None},
    "qwen2_moe": {"mlp_only_layers": []},
    "qwen3_moe": {},
    "olmoe": {"num_key_value_heads": 5},
    "granitemoe": {},
    "phimoe": {},
    "ernie4_5_moe": {"intermediate_size": 76, "use_bias": False},
    "glm4_moe": {},
    "granite": {},
    "smollm3": {"num_hidden_layers": 5, "no_rope_layers": None},
    "olmo2": {},
    "olmo3": {
        "rope_parameters": {
            "full_attention": _YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        },
    },
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    "stablelm": {},
    "nemotron": {"head_dim": 64},
    "starcoder2": {"sliding_window": None},
    "phi": {"intermediate_size": 1280, "num_key_value_heads": 5},
    "phi3": {"sliding_window": None},
    "cohere": {"attention_bias": False},  # llama.cpp has none on o_proj
    "cohere2": {"num_hidden_layers": 5, "layer_types": None},
    "ernie4_5": {"use_bias": False},
    "glm": {},
    "glm4": {},
    "lfm2": {"conv_bias": False, "layer_types": ["conv", "full_attention", "conv"],
             "num_hidden_layers": 3},
}  # fmt: skip
_PERMUTED = ("mixtral", "granite", "granitemoe", "smollm3")
_STACK = re.compile(r"(model\.layers\.\d+\.(?:mlp|block_sparse_moe)\.experts)\.(\d+)\.(\w+)\.weight")


def convert(
    path: Path, folder: Path, kind: Kind | KindOf = Kind.F32, *, edit: Edit | None = None, part: int | None = None
) -> Path:
    """Write the checkpoint in `folder` as a GGUF file.

    edit: changes metadata; part: tensors in each part of a split file
    """
    raw = json.loads((folder / "config.json").read_text())
    family, n_layers = raw["model_type"], raw["num_hidden_layers"]
    arch = ARCHITECTURES[family]
    size = {} if part is None else {"split_max_tensors": part}
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch], **size)
    _add_keys(writer, family, raw)
    add_tokenizer(writer, folder, n_tokens=raw["vocab_size"])
    names = gguf.get_tensor_name_map(arch, n_layers)
    for name, array in _changed(family, raw, dict(_stacked(_tensors(folder)))):
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        stored = stored or (name if name.startswith(("blk.", "rope_f")) else None)
        assert stored is not None, f"gguf has no name for {name}"
        is_float = "ffn_gate_inp" in stored or "shortconv.conv" in stored
        one = kind if isinstance(kind, Kind) else kind(stored)
        add_tensor(writer, stored, array, Kind.F32 if min(array.shape) == 1 or array.ndim < 2 or is_float else one)
    if edit:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(folder: Path) -> Iterator[tuple[str, Array]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "numpy") as opened:
            for name in list(opened.keys()):
                yield name, opened.get_tensor(name)


def _stacked(tensors: Iterator[tuple[str, Array]]) -> Iterator[tuple[str, Array]]:
    """Yield the tensors with the matrices of all experts as one."""
    stacks: dict[str, dict[int, Array]] = {}
    for name, array in tensors:
        if match := _STACK.fullmatch(name):
            stacks.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = array
        else:
            yield name, array
    for name, experts in stacks.items():
        yield name, np.stack([experts[i] for i in range(len(experts))])


def permuted(x: Array, heads: int) -> Array:
    """LlamaModel.permute of the converter."""
    return x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def _changed(family: str, raw: Raw, tensors: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
    n_heads = raw["num_attention_heads"]
    for name, value in tensors.items():
        array = value.astype(np.float32) if value.dtype == ml_dtypes.bfloat16 else value
        if family in _PERMUTED and ".q_proj." in name:
            array = permuted(array, n_heads)
        if family in _PERMUTED and ".k_proj." in name:
            array = permuted(array, raw["num_key_value_heads"])
        if family == "nemotron" and name.endswith("norm.weight"):
            array = array + np.float32(1)
        if family == "lfm2" and ".conv.conv." in name:
            array = array.squeeze(1)
        if name.endswith("input_linear.weight"):
            layer, half = name.split(".")[2], array.shape[1] // 2
            yield f"blk.{layer}.ffn_gate_exps.weight", array[:, :half]
            yield f"blk.{layer}.ffn_up_exps.weight", array[:, half:]
            continue
        if name.endswith("e_score_correction_bias"):
            yield f"blk.{name.split('.')[2]}.exp_probs_b.bias", array
            continue
        if not (name == "lm_head.weight" and raw.get("tie_word_embeddings")):
            yield name, array
    rope = raw.get("rope_parameters") or {}
    if rope.get("long_factor"):
        yield "rope_factors_long.weight", np.asarray(rope["long_factor"], np.float32)
        yield "rope_factors_short.weight", np.asarray(rope["short_factor"], np.float32)
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_divisors(rope, raw["head_dim"])


def _llama3_divisors(rope: Raw, size: int) -> Array:
    result = []
    low, high = (rope["original_max_position_embeddings"] / rope[f"{k}_freq_factor"] for k in ("low", "high"))
    for i in range(0, size, 2):
        length = 2 * np.pi * rope["rope_theta"] ** (i / size)
        share = (rope["original_max_position_embeddings"] / length - rope["low_freq_factor"]) / (
            rope["high_freq_factor"] - rope["low_freq_factor"]
        )
        usual = 1 / ((1 - share) / rope["factor"] + share)
        result.append(1 if length < high else rope["factor"] if length > low else usual)
    return np.asarray(result, np.float32)


def _add_keys(writer: gguf.GGUFWriter, family: str, raw: Raw) -> None:
    """TextModel.set_gguf_parameters, then that of the family's class."""
    rope: dict[str, Any] = raw.get("rope_parameters") or {}
    local: Raw | None = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    kv_heads = raw.get("num_key_value_heads")
    if family == "lfm2":
        kv_heads = [0 if kind == "conv" else kv_heads for kind in raw["layer_types"]]
    size = raw["hidden_size"] // raw["num_attention_heads"]
    add: list[tuple[Callable[..., None], Any]] = [
        (writer.add_block_count, raw["num_hidden_layers"]), (writer.add_context_length, raw["max_position_embeddings"]),
        (writer.add_embedding_length, raw["hidden_size"]), (writer.add_feed_forward_length, raw["intermediate_size"]),
        (writer.add_head_count, raw["num_attention_heads"]),
        (writer.add_head_count_kv, kv_heads or raw["num_attention_heads"]),
        (writer.add_layer_norm_rms_eps, raw.get("rms_norm_eps", raw.get("norm_eps"))),
        (writer.add_layer_norm_eps, raw.get("layer_norm_eps", raw.get("norm_epsilon"))),
        (writer.add_key_length, raw.get("head_dim")), (writer.add_value_length, raw.get("head_dim")),
        (writer.add_rope_freq_base, rope.get("rope_theta")),
        (writer.add_rope_freq_base_swa, local and local["rope_theta"]),
        (writer.add_expert_count, raw.get("num_local_experts", raw.get("num_experts", raw.get("n_routed_experts")))),
        (writer.add_expert_used_count, raw.get("num_experts_per_tok")),
        (writer.add_expert_group_count, raw.get("n_group")),
        (writer.add_expert_group_used_count, raw.get("topk_group")),
    ]  # fmt: skip
    for method, value in add:
        if value is not None:
            method(value)
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    share = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if share is not None:
        writer.add_rope_dimension_count(int(share * (raw.get("head_dim") or size)))
    if (more := _OF_FAMILY.get(family)) is not None:
        more(writer, raw)


def _granite(writer: gguf.GGUFWriter, raw: Raw) -> None:
    writer.add_attention_scale(raw["attention_multiplier"])
    writer.add_embedding_scale(raw["embedding_multiplier"])
    writer.add_residual_scale(raw["residual_multiplier"])
    writer.add_logit_scale(raw["logits_scaling"])


def _windows(writer: gguf.GGUFWriter, raw: Raw) -> None:
    if raw["sliding_window"] is not None:
        writer.add_sliding_window(raw["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in raw["layer_types"]])


def _cohere(writer: gguf.GGUFWriter, raw: Raw) -> None:
    writer.add_logit_scale(raw["logit_scale"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if raw.get("sliding_window"):
        writer.add_sliding_window(raw["sliding_window"])


def _qwen_moe(writer: gguf.GGUFWriter, raw: Raw) -> None:
    writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in raw:
        writer.add_expert_shared_feed_forward_length(raw["shared_expert_intermediate_size"])


def _ernie_moe(writer: gguf.GGUFWriter, raw: Raw) -> None:
    writer.add_expert_count(raw["moe_num_experts"])
    writer.add_expert_used_count(raw["moe_k"])
    writer.add_interleave_moe_layer_step(raw["moe_layer_interval"])
    writer.add_leading_dense_block_count(raw["moe_layer_start_index"])
    writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
    writer.add_expert_shared_count(raw["moe_num_shared_experts"])
    writer.add_expert_shared_feed_forward_length(raw["intermediate_size"] // raw["num_key_value_heads"])


def _glm4_moe(writer: gguf.GGUFWriter, raw: Raw) -> None:
    writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
    writer.add_expert_shared_count(raw["n_shared_experts"])
    writer.add_leading_dense_block_count(raw["first_k_dense_replace"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(raw["routed_scaling_factor"])
    writer.add_expert_weights_norm(raw["norm_topk_prob"])


def _phi3(writer: gguf.GGUFWriter, raw: Raw) -> None:
    original, context = raw.get("original_max_position_embeddings"), raw["max_position_embeddings"]
    writer.add_rope_scaling_orig_ctx_len(original or context)
    writer.add_sliding_window(raw["sliding_window"] or 0)
    if original and context > original:
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(context / original) / np.log(original))))


def _lfm2(writer: gguf.GGUFWriter, raw: Raw) -> None:
    writer.add_shortconv_l_cache(raw["conv_L_cache"])
    writer.add_vocab_size(raw["vocab_size"])


def _layer_norm(writer: gguf.GGUFWriter, raw: Raw) -> None:
    writer.add_layer_norm_eps(raw["norm_eps"])


_OF_FAMILY: Mapping[str, Callable[[gguf.GGUFWriter, Raw], None]] = {
    "granite": _granite, "granitemoe": _granite, "olmo3": _windows, "exaone4": _windows, "cohere": _cohere,
    "cohere2": _cohere, "qwen2_moe": _qwen_moe, "qwen3_moe": _qwen_moe, "ernie4_5_moe": _ernie_moe,
    "glm4_moe": _glm4_moe, "phi3": _phi3, "phimoe": _phi3, "lfm2": _lfm2, "nemotron": _layer_norm,
}  # fmt: skip
