"""Arrays through DLPack, BF16 among them, which NumPy neither takes nor gives.

A capsule of BF16 is read and made as one of 16-bit integers: the type in its header is changed, not the numbers.
"""

import ctypes
from typing import Any

import numpy as np

from .bytes_tensors import Array

try:
    from ml_dtypes import bfloat16
except ImportError:  # in an interpreter of the model's own, which may know no BF16
    bfloat16 = None

_UNSIGNED, _BFLOAT = 1, 4  # DLDataTypeCode
_CPU = (1, 0)  # DLDevice
# Where a DLDataType (code, bits, lanes) lies, by the name of the capsule: behind data, device and number of dimensions
# of the DLTensor, which in the versioned struct has the version, the context, the deleter and the flags before it.
_TYPE_AT = {b"dltensor": 20, b"dltensor_versioned": 52}
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]


class _Capsule:
    """What NumPy asks for one; where that is none, or of another device, NumPy says so."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU


class _Shared(np.ndarray[Any, np.dtype[Any]]):
    """An array that others see, with what must live as long as it does."""

    owner: object = None


def imported(tensor: Any) -> Array:
    """The numbers of another framework's tensor on the CPU, or of a capsule; memory is shared.

    raises AttributeError, BufferError, RuntimeError, TypeError or ValueError, as NumPy does
    """
    if not hasattr(tensor, "__dlpack__"):
        return _of_capsule(tensor)
    try:
        return np.from_dlpack(tensor)
    except (BufferError, RuntimeError, TypeError, ValueError):
        if bfloat16 is None or tuple(tensor.__dlpack_device__()) != _CPU:
            raise
        try:
            capsule = tensor.__dlpack__(max_version=(1, 0))  # whose flags say that it may be written into
        except TypeError:
            capsule = tensor.__dlpack__()
        kind = _type_of(capsule)
        if kind is None or kind[0] != _BFLOAT:
            raise
    return _of_capsule(capsule)


def _of_capsule(capsule: Any) -> Array:
    kind = _type_of(capsule)
    if kind is None or bfloat16 is None or (kind[0], kind[1]) != (_BFLOAT, 16):
        return np.from_dlpack(_Capsule(capsule))
    kind[0] = _UNSIGNED
    found: Array = np.from_dlpack(_Capsule(capsule)).view(bfloat16)
    return found


def exported(array: Array, owner: object) -> Any:
    """A capsule of the array, which keeps `owner`. raises BufferError for types that DLPack does not have"""
    is_bfloat = bfloat16 is not None and array.dtype == bfloat16
    shared = (array.view(np.uint16) if is_bfloat else array).view(_Shared)
    shared.owner = owner
    capsule = shared.__dlpack__()
    kind = _type_of(capsule) if is_bfloat else None
    if kind is not None:
        kind[0] = _BFLOAT
    return capsule


def _type_of(capsule: Any) -> Any:
    """Code and bits of the numbers, as they lie in the capsule; None where it is none, or was used."""
    for name, at in _TYPE_AT.items():
        if _is_valid(capsule, name):
            return (ctypes.c_uint8 * 2).from_address(_pointer_of(capsule, name) + at)
    return None
