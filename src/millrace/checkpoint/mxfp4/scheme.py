"""Reads `quantization_config` of config.json if its quant_method is mxfp4.

source: transformers' utils/quantization_config.py (Mxfp4Config)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from millrace.checkpoint.compressed.scheme import unsupported
from millrace.errors import nearest

METHOD = "mxfp4"
_KEYS = frozenset(["quant_method", "modules_to_not_convert", "dequantize"])  # tensors say which of them have codes


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Experts are stored as FP4 codes in groups of 32, each with a power of two."""


def is_mxfp4(raw: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether quantization_config describes this format."""
    return isinstance(raw, dict) and raw.get("quant_method") == METHOD


def read_mxfp4(raw: Mapping[str, Any]) -> Mxfp4:
    """Parse quantization_config. raises CheckpointError that names what is unsupported"""
    for key, value in raw.items():
        if key not in _KEYS:
            raise unsupported(key, value, nearest(key, _KEYS))
    return Mxfp4()
