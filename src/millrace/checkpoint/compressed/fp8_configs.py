"""Reads `quantization_config` of FP8 folders of other writers as schemes of compressed-tensors.

    fp8       Hugging Face's (transformers' FineGrainedFP8Config; DeepSeek, Qwen): weight E4M3 (N, K), weight_scale_inv
              one for each block, or for the matrix; despite its name it multiplies
    modelopt  Model Optimizer's algorithm FP8: weight E4M3, weight_scale one for the matrix, input_scale

source: transformers' utils/quantization_config.py and integrations/finegrained_fp8.py; Model Optimizer's
export/quant_utils.py
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from millrace.checkpoint.compressed.scheme import FLOATS, LINEAR, STATIC_FP8, Compression, Scheme, unsupported
from millrace.checkpoint.tokenizer.tokenizer import read_json_object
from millrace.errors import nearest

FP8, MODELOPT = "fp8", "modelopt"
MODELOPT_FILE = "hf_quant_config.json"
_HEAD = "lm_head"  # which no writer converts
_FP8_KEYS = frozenset(
    [
        "quant_method",
        "activation_scheme",
        "weight_block_size",
        "modules_to_not_convert",
        "ignored_layers",
        "dequantize",
        "fmt",
        "scale_fmt",
        "modules_to_convert",
        "expert_dtype",
    ]
)
_FP8_ONLY_AT: Mapping[str, tuple[object, ...]] = {
    "activation_scheme": (None, "dynamic"),
    "fmt": (None, "e4m3"),
    "scale_fmt": (None, "float"),
    "modules_to_convert": (None, []),
}
_MODELOPT_KEYS = frozenset(
    [
        "quant_method",
        "quant_algo",
        "kv_cache_quant_algo",
        "kv_cache_scheme",
        "exclude_modules",
        "ignore",
        "config_groups",
        "producer",
        "group_size",
        "has_zero_point",
        "pre_quant_scale",
    ]
)
_MODELOPT_ONLY_AT: Mapping[str, tuple[object, ...]] = {
    "quant_algo": ("FP8",),
    "kv_cache_quant_algo": (None, "FP8"),
    "pre_quant_scale": (None, False),
}
_MAX_BLOCK = 1 << 16


def is_fp8(raw: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether the value at KEY of config.json describes one of these formats."""
    return isinstance(raw, dict) and raw.get("quant_method") in (FP8, MODELOPT)


def modelopt_config(folder: Path) -> Mapping[str, Any] | None:
    """Return the fields of the file that Model Optimizer writes beside config.json; None without it."""
    fields = read_json_object(folder / MODELOPT_FILE).get("quantization")
    return {**fields, "quant_method": MODELOPT} if isinstance(fields, dict) else None


def read_fp8(raw: Mapping[str, Any]) -> Compression:
    """Parse quantization_config. raises CheckpointError that names what is unsupported"""
    if raw["quant_method"] == MODELOPT:
        _check(raw, _MODELOPT_KEYS, _MODELOPT_ONLY_AT)
        scheme = Scheme(
            (LINEAR,), FLOATS, 8, None, floats=True, per_tensor=True, activation_bits=8, float_activations=True
        )
        ignore = raw.get("exclude_modules", raw.get("ignore")) or []
        kv = STATIC_FP8 if raw.get("kv_cache_quant_algo") or raw.get("kv_cache_scheme") else None
        return Compression([scheme], [_HEAD, *map(_pattern, _names("exclude_modules", ignore))], kv)
    _check(raw, _FP8_KEYS, _FP8_ONLY_AT)
    block = _block(raw.get("weight_block_size"))
    scheme = Scheme(
        (LINEAR,), FLOATS, 8, None if block is None else block[1], floats=True, per_tensor=block is None,
        activation_bits=8, float_activations=True, block_rows=1 if block is None else block[0],
        scale_suffix=".weight_scale_inv",
    )  # fmt: skip
    ignore = raw.get("modules_to_not_convert", raw.get("ignored_layers")) or []
    names = _names("modules_to_not_convert", ignore)
    # a short name stands for all modules that contain it
    return Compression(
        [scheme], [_HEAD, *(name if name.startswith("model.") else _pattern(f"*{name}*") for name in names)]
    )


def _check(raw: Mapping[str, Any], keys: frozenset[str], only_at: Mapping[str, tuple[object, ...]]) -> None:
    for key in raw:
        if key not in keys:
            raise unsupported(key, raw[key], nearest(key, keys))
    for key, values in only_at.items():
        if raw.get(key) not in values:
            raise unsupported(
                key, raw.get(key), " or ".join("null" if value is None else str(value) for value in values)
            )


def _block(raw: object) -> tuple[int, int] | None:
    """Return rows and columns of a block; None for one scale of the whole matrix."""
    if raw is None:
        return None
    if (
        not isinstance(raw, list)
        or len(raw) != 2
        or not all(type(n) is int and 4 <= n <= _MAX_BLOCK and n % 4 == 0 for n in raw)
    ):
        raise unsupported("weight_block_size", raw, "null, or rows and columns of a block, each a multiple of 4")
    return raw[0], raw[1]


def _names(key: str, raw: object) -> Sequence[str]:
    if not isinstance(raw, list) or not all(isinstance(name, str) and 0 < len(name) <= 300 for name in raw):
        raise unsupported(key, raw, "a list of names of modules")
    return raw


def _pattern(name: str) -> str:
    """Return a name with the wildcard * as a pattern of compressed-tensors. raises CheckpointError for others"""
    if "*" not in name:
        return name
    if re.search(r"[^\w.*-]", name):
        raise unsupported("a pattern", name, "names and *")
    return "re:" + name.replace(".", "\\.").replace("*", ".*") + "$"
