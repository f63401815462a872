"""Reads `config.json` into a typed, frozen `ModelConfig`: every key is used, refused, or listed in a note.

Both of today's spellings are read: `rope_theta`, `rope_scaling`, `torch_dtype`, and `rope_parameters`, `dtype`.
Defaults of missing keys are those of the family's configuration class in transformers 5.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

from millrace.checkpoint.config.config_keys import ACTIVATIONS
from millrace.checkpoint.config.config_reader import (
    HEAD_SIZES,
    MAX_LAYERS,
    ConfigReader,
    Raw,
    check_keys,
    family_of,
    head_fits,
    positive_number,
    read_dtype,
    token_ids,
    wrong,
)
from millrace.checkpoint.config.expert_config import ExpertConfig, read_experts
from millrace.checkpoint.config.families.family import ModelFamily
from millrace.checkpoint.config.layer_windows import CONVOLVING, LATER_GEMMAS, read_rotates, read_windows
from millrace.checkpoint.config.rope_config import RopeConfig, read_ropes

MAX_TAPS = 8  # kernel size of a short convolution


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Configuration of a decoder, with the same names for all families."""

    architecture: str  # "LlamaForCausalLM"
    family: str  # a name of config_keys.FAMILIES
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int  # tokens
    norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    attention_bias: bool  # on q_proj, k_proj, v_proj
    attention_output_bias: bool  # on o_proj
    mlp_bias: bool
    activation: str  # "silu" | "gelu_tanh" | "squared_relu"
    dtype: str  # "float32" | "float16" | "bfloat16"
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    notes: tuple[str, ...]  # to be shown to the user
    # per layer: window size in tokens, including the token itself; 0: full attention. (): full attention in all layers
    windows: tuple[int, ...] = ()
    local_rope: RopeConfig | None = None  # of layers with a window; None: same as the others
    attention_sinks: bool = False  # each head has a further score, whose value is zero
    attention_scale: float | None = None  # of scores; None: head_dim ** -0.5
    attention_softcap: float = 0.0  # of attention scores; 0: none
    logits_softcap: float = 0.0  # of logits; 0: none
    qk_norm: str = ""  # RMSNorm of queries and keys before the rotation: "head", "full" (all heads as one row), or ""
    rotates: tuple[bool, ...] = ()  # whether each layer has rotary positions; (): all have
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what attention and MLP add
    logits_multiplier: float = 1.0
    norm: str = (
        "rms"  # of the residual stream: "rms", "layer", "layer_without_bias", "layer_offset" (stored as weight - 1)
    )
    gated_mlp: bool = True
    parallel_residual: bool = (
        False  # attention and MLP read the same normed row, and both are added to the residual stream
    )
    head_bias: bool = False
    # Whether each layer is a short convolution over `conv_taps` tokens instead of attention. (): none is.
    convolves: tuple[bool, ...] = ()
    conv_taps: int = 0
    conv_bias: bool = False
    experts: ExpertConfig | None = None

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts instead of one MLP."""
        return self.experts is not None and self.experts.layers[layer]

    def has_rotary(self, layer: int) -> bool:
        """Return whether a layer has rotary positions."""
        return not self.rotates or self.rotates[layer]

    def window_of(self, layer: int) -> int:
        """Return the window of a layer; 0 if it has none, or if it covers the whole context."""
        window = self.windows[layer] if self.windows else 0
        return window if window < self.max_context else 0


def read_config(raw: Raw) -> ModelConfig:
    """Parse config.json of a decoder. raises CheckpointError that names the key, its value and what was expected"""
    family = family_of(raw)
    assert not family.is_encoder, family  # read by checkpoint/config/encoder_config.py
    raw = _renamed_keys(raw, family)
    notes = check_keys(raw, family)
    read = ConfigReader(raw, family)
    n_layers = read.positive_int("num_hidden_layers", high=MAX_LAYERS)
    n_heads = read.positive_int("num_attention_heads")
    hidden_size = read.positive_int("hidden_size")
    vocab_size = read.positive_int("vocab_size")
    max_positions = read.positive_int("max_position_embeddings")
    attention_bias, output_bias = _attention_bias(read)
    head_dim = _head_dim(read, hidden_size, n_heads)
    bos, eos, token_notes = _tokens(read, vocab_size)
    (rope, local_rope), rope_notes = read_ropes(read, max_positions)
    rope = _with_width(read, rope, head_dim)
    rotates = read_rotates(read, n_layers)
    return ModelConfig(
        architecture=family.architecture,
        family=family.name,
        hidden_size=hidden_size,
        intermediate_size=_intermediate_size(read),
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=_kv_heads(read, n_heads),
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_context=max_positions,
        norm_eps=read.positive_float(next(key for key in _EPS_KEYS if key in family.defaults)),
        rope=rope,
        tie_embeddings=_tied(read),
        attention_bias=attention_bias,
        attention_output_bias=output_bias,
        mlp_bias=_mlp_bias(read),
        activation=_activation(read),
        windows=read_windows(read, n_layers, rotates),
        local_rope=local_rope,
        attention_scale=_attention_scale(read, head_dim),
        attention_softcap=_softcap(read, "attn_logit_softcapping"),
        logits_softcap=_softcap(read, "final_logit_softcapping"),
        qk_norm=_qk_norm(read),
        rotates=rotates,
        attention_sinks=family.attention_sinks,
        embedding_multiplier=_multiplier(read, "embedding_multiplier"),
        residual_multiplier=_multiplier(read, "residual_multiplier"),
        logits_multiplier=_multiplier(read, "logit_scale") / _multiplier(read, "logits_scaling"),
        norm=family.norm,
        gated_mlp=family.gated_mlp,
        parallel_residual=family.parallel_residual
        or ("use_parallel_residual" in family.defaults and read.boolean("use_parallel_residual")),
        head_bias=_head_bias(read),
        **_layer_kinds(read, n_layers),
        dtype=read_dtype(raw),
        bos_token_id=bos,
        eos_token_ids=eos,
        notes=(*notes, *rope_notes, *token_notes),
    )


def _renamed_keys(raw: Raw, family: ModelFamily) -> Raw:
    """Return config.json with today's names of keys."""
    result = {key: value for key, value in raw.items() if key not in family.older_keys}
    for older, key in family.older_keys.items():
        if older in raw and raw.get(key, raw[older]) != raw[older]:
            raise wrong(older, raw[older], f"{raw[key]!r}, as {key} says, which is another name of it")
        if older in raw:
            result[key] = raw[older]
    return result


def _kv_heads(read: ConfigReader, n_heads: int) -> int:
    n_kv_heads = read.positive_int("num_key_value_heads", missing=n_heads)
    if n_heads % n_kv_heads:
        raise wrong("num_key_value_heads", n_kv_heads, f"a divisor of num_attention_heads {n_heads}")
    return n_kv_heads


def _head_bias(read: ConfigReader) -> bool:
    return read.family.name == "phi" or ("lm_head_bias" in read.family.defaults and read.boolean("lm_head_bias"))


def _layer_kinds(read: ConfigReader, n_layers: int) -> dict[str, Any]:
    """Return the fields for layers that are not attention and one MLP."""
    convolutions = _lfm2_convolutions(read, n_layers) if read.family.name in CONVOLVING else {}
    return {**convolutions, "experts": read_experts(read, n_layers)}


def _qk_norm(read: ConfigReader) -> str:
    if "use_qk_norm" in read.family.defaults:
        return "head" if read.boolean("use_qk_norm") else ""
    return read.family.qk_norm


def _attention_scale(read: ConfigReader, head_dim: int) -> float | None:
    if "attention_multiplier" in read.family.defaults:
        scale = read.positive_float("attention_multiplier")
        return None if scale == head_dim**-0.5 else scale
    if read.family.name not in LATER_GEMMAS:
        return None
    size = read.positive_float("query_pre_attn_scalar")
    return None if size == head_dim else size**-0.5


def _head_dim(read: ConfigReader, hidden_size: int, n_heads: int) -> int:
    usual = read.family.defaults.get("head_dim")
    value = read.raw.get("head_dim", usual)
    if value is None and usual is None:
        if hidden_size % n_heads:
            raise wrong(
                "hidden_size", hidden_size, f"a multiple of num_attention_heads {n_heads}, or an explicit head_dim"
            )
        head_dim = hidden_size // n_heads
    else:
        head_dim = read.positive_int("head_dim")
    if not head_fits(head_dim):
        raise wrong("head_dim", head_dim, HEAD_SIZES)
    return head_dim


def _attention_bias(read: ConfigReader) -> tuple[bool, bool]:
    """Return whether q/k/v and o have a bias: by architecture, or as configured."""
    if "use_bias" in read.family.defaults:
        return read.boolean("use_bias"), read.boolean("use_bias")
    if "use_qkv_bias" in read.family.defaults:
        return read.boolean("use_qkv_bias"), False
    if "attention_bias" not in read.family.defaults:
        return read.family.name in ("qwen2", "phi"), read.family.name == "phi"
    has = read.boolean("attention_bias")
    return has, has and read.family.name not in ("glm", "glm4", "glm4_moe", "qwen2_moe")


def _mlp_bias(read: ConfigReader) -> bool:
    key = next((key for key in ("mlp_bias", "use_bias") if key in read.family.defaults), None)
    return read.boolean(key) if key is not None else read.family.name == "phi"


def _with_width(read: ConfigReader, rope: RopeConfig, head_dim: int) -> RopeConfig:
    """Return the rotary embedding with its part of the head, which the family or config.json says."""
    family, share = read.family, read.family.rotary_share
    if "partial_rotary_factor" in family.defaults:
        nested = cast(dict[str, object], read.raw.get("rope_parameters") or {}).get("partial_rotary_factor")
        value = read.get("partial_rotary_factor") if nested is None else nested
        share = share if value is None else positive_number("partial_rotary_factor", value)
    width = int(head_dim * share)
    if share > 1 or width < 2 or width % 2:
        raise wrong("partial_rotary_factor", share, f"a share of a head of {head_dim} that is an even number")
    for name, factors in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors)):
        if rope.kind == "longrope" and len(factors) != width // 2:
            raise wrong(name, f"{len(factors)} numbers", f"{width // 2}, one for each frequency")
    return replace(rope, rotary_dim=0 if width == head_dim else width, interleaved=family.interleaved)


def _intermediate_size(read: ConfigReader) -> int:
    """Return the width of the MLP; of LFM2 derived like in transformers' Lfm2MLP."""
    if "block_ff_dim" not in read.family.defaults:
        return read.positive_int("intermediate_size")
    inner = read.positive_int("intermediate_size" if read.get("block_ff_dim") is None else "block_ff_dim")
    if not read.boolean("block_auto_adjust_ff_dim"):
        return inner
    inner = int(2 * inner / 3)
    if read.get("block_ffn_dim_multiplier") is None:
        return inner
    inner, multiple = (
        int(read.positive_float("block_ffn_dim_multiplier") * inner),
        read.positive_int("block_multiple_of"),
    )
    return -(-inner // multiple) * multiple


def _lfm2_convolutions(read: ConfigReader, n_layers: int) -> dict[str, Any]:
    types, attending = read.get("layer_types"), read.get("full_attn_idxs")  # an older key, which LFM2 MoE never had
    if types is None:
        idxs = list(range(n_layers)) if attending is None else attending
        if not isinstance(idxs, list) or not all(type(i) is int and 0 <= i < n_layers for i in idxs):
            raise wrong("full_attn_idxs", idxs, f"a list of layers, from 0 to {n_layers - 1}")
        types = ["full_attention" if layer in idxs else "conv" for layer in range(n_layers)]
    if not isinstance(types, list) or len(types) != n_layers or not set(map(str, types)) <= {"conv", "full_attention"}:
        raise wrong("layer_types", types, f"a list of {n_layers} names, conv or full_attention")
    taps = read.positive_int("conv_L_cache")
    if not 2 <= taps <= MAX_TAPS:
        raise wrong("conv_L_cache", taps, f"2 to {MAX_TAPS}: no kernel takes others")
    return {
        "convolves": tuple(kind == "conv" for kind in types),
        "conv_taps": taps,
        "conv_bias": read.boolean("conv_bias"),
    }


def _tied(read: ConfigReader) -> bool:
    """Return whether the head is tied. LFM2 has another key for it, which takes precedence as in transformers."""
    other = read.family.name in CONVOLVING and read.get("tie_embedding") is not None
    return read.boolean("tie_embedding" if other else "tie_word_embeddings")


def _multiplier(read: ConfigReader, key: str) -> float:
    """Return a multiplier; 1 if the family has none."""
    return read.positive_float(key) if key in read.family.defaults else 1.0


def _softcap(read: ConfigReader, key: str) -> float:
    """Return a softcap; 0 if the family has none."""
    return 0.0 if key not in read.family.defaults or read.get(key) is None else read.positive_float(key)


def _activation(read: ConfigReader) -> str:
    if read.family.name in CONVOLVING:
        return "silu"
    if read.family.name in LATER_GEMMAS:
        if (raw_value := read.get("hidden_activation")) != "gelu_pytorch_tanh":
            raise wrong("hidden_activation", raw_value, "gelu_pytorch_tanh, the activation of every Gemma")
        return "gelu_tanh"
    name = read.get("hidden_act")
    gemma = read.family.name == "gemma"
    if gemma and name == "gelu":
        name = "gelu_pytorch_tanh"  # official Gemma files say "gelu" but mean the tanh form (transformers PR 29402)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise wrong("hidden_act", name, "one of " + ", ".join(sorted(ACTIVATIONS)))
    if gemma:
        # transformers 4 used hidden_activation and ignored hidden_act, transformers 5 does the opposite.
        for key in ("hidden_act", "hidden_activation"):
            value = name if key == "hidden_act" else read.get(key)
            if value is not None and ACTIVATIONS.get(str(value)) != "gelu_tanh":
                raise wrong(key, value, "gelu_pytorch_tanh, the activation of every Gemma")
    return ACTIVATIONS[name]


_EPS_KEYS = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "norm_epsilon")


def _tokens(read: ConfigReader, vocab_size: int) -> tuple[int | None, tuple[int, ...], tuple[str, ...]]:
    bos = token_ids("config.json", "bos_token_id", read.get("bos_token_id"))
    eos = token_ids("config.json", "eos_token_id", read.get("eos_token_id"))
    if len(bos) > 1:
        raise wrong("bos_token_id", list(bos), "one id or null")
    notes = tuple(
        f"{name} {i} lies outside the vocabulary of {vocab_size}: it can never be produced"
        for name, ids in (("bos_token_id", bos), ("eos_token_id", eos))
        for i in ids
        if i >= vocab_size
    )
    return (bos[0] if bos else None), eos, notes
