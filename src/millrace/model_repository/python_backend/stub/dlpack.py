"""DLPack import and export of arrays, including BF16, which NumPy does not support.

BF16 capsules are read and created as 16-bit integers; only the type in the capsule's header is changed.
"""

import ctypes
from typing import Any

import numpy as np

from .bytes_tensors import Array

try:
    from ml_dtypes import bfloat16
except ImportError:  # the model's own interpreter may lack it
    bfloat16 = None

_UNSIGNED, _BFLOAT = 1, 4  # DLDataTypeCode
_CPU = (1, 0)  # DLDevice
# Offset of the DLDataType (code, bits, lanes) by capsule name: after data, device and number of dimensions of the
# DLTensor, which in the versioned struct follows version, context, deleter and flags.
_TYPE_AT = {b"dltensor": 20, b"dltensor_versioned": 52}
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]


class _Capsule:
    """Wrapper with the DLPack protocol; NumPy itself rejects invalid capsules and other devices."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU


class _Shared(np.ndarray[Any, np.dtype[Any]]):
    """An exported array, with a reference that must live as long as it does."""

    owner: object = None


def import_array(tensor: Any) -> Array:
    """Return another framework's CPU tensor, or a capsule, as an array that shares its memory.

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
            capsule = tensor.__dlpack__(max_version=(1, 0))  # versioned, so that its flags allow writing
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
    array: Array = np.from_dlpack(_Capsule(capsule)).view(bfloat16)
    return array


def export_array(array: Array, owner: object) -> Any:
    """Return a capsule of the array that keeps `owner` alive. raises BufferError for types that DLPack lacks"""
    is_bfloat = bfloat16 is not None and array.dtype == bfloat16
    shared = (array.view(np.uint16) if is_bfloat else array).view(_Shared)
    shared.owner = owner
    capsule = shared.__dlpack__()
    kind = _type_of(capsule) if is_bfloat else None
    if kind is not None:
        kind[0] = _BFLOAT
    return capsule


def _type_of(capsule: Any) -> Any:
    """Return code and bits of the type, in the capsule's memory; None if it is invalid or consumed."""
    for name, at in _TYPE_AT.items():
        if _is_valid(capsule, name):
            return (ctypes.c_uint8 * 2).from_address(_pointer_of(capsule, name) + at)
    return None
