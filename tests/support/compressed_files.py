"""Folders in the format of compressed-tensors, written by NumPy alone as the format's pages describe it."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from millrace.checkpoint.weights.safetensors import Tensors

Array = NDArray[Any]


@dataclass(frozen=True)
class Kind:
    """group: None for one scale a row; scale: the dtype of scales; coarse: their mantissas have so many bits"""

    format: str = "pack-quantized"
    bits: int = 4
    group: int | None = 128
    symmetric: bool = True
    floats: bool = False
    scale: str = "float16"
    coarse: int = 11
    per_tensor: bool = False
    activations: Mapping[str, object] | None = None

    @property
    def weights(self) -> dict[str, object]:
        strategy = "tensor" if self.per_tensor else "channel" if self.group is None else "group"
        return {
            "num_bits": self.bits, "type": "float" if self.floats else "int", "symmetric": self.symmetric,
            "strategy": strategy, "group_size": self.group, "dynamic": False, "actorder": None, "observer": "minmax",
        }  # fmt: skip


PER_TOKEN: Mapping[str, object] = {
    "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True, "group_size": None,
}  # fmt: skip
FP8_PER_TOKEN = {**PER_TOKEN, "type": "float"}


def packed_by_spec(codes: Array, bits: int) -> Array:
    """(R, C) signed -> int32 (R, words): a dense run of little-endian bits, codes made unsigned."""
    unsigned = (codes.astype(np.int64) + (1 << bits - 1))[:, :, None] >> np.arange(bits) & 1
    stream = unsigned.reshape(len(codes), -1).astype(np.uint8)
    padded = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    words: Array = np.packbits(padded, axis=1, bitorder="little").view("<i4")
    return words


def unpacked_by_spec(words: Array, bits: int, n: int) -> Array:
    stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
    codes: Array = stream[:, : n * bits].reshape(len(words), n, bits).astype(np.int64) << np.arange(bits)
    found: Array = codes.sum(axis=2) - (1 << bits - 1)
    return found


def dequantised_by_spec(file: Mapping[str, Array], module: str, kind: Mapping[str, Any]) -> Array:
    """float64 (N, K) of what a file holds of a layer; kind: its scheme's weights"""
    bits, scale = kind["num_bits"], file[f"{module}.weight_scale"].astype(np.float64)
    if f"{module}.weight_packed" in file:
        N, K = file[f"{module}.weight_shape"].tolist()
        codes = unpacked_by_spec(file[f"{module}.weight_packed"], bits, K)
    else:
        codes = file[f"{module}.weight"].astype(np.float64)
        N, K = codes.shape
    zero = np.zeros_like(scale)
    if not kind["symmetric"]:
        stored = file[f"{module}.weight_zero_point"]
        packed = f"{module}.weight_packed" in file
        zero = unpacked_by_spec(stored.T, bits, N).T if packed else stored.astype(np.float64)
    size = kind["group_size"] or K
    wide = [
        np.broadcast_to(np.repeat(part.reshape(-1, part.shape[-1]), size, axis=1)[:, :K], (N, K))
        for part in (zero, scale)
    ]
    return (codes - wide[0]) * wide[1]


_TYPES = {
    "F32": "<f4", "F16": "<f2", "BF16": ml_dtypes.bfloat16, "I8": "i1", "I32": "<i4", "I64": "<i8",
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}  # fmt: skip


def read_file(path: Path) -> dict[str, Array]:
    """A safetensors file as its page describes it, E4M3 included."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    spans = {
        name: (8 + size + said["data_offsets"][0], 8 + size + said["data_offsets"][1]) for name, said in header.items()
    }
    return {
        name: np.frombuffer(data[begin:end], _TYPES[header[name]["dtype"]]).reshape(header[name]["shape"])
        for name, (begin, end) in spans.items()
    }


def write_compressed(
    folder: Path, source: Path, kind: Kind, seed: int = 0, ignore: tuple[str, ...] = ("lm_head",), **said: object
) -> dict[str, Array]:
    """The decoder layers' matrices of `source` as random codes; float64 weights by tensor name.

    said: keys of quantization_config over the usual ones
    """
    shutil.copytree(source, folder)
    floats, rng, held, exact = Tensors.open(source), np.random.default_rng(seed), {}, {}
    for name in floats:
        values = floats.load(name)
        if values.ndim == 1 or "embed" in name or name.removesuffix(".weight") in ignore:
            held[name] = values
            continue
        module = name.removesuffix(".weight")
        held |= {f"{module}.{part}": array for part, array in _parts(rng, values.shape, kind).items()}
        exact[name] = dequantised_by_spec(held, module, kind.weights)
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    safetensors.numpy.save_file({n: np.ascontiguousarray(a) for n, a in held.items()}, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    group = {"targets": ["Linear"], "weights": kind.weights, "input_activations": kind.activations}
    raw["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": kind.format, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": list(ignore), "kv_cache_scheme": None, **said,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    return exact


def _parts(rng: np.random.Generator, shape: tuple[int, ...], kind: Kind) -> dict[str, Array]:
    (N, K), low = shape, -(1 << kind.bits - 1)
    G = 1 if kind.group is None else -(-K // kind.group)
    scales = rng.uniform(0.5, 1, (1,) if kind.per_tensor else (N, G)) * 2.0 ** (1 - kind.bits) / np.sqrt(K)
    mantissa, exponent = np.frexp(scales)
    scales = np.ldexp(np.rint(np.ldexp(mantissa, kind.coarse)), exponent - kind.coarse)
    found: dict[str, Array] = {"weight_scale": scales.astype(getattr(ml_dtypes, kind.scale, None) or kind.scale)}
    codes = rng.integers(low, -low, (N, K)).astype(np.int8)
    if kind.floats:
        found["weight"] = (rng.standard_normal((N, K)) * 100).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    elif kind.format == "pack-quantized":
        found |= {"weight_packed": packed_by_spec(codes, kind.bits), "weight_shape": np.array([N, K], np.int64)}
    else:
        found["weight"] = codes
    if not kind.symmetric:
        zeros = rng.integers(low, -low, (N, G)).astype(np.int8)
        packed = kind.format == "pack-quantized"
        found["weight_zero_point"] = packed_by_spec(zeros.T, kind.bits).T if packed else zeros
    return found
