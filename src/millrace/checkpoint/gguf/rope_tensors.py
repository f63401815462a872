"""Reads the tensors of a GGUF file that change rotary frequencies."""

from pathlib import Path

import numpy as np

from millrace.checkpoint.files import read_span
from millrace.checkpoint.gguf.reader import GgufFile, GgufTensor
from millrace.errors import CheckpointError

ROPE_FREQS = "rope_freqs.weight"  # divisors of the frequencies, Llama 3.1's scaling
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"  # LongRoPE's
ROPE_TENSORS = (ROPE_FREQS, LONG_FACTORS, SHORT_FACTORS)


def rope_divisors(file: GgufFile, name: str, count: int) -> tuple[float, ...]:
    """Return the divisors of `count` rotary frequencies, () if there is no such tensor. raises CheckpointError"""
    tensor = file.tensors.get(name)
    if tensor is None:
        return ()
    if tensor.shape != (count,) or tensor.type.name != "F32":
        raise misshapen(file, tensor, (count,))
    values = read_span(tensor.file, file.states[tensor.file], tensor.offset, tensor.nbytes).view("<f4")
    if not (np.isfinite(values) & (values > 0)).all():
        raise CheckpointError(f"{file.path}: {name} has {values.min()}", "numbers above zero", download_hint(file.path))
    return tuple(values.tolist())


def misshapen(file: GgufFile, tensor: GgufTensor, shape: tuple[int, ...]) -> CheckpointError:
    what = f"{file.path}: {tensor.name} is {tensor.shape} {tensor.type.name}"
    return CheckpointError(what, f"{shape}, by the file's metadata", download_hint(file.path))


def download_hint(path: Path) -> str:
    return f"download {path.name} again, or convert the original checkpoint with llama.cpp's convert_hf_to_gguf.py"
