"""Inputs for a tensor model: random by seed, zero, or from a file; created before the run.

Files have perf_analyzer's format: {"data": [{INPUT: [values] | {"content": [values], "shape": [...]} | {"b64": "..."}},
...]}, one entry per batch item, used cyclically. A folder instead holds one file per input, named like it: raw values,
or for BYTES one string per line.
"""

import base64
import binascii
import json
import random
from collections.abc import Mapping, Sequence
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from millrace.bench.infer.model import BenchModel, BenchTensor, dims
from millrace.errors import ConfigError
from millrace.model_repository.request.tensors import (
    BYTES,
    DTYPES,
    MAX_DIMENSIONS,
    Array,
    InferTensor,
    from_json_values,
    from_raw,
    objects,
)

RANDOM, ZERO = "random", "zero"
MAX_FILE, MAX_BYTES, DIFFERENT = (
    1 << 30,
    256 << 20,
    16,
)  # file size; bytes and number of distinct requests per batch size
_INTEGERS = 128  # bound of random integers: fits every datatype and every vocabulary
_LETTERS = b"abcdefghijklmnopqrstuvwxyz"
Item = Mapping[str, Array]  # one value of each input, without the batch


def parse_shapes(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Parse --shape values such as `NAME:3,224,224`. raises ConfigError"""
    shapes = {}
    for text in texts:
        name, _, lengths = text.rpartition(":")
        try:
            shape = tuple(int(d) for d in lengths.split(","))
        except ValueError:
            shape = ()
        if not name or not shape or len(shape) > MAX_DIMENSIONS or not all(0 < d <= 1 << 32 for d in shape):
            raise ConfigError(f'--shape is "{text}"', "NAME:LENGTH,LENGTH,... of one item of a batch", "write it so")
        shapes[name] = shape
    return shapes


def read_items(path: Path, model: BenchModel) -> list[Item]:
    """Read and check a whole input file or folder. raises ConfigError"""
    try:
        if path.is_dir():
            return [{spec.name: _from_folder(path, spec) for spec in model.inputs}]
        if path.stat().st_size > MAX_FILE:
            raise ConfigError(f"{path} has {path.stat().st_size} bytes", f"at most {MAX_FILE}", "give less of it")
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"--input-data {path} cannot be read: {error.strerror}", "random, zero, a file or a folder", "check it"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not JSON: {error}", '{"data": [...]}, as perf_analyzer has it', "fix it"
        ) from None
    entries = document.get("data") if isinstance(document, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f'{path} has no list "data"', "an entry for each item", "write it as perf_analyzer has it")
    streams = [e if isinstance(e, list) else [e] for e in entries]  # a list in the list is a sequence's
    return [_item(path, number, entry, model) for number, entry in enumerate(chain.from_iterable(streams), 1)]


def _wrong(path: Path, number: int, problem: str, expected: str) -> NoReturn:
    raise ConfigError(f"{path}, entry {number} of data: {problem}", expected, "correct it")


def _item(path: Path, number: int, entry: Any, model: BenchModel) -> Item:
    names = [spec.name for spec in model.inputs]
    if not isinstance(entry, dict) or sorted(entry) != sorted(names):
        _wrong(path, number, f"{sorted(entry) if isinstance(entry, dict) else entry!r:.80}", f"inputs {names}")
    arrays = {}
    for spec in model.inputs:
        value = entry[spec.name]
        fields: dict[str, Any] = value if isinstance(value, dict) else {"content": value}
        shape = _shape(path, number, spec, fields.get("shape", spec.shape))
        try:
            if "b64" in fields:
                arrays[spec.name] = from_raw(base64.b64decode(fields["b64"], validate=True), spec.datatype, shape)
            else:
                arrays[spec.name] = from_json_values(fields["content"], spec.datatype, shape)
        except (ValueError, TypeError, OverflowError, KeyError, binascii.Error) as error:
            _wrong(path, number, f'"{spec.name}": {error!s:.200}', f"{spec.datatype} of shape {dims(shape)}")
    return arrays


def _shape(path: Path, number: int, spec: BenchTensor, shape: Any) -> tuple[int, ...]:
    is_shape = isinstance(shape, list | tuple) and all(isinstance(d, int) and not isinstance(d, bool) for d in shape)
    fits = is_shape and len(shape) == len(spec.shape)
    if not fits or any(d < 1 or s not in (-1, d) for s, d in zip(spec.shape, shape, strict=True)):
        _wrong(path, number, f'"{spec.name}" has the shape {shape!s:.80}',
               f'"shape": {dims(spec.shape)}, -1 being any length, or --shape')  # fmt: skip
    return tuple(shape)


def _from_folder(folder: Path, spec: BenchTensor) -> Array:
    """Read one input of a folder. raises ConfigError, OSError"""
    data = (folder / spec.name).read_bytes()
    try:
        if spec.datatype == BYTES:
            return objects(data.splitlines()).reshape(spec.shape)
        return from_raw(data, spec.datatype, spec.shape)
    except ValueError as error:
        expected = f"{spec.datatype} of shape {dims(spec.shape)}, which --shape gives where it may be any length"
        raise ConfigError(f"{folder / spec.name}: {error}", expected, "correct it") from None


def random_array(spec: BenchTensor, kind: str, string_length: int, rng: "np.random.Generator") -> Array:
    """Generate an input: floats in [0, 1), integers from 0 to 127, strings of letters; or zeros and empty strings."""
    n = prod(spec.shape)
    if spec.datatype == BYTES:
        length = string_length if kind == RANDOM else 0
        letters = rng.choice(np.frombuffer(_LETTERS, np.uint8), (n, length)).astype(np.uint8)
        return objects([row.tobytes() for row in letters]).reshape(spec.shape)
    dtype = DTYPES[spec.datatype]
    if kind == ZERO:
        return np.zeros(spec.shape, dtype)
    if spec.datatype == "BOOL":
        return rng.integers(0, 2, spec.shape).astype(dtype)
    if spec.datatype.startswith(("INT", "UINT")):
        return rng.integers(0, _INTEGERS, spec.shape).astype(dtype)
    return rng.random(spec.shape).astype(dtype)


def batches(model: BenchModel, size: int, items: Sequence[Item], label: str = "the file") -> list[list[InferTensor]]:
    """Assemble items into distinct requests, as many as fit into `MAX_BYTES`. raises ConfigError"""
    requests: list[list[InferTensor]] = []
    n_bytes, n_requests = 0, len(items) if len(items) % size else len(items) // size
    for i in range(n_requests):
        chosen = [items[(i * size + k) % len(items)] for k in range(size)]
        tensors = [_stack(spec, [item[spec.name] for item in chosen], model.batched, label) for spec in model.inputs]
        n_bytes += sum(len(t.raw()) for t in tensors)
        if n_bytes > MAX_BYTES and requests:
            break
        if n_bytes > MAX_BYTES:
            raise ConfigError(f"a request of {n_bytes:,} bytes", f"at most {MAX_BYTES:,}", "a smaller batch or shape")
        requests.append(tensors)
    return requests


def _stack(spec: BenchTensor, values: Sequence[Array], batched: bool, label: str) -> InferTensor:
    if len({v.shape for v in values}) > 1:
        raise ConfigError(
            f'items of "{spec.name}" of different shapes in one batch', "one shape", f"change {label}, or -b 1"
        )
    return InferTensor(spec.name, spec.datatype, np.stack(values) if batched else values[0])


def synthetic(model: BenchModel, size: int, kind: str, string_length: int, seed: int) -> list[list[InferTensor]]:
    """Generate distinct random requests, or one of zeros. raises ConfigError"""
    per_item = sum(prod(s.shape) * _bytes_of(s, string_length) for s in model.inputs)
    n = 1 if kind == ZERO else max(1, min(DIFFERENT, MAX_BYTES // max(1, size * per_item)))
    if size * per_item > MAX_BYTES:
        raise ConfigError(f"a request of {size * per_item:,} bytes", f"at most {MAX_BYTES:,}", "a smaller batch")
    rng = np.random.default_rng(random.Random(f"{seed}/tensors/{size}").getrandbits(64))
    items = [{s.name: random_array(s, kind, string_length, rng) for s in model.inputs} for _ in range(n * size)]
    return batches(model, size, items)


def _bytes_of(spec: BenchTensor, string_length: int) -> int:
    return 4 + string_length if spec.datatype == BYTES else int(np.dtype(DTYPES[spec.datatype]).itemsize)
