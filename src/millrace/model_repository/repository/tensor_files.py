"""Tensor files in a model's folder: initial states and warm-up data."""

from pathlib import Path

import numpy as np

from millrace.model_repository.config.data_files_check import MAX_BYTES
from millrace.model_repository.request.status_code import Code, StatusError, invalid
from millrace.model_repository.request.tensors import BYTES, DTYPES, Array, CutOffError, objects, split_strings


def read_tensor(file: Path, datatype: str, n: int) -> Array:
    """Read the first n elements as a flat array; strings have 4-byte length prefixes. raises StatusError"""
    file_label = f"{file.parent.name}/{file.name}"
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_BYTES)
    except OSError as error:
        raise StatusError(Code.INTERNAL, f"failed to read {file_label}: {error.strerror}") from None
    if datatype == BYTES:
        try:
            strings = split_strings(data)
        except CutOffError:
            strings = []
        if len(strings) != n:
            raise invalid(f"{file_label} is not {n} strings, each behind its length in 4 bytes")
        return objects(strings)
    dtype = np.dtype(DTYPES[datatype])
    if len(data) < n * dtype.itemsize:  # it has become shorter since it was checked
        raise invalid(f"{file_label} has {len(data)} bytes, expected {n * dtype.itemsize}")
    array: Array = np.frombuffer(data, dtype, n).copy()
    if datatype == "BOOL":
        array = array.view(np.uint8) != 0
    return array
