"""Tensors of KServe's protocol, for server and load generator: datatypes, and their bytes in the binary extension."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from millrace.errors import ConfigError
from millrace.model_repository.python_backend.stub.bytes_tensors import Array as Array
from millrace.model_repository.python_backend.stub.bytes_tensors import CutOffError as CutOffError
from millrace.model_repository.python_backend.stub.bytes_tensors import joined_pieces
from millrace.model_repository.python_backend.stub.bytes_tensors import objects as objects
from millrace.model_repository.python_backend.stub.bytes_tensors import split_strings as split_strings
from millrace.model_repository.python_backend.stub.bytes_tensors import split_up_to as split_up_to
from millrace.model_repository.request.concatenation import concatenated
from millrace.model_repository.request.status_code import Code, StatusError

BYTES = "BYTES"
DTYPES: dict[str, Any] = {
    "BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.dtype("<u2"), "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"), "INT8": np.int8, "INT16": np.dtype("<i2"), "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"), "FP16": np.dtype("<f2"), "FP32": np.dtype("<f4"), "FP64": np.dtype("<f8"),
    "BF16": ml_dtypes.bfloat16, BYTES: np.object_,
}  # fmt: skip
WIRE_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
MOST_DIMENSIONS, MOST_ELEMENTS = 32, 1 << 32
MOST_STRINGS = 1 << 21  # of one request's input: each takes some 60 bytes beside its text
ONLY_BINARY = ("FP16", "BF16")  # have no form in JSON
_LOOKS = 1 << 14  # at strings, to know about what all of them hold
_FLOATS = ("FP16", "FP32", "FP64", "BF16")


@dataclass(frozen=True, slots=True)
class Tensor:
    """values: of `DTYPES[datatype]`; of BYTES objects, each `bytes`"""

    name: str
    datatype: str
    values: Array

    def raw(self) -> bytes:
        """Little-endian, row after row; each element of BYTES after its length in four bytes."""
        return concatenated(self.raw_parts())

    def raw_parts(self) -> list[bytes | memoryview]:
        """The same in parts, of numbers their own memory where it is contiguous."""
        if self.datatype == BYTES:
            return list(joined_pieces(self.values.reshape(-1)))
        return [np.ascontiguousarray(self.values).reshape(-1).view(np.uint8).data]

    def listed(self) -> list[Any]:
        """Flat, for JSON. raises ConfigError where the datatype has no such form"""
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
    """Whether a server's tensor has as many bytes as it says. raises ValueError; strings are not counted one by one"""
    n = n_elements(datatype, shape)
    if datatype == BYTES:
        fits = n_bytes >= 4 * n and (n > 0 or n_bytes == 0)
    else:
        fits = n_bytes == n * np.dtype(DTYPES[datatype]).itemsize
    if not fits:
        raise ValueError(f"{n_bytes} bytes of data for {datatype} of shape {list(shape)}")


def check_count(datatype: str, shape: Sequence[int], n: int) -> None:
    """The same of what comes as numbers or strings: n of them. raises ValueError"""
    if n != n_elements(datatype, shape):
        raise ValueError(f"{n} values for {datatype} of shape {list(shape)}")


def n_elements(datatype: str, shape: Sequence[int]) -> int:
    """raises ValueError where there is no such tensor"""
    if datatype not in DTYPES:
        raise ValueError(f"the datatype {datatype!r:.40}")
    if len(shape) > MOST_DIMENSIONS or not all(0 <= d <= MOST_ELEMENTS for d in shape):
        raise ValueError(f"the shape {list(shape)!r:.80}")
    return prod(shape)


def n_items(shapes: Sequence[Sequence[int]]) -> int | None:
    """The first dimension that all of them have, which is the batch's where they have one; None: there is none such."""
    firsts = {shape[0] if shape else None for shape in shapes}
    return firsts.pop() if len(firsts) == 1 else None


def typed(values: Any, datatype: str, shape: Sequence[int]) -> Array:
    """What JSON says, nested or flat, as an array. raises ValueError, OverflowError"""
    if datatype == BYTES:
        return _strings(values).reshape(shape)
    found = np.asarray(values)
    if found.dtype.kind not in ("buif" if datatype in _FLOATS else "bui"):
        raise ValueError(f"values that are no {datatype}")
    whole: Array = found.astype(DTYPES[datatype])
    if datatype not in _FLOATS and not np.array_equal(whole, found):
        raise ValueError(f"values beyond {datatype}")
    return whole.reshape(shape)


def _strings(values: Any) -> Array:
    flat = np.array(values, dtype=np.object_).reshape(-1)
    if not all(isinstance(v, str) for v in flat):
        raise ValueError("values that are no strings")
    return objects([v.encode() for v in flat])


def held_bytes(arrays: Iterable[Array]) -> int:
    """About what they hold in memory; an array of strings itself only points at them."""
    found = 0
    for array in arrays:
        found += array.nbytes
        if array.dtype.hasobject:
            if array.size == 1 and type(one := array.item()) is bytes:  # a token's text
                found += len(one)
            else:
                flat = array.reshape(-1)
                step = -(-len(flat) // _LOOKS) or 1  # of very many, some stand for all: looking at each takes its time
                found += step * sum(len(v) for v in flat[::step] if isinstance(v, bytes | str))
    return found


def from_raw(data: bytes, datatype: str, shape: Sequence[int]) -> Array:
    """raises ValueError"""
    if datatype != BYTES:
        return np.frombuffer(data, DTYPES[datatype]).reshape(shape)
    return objects(split_strings(data)).reshape(shape)


def named_type(name: str, array: Array) -> str:
    """The datatype of an output. raises StatusError"""
    found = WIRE_NAMES.get(array.dtype)
    if found is None:
        raise StatusError(Code.INTERNAL, f"output '{name}' has the data type {array.dtype}, which has no name here")
    return found
