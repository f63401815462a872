"""Weight files of PyTorch (`torch.save`): where each tensor's elements are in the file. Nothing in them is executed.

    since torch 1.6   a zip file without compression: NAME/data.pkl, NAME/byteorder, NAME/data/KEY of each storage
    before            pickles one after another: magic number, version, machine, object, keys of the storages; then for
                      each key the number of its elements (8 bytes) and the elements

source: torch/serialization.py of PyTorch 2, `_save` and `_legacy_save`.
"""

import io
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.files import FileState, read_span, unreadable
from millrace.checkpoint.weights.torch_pickle import (
    ITEM_BYTES,
    TorchGlobal,
    TorchStorage,
    TorchTensor,
    read_torch_pickle,
)
from millrace.checkpoint.weights.zip_directory import ReadAt, read_zip_directory
from millrace.errors import CheckpointError, sanitize

MAX_PICKLE_BYTES = 32 << 20
_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001
_BLOCK = 16 << 20  # bytes
_MAX_GROWTH = 4  # tensors that share a storage are written each for itself
_SPREAD = 2  # a tensor whose elements span at most this multiple of its bytes is read at once
_WRAPPERS = ("state_dict", "model_state_dict", "model")  # keys of training checkpoints
_AGAIN = "download or copy the file again"
_EXPORT = "save the state_dict alone: torch.save(model.state_dict(), FILE), where the file comes from"


@dataclass(frozen=True, slots=True)
class TorchTensorInfo:
    """A tensor in a file. offset: of its first element, in bytes; strides: in elements"""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    file: Path
    offset: int

    @property
    def nbytes(self) -> int:
        """Return the bytes of a contiguous copy."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class TorchFile:
    """An open weight file. extras: entries that are no tensors, as "name (type)" """

    path: Path
    state: FileState
    tensors: Mapping[str, TorchTensorInfo]
    extras: tuple[str, ...]

    @classmethod
    def open(cls, path: Path) -> "TorchFile":
        """Read the pickle and check it against the file. raises CheckpointError if the file is damaged, holds anything
        but tensors and plain containers, or no state_dict"""
        try:
            with path.open("rb") as file:
                state = FileState.from_file(file)
                root, places = (_open_zip if file.read(4) == b"PK\3\4" else _open_legacy)(path, file, state.nbytes)
        except OSError as error:
            raise unreadable(path, error) from error
        entries, extras = _state_dict(path, root)
        tensors = {name: _info(path, name, tensor, places) for name, tensor in entries.items()}
        nbytes = sum(info.nbytes for info in tensors.values())
        if nbytes > _MAX_GROWTH * state.nbytes + _BLOCK:  # expanded views could be of any size
            raise CheckpointError(
                f"{path} has {state.nbytes:,} bytes, and copies of its tensors need {nbytes:,}",
                f"at most {_MAX_GROWTH} times as many", _EXPORT,
            )  # fmt: skip
        return cls(path, state, tensors, extras)

    def blocks(self, name: str) -> Iterator[NDArray[np.uint8]]:
        """Yield the bytes of a contiguous copy of a tensor, in blocks. raises CheckpointError if the file
        has changed"""
        info = self.tensors[name]
        if info.nbytes:
            yield from self._blocks(info.shape, info.strides, info.offset, ITEM_BYTES[info.dtype])

    def _blocks(
        self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, item: int
    ) -> Iterator[NDArray[np.uint8]]:
        dims = [(n, stride) for n, stride in zip(shape, strides, strict=True) if n > 1]
        shape, strides = tuple(n for n, _ in dims), tuple(stride for _, stride in dims)
        nbytes, span = math.prod(shape) * item, (1 + sum((n - 1) * stride for n, stride in dims)) * item
        if strides == _contiguous(shape):
            for at in range(0, span, _BLOCK):
                yield read_span(self.path, self.state, offset + at, min(_BLOCK, span - at))
        elif span <= max(_BLOCK, _SPREAD * nbytes):  # e.g. a transposed matrix: each row is spread over the span
            data = read_span(self.path, self.state, offset, span)
            steps = (*(stride * item for stride in strides), 1)
            yield from _copies(np.lib.stride_tricks.as_strided(data, (*shape, item), steps))
        else:
            half = shape[0] // 2
            yield from self._blocks((half, *shape[1:]), strides, offset, item)
            yield from self._blocks((shape[0] - half, *shape[1:]), strides, offset + half * strides[0] * item, item)


def _copies(view: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
    """Yield contiguous copies of the parts of a view, in order, each of at most a block."""
    row_bytes = view.nbytes // view.shape[0]
    if view.nbytes <= _BLOCK:
        yield np.ascontiguousarray(view).reshape(-1)
    elif row_bytes > _BLOCK:
        for row in view:
            yield from _copies(row)
    else:
        rows = _BLOCK // row_bytes
        for start in range(0, view.shape[0], rows):
            yield np.ascontiguousarray(view[start : start + rows]).reshape(-1)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = list[int](), 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def _open_zip(path: Path, file: BinaryIO, nbytes: int) -> tuple[object, dict[str, tuple[int, int]]]:
    """Return the object, and the offset and the bytes of each storage by its key."""
    read_at = _reader(path, file)
    members = read_zip_directory(path, nbytes, read_at)
    roots = [name.removesuffix("data.pkl") for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(roots) != 1:
        raise CheckpointError(f"{path} has {len(roots)} members data.pkl in its folder", "one", _EXPORT)
    (root,) = roots
    if f"{root}constants.pkl" in members:
        raise CheckpointError(f"{path} is TorchScript (torch.jit.save)", "a file of torch.save", _EXPORT)
    if order := members.get(f"{root}byteorder"):
        _check_little_endian(path, read_at(order.offset, min(order.nbytes, 16)) == b"little")
    pickled = members[f"{root}data.pkl"]
    if pickled.nbytes > MAX_PICKLE_BYTES:
        raise CheckpointError(
            f"{path} has a pickle of {pickled.nbytes:,} bytes", f"at most {MAX_PICKLE_BYTES:,}", _AGAIN
        )
    result, _ = read_torch_pickle(io.BytesIO(read_at(pickled.offset, pickled.nbytes)), path)
    data = f"{root}data/"
    return result, {n.removeprefix(data): (m.offset, m.nbytes) for n, m in members.items() if n.startswith(data)}


def _reader(path: Path, file: BinaryIO) -> ReadAt:
    def read_at(offset: int, nbytes: int) -> bytes:
        data = os.pread(file.fileno(), nbytes, offset)
        if len(data) < nbytes:
            raise CheckpointError(f"{path} ends before byte {offset + nbytes}", "a file that stays as it is", _AGAIN)
        return data

    return read_at


def _open_legacy(path: Path, file: BinaryIO, nbytes: int) -> tuple[object, dict[str, tuple[int, int]]]:
    """Return the object, and the offset and the bytes of each storage by its key."""
    file.seek(0)
    head = io.BytesIO(file.read(MAX_PICKLE_BYTES))
    if head.getvalue()[:1] != b"\x80" or read_torch_pickle(head, path)[0] != _MAGIC:
        raise CheckpointError(f"{path} is not a file of torch.save", "a zip file, or its older format", _EXPORT)
    version, _ = read_torch_pickle(head, path)
    if version != _VERSION:
        raise CheckpointError(f"{path} has another version of torch.save's old format", f"{_VERSION}", _EXPORT)
    machine, _ = read_torch_pickle(head, path)
    _check_little_endian(path, isinstance(machine, dict) and machine.get("little_endian") is True)
    root, storages = read_torch_pickle(head, path)
    keys, _ = read_torch_pickle(head, path)
    at, places = head.tell(), dict[str, tuple[int, int]]()
    read_at = _reader(path, file)
    for key in keys if isinstance(keys, list) else ():
        storage = storages.get(key) if isinstance(key, str) else None
        count = int.from_bytes(read_at(at, 8), "little")
        if storage is None or count != storage.count or at + 8 + count * ITEM_BYTES[storage.dtype] > nbytes:
            raise CheckpointError(
                f"{path} is truncated or damaged: a storage of {count:,} elements at byte {at:,} of {nbytes:,}",
                "storages as its pickle names them", _AGAIN,
            )  # fmt: skip
        places[storage.key] = (at + 8, count * ITEM_BYTES[storage.dtype])
        at += 8 + count * ITEM_BYTES[storage.dtype]
    return root, places


def _check_little_endian(path: Path, is_little: bool) -> None:
    if not is_little:
        raise CheckpointError(f"{path} was written by a big-endian machine", "little-endian tensors", _EXPORT)


def _state_dict(path: Path, root: object) -> tuple[dict[str, TorchTensor], tuple[str, ...]]:
    """Return the tensors by name, and a description of what else there is."""
    if not isinstance(root, dict):
        raise CheckpointError(f"{path} holds an object of type {_type(root)}", "a state_dict", _EXPORT)
    choices = [("", root), *((key, root[key]) for key in _WRAPPERS if isinstance(root.get(key), dict))]
    choices = [(key, value) for key, value in choices if any(isinstance(v, TorchTensor) for v in value.values())]
    if len(choices) != 1:
        keys = ", ".join(str(key) for key in list(root)[:8])
        what = "tensors in several places" if choices else "no tensors where a state_dict is expected"
        raise CheckpointError(
            f"{path} has {what}; its keys: {keys}", f"a dict of tensors, or one under {' or '.join(_WRAPPERS)}", _EXPORT
        )
    ((wrapper, entries),) = choices
    tensors = {key: value for key, value in entries.items() if isinstance(value, TorchTensor)}
    for name in tensors:
        if not isinstance(name, str) or not name.isprintable() or name in ("", "__metadata__"):
            raise CheckpointError(f"{path} has a tensor named {name!r}", "a printable name", _EXPORT)
    extras = [f"{key} ({_type(value)})" for key, value in entries.items() if key not in tensors]
    if wrapper:
        extras += [f"{key} ({_type(value)})" for key, value in root.items() if key != wrapper]
    return tensors, tuple(map(sanitize, extras))


def _type(value: object) -> str:
    if isinstance(value, TorchGlobal):
        return value.name
    return "tensor" if isinstance(value, TorchTensor) else type(value).__name__


def _info(path: Path, name: str, tensor: TorchTensor, places: Mapping[str, tuple[int, int]]) -> TorchTensorInfo:
    storage: TorchStorage = tensor.storage
    offset, nbytes = places.get(storage.key, (0, -1))
    needed = storage.count * ITEM_BYTES[storage.dtype]
    if nbytes < needed:
        has = "is missing" if nbytes < 0 else f"has {nbytes:,} bytes"
        raise CheckpointError(f"{path}: the storage {storage.key} of {name} {has}", f"{needed:,} bytes", _AGAIN)
    at = offset + tensor.offset * ITEM_BYTES[tensor.dtype]
    return TorchTensorInfo(name, tensor.dtype, tensor.shape, tensor.strides, path, at)
