"""Decoding of `prompt_embeds` into rows: lists of numbers, or base64 of a safetensors file with one tensor.

Format: https://github.com/huggingface/safetensors#format
"""

import binascii
from base64 import b64decode
from typing import Annotated, Any

import ml_dtypes
import msgspec
import numpy as np
from msgspec import Meta

from millrace.engine.executor import ExecutorLimits
from millrace.errors import RequestError
from millrace.runtime.request.prompt_embeds import FIELD, Rows, check_shape, to_rows

_DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_ZIP = b"PK"  # how a file of torch.save begins
_LENGTH_BYTES = 8
_MAX_HEADER = 1 << 16
_MAX_RANK = 8


class _Tensor(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[Annotated[int, Meta(ge=1)], ...], Meta(max_length=_MAX_RANK)]
    data_offsets: tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)]]


def embedding_rows(embeds: str | list[list[float]], limits: ExecutorLimits) -> Rows:
    """Return rows (N, width). What does not fit `limits` is refused before it is converted. raises RequestError"""
    if isinstance(embeds, str):
        return _rows_from_safetensors(embeds, limits)
    if embeds and embeds[0]:
        check_shape(len(embeds), len(embeds[0]), limits)
    return to_rows(embeds, limits)


def _rows_from_safetensors(text: str, limits: ExecutorLimits) -> Rows:
    try:
        data = b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _wrong(f"is no base64: {error}") from None
    if data.startswith(_ZIP):
        raise _wrong("is a file of torch.save, a pickle, which is not read")
    size = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if len(data) < _LENGTH_BYTES or size > min(_MAX_HEADER, len(data) - _LENGTH_BYTES):
        raise _wrong("is no safetensors file")
    try:
        header = msgspec.json.decode(data[_LENGTH_BYTES : _LENGTH_BYTES + size], type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        tensors = [msgspec.json.decode(raw, type=_Tensor) for raw in header.values()]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _wrong(f"is no safetensors file: {error}") from None
    if len(tensors) != 1:
        raise _wrong(f"has {len(tensors)} tensors")
    (tensor,), values = tensors, memoryview(data)[_LENGTH_BYTES + size :]
    if tensor.dtype not in _DTYPES:
        raise _wrong(f"has a tensor of {tensor.dtype}")
    if len(tensor.shape) != 2:
        raise _wrong(f"has a tensor of {len(tensor.shape)} dimensions, {list(tensor.shape)}")
    dtype, (begin, end) = np.dtype(_DTYPES[tensor.dtype]), tensor.data_offsets
    if not begin <= end <= len(values) or end - begin != tensor.shape[0] * tensor.shape[1] * dtype.itemsize:
        raise _wrong(f"has {len(values)} bytes for a tensor of {tensor.dtype}{list(tensor.shape)}")
    return to_rows(np.frombuffer(values[begin:end], dtype).reshape(tensor.shape), limits)


def _wrong(what: str) -> RequestError:
    expected = (
        "base64 of a safetensors file with one tensor (tokens, hidden size) of F32, F16 or BF16, or lists of numbers"
    )
    return RequestError(f"{FIELD} {what}", expected, "write it with safetensors.torch.save", FIELD)
