"""Tensors of KServe's protocol, for server and load generator: datatypes and the binary encoding."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from millrace.errors import ConfigError
from millrace.model_repository.python_backend.stub.bytes_tensors import Array as Array
from millrace.model_repository.python_backend.stub.bytes_tensors import CutOffError as CutOffError
from millrace.model_repository.python_backend.stub.bytes_tensors import join_in_pieces
from millrace.model_repository.python_backend.stub.bytes_tensors import objects as objects
from millrace.model_repository.python_backend.stub.bytes_tensors import split_strings as split_strings
from millrace.model_repository.python_backend.stub.bytes_tensors import split_up_to as split_up_to
from millrace.model_repository.request.concatenation import concatenate
from millrace.model_repository.request.status_code import Code, StatusError

BYTES = "BYTES"
DTYPES: dict[str, Any] = {
    "BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.dtype("<u2"), "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"), "INT8": np.int8, "INT16": np.dtype("<i2"), "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"), "FP16": np.dtype("<f2"), "FP32": np.dtype("<f4"), "FP64": np.dtype("<f8"),
    "BF16": ml_dtypes.bfloat16, BYTES: np.object_,
}  # fmt: skip
WIRE_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
MAX_DIMENSIONS, MAX_ELEMENTS = 32, 1 << 32
MAX_STRINGS = 1 << 21  # per input: each string takes about 60 bytes in addition to its text
ONLY_BINARY = ("FP16", "BF16")  # no JSON representation
_MAX_SAMPLES = 1 << 14  # strings sampled to estimate the size of all
_FLOATS = ("FP16", "FP32", "FP64", "BF16")


@dataclass(frozen=True, slots=True)
class InferTensor:
    """A tensor. values: of `DTYPES[datatype]`; for BYTES, `bytes` objects"""

    name: str
    datatype: str
    values: Array

    def raw(self) -> bytes:
        """Return the binary encoding: little-endian, row-major; each BYTES element after its 4-byte length."""
        return concatenate(self.raw_parts())

    def raw_parts(self) -> list[bytes | memoryview]:
        """Return the binary encoding in parts, without copying contiguous numbers."""
        if self.datatype == BYTES:
            return list(join_in_pieces(self.values.reshape(-1)))
        return [np.ascontiguousarray(self.values).reshape(-1).view(np.uint8).data]

    def to_json_values(self) -> list[Any]:
        """Return the values as a flat JSON list. raises ConfigError if the datatype has no JSON representation"""
        flat = self.values.reshape(-1)
        if self.datatype in ONLY_BINARY:
            raise ConfigError(
                f'input "{self.name}" of {self.datatype} as JSON', "--tensor-format binary", "leave out --tensor-format"
            )
        if self.datatype != BYTES:
            return list(flat.tolist())
        try:
            return [v.decode() for v in flat]
        except UnicodeDecodeError:
            raise ConfigError(
                f'input "{self.name}" holds bytes that are no text', "--tensor-format binary", "leave it out"
            ) from None


def check_size(datatype: str, shape: Sequence[int], n_bytes: int) -> None:
    """Check the byte size of a server's tensor, without counting strings. raises ValueError"""
    n = n_elements(datatype, shape)
    if datatype == BYTES:
        fits = n_bytes >= 4 * n and (n > 0 or n_bytes == 0)
    else:
        fits = n_bytes == n * np.dtype(DTYPES[datatype]).itemsize
    if not fits:
        raise ValueError(f"{n_bytes} bytes of data for {datatype} of shape {list(shape)}")


def check_count(datatype: str, shape: Sequence[int], n: int) -> None:
    """Check the number of values of a tensor. raises ValueError"""
    if n != n_elements(datatype, shape):
        raise ValueError(f"{n} values for {datatype} of shape {list(shape)}")


def n_elements(datatype: str, shape: Sequence[int]) -> int:
    """Return the number of elements. raises ValueError for an invalid datatype or shape"""
    if datatype not in DTYPES:
        raise ValueError(f"the datatype {datatype!r:.40}")
    if len(shape) > MAX_DIMENSIONS or not all(0 <= d <= MAX_ELEMENTS for d in shape):
        raise ValueError(f"the shape {list(shape)!r:.80}")
    return prod(shape)


def n_items(shapes: Sequence[Sequence[int]]) -> int | None:
    """Return the first dimension if all shapes share it (the batch size, if batched); otherwise None."""
    firsts = {shape[0] if shape else None for shape in shapes}
    return firsts.pop() if len(firsts) == 1 else None


def from_json_values(values: Any, datatype: str, shape: Sequence[int]) -> Array:
    """Convert nested or flat JSON values to an array. raises ValueError, OverflowError"""
    if datatype == BYTES:
        return _strings(values).reshape(shape)
    array = np.asarray(values)
    if array.dtype.kind not in ("buif" if datatype in _FLOATS else "bui"):
        raise ValueError(f"values that are no {datatype}")
    converted: Array = array.astype(DTYPES[datatype])
    if datatype not in _FLOATS and not np.array_equal(converted, array):
        raise ValueError(f"values beyond {datatype}")
    return converted.reshape(shape)


def _strings(values: Any) -> Array:
    flat = np.array(values, dtype=np.object_).reshape(-1)
    if not all(isinstance(v, str) for v in flat):
        raise ValueError("values that are no strings")
    return objects([v.encode() for v in flat])


def memory_bytes(arrays: Iterable[Array]) -> int:
    """Estimate the memory of arrays, including the strings that object arrays point to."""
    n_bytes = 0
    for array in arrays:
        n_bytes += array.nbytes
        if array.dtype.hasobject:
            if array.size == 1 and type(one := array.item()) is bytes:  # a token's text
                n_bytes += len(one)
            else:
                flat = array.reshape(-1)
                step = -(-len(flat) // _MAX_SAMPLES) or 1  # sample large arrays, because inspecting each string is slow
                n_bytes += step * sum(len(v) for v in flat[::step] if isinstance(v, bytes | str))
    return n_bytes


def from_raw(data: bytes, datatype: str, shape: Sequence[int]) -> Array:
    """Decode the binary encoding. raises ValueError"""
    if datatype != BYTES:
        return np.frombuffer(data, DTYPES[datatype]).reshape(shape)
    return objects(split_strings(data)).reshape(shape)


def output_datatype(name: str, array: Array) -> str:
    """Return the datatype of an output. raises StatusError"""
    datatype = WIRE_NAMES.get(array.dtype)
    if datatype is None:
        raise StatusError(Code.INTERNAL, f"output '{name}' has the data type {array.dtype}, which has no name here")
    return datatype
