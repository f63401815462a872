"""Reads `quantization_config` of config.json if its quant_method is compressed-tensors: which layers are quantized, and
how.

An unknown key, or a value that would require other arithmetic, is an error that names it.
source: https://github.com/vllm-project/compressed-tensors, quantization/quant_config.py
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeGuard

from millrace.checkpoint.compressed.packing import BITS
from millrace.errors import CheckpointError, nearest

METHOD = "compressed-tensors"
KEY = "quantization_config"
PACKED, INTEGERS, FLOATS, NAIVE = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
FORMATS = (PACKED, INTEGERS, FLOATS, NAIVE)
_MIXED = "mixed-precision"  # each scheme has its own
LINEAR = "Linear"  # the only supported class of modules
_MAX_SCHEMES, _MAX_NAMES, _MAX_PATTERNS, _LONGEST = 256, 100_000, 256, 300
_FIX = "choose another checkpoint, or compress the original one with `millrace compress`"

_KV = "kv_cache_scheme"
INT8, FP8, INT4 = "int8", "fp8", "int4"  # of keys and values, with dynamic scales
STATIC_FP8 = "fp8 with scales of its own"

# Keys that change no weight, or that are read separately.
_HARMLESS = {
    "quant_method", "global_compression_ratio", "version", "run_compressed", "dequantize", "use_optimized_inference",
    "config_groups", "format", "ignore", _KV,
}  # fmt: skip
_ONLY_AT: Mapping[str, tuple[object, ...]] = {
    "quantization_status": (None, "compressed"),
    "sparsity_config": (None, {}),
    "transform_config": (None, {}),
    "moe_sparsity_config": (None,),
}
_SCHEME_KEYS = {"targets", "weights", "input_activations", "output_activations", "format"}
_ARGUMENTS = {
    "num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder", "scale_dtype",
    "zp_dtype", "observer", "observer_kwargs",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the matrices that `targets` names are stored.

    bits: 4 or 8; floats: E4M3 instead of integers
    group: inputs per scale; None: one scale per row, or per matrix if `per_tensor`
    activation_bits: precision of the activations that the checkpoint was made for; 16: floats
    """

    targets: tuple[str, ...]
    format: str
    bits: int
    group: int | None
    symmetric: bool = True
    floats: bool = False
    per_tensor: bool = False
    activation_bits: int = 16
    float_activations: bool = False  # 8-bit floats
    per_token: bool = False  # dynamic scales of activations, one per token
    block_rows: int = 1  # outputs per scale
    scale_suffix: str = ".weight_scale"

    @property
    def packed(self) -> bool:
        return self.format == PACKED

    @property
    def dtype(self) -> str:
        """Return the name used in `TensorInfo`."""
        return "fp8" if self.floats else f"int{self.bits}"


class Compression:
    """Assigns schemes to linear layers. kv: format of keys and values that the checkpoint was made for; None: floats"""

    def __init__(self, schemes: Sequence[Scheme], ignore: Sequence[str], kv: str | None = None) -> None:
        """Raise CheckpointError if there are implausibly many names or patterns."""
        self.schemes, self.kv = tuple(schemes), kv
        pairs = [(target, scheme) for scheme in schemes for target in scheme.targets]
        _check_bounds([target for target, _ in pairs] + list(ignore))
        self._scheme_by_name = {target: scheme for target, scheme in reversed(pairs) if _is_name(target)}
        self._patterns = [(_glob(target), scheme) for target, scheme in pairs if _is_pattern(target)]
        self._rest = next((scheme for target, scheme in pairs if target == LINEAR), None)
        self._ignored = frozenset(ignore)
        self._ignored_patterns = [_glob(target) for target in ignore if _is_pattern(target)]

    def scheme_of(self, module: str) -> Scheme | None:
        """Return the scheme of a linear layer, or None if it is stored as floats. A name takes precedence over a
        pattern, a pattern over the class."""
        ignored = self._ignored
        if module in ignored or LINEAR in ignored or any(fnmatchcase(module, g) for g in self._ignored_patterns):
            return None
        if module in self._scheme_by_name:
            return self._scheme_by_name[module]
        return next((scheme for glob, scheme in self._patterns if fnmatchcase(module, glob)), self._rest)


def _is_pattern(target: str) -> bool:
    return target.startswith("re:")


def _is_name(target: str) -> bool:
    return target != LINEAR and not _is_pattern(target)


def is_compressed(raw: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether the value at KEY of config.json describes compressed-tensors."""
    return isinstance(raw, dict) and raw.get("quant_method") == METHOD


def read_compression(raw: Mapping[str, Any]) -> Compression:
    """Parse quantization_config. raises CheckpointError that names what is unsupported"""
    for key, value in raw.items():
        if key in _HARMLESS:
            continue
        if key not in _ONLY_AT:
            raise unsupported(key, value, nearest(key, {*_HARMLESS, *_ONLY_AT}))
        if not any(value == at and type(value) is type(at) for at in _ONLY_AT[key]):
            raise unsupported(key, value, " or ".join(map(_json, _ONLY_AT[key])))
    groups = raw.get("config_groups")
    if not isinstance(groups, dict) or not 0 < len(groups) <= _MAX_SCHEMES:
        raise unsupported("config_groups", groups, f"1 to {_MAX_SCHEMES} schemes")
    schemes = tuple(_scheme(f"config_groups.{name}", value, raw.get("format")) for name, value in groups.items())
    return Compression(schemes, _targets("ignore", raw.get("ignore") or []), _kv_cache(raw.get(_KV)))


def kv_scheme(kv: str | None) -> dict[str, object] | None:
    """Return the `kv_cache_scheme` for a format, as `_kv_cache` reads it. The format cannot express one scale per token
    and head; one per token is closest."""
    if kv is None:
        return None
    return {
        "num_bits": 4 if kv == INT4 else 8, "type": "float" if kv == FP8 else "int", "symmetric": kv != INT4,
        "dynamic": True, "strategy": "token", "group_size": None,
    }  # fmt: skip


def _kv_cache(raw: object) -> str | None:
    """Parse kv_cache_scheme: integers must have dynamic scales, like ours; floats must have static ones."""
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise unsupported(_KV, raw, "null, or how keys and values are kept")
    _check_keys(_KV, raw, _ARGUMENTS)
    floats = raw.get("type", "int") == "float"
    four = raw.get("num_bits") == 4 and not floats
    _check_values(_KV, raw, {
        "num_bits": (8,) if floats else (8, 4), "type": (None, "int", "float"), "block_structure": (None,),
        "symmetric": (False,) if four else (None, True),
        "dynamic": (None, True, False) if floats else (True,), "group_size": (None,), "actorder": (None,),
        "strategy": (None, "tensor", "attn_head", "token") if floats else ("token",),
    })  # fmt: skip
    if floats:
        return FP8 if raw.get("dynamic") and raw.get("strategy") == "token" else STATIC_FP8
    return INT4 if four else INT8


def _scheme(where: str, raw: object, format: object) -> Scheme:
    if not isinstance(raw, dict):
        raise unsupported(where, raw, "a scheme with targets and weights")
    _check_keys(where, raw, _SCHEME_KEYS)
    if raw.get("output_activations") is not None:
        raise unsupported(
            f"{where}.output_activations", raw["output_activations"], "null: results are not rounded here"
        )
    own = raw.get("format") or format
    if own not in FORMATS:
        raise unsupported(f"{where}.format", own, f"one of {', '.join(FORMATS)}; with {_MIXED} of each scheme's own")
    targets = _targets(f"{where}.targets", raw.get("targets"))
    scheme = _weights(f"{where}.weights", raw.get("weights"), targets, str(own))
    rows = raw.get("input_activations")
    activation_bits, floats = _activations(f"{where}.input_activations", rows)
    per_token = isinstance(rows, dict) and bool(rows.get("dynamic")) and rows.get("strategy") == "token"
    if activation_bits == 8 and floats != scheme.floats and not (floats and scheme.bits == 4):
        raise unsupported(f"{where}.input_activations.type", "float" if floats else "int", "the weights' own type")
    values = {f: getattr(scheme, f) for f in ("bits", "group", "symmetric", "floats", "per_tensor")}
    return Scheme(
        targets, str(own), **values, activation_bits=activation_bits, float_activations=floats, per_token=per_token
    )


def _weights(where: str, raw: object, targets: tuple[str, ...], format: str) -> Scheme:
    if not isinstance(raw, dict):
        raise unsupported(where, raw, "how weights are stored")
    _check_keys(where, raw, _ARGUMENTS)
    _check_values(where, raw, {
        "block_structure": (None,), "dynamic": (None, False), "actorder": (None, False, "weight", "static"),
    })  # fmt: skip
    bits, kind, symmetric = raw.get("num_bits"), raw.get("type", "int"), raw.get("symmetric", True)
    floats = kind == "float"
    if kind not in ("int", "float"):
        raise unsupported(f"{where}.type", kind, "int or float")
    if type(bits) is not int or bits not in ((8,) if floats else BITS):
        raise unsupported(f"{where}.num_bits", bits, "8 bits of floats" if floats else "4 or 8")
    if type(symmetric) is not bool or not (symmetric or not floats):
        raise unsupported(f"{where}.symmetric", symmetric, "true, or of integers false")
    if floats == (format in (PACKED, INTEGERS)) and format != NAIVE:
        raise unsupported(f"{where}.type", kind, f"what the format {format} holds")
    if bits == 4 and format != PACKED:
        raise unsupported(f"{where}.num_bits", bits, f"8 in the format {format}")
    strategy, group = _grouping(where, raw)
    if strategy == "tensor" and not floats:
        raise unsupported(f"{where}.strategy", strategy, "group or channel")
    return Scheme(
        targets, format, bits, group if strategy == "group" else None, symmetric, floats, strategy == "tensor"
    )


def _grouping(where: str, raw: Mapping[str, Any]) -> tuple[str, int]:
    """Return the strategy, derived from group_size if it is missing, and the group size."""
    size = raw.get("group_size")
    if size is not None and type(size) is not int:
        raise unsupported(f"{where}.group_size", size, "a number of inputs")
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = raw.get("strategy") or inferred
    if strategy not in ("group", "channel", "tensor"):
        raise unsupported(f"{where}.strategy", strategy, "group, channel or tensor")
    if strategy == "group" and (size is None or not 4 <= size <= 4096 or size % 4):
        raise unsupported(f"{where}.group_size", size, "a multiple of 4, at most 4096")
    if strategy != "group" and size not in (None, -1):
        raise unsupported(f"{where}.group_size", size, f"null: {strategy} has one scale for more than that")
    return str(strategy), size or 0


def _activations(where: str, raw: object) -> tuple[int, bool]:
    """Return the bits of activations, and whether these are 8-bit floats."""
    if raw is None:
        return 16, False
    if not isinstance(raw, dict):
        raise unsupported(where, raw, "null, or how activations are rounded")
    _check_keys(where, raw, _ARGUMENTS)
    floats = raw.get("type", "int") == "float"
    # activations stay bfloat16 here in any case
    strategies = ("token", "tensor", "group") if floats else ("token", "group")
    _check_values(where, raw, {
        "num_bits": (8,), "type": (None, "int", "float"), "symmetric": (None, True),
        "dynamic": (True, False) if floats else (True,), "strategy": strategies, "block_structure": (None,),
        "actorder": (None,),
    })  # fmt: skip
    return 8, floats


def _check_keys(where: str, raw: Mapping[str, object], valid_keys: set[str]) -> None:
    for key in raw:
        if key not in valid_keys:
            raise unsupported(f"{where}.{key}", raw[key], nearest(key, valid_keys))


def _check_values(where: str, raw: Mapping[str, object], only: Mapping[str, tuple[object, ...]]) -> None:
    for key, values in only.items():
        value = raw.get(key)
        if not any(value == at and type(value) is type(at) for at in values):
            raise unsupported(f"{where}.{key}", value, " or ".join(map(_json, values)))


def _targets(where: str, raw: object) -> tuple[str, ...]:
    if not isinstance(raw, list) or not all(isinstance(t, str) and 0 < len(t) <= _LONGEST for t in raw):
        raise unsupported(where, raw, f"a list of names, each of at most {_LONGEST} characters")
    for target in filter(_is_pattern, raw):
        _glob(target)
    return tuple(raw)


def _check_bounds(targets: Sequence[str]) -> None:
    patterns = sum(map(_is_pattern, targets))
    if len(targets) > _MAX_NAMES or patterns > _MAX_PATTERNS:
        raise CheckpointError(
            f"config.json: {KEY} has {len(targets)} targets, {patterns} of them patterns",
            f"at most {_MAX_NAMES}, and {_MAX_PATTERNS} patterns", _FIX,
        )  # fmt: skip


_PIECE = re.compile(r"\\\.|\.\*|[.A-Za-z0-9_-]")


def _glob(target: str) -> str:
    r"""Convert a `re:` pattern to an fnmatch pattern. Only names, \. and .* are supported (most patterns): other
    expressions could take arbitrarily long to match."""
    expression = target.removeprefix("re:").removeprefix("^")
    body, end = (expression[:-1], "") if expression.endswith("$") else (expression, "*")
    pieces = _PIECE.findall(body)
    if "".join(pieces) != body:
        raise unsupported("a pattern", target, r"names, \., .* and a $ at the end")
    return "".join({".*": "*", "\\.": ".", ".": "?"}.get(piece, piece) for piece in pieces) + end


def unsupported(key: str, value: object, expected: str) -> CheckpointError:
    """Return the error for a key of quantization_config."""
    return CheckpointError(f"config.json: {KEY}: {key} is {value!r:.300}", expected, _FIX)


def _json(value: object) -> str:
    return json.dumps(value)
