"""Folders in the format of bitsandbytes, written by NumPy alone as its pages describe it."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from millrace.checkpoint.weights.safetensors import Tensors

Array = NDArray[Any]
FOUR: dict[str, Any] = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "_load_in_4bit": True,
    "_load_in_8bit": False, "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True, "bnb_4bit_quant_storage": "uint8", "llm_int8_skip_modules": None,
    "llm_int8_threshold": 6.0, "llm_int8_has_fp16_weight": False, "llm_int8_enable_fp32_cpu_offload": False,
}  # fmt: skip
EIGHT = {**FOUR, "load_in_4bit": False, "load_in_8bit": True, "_load_in_4bit": False, "_load_in_8bit": True}


def four_bits(rng: np.random.Generator, shape: tuple[int, int], nested: bool) -> tuple[dict[str, Array], Array]:
    """A random matrix's tensors by suffix, and its float64 numbers."""
    n = shape[0] * shape[1]
    codes, numbers = rng.integers(0, 16, n), np.sort(rng.uniform(-1, 1, 16)).astype(np.float32)
    n_blocks = -(-n // 64)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
    if nested:
        indices, levels = rng.integers(0, 256, n_blocks), np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
        outer = rng.uniform(0.01, 0.02, -(-n_blocks // 256)).astype(np.float32)
        of_blocks = outer.astype(np.float64)[np.arange(n_blocks) // 256]
        scales = levels[indices].astype(np.float64) * of_blocks + 0.04
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.04}
        more: dict[str, Array] = {
            ".absmax": indices.astype(np.uint8),
            ".nested_quant_map": levels,
            ".nested_absmax": outer,
        }
    else:
        absmax = rng.uniform(0.01, 0.02, n_blocks).astype(np.float32)
        scales, more = absmax.astype(np.float64), {".absmax": absmax}
    padded = np.append(codes, 0) if n % 2 else codes
    document = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors: dict[str, Array] = {
        "": (padded[::2] << 4 | padded[1::2]).astype(np.uint8)[:, None], ".quant_map": numbers,
        ".quant_state.bitsandbytes__nf4": document, **more,
    }  # fmt: skip
    return tensors, (numbers.astype(np.float64)[codes] * scales[np.arange(n) // 64]).reshape(shape)


def write_bitsandbytes(folder: Path, source: Path, fields: dict[str, Any], *, nested: bool = True) -> dict[str, Array]:
    """Write the decoder layers' matrices of `source` as random codes; return float64 weights by tensor name."""
    shutil.copytree(source, folder)
    floats, rng = Tensors.open(source), np.random.default_rng(0)
    tensors: dict[str, Array] = {}
    exact: dict[str, Array] = {}
    for name in floats:
        values = floats.load(name)
        if values.ndim == 1 or "embed" in name or name.startswith("lm_head"):
            tensors[name] = values
        elif fields["load_in_4bit"]:
            parts, exact[name] = four_bits(rng, values.shape, nested)
            tensors |= {name + suffix: array for suffix, array in parts.items()}
        else:
            codes = np.asarray(rng.integers(-127, 128, values.shape), np.int8)
            scales: Array = rng.uniform(0.1, 1, len(values)).astype(np.float32)
            module = name.removesuffix(".weight")
            tensors |= {name: codes, f"{module}.SCB": scales, f"{module}.weight_format": np.zeros((), np.uint8)}
            exact[name] = codes * (scales.astype(np.float64) / 127)[:, None]
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    safetensors.numpy.save_file({n: np.ascontiguousarray(a) for n, a in tensors.items()}, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": fields}))
    return exact
