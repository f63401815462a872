"""The weights as a GGUF file for llama.cpp, and llama.cpp's own quantiser on it."""

import ctypes
import math
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np

from benchmarks.peers.weights import NamedWeights
from millrace.checkpoint.config.layer_windows import LATER_GEMMAS
from millrace.checkpoint.config.model_config import ModelConfig
from millrace.checkpoint.weights.expert_names import stack_name
from millrace.graph.types import Array

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma": "gemma", "gemma2": "gemma2",
    "gemma3_text": "gemma3", "qwen3_moe": "qwen3moe",
}  # fmt: skip
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_INNER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.experts.*.gate_proj": "ffn_gate_exps", "mlp.experts.*.up_proj": "ffn_up_exps",
    "mlp.experts.*.down_proj": "ffn_down_exps",
}  # fmt: skip
_OF_LATER_GEMMAS = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
_F32, _BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
_TYPES = {_F32: gguf.GGMLQuantizationType.F32, _BF16: gguf.GGMLQuantizationType.BF16}
# No tokenizer is written (its kind is "no_vocab"): benchmarks give token ids.
_NO_TOKENIZER = "no_vocab"


def write_gguf(path: Path, weights: NamedWeights, dtype: str) -> None:
    """`dtype` of the matrices: "f32" or "bf16"; norms and biases are float32, as llama.cpp wants them.

    raises KeyError for a family or a tensor that has no place here
    """
    config = weights.config
    unfinished = path.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, ARCHITECTURES[config.family])
    assert config.rope.kind == "default", "no scaling of rotary positions is written here"
    describe(writer, config)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model(_NO_TOKENIZER)
    stacks = _stacks(weights)
    for name, parts in stacks.items():
        shape = weights.shapes[parts[0]] if len(parts) == 1 else (len(parts), *weights.shapes[parts[0]])
        kind = _stored_as(name, shape, dtype)
        stored = gguf_name(name, config.family)
        writer.add_tensor_info(stored, shape, kind, math.prod(shape) * kind.itemsize, raw_dtype=_TYPES[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, parts in stacks.items():
        kind = _stored_as(name, weights.shapes[parts[0]], dtype)
        arrays = [_arranged(weights, part).astype(kind) for part in parts]
        x = arrays[0] if len(parts) == 1 else np.stack(arrays)
        writer.write_tensor_data(x.view(np.uint8))
    writer.close()
    unfinished.rename(path)


def _stacks(weights: NamedWeights) -> dict[str, list[str]]:
    """The tensors that become one, by its name: one of each expert, or a tensor by itself."""
    result: dict[str, list[str]] = {}
    for name in weights.shapes:
        result.setdefault(stack_name(name), []).append(name)
    return result


def gguf_name(name: str, family: str = "llama") -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight"""
    module, end = name.rsplit(".", 1)
    if module in _OUTER:
        return f"{_OUTER[module]}.{end}"
    _, _, layer, rest = module.split(".", 3)
    own = _OF_LATER_GEMMAS if family in LATER_GEMMAS else {}
    return f"blk.{layer}.{own.get(rest) or _INNER[rest]}.{end}"


def quantise(source: Path, path: Path, ftype: str) -> None:
    """llama.cpp's own quantisation of a GGUF file; ftype as in llama_cpp.LLAMA_FTYPE_MOSTLY_*.

    "F32" is the other way: the weights that the codes of a quantised file stand for. "Q4_0+Q8_0": with a head of Q8_0.
    """
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    ftype, _, head = ftype.partition("+")
    if head:
        params.output_tensor_type = gguf.GGMLQuantizationType[head].value
    params.ftype = getattr(llama_cpp, "LLAMA_FTYPE_ALL_F32" if ftype == "F32" else f"LLAMA_FTYPE_MOSTLY_{ftype}")
    params.allow_requantize = ftype == "F32"
    unfinished = path.with_suffix(".unfinished")
    failed = llama_cpp.llama_model_quantize(bytes(source), bytes(unfinished), ctypes.byref(params))
    if failed:
        raise RuntimeError(f"llama_model_quantize to {ftype} gave {failed}")
    unfinished.rename(path)


def read_per_step(path: Path) -> int:
    """Bytes of weights that one decode step reads: all, but of an embedding that is not the head as well, nothing."""
    tensors = {t.name: int(t.n_bytes) for t in gguf.GGUFReader(path).tensors}
    looked_up = tensors["token_embd.weight"] if "output.weight" in tensors else 0
    return sum(tensors.values()) - looked_up


def head_type(path: Path) -> str:
    """Of the head, which is the embedding where it has no matrix of its own."""
    tensors = {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}
    return str(tensors.get("output.weight", tensors["token_embd.weight"]))


def types(path: Path) -> dict[str, int]:
    """How many matrices are stored in which type: quantisers fall back where a row does not divide into blocks."""
    matrices = (t for t in gguf.GGUFReader(path).tensors if len(t.shape) > 1)
    return dict(Counter(t.tensor_type.name for t in matrices))


def describe(writer: gguf.GGUFWriter, c: ModelConfig) -> None:
    """The model's sizes; neither its tokenizer nor a scaling of rotary positions."""
    writer.add_context_length(c.max_context)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.n_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.n_heads)
    writer.add_head_count_kv(c.n_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_rope_freq_base(c.rope.theta)
    writer.add_rope_dimension_count(c.head_dim)
    if c.experts is not None:
        writer.add_expert_count(c.experts.count)
        writer.add_expert_used_count(c.experts.routing.chosen)
        writer.add_expert_feed_forward_length(c.experts.size)
    if window := max(c.windows, default=0):
        writer.add_sliding_window(window)
    if c.attention_softcap:
        writer.add_attn_logit_softcapping(c.attention_softcap)
    if c.logits_softcap:
        writer.add_final_logit_softcapping(c.logits_softcap)
    if c.local_rope is not None:
        writer.add_float32(f"{writer.arch}.rope.freq_base_swa", c.local_rope.theta)


def neighbours(x: Array, heads: int) -> Array:
    """x (heads * D, ...) as llama.cpp's llama graphs rotate it: neighbours, where Hugging Face's rotate halves of D."""
    return x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def _stored_as(name: str, shape: tuple[int, ...], dtype: str) -> "np.dtype[Any]":
    """Routers are float32, as llama.cpp's converter writes them."""
    return _BF16 if dtype == "bf16" and len(shape) > 1 and not name.endswith("mlp.gate.weight") else _F32


def _arranged(weights: NamedWeights, name: str) -> Array:
    """The tensor as llama.cpp wants it."""
    x = np.asarray(weights.load(name), np.float32)
    c = weights.config
    heads = {"q_proj": c.n_heads, "k_proj": c.n_kv_heads}.get(name.rsplit(".", 2)[-2])
    return x if c.family != "llama" or heads is None else np.ascontiguousarray(neighbours(x, heads))
