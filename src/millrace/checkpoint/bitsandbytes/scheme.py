"""Reads `quantization_config` of config.json if its quant_method is bitsandbytes.

source: transformers' utils/quantization_config.py (BitsAndBytesConfig)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from millrace.checkpoint.compressed.scheme import unsupported
from millrace.errors import nearest

METHOD = "bitsandbytes"
# Keys of the computation in other engines, or that the tensors say themselves.
_HARMLESS = frozenset(
    [
        "quant_method",
        "_load_in_4bit",
        "_load_in_8bit",
        "load_in_4bit",
        "load_in_8bit",
        "bnb_4bit_compute_dtype",
        "bnb_4bit_quant_storage",
        "bnb_4bit_quant_type",
        "bnb_4bit_use_double_quant",
        "llm_int8_enable_fp32_cpu_offload",
        "llm_int8_has_fp16_weight",
        "llm_int8_skip_modules",
        "llm_int8_threshold",
        "modules_to_not_convert",
    ]
)


@dataclass(frozen=True, slots=True)
class BitsAndBytes:
    """How linear layers are stored: bits 4 (NF4 or FP4 codes of blocks) or 8 (integers with a scale for each row)."""

    bits: int


def is_bitsandbytes(raw: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether quantization_config describes this format."""
    return isinstance(raw, dict) and raw.get("quant_method") == METHOD


def read_bitsandbytes(raw: Mapping[str, Any]) -> BitsAndBytes:
    """Parse quantization_config. raises CheckpointError that names what is unsupported"""
    for key, value in raw.items():
        if key not in _HARMLESS:
            raise unsupported(key, value, nearest(key, _HARMLESS))
    four, eight = (raw.get(f"load_in_{bits}bit", raw.get(f"_load_in_{bits}bit")) is True for bits in (4, 8))
    if four == eight:
        raise unsupported("load_in_4bit", four, "true, or else load_in_8bit")
    return BitsAndBytes(4 if four else 8)
