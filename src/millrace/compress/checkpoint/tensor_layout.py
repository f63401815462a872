"""Storage of compressed matrices in compressed-tensors' format: their scheme in config.json, and their tensors."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.compressed.packing import pack, words_of
from millrace.checkpoint.compressed.scheme import FLOATS, INTEGERS, PACKED, kv_scheme
from millrace.checkpoint.weights.quantized_matrix import QuantisedMatrix
from millrace.compress.methods.e4m3 import Fp8Matrix
from millrace.compress.methods.quantization_grid import Array

Matrix = QuantisedMatrix | Fp8Matrix


@dataclass(frozen=True, slots=True)
class StoredTensorSpec:
    """Shape and dtype of a tensor that will be written. dtype: safetensors' name"""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        size = WIDTHS[self.dtype]
        for n in self.shape:
            size *= n
        return size


WIDTHS = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64",
    "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The storage format of a matrix. group: 0 for a whole row; floats: E4M3

    activations: bits of activations; 8-bit ones are of the weights' kind; float_rows: E4M3 even with integer weights
    one_scale: a single scale for a whole matrix of floats
    """

    bits: int
    group: int
    minimums: bool = False
    floats: bool = False
    activations: int = 16
    float_rows: bool = False
    one_scale: bool = False

    @property
    def format(self) -> str:
        if self.floats:
            return FLOATS
        return INTEGERS if self.bits == self.activations == 8 else PACKED

    @property
    def meets_fp8(self) -> bool:
        """Whether activations are specified as E4M3, for which bfloat16 is used here."""
        return self.float_rows or (self.floats and self.activations == 8)

    @property
    def scheme(self) -> dict[str, object]:
        """Return the scheme as in config.json, without its targets."""
        kind, strategy = "float" if self.floats else "int", "group" if self.group else "channel"
        weights = {
            "num_bits": self.bits, "type": kind, "symmetric": not self.minimums, "dynamic": False,
            "strategy": "tensor" if self.one_scale else strategy, "group_size": self.group or None,
        }  # fmt: skip
        rows = {
            "num_bits": 8, "type": "float" if self.meets_fp8 else "int", "symmetric": True, "dynamic": True,
            "strategy": "token", "group_size": None,
        }  # fmt: skip
        return {
            "weights": weights, "input_activations": rows if self.activations == 8 else None,
            "output_activations": None, "format": self.format,
        }  # fmt: skip

    def specs(self, N: int, K: int) -> dict[str, StoredTensorSpec]:
        """Return the stored tensors by the suffix of their names."""
        G = K // self.group if self.group else 1
        if self.floats:
            return {
                "weight": StoredTensorSpec("F8_E4M3", (N, K)),
                "weight_scale": StoredTensorSpec("BF16", (1,) if self.one_scale else (N, 1)),
            }
        scale = {"weight_scale": StoredTensorSpec("F16", (N, G))}
        if self.format == INTEGERS:
            return {"weight": StoredTensorSpec("I8", (N, K)), **scale}
        zeros = {"weight_zero_point": StoredTensorSpec("I32", (words_of(N, self.bits), G))} if self.minimums else {}
        return {
            "weight_packed": StoredTensorSpec("I32", (N, words_of(K, self.bits))), **scale, **zeros,
            "weight_shape": StoredTensorSpec("I64", (2,)),
        }  # fmt: skip

    def tensors(self, matrix: Matrix) -> dict[str, Array]:
        """Return the tensors described by `specs` for a matrix of this format."""
        if isinstance(matrix, Fp8Matrix) or self.format == INTEGERS:
            return {"weight": matrix.codes, "weight_scale": matrix.scales[0] if self.one_scale else matrix.scales}
        codes, zeros = matrix.codes, {}
        if matrix.minimums is not None:
            half = np.int8(1 << self.bits - 1)  # codes are unsigned; files have them signed
            codes, signed = codes - half, _zeros(matrix) - half
            zeros = {"weight_zero_point": np.ascontiguousarray(pack(np.ascontiguousarray(signed.T), self.bits).T)}
        shape = np.array(matrix.codes.shape, np.int64)
        return {"weight_packed": pack(codes, self.bits), "weight_scale": matrix.scales, **zeros, "weight_shape": shape}


def _zeros(matrix: QuantisedMatrix) -> NDArray[np.int8]:
    """Return the codes that represent 0, (N, G); all minimums of a grid are multiples of their scales."""
    scales, lows = matrix.group_scales(), matrix.group_minimums()
    exact = np.divide(-lows, scales, out=np.zeros_like(lows), where=scales != 0)
    zeros = np.rint(exact).astype(np.int8)
    assert (zeros == exact).all() and zeros.min() >= 0 and zeros.max() < 1 << matrix.bits, "minimums beside the grid"
    return zeros


def described(forms: Mapping[str, TensorLayout], ignore: list[str], kv: str | None = None) -> dict[str, object]:
    """Return quantization_config. forms: by linear layer; ignore: layers that stay floats; kv: KV cache format"""
    groups: dict[TensorLayout, list[str]] = {}
    for layer, form in forms.items():
        groups.setdefault(form, []).append(layer)
    usual = max(groups, key=lambda form: len(groups[form]))
    formats = {form.format for form in groups}
    exceptional = [(form, layers) for form, layers in groups.items() if form is not usual]
    schemes = [{"targets": layers, **form.scheme} for form, layers in exceptional]
    schemes.append({"targets": ["Linear"], **usual.scheme})  # a name has priority over a class
    return {
        "quant_method": "compressed-tensors", "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision", "ignore": ignore,
        "kv_cache_scheme": kv_scheme(kv),
        "config_groups": {f"group_{i}": scheme for i, scheme in enumerate(schemes)},
    }  # fmt: skip
