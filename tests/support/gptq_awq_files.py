"""Folders in the formats of GPTQ and AWQ, written by NumPy alone as their packers pack."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from millrace.checkpoint.weights.safetensors import Tensors

Array = NDArray[Any]


@dataclass(frozen=True)
class Packing:
    """version: GPTQ's checkpoint_format, or AWQ's version; mantissa: bits of a scale's"""

    version: str = "gptq"
    bits: int = 4
    group: int = 32  # -1: whole rows
    symmetric: bool = True
    shuffled: bool = False  # inputs' groups
    mantissa: int = 11

    @property
    def config(self) -> dict[str, object]:
        if self.version.startswith("gptq"):
            return {
                "quant_method": "gptq", "bits": self.bits, "group_size": self.group, "desc_act": self.shuffled,
                "sym": self.symmetric, "checkpoint_format": self.version, "damp_percent": 0.01, "true_sequential": True,
                "lm_head": False, "dynamic": None, "pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:2.0.0"]},
            }  # fmt: skip
        return {
            "quant_method": "awq", "bits": 4, "group_size": self.group, "zero_point": True, "version": self.version,
            "modules_to_not_convert": None,
        }  # fmt: skip


def bits_along_rows(values: Array, bits: int) -> Array:
    """(n, C) unsigned -> (words, C): GPTQ's packing, one value after the other, bit after bit."""
    words = np.zeros((-(-len(values) * bits // 32), values.shape[1]), np.uint32)
    for row, codes in enumerate(values.astype(np.uint32)):
        for bit in range(bits):
            word, shift = divmod(row * bits + bit, 32)
            words[word] |= (codes >> np.uint32(bit) & np.uint32(1)) << np.uint32(shift)
    return words.view(np.int32)


def awq_gemm_columns(values: Array) -> Array:
    """(R, C) -> (R, C / 8): nibble i of a word has column 0, 2, 4, 6, 1, 3, 5, 7 of eight."""
    words = np.zeros((len(values), values.shape[1] // 8), np.uint32)
    for column in range(words.shape[1]):
        for nibble, place in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            words[:, column] |= values[:, column * 8 + place].astype(np.uint32) << np.uint32(4 * nibble)
    return words.view(np.int32)


def packed_parts(rng: np.random.Generator, shape: tuple[int, int], packing: Packing) -> tuple[dict[str, Array], Array]:
    """A random layer's tensors, and its float64 weights (N, K)."""
    (N, K), bits = shape, packing.bits
    size = K if packing.group == -1 else packing.group
    G, top = -(-K // size), 1 << bits
    scales = rng.uniform(0.5, 1, (N, G)) * 2.0 / top / np.sqrt(K)
    fraction, exponent = np.frexp(scales)
    scales = np.ldexp(np.rint(np.ldexp(fraction, packing.mantissa)), exponent - packing.mantissa).astype(np.float16)
    codes = rng.integers(0, top, (N, K))
    # GPTQ's first format cannot store a zero point of 0 without damage to its neighbours
    zeros = np.full((N, G), top // 2) if packing.symmetric else rng.integers(1, top, (N, G))
    groups = np.arange(K) // size
    if packing.shuffled:
        rng.shuffle(groups)
    exact = (codes - zeros[:, groups]) * scales.astype(np.float64)[:, groups]
    if packing.version.startswith("gptq"):
        stored_zeros = zeros - (packing.version == "gptq")
        return {
            "qweight": bits_along_rows(codes.T, bits), "qzeros": bits_along_rows(stored_zeros, bits).T,
            "scales": scales.T, "g_idx": groups.astype(np.int32),
        }, exact  # fmt: skip
    if packing.version == "gemm":
        return {
            "qweight": awq_gemm_columns(codes.T), "qzeros": awq_gemm_columns(zeros.T), "scales": scales.T,
        }, exact  # fmt: skip
    wide = -(-G // 8) * 8
    wide_zeros, wide_scales = np.zeros((N, wide), np.int64), np.zeros((N, wide), np.float16)
    wide_zeros[:, :G], wide_scales[:, :G] = zeros, scales
    return {
        "qweight": bits_along_rows(codes.T, 4).T, "qzeros": bits_along_rows(wide_zeros.T, 4).T, "scales": wide_scales,
    }, exact  # fmt: skip


ROUTERS = ("mlp.gate.weight", "moe.gate.weight", "feed_forward.gate.weight", "shared_expert_gate.weight")


def write_packed(folder: Path, source: Path, packing: Packing, seed: int = 0, **fields: object) -> dict[str, Array]:
    """Write the decoder layers' matrices of `source` as random codes; return float64 weights by tensor name.

    fields: keys of quantization_config over the usual ones
    """
    shutil.copytree(source, folder)
    floats, rng = Tensors.open(source), np.random.default_rng(seed)
    tensors: dict[str, Array] = {}
    exact: dict[str, Array] = {}
    for name in floats:
        values = floats.load(name)
        is_matrix = values.ndim == 2 and name.endswith(".weight")
        if not is_matrix or "embed" in name or name.startswith("lm_head") or name.endswith(ROUTERS):
            tensors[name] = values
            continue
        parts, exact[name] = packed_parts(rng, values.shape, packing)
        tensors |= {name.replace(".weight", f".{part}"): array for part, array in parts.items()}
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    safetensors.numpy.save_file(contiguous, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {**packing.config, **fields}
    (folder / "config.json").write_text(json.dumps(raw))
    return exact


def rewrite(folder: Path, tensors: Mapping[str, Array | None]) -> None:
    """Replace tensors of a folder by name; None removes one."""
    path = folder / "model.safetensors"
    content = {**safetensors.numpy.load_file(path), **tensors}
    safetensors.numpy.save_file({name: array for name, array in content.items() if array is not None}, path)
