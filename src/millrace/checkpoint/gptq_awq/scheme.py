"""Reads `quantization_config` of config.json if its quant_method is gptq or awq.

An unknown key, or a value that would require other arithmetic, is an error that names it.
source: GPTQModel's quantization/config.py; AutoAWQ's models/_config.py; transformers' utils/quantization_config.py
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from millrace.checkpoint.compressed.scheme import unsupported
from millrace.checkpoint.gptq_awq.packing import BITS
from millrace.errors import nearest

GPTQ, AWQ = "gptq", "awq"
GEMM, GEMV = "gemm", "gemv"
_MAX_GROUP = 1 << 16

# Keys of how the codes were found, or of the kernels of other engines; they change no weight.
_HARMLESS = frozenset(
    [
        "quant_method",
        "damp_percent",
        "damp_auto_increment",
        "true_sequential",
        "static_groups",
        "sym",
        "meta",
        "quantizer",
        "pack_dtype",
        "model_name_or_path",
        "model_file_base_name",
        "base_model_name",
        "dataset",
        "tokenizer",
        "use_cuda_fp16",
        "model_seqlen",
        "block_name_to_quantize",
        "module_name_preceding_first_block",
        "modules_in_block_to_quantize",
        "batch_size",
        "pad_token_id",
        "use_exllama",
        "disable_exllama",
        "exllama_config",
        "max_input_length",
        "cache_block_outputs",
        "mse",
        "act_group_aware",
        "lm_head",
        "quant_method_version",
        "backend",
        "modules_to_not_convert",
        "modules_to_fuse",
        "do_fuse",
        "fuse_max_seq_len",
        "desc_act",
        "bits",
        "w_bit",
        "group_size",
        "q_group_size",
        "checkpoint_format",
        "format",
        "version",
        "zero_point",
    ]
)
_ONLY_AT: Mapping[str, tuple[object, ...]] = {
    "dynamic": (None, {}),  # another scheme of some layers
    "is_marlin_format": (None, False),
    "rotation": (None, ""),
    "adapter": (None, {}),
}


@dataclass(frozen=True, slots=True)
class PackedScheme:
    """How all quantized matrices of a checkpoint are stored.

    bits: of a code; group: inputs per scale, None for whole rows
    layout: "gptq", or AWQ's "gemm" or "gemv"
    zero_offset: what is added to a stored zero point: 1 in GPTQ's first format
    """

    bits: int
    group: int | None
    layout: str
    zero_offset: int = 0


def is_packed(raw: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether the value at KEY of config.json describes GPTQ's or AWQ's files."""
    return isinstance(raw, dict) and raw.get("quant_method") in (GPTQ, AWQ)


def read_packed(raw: Mapping[str, Any]) -> PackedScheme:
    """Parse quantization_config. raises CheckpointError that names what is unsupported"""
    for key, value in raw.items():
        if key in _ONLY_AT and value not in _ONLY_AT[key]:
            raise unsupported(key, value, "null: this would require other arithmetic")
        if key not in _HARMLESS and key not in _ONLY_AT:
            raise unsupported(key, value, nearest(key, _HARMLESS | _ONLY_AT.keys()))
    is_gptq = raw["quant_method"] == GPTQ
    bits = raw.get("bits", raw.get("w_bit"))
    if type(bits) is not int or bits not in (BITS if is_gptq else (4,)):
        raise unsupported("bits", bits, "2, 3, 4 or 8" if is_gptq else "4")
    group = raw.get("group_size", raw.get("q_group_size"))
    if type(group) is not int or (group != -1 and not (4 <= group <= _MAX_GROUP and group % 4 == 0)):
        raise unsupported("group_size", group, f"-1 for whole rows, or a multiple of 4 up to {_MAX_GROUP}")
    layout, offset = (GPTQ, _zero_offset(raw)) if is_gptq else (_awq_layout(raw), 0)
    return PackedScheme(bits, None if group == -1 else group, layout, offset)


def _zero_offset(raw: Mapping[str, Any]) -> int:
    name = raw.get("checkpoint_format") or raw.get("format") or "gptq"
    if name not in ("gptq", "gptq_v2"):
        raise unsupported("checkpoint_format", name, "gptq or gptq_v2")
    return int(name == "gptq")


def _awq_layout(raw: Mapping[str, Any]) -> str:
    if raw.get("zero_point", True) is not True:
        raise unsupported("zero_point", raw["zero_point"], "true")
    layout = str(raw.get("version", GEMM)).lower()
    if layout not in (GEMM, GEMV):
        raise unsupported("version", raw["version"], f"{GEMM} or {GEMV}")
    return layout
