"""Reads the rotary position embedding of config.json, in both of its spellings."""

import math
from dataclasses import dataclass
from typing import cast

from millrace.checkpoint.config.config_reader import ConfigReader, Raw, positive_number, unread_keys, wrong

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
MAX_FACTORS = 256  # frequencies of a head


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding of the first R numbers of a head: d against d + R/2, or 2d against 2d + 1.

    inverse frequency i of R/2: theta ** (-2i/R); `linear` divides it by `factor`; `llama3` and `yarn` divide low
    frequencies by it. sources: arXiv:2104.09864; arXiv:2306.15595 (linear); Llama 3.1's reference code (llama3);
    arXiv:2309.00071 (yarn). `longrope` divides each frequency by a factor of its own: by `long_factors` in engines for
    more tokens than the original context, otherwise by `short_factors` (arXiv:2402.13753)
    """

    theta: float
    rotary_dim: int = 0  # R; 0: the whole head
    interleaved: bool = False
    kind: str = "default"  # "default", "linear", "llama3", "yarn" or "longrope"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int | None = None  # only llama3, yarn and longrope
    # only yarn: rotations within the original context at which frequencies are kept, and divided
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # the range between them to whole frequencies
    attention_factor: float = 1.0  # of cosines and sines; also longrope
    short_factors: tuple[float, ...] = ()  # (R/2,), only longrope
    long_factors: tuple[float, ...] = ()
    divisors: tuple[float, ...] = ()  # (D/2,) from GGUF's rope_freqs.weight: one per frequency, in addition to `factor`


def read_ropes(read: ConfigReader, max_positions: int) -> tuple[tuple[RopeConfig, RopeConfig | None], tuple[str, ...]]:
    """Return the rotary embedding, that of layers with a window if they have their own, and notes."""
    default_theta = read.family.rope_theta
    if read.family.name not in ("gemma3_text", "olmo3"):
        partial = "partial_rotary_factor" in read.family.defaults
        raw = read.raw if read.family.name != "phi3" else _phi3_rope(read)
        if read.family.name == "gpt_oss" and not {"rope_parameters", "rope_scaling"} & raw.keys():
            raw = {**raw, "rope_parameters": _GPT_OSS}
        rope, unread = _rope(raw, max_positions, default_theta, partial=partial)
        return (rope, None), unread
    raw_value = read.raw.get("rope_parameters")
    if raw_value is not None and not isinstance(raw_value, dict):
        raise wrong("rope_parameters", raw_value, "an object or null")
    of_kinds = cast(dict[str, object], raw_value or {})
    if unknown := sorted(of_kinds.keys() - {"full_attention", "sliding_attention"}):
        raise wrong("rope_parameters", raw_value, f"full_attention and sliding_attention alone, not {unknown[0]}")
    result, notes = list[RopeConfig](), list[str]()
    local = ("rope_local_base_freq", 10_000.0) if read.family.name == "gemma3_text" else ("rope_theta", default_theta)
    for kind, scaling, key, usual in (
        ("full_attention", read.raw.get("rope_scaling"), "rope_theta", default_theta),
        ("sliding_attention", None, *local),
    ):
        own = of_kinds.get(kind)
        if own is not None and not isinstance(own, dict):
            raise wrong(f"rope_parameters.{kind}", own, "an object or null")
        flat = read.raw.get(key)
        has_own = bool(own) and "rope_theta" in cast(dict[str, object], own)
        flat_theta = {} if flat is None and has_own else {"rope_theta": usual if flat is None else flat}
        if flat is not None:
            positive_number(key, flat)  # checked under the key that the user wrote
        rope, more = _rope({"rope_parameters": own, "rope_scaling": scaling, **flat_theta}, max_positions)
        result.append(rope)
        notes += more
    return (result[0], result[1]), tuple(notes)


# If config.json says nothing, as in transformers' GptOssConfig.
_GPT_OSS: Raw = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096, "rope_theta": 150_000.0,
}  # fmt: skip


def _phi3_rope(read: ConfigReader) -> Raw:
    """Return config.json with the original context among the scaling's keys, and the present name of `su`."""
    raw = dict(read.raw)
    for key in ("rope_scaling", "rope_parameters"):
        rope = raw.get(key)
        if isinstance(rope, dict) and (kind := rope.get("rope_type", rope.get("type"))) not in (None, "default"):
            kind = "longrope" if kind in ("su", "yarn") else kind
            original = {"original_max_position_embeddings": read.positive_int("original_max_position_embeddings")}
            raw[key] = {k: v for k, v in rope.items() if k != "type"} | {"rope_type": kind} | original
    return raw


def _rope(
    raw: Raw, max_positions: int, default_theta: float = 10_000.0, *, partial: bool = False
) -> tuple[RopeConfig, tuple[str, ...]]:
    """Return the rotary embedding, and a note on keys that transformers does not read for its type.

    If a value is given in both spellings, they must agree. partial: parts of heads may rotate
    """
    old, new = raw.get("rope_scaling"), raw.get("rope_parameters")
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
    flat_theta = raw.get("rope_theta")
    theta = rope.get("rope_theta", default_theta if flat_theta is None else flat_theta)
    if flat_theta is not None and flat_theta != theta:
        raise wrong("rope_theta", flat_theta, f"the same as in {key}, which is {theta!r}", "remove one of the two")
    valid_keys = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_SCALING_KEYS[kind]}
    unread = [name for name in rope if name not in valid_keys]
    notes = (unread_keys(f"config.json: {key} (rope_type {kind})", unread, valid_keys),) if unread else ()
    if not partial and rope.get("partial_rotary_factor", 1) != 1:
        raise wrong("partial_rotary_factor", rope["partial_rotary_factor"], "1 (rotation of whole heads)")
    return _scaled_rope(key, kind, rope, positive_number("rope_theta", theta), max_positions), notes


_YARN_OPTIONS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
# Keys of a scaling that transformers' modeling_rope_utils.py reads, by type.
_SCALING_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", *_YARN_OPTIONS),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings", "factor", "attention_factor"),
}
_OPTIONAL = ("original_max_position_embeddings", *_YARN_OPTIONS)


def _scaled_rope(key: str, kind: str, rope: dict[str, object], theta: float, max_positions: int) -> RopeConfig:
    for name in _SCALING_KEYS[kind]:
        is_optional = name in _OPTIONAL or (kind, name) == ("longrope", "factor")
        if name not in rope and not is_optional:
            raise wrong(f"{key}.{name}", None, f"a number, because rope_type is {kind}")
    factor = positive_number(f"{key}.factor", rope.get("factor", 1.0))
    if factor < 1:
        raise wrong(f"{key}.factor", factor, "at least 1")
    if kind == "dynamic":  # changes the frequencies beyond max_position_embeddings, which no engine exceeds
        return RopeConfig(theta=theta)
    if kind in ("default", "linear"):
        return RopeConfig(theta=theta, kind=kind, factor=factor)
    if kind == "longrope":
        return _longrope(key, rope, theta, max_positions)
    if kind == "yarn":
        return _yarn(key, rope, theta, factor, max_positions)
    low = positive_number(f"{key}.low_freq_factor", rope["low_freq_factor"])
    high = positive_number(f"{key}.high_freq_factor", rope["high_freq_factor"])
    if high <= low:
        raise wrong(f"{key}.high_freq_factor", high, f"more than low_freq_factor {low}")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=_original_positions(key, rope, max_positions),
    )


def _original_positions(key: str, rope: dict[str, object], max_positions: int) -> int:
    original = rope.get("original_max_position_embeddings", max_positions)
    if isinstance(original, bool) or not isinstance(original, int) or not 0 < original < 2**31:
        raise wrong(f"{key}.original_max_position_embeddings", original, "an integer from 1 to 2147483647")
    return original


def _yarn(key: str, rope: dict[str, object], theta: float, factor: float, max_positions: int) -> RopeConfig:
    """Return YaRN's scaling (arXiv:2309.00071), with the attention factor as transformers derives it."""

    def option(name: str, default: float) -> float:
        return positive_number(f"{key}.{name}", rope[name]) if name in rope else default

    def magnitude(multiplier: float) -> float:
        return 0.1 * multiplier * math.log(factor) + 1.0

    fast, slow, truncate = option("beta_fast", 32.0), option("beta_slow", 1.0), rope.get("truncate", True)
    if fast <= slow:
        raise wrong(f"{key}.beta_fast", fast, f"more than beta_slow {slow:g}")
    if not isinstance(truncate, bool):
        raise wrong(f"{key}.truncate", truncate, "true or false")
    has_both = "mscale" in rope and "mscale_all_dim" in rope
    usual = magnitude(option("mscale", 1)) / magnitude(option("mscale_all_dim", 1)) if has_both else magnitude(1)
    return RopeConfig(
        theta=theta, kind="yarn", factor=factor, beta_fast=fast, beta_slow=slow, truncate=truncate,
        original_max_positions=_original_positions(key, rope, max_positions),
        attention_factor=option("attention_factor", usual),
    )  # fmt: skip


def _longrope(key: str, rope: dict[str, object], theta: float, max_positions: int) -> RopeConfig:
    """Return LongRoPE's factors (arXiv:2402.13753), with the attention factor as transformers derives it."""
    factors = []
    for name in ("short_factor", "long_factor"):
        values = rope[name]
        if not isinstance(values, list) or not 0 < len(values) <= MAX_FACTORS:
            raise wrong(f"{key}.{name}", values, "a list of numbers, one for each frequency")
        factors.append(tuple(positive_number(f"{key}.{name}", value) for value in values))
    original = _original_positions(key, rope, max_positions)
    factor = positive_number(f"{key}.factor", rope["factor"]) if "factor" in rope else max_positions / original
    usual = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    attention_factor = rope.get("attention_factor")
    return RopeConfig(
        theta=theta, kind="longrope", original_max_positions=original, short_factors=factors[0],
        long_factors=factors[1],
        attention_factor=usual if attention_factor is None else positive_number("attention_factor", attention_factor),
    )  # fmt: skip
