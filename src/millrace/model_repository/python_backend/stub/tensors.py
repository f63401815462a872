"""`pb_utils.Tensor`, and Triton's data types as NumPy has them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .bytes_tensors import Array, joined_strings, objects, split_strings, text
from .dlpack import exported, imported
from .errors import TritonModelException

try:
    from ml_dtypes import bfloat16
except ImportError:  # in an interpreter of the model's own, which may know no BF16
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
        """array: of numbers, or of objects: bytes as they are, anything else as the UTF-8 of its `str`"""
        if array is None:
            raise TypeError(f"tensor '{text(name)}' is made of an array, not of None")
        name, found = text(name), np.asarray(array)
        if found.dtype.kind in "SU":
            found = found.astype(np.object_)
        if found.dtype == np.object_:
            found = objects([_element(value) for value in found.reshape(-1)]).reshape(found.shape)
        if found.dtype not in NUMBERS:
            raise TritonModelException(f"the data type {found.dtype} of tensor '{name}' has no name in Triton")
        self._name, self._array = name, found

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Array:
        """A model may write into it."""
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
        """What else a framework may ask for (a version, a device, a copy) it does not insist on."""
        if self._array.dtype == np.object_:
            raise TritonModelException("DLPack does not have support for string tensors.")
        return exported(self.as_numpy(), self)

    def __dlpack_device__(self) -> Any:
        return 1, 0  # the CPU

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> "Tensor":
        """tensor: of another framework, on the CPU, or a capsule, as PyTorch's `to_dlpack` makes; memory is shared

        raises TritonModelException
        """
        try:
            found = imported(tensor)
        except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
            raise TritonModelException(f"what tensor '{name}' is made of is no tensor on the CPU: {error}") from None
        return Tensor(name, found)


def _element(value: Any) -> bytes:
    """What an object is as an element of TYPE_STRING."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    return str(value).encode()


def held(tensors: Sequence[Tensor]) -> list[tuple[str, Array]]:
    """Their names, and their arrays as they are, which nobody writes into before they were copied."""
    return [(tensor._name, tensor._array) for tensor in tensors]


def triton_to_numpy_type(number: int) -> Any:
    return TYPES[number]


def numpy_to_triton_type(kind: Any) -> int:
    return NUMBERS[np.dtype(kind)]


def triton_string_to_numpy(text: str) -> Any:
    """text: TYPE_FP32, as a configuration has it"""
    return TYPES[NAMES.index(text.removeprefix("TYPE_"))]


def serialize_byte_tensor(array: Array) -> Array | None:
    """Each element after its length in four bytes, as an array of one element; None of an empty one."""
    if not array.size:
        return None
    return objects([joined_strings(Tensor("", array).as_numpy().reshape(-1))])


def deserialize_bytes_tensor(data: Any) -> Array:
    return objects(split_strings(bytes(data)))
