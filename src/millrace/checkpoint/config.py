"""`config.json` as a typed, frozen `ModelConfig`: every key is used, refused, or listed in a note.

Both of today's spellings are read: `rope_theta`, `rope_scaling`, `torch_dtype`, and `rope_parameters`, `dtype`.
Defaults of missing keys are those of the family's configuration class in transformers 5.
"""

from dataclasses import dataclass
from typing import cast

from millrace.checkpoint.config_keys import ACTIVATIONS
from millrace.checkpoint.config_reader import (
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
    unread_keys,
    wrong,
)

ROPE_KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding over the whole head, halves rotated against each other (not interleaved).

    inverse frequency i of D/2: theta ** (-2i/D); `linear` divides it by `factor`; `llama3` as transformers does.
    sources: arXiv:2104.09864; arXiv:2306.15595 (linear); Llama 3.1's reference code (llama3)
    """

    theta: float
    kind: str = "default"  # one of ROPE_KINDS
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int | None = None  # only llama3
    divisors: tuple[float, ...] = ()  # (D/2,) of GGUF's rope_freqs.weight: each frequency's own, beside `factor`


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the architecture needs to know of a checkpoint, under one set of names for all families."""

    architecture: str  # "LlamaForCausalLM"
    family: str  # "llama" | "mistral" | "qwen2" | "qwen3" | "gemma"
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int  # tokens; already capped at the sliding window
    norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    attention_bias: bool  # on q_proj, k_proj, v_proj
    attention_output_bias: bool  # on o_proj
    mlp_bias: bool
    activation: str  # "silu" | "gelu_tanh"
    sliding_window: int | None  # tokens; None: every layer attends to everything before it
    dtype: str  # "float32" | "float16" | "bfloat16"
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    notes: tuple[str, ...]  # to be said aloud to the user


def read_config(raw: Raw) -> ModelConfig:
    """`raw`: the parsed config.json of a decoder. Raises CheckpointError naming the key, its value, what it may be."""
    family = family_of(raw)
    assert not family.is_encoder, family  # checkpoint/encoder.py reads these
    notes = check_keys(raw, family)
    read = ConfigReader(raw, family)
    n_layers = read.positive_int("num_hidden_layers", most=MAX_LAYERS)
    n_heads = read.positive_int("num_attention_heads")
    hidden_size = read.positive_int("hidden_size")
    vocab_size = read.positive_int("vocab_size")
    n_kv_heads = read.positive_int("num_key_value_heads", missing=n_heads)
    if n_heads % n_kv_heads:
        raise wrong("num_key_value_heads", n_kv_heads, f"a divisor of num_attention_heads {n_heads}")
    max_positions = read.positive_int("max_position_embeddings")
    window, window_notes = _window(read, n_layers, max_positions)
    attention_bias, output_bias = _attention_bias(read)
    bos, eos, token_notes = _tokens(read, vocab_size)
    rope, rope_notes = _rope(read, max_positions)
    return ModelConfig(
        architecture=family.architecture,
        family=family.name,
        hidden_size=hidden_size,
        intermediate_size=read.positive_int("intermediate_size"),
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=_head_dim(read, hidden_size, n_heads),
        vocab_size=vocab_size,
        max_context=max_positions if window is None else min(window, max_positions),
        norm_eps=read.positive_float("rms_norm_eps"),
        rope=rope,
        tie_embeddings=read.boolean("tie_word_embeddings"),
        attention_bias=attention_bias,
        attention_output_bias=output_bias,
        mlp_bias=family.name == "llama" and read.boolean("mlp_bias"),
        activation=_activation(read),
        sliding_window=window,
        dtype=read_dtype(raw),
        bos_token_id=bos,
        eos_token_ids=eos,
        notes=(*notes, *rope_notes, *window_notes, *token_notes),
    )


def _head_dim(read: ConfigReader, hidden_size: int, n_heads: int) -> int:
    value = read.raw.get("head_dim", read.family.defaults["head_dim"])
    if value is None and read.family.defaults["head_dim"] is None:
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
    """On q/k/v and on o. Qwen2 has the first by architecture; Mistral has none; the rest say it in config.json."""
    if read.family.name in ("qwen2", "mistral"):
        return read.family.name == "qwen2", False
    has = read.boolean("attention_bias")
    return has, has


def _activation(read: ConfigReader) -> str:
    name = read.get("hidden_act")
    gemma = read.family.name == "gemma"
    if gemma and name == "gelu":
        name = "gelu_pytorch_tanh"  # the official Gemma files say "gelu" and mean the tanh form (transformers PR 29402)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise wrong("hidden_act", name, "one of " + ", ".join(sorted(ACTIVATIONS)))
    if gemma:
        # transformers 4 obeyed hidden_activation and ignored hidden_act, transformers 5 does the opposite
        for key in ("hidden_act", "hidden_activation"):
            value = name if key == "hidden_act" else read.get(key)
            if value is not None and ACTIVATIONS.get(str(value)) != "gelu_tanh":
                raise wrong(key, value, "gelu_pytorch_tanh, the activation of every Gemma")
    return ACTIVATIONS[name]


def _window(read: ConfigReader, n_layers: int, max_positions: int) -> tuple[int | None, tuple[str, ...]]:
    """The narrowest window that any layer has (tokens), and a note where it caps the context."""
    types = read.get("layer_types")
    named = isinstance(types, list) and len(types) == n_layers and all(isinstance(kind, str) for kind in types)
    if types is not None and not named:
        raise wrong("layer_types", types, f"a list of {n_layers} names, one per layer")
    name = read.family.name
    window: int | None = None
    if name == "mistral" or (name in ("qwen2", "qwen3") and read.get("use_sliding_window") not in (None, False)):
        window = None if read.get("sliding_window") is None else read.positive_int("sliding_window")
    if name in ("qwen2", "qwen3") and window is not None and types is None:
        first = read.get("max_window_layers")
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise wrong("max_window_layers", first, "a number of layers")
        window = window if first < n_layers else None
    if types is not None:
        kinds = set(cast(list[str], types))
        allowed = {"full_attention", "sliding_attention"} if window is not None else {"full_attention"}
        if name == "mistral" and window is not None:
            allowed = {"sliding_attention"}  # transformers gives every Mistral layer the window, whatever is said here
        if not kinds <= allowed:
            raise wrong("layer_types", sorted(kinds), "only " + " and ".join(sorted(allowed)))
        window = window if "sliding_attention" in kinds else None
    if window is None or window >= max_positions:
        return window, ()
    note = f"context capped at the model's sliding window of {window} tokens (config.json promises {max_positions})"
    return window, (note,)


def _rope(read: ConfigReader, max_positions: int) -> tuple[RopeConfig, tuple[str, ...]]:
    """Return the rotary embedding, with a note on the keys that transformers does not read for its type.

    Two spellings of one value must agree.
    """
    old, new = read.raw.get("rope_scaling"), read.raw.get("rope_parameters")
    for key, value in (("rope_scaling", old), ("rope_parameters", new)):
        if value is not None and not isinstance(value, dict):
            raise wrong(key, value, "an object or null")
    if old and new and old != new:
        raise wrong("rope_scaling", old, f"the same as rope_parameters, which is {new!r}", "remove one of the two")
    key = "rope_scaling" if old else "rope_parameters"
    rope = {k: v for k, v in cast(dict[str, object], old or new or {}).items() if v is not None}
    nested = sorted(k for k, v in rope.items() if isinstance(v, dict))
    if nested:
        raise wrong(
            key,
            rope,
            "one set of values for all layers",
            f"a different RoPE per layer type ({nested[0]}) is not supported",
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if "type" in rope and rope["type"] != kind:
        raise wrong(f"{key}.type", rope["type"], f"the same as rope_type, which is {kind!r}", "remove one of the two")
    if not isinstance(kind, str) or kind not in ROPE_KINDS:
        raise wrong(
            f"{key}.rope_type", kind, "one of " + ", ".join(ROPE_KINDS), "choose a checkpoint without this scaling"
        )
    beside = read.raw.get("rope_theta")
    theta = rope.get("rope_theta", 10_000.0 if beside is None else beside)
    if beside is not None and beside != theta:
        raise wrong("rope_theta", beside, f"the same as in {key}, which is {theta!r}", "remove one of the two")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_SCALING_KEYS[kind]}
    unread = [name for name in rope if name not in known]
    notes = (unread_keys(f"config.json: {key} (rope_type {kind})", unread, known),) if unread else ()
    return _scaled_rope(key, kind, rope, positive_number("rope_theta", theta), max_positions), notes


# What transformers' functions of modeling_rope_utils.py read of a scaling, by its type.
_SCALING_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _scaled_rope(key: str, kind: str, rope: dict[str, object], theta: float, max_positions: int) -> RopeConfig:
    if rope.get("partial_rotary_factor", 1) != 1:
        raise wrong("partial_rotary_factor", rope["partial_rotary_factor"], "1 (rotation of whole heads)")
    for name in _SCALING_KEYS[kind]:
        if name not in rope and name != "original_max_position_embeddings":
            raise wrong(f"{key}.{name}", None, f"a number, because rope_type is {kind}")
    factor = positive_number(f"{key}.factor", rope.get("factor", 1.0))
    if factor < 1:
        raise wrong(f"{key}.factor", factor, "at least 1")
    if kind != "llama3":
        return RopeConfig(theta=theta, kind=kind, factor=factor)
    low = positive_number(f"{key}.low_freq_factor", rope["low_freq_factor"])
    high = positive_number(f"{key}.high_freq_factor", rope["high_freq_factor"])
    if high <= low:
        raise wrong(f"{key}.high_freq_factor", high, f"more than low_freq_factor {low}")
    original = rope.get("original_max_position_embeddings", max_positions)
    if isinstance(original, bool) or not isinstance(original, int) or not 0 < original < 2**31:
        raise wrong(f"{key}.original_max_position_embeddings", original, "an integer from 1 to 2147483647")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=original,
    )


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
