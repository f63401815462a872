"""`pb_utils.Tensor`, and the mapping of Triton's data types to NumPy."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .bytes_tensors import Array, join_strings, objects, split_strings, text
from .dlpack import export_array, import_array
from .errors import TritonModelException

try:
    from ml_dtypes import bfloat16
except ImportError:  # the model's own interpreter may lack it
    bfloat16 = None

NAMES = (
    "INVALID", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64",
    "STRING", "BF16",
)  # fmt: skip
# By Triton's number of each.
TYPES: dict[int, Any] = {
    1: np.bool_, 2: np.uint8, 3: np.uint16, 4: np.uint32, 5: np.uint64, 6: np.int8, 7: np.int16, 8: np.int32,
    9: np.int64, 10: np.float16, 11: np.float32, 12: np.float64, 13: np.object_,
    **({14: bfloat16} if bfloat16 is not None else {}),
}  # fmt: skip
NUMBERS = {np.dtype(kind): number for number, kind in TYPES.items()}


class Tensor:
    def __init__(self, name: str | bytes, array: Any) -> None:
        """array: numbers or objects; bytes are kept, other objects become the UTF-8 of their `str`"""
        if array is None:
            raise TypeError(f"tensor '{text(name)}' is made of an array, not of None")
        name, values = text(name), np.asarray(array)
        if values.dtype.kind in "SU":
            values = values.astype(np.object_)
        if values.dtype == np.object_:
            values = objects([_element(value) for value in values.reshape(-1)]).reshape(values.shape)
        if values.dtype not in NUMBERS:
            raise TritonModelException(f"the data type {values.dtype} of tensor '{name}' has no name in Triton")
        self._name, self._array = name, values

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Array:
        """Return the array, writable: a read-only one is copied first."""
        if not self._array.flags.writeable:
            self._array = self._array.copy()
        return self._array

    def triton_dtype(self) -> int:
        return NUMBERS[self._array.dtype]

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        return True

    def to_dlpack(self) -> Any:
        return self.__dlpack__()

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        """Export through DLPack; optional requests (version, device, copy) are ignored."""
        if self._array.dtype == np.object_:
            raise TritonModelException("DLPack does not have support for string tensors.")
        return export_array(self.as_numpy(), self)

    def __dlpack_device__(self) -> Any:
        return 1, 0  # the CPU

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> "Tensor":
        """Wrap another framework's CPU tensor or a DLPack capsule, sharing its memory.

        raises TritonModelException
        """
        try:
            array = import_array(tensor)
        except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
            raise TritonModelException(f"what tensor '{name}' is made of is no tensor on the CPU: {error}") from None
        return Tensor(name, array)


def _element(value: Any) -> bytes:
    """Convert an object to an element of TYPE_STRING."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    return str(value).encode()


def named_arrays(tensors: Sequence[Tensor]) -> list[tuple[str, Array]]:
    """Return names and uncopied arrays; nothing may write into them before they are copied."""
    return [(tensor._name, tensor._array) for tensor in tensors]


def triton_to_numpy_type(number: int) -> Any:
    return TYPES[number]


def numpy_to_triton_type(kind: Any) -> int:
    return NUMBERS[np.dtype(kind)]


def triton_string_to_numpy(text: str) -> Any:
    """Return the NumPy type of a configuration's data type, such as TYPE_FP32."""
    return TYPES[NAMES.index(text.removeprefix("TYPE_"))]


def serialize_byte_tensor(array: Array) -> Array | None:
    """Encode BYTES elements into an array of one element; None for an empty array."""
    if not array.size:
        return None
    return objects([join_strings(Tensor("", array).as_numpy().reshape(-1))])


def deserialize_bytes_tensor(data: Any) -> Array:
    return objects(split_strings(bytes(data)))
