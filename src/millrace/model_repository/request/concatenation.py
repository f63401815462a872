"""Concatenation of large bytes without holding the GIL, which `bytes.join` does until it has finished."""

import ctypes
from collections.abc import Sequence

import numpy as np

LARGE = 1 << 20  # bytes: smaller copies take at most 0.3 ms
# Creates an uninitialised bytes object, which is filled before other code sees it, as its documentation allows.
_new = ctypes.pythonapi.PyBytes_FromStringAndSize
_new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_char_p, ctypes.c_ssize_t]
_address = ctypes.pythonapi.PyBytes_AsString
_address.restype, _address.argtypes = ctypes.c_void_p, [ctypes.py_object]


def concatenate(parts: Sequence[bytes | memoryview]) -> bytes:
    """Concatenate contiguous parts. Nothing may write into them meanwhile."""
    n_bytes = sum(map(len, parts))
    if n_bytes < LARGE:
        return b"".join(parts)
    if len(parts) == 1 and isinstance(parts[0], bytes):
        return parts[0]
    joined: bytes = _new(None, n_bytes)
    at = _address(joined)
    for part in parts:
        if part:
            ctypes.memmove(at, np.frombuffer(part, np.uint8).ctypes.data, len(part))  # releases the GIL
        at += len(part)
    return joined
