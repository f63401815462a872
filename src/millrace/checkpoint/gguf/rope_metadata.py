"""Reads the rotary position embedding of a GGUF file, with the defaults that llama.cpp has."""

import math

import numpy as np

from millrace.checkpoint.config.rope_config import RopeConfig
from millrace.checkpoint.gguf.metadata_keys import MetadataKeys
from millrace.checkpoint.gguf.reader import GgufFile
from millrace.checkpoint.gguf.rope_tensors import LONG_FACTORS, ROPE_FREQS, SHORT_FACTORS, rope_divisors

_KINDS = ("none", "linear", "yarn", "longrope")


def read_rope(file: GgufFile, keys: MetadataKeys, arch: str, context: int, width: int) -> RopeConfig:
    """Return the rotary embedding. raises CheckpointError. width: of the part of a head that rotates, 0 for all"""
    theta, scaling = keys.number(f"{arch}.rope.freq_base", 10_000.0), f"{arch}.rope.scaling"
    kind = keys.text(f"{scaling}.type", "linear")  # llama.cpp's default
    if kind not in _KINDS:
        raise keys.wrong(f"{scaling}.type", "one of " + ", ".join(_KINDS), "choose a model without this scaling")
    count = (width or _head_size(keys, arch)) // 2
    short, long = rope_divisors(file, SHORT_FACTORS, count), rope_divisors(file, LONG_FACTORS, count)
    if short and long:
        return _longrope(keys, scaling, context, RopeConfig(theta=theta, rotary_dim=width), (short, long))
    if short or long or kind == "longrope":
        missing = LONG_FACTORS if short else SHORT_FACTORS
        raise keys.wrong(f"{scaling}.type", f"a file with the tensor {missing}, as LongRoPE needs it")
    divisors = rope_divisors(file, ROPE_FREQS, count)
    old = keys.number(f"{arch}.rope.scale_linear", 1.0)  # the older name of the key
    factor = keys.number(f"{scaling}.factor", old)
    if factor < 1:
        raise keys.wrong(f"{scaling}.factor", "at least 1")
    if kind == "yarn":
        return _yarn(keys, scaling, context, RopeConfig(theta=theta, rotary_dim=width, factor=factor))
    if keys.optional_number(f"{scaling}.attn_factor", 1.0) != 1:
        raise keys.wrong(f"{scaling}.attn_factor", f"1: {scaling}.type is {kind}", "choose another model")
    if factor == 1 or kind == "none":
        return RopeConfig(theta=theta, rotary_dim=width, divisors=divisors)
    return RopeConfig(theta=theta, rotary_dim=width, kind="linear", factor=factor, divisors=divisors)


def _head_size(keys: MetadataKeys, arch: str) -> int:
    hidden, heads = keys.integer(f"{arch}.embedding_length"), keys.integer(f"{arch}.attention.head_count")
    return keys.integer(f"{arch}.attention.key_length", max(hidden // heads, 1))


def _yarn(keys: MetadataKeys, scaling: str, context: int, plain: RopeConfig) -> RopeConfig:
    """Return YaRN's scaling (arXiv:2309.00071).

    attn_factor multiplies the usual factor of cosines and sines, yarn_attn_factor replaces it, as converters write it.
    """
    fast, slow = keys.number(f"{scaling}.yarn_beta_fast", 32.0), keys.number(f"{scaling}.yarn_beta_slow", 1.0)
    if fast <= slow:
        raise keys.wrong(f"{scaling}.yarn_beta_fast", f"more than yarn_beta_slow {slow:g}")
    usual = 0.1 * math.log(plain.factor) + 1.0
    stated = keys.optional_number(f"{scaling}.yarn_attn_factor", usual)
    magnitude = _refined(stated, usual) * keys.optional_number(f"{scaling}.attn_factor", 1.0)
    return RopeConfig(
        theta=plain.theta, rotary_dim=plain.rotary_dim, kind="yarn", factor=plain.factor, beta_fast=fast,
        beta_slow=slow,        original_max_positions=keys.integer(f"{scaling}.original_context_length", context),
        attention_factor=magnitude,
    )  # fmt: skip


def _longrope(
    keys: MetadataKeys, scaling: str, context: int, plain: RopeConfig,
    factors: tuple[tuple[float, ...], tuple[float, ...]],
) -> RopeConfig:  # fmt: skip
    """Return LongRoPE's factors (arXiv:2402.13753). The shortest decimals of the file's float32 are the original's."""
    original = keys.integer(f"{scaling}.original_context_length", context)
    ratio = context / original
    usual = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 and original > 1 else 1.0
    short, long = (tuple(float(str(np.float32(value))) for value in values) for values in factors)
    return RopeConfig(
        theta=plain.theta, rotary_dim=plain.rotary_dim, kind="longrope", original_max_positions=original,
        short_factors=short, long_factors=long,
        attention_factor=_refined(keys.optional_number(f"{scaling}.attn_factor", 1.0), usual),
    )  # fmt: skip


def _refined(stated: float, usual: float) -> float:
    """Return the usual value in full precision if the file's float32 is its rounding."""
    return usual if np.float32(stated) == np.float32(usual) else stated
