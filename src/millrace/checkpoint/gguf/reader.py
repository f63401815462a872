"""Reads the header of GGUF files: metadata and the table of tensors, not the data.

A file is hostile input: every value is checked.

    byte 0-3         "GGUF"
    byte 4-7         version, 2 or 3 (their bytes are the same)
    byte 8-23        number of tensors, number of metadata pairs
    byte 24 -        pairs: key, type of the value, value
                     tensors: name, number of dimensions, dimensions (innermost first), type, offset into the data
    aligned up -     the data, each tensor at a multiple of general.alignment (32)

Integers are little endian; a string is its length in bytes (8 bytes) and UTF-8; an array is the type of its elements
(4 bytes), their number (8 bytes), and the elements.
source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from millrace.checkpoint.files import FileState, unreadable
from millrace.checkpoint.gguf.blocks import TYPES, BlockType, type_name
from millrace.errors import CheckpointError

MAGIC = b"GGUF"
MAX_HEADER_BYTES = 100_000_000  # a vocabulary of 256,000 tokens with its merges takes 10 MB
MAX_ENTRIES, MAX_STRINGS = 1 << 16, 1 << 22  # far more than any model has; reading more would take seconds
MAX_NAME_BYTES = 65_535  # of a key; the format limits names of tensors to 64
MAX_DIMENSIONS = 4

Value = bool | int | float | str | list[str] | np.ndarray[Any, np.dtype[Any]]
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_COPY_AGAIN = "download or copy the file again"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's entry. `shape` has the outermost dimension first, as in NumPy; `offset` is from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    offset: int
    nbytes: int
    file: Path


@dataclass(frozen=True, slots=True, eq=False)
class GgufFile:
    """The header of a file, after checking it against the file's size.

    path: the file that was named; states: of the files with tensors, more than one if the model is split
    """

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]
    states: Mapping[Path, FileState]

    @classmethod
    def open(cls, path: Path) -> "GgufFile":
        """Read a header. raises CheckpointError if it is damaged, or has an unsupported version or tensor type"""
        try:
            with path.open("rb") as file:
                if (start := file.read(len(MAGIC))) != MAGIC:
                    damaged(path, f"is no GGUF file: it begins with {start!r}", f"{MAGIC!r}", "name a .gguf file")
                state = FileState.from_file(file)
                if state.nbytes < 24:
                    damaged(path, f"is truncated: {state.nbytes} bytes", "a header of at least 24 bytes")
                return _read(path, _Cursor(path, file, min(state.nbytes, MAX_HEADER_BYTES)), state)
        except OSError as error:
            raise unreadable(path, error) from error


def is_gguf(path: Path) -> bool:
    """Whether a file is GGUF, by its name or its first bytes (a download cache has its own names for files)."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return path.suffix.lower() == ".gguf" or file.read(len(MAGIC)) == MAGIC
    except OSError:  # a name that is too long, or an unreadable file, which opening it will report
        return path.suffix.lower() == ".gguf"


def damaged(path: Path, what: str, expected: str, fix: str = _COPY_AGAIN) -> NoReturn:
    raise CheckpointError(f"{path} {what}", expected, fix)


class _Cursor:
    """Reads the header sequentially, never past `end`."""

    def __init__(self, path: Path, file: BinaryIO, end: int) -> None:
        self.path, self.file, self.end, self.at = path, file, end, len(MAGIC)

    def take(self, n: int, what: str) -> bytes:
        data = self.file.read(n) if n <= self.end - self.at else b""
        if len(data) < n:  # also if the file was truncated meanwhile
            self._ends(what)
        self.at += n
        return data

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def string(self, what: str) -> str:
        return self._text(self.take(self.u64(what), what), what)

    def value(self, key: str) -> Value:
        kind = self.u32(key)
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            return self._array(key)
        numbers = self._numbers(kind, 1, key)
        scalar: bool | int | float = numbers[0].item()
        return scalar

    def _array(self, key: str) -> Value:
        kind, count = self.u32(key), self.u64(key)
        return self._strings(count, key) if kind == _STRING else self._numbers(kind, count, key)

    def _numbers(self, kind: int, count: int, key: str) -> np.ndarray[Any, np.dtype[Any]]:
        if kind not in _SCALARS:
            damaged(self.path, f"has a value of type {kind}: {key}", "a number, a bool, a string, or an array of these")
        dtype = np.dtype(_SCALARS[kind])
        raw = self.take(count * dtype.itemsize, key)
        # a bool that is any byte other than 0 is true, as in C
        return np.frombuffer(raw, np.uint8) != 0 if dtype.kind == "b" else np.frombuffer(raw, dtype)

    def _strings(self, count: int, key: str) -> list[str]:
        """Read strings. A vocabulary has hundreds of thousands, so this loop must be fast."""
        read, at, end = self.file.read, self.at, self.end
        if count > (end - at) // 8:
            self._ends(key)
        if count > MAX_STRINGS:
            damaged(self.path, f"has {count} texts in {key}", f"at most {MAX_STRINGS}")
        result: list[bytes] = []
        for _ in range(count):
            n = int.from_bytes(read(8), "little")
            at += 8 + n
            if at > end:
                self._ends(key)
            result.append(read(n))
        self.at = at
        if self.file.tell() != at:
            self._ends(key)
        return [self._text(raw, key) for raw in result]

    def _text(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            damaged(self.path, f"has a text that is not UTF-8: {what}", "UTF-8")

    def _ends(self, what: str) -> NoReturn:
        if self.end == MAX_HEADER_BYTES:
            damaged(self.path, f"has a header of more than {MAX_HEADER_BYTES} bytes: {what}", "a shorter one")
        damaged(self.path, f"is truncated: it ends inside its header, in {what}", "a complete file")


def _read(path: Path, cursor: _Cursor, state: FileState) -> GgufFile:
    version = cursor.u32("version")
    if version not in (2, 3):
        order = "is big endian" if version in (2 << 24, 3 << 24) else f"is of version {version}"
        damaged(path, order, "GGUF version 2 or 3, little endian", "convert the model again with a recent llama.cpp")
    n_tensors, n_pairs = cursor.u64("the number of tensors"), cursor.u64("the number of metadata pairs")
    if max(n_tensors, n_pairs) > MAX_ENTRIES:
        damaged(path, f"promises {n_tensors} tensors and {n_pairs} metadata pairs", f"at most {MAX_ENTRIES} of each")
    metadata: dict[str, Value] = {}
    for i in range(n_pairs):  # each consumes bytes of the header, so a wrong count fails soon
        key = _name(cursor, f"key {i} of {n_pairs}", MAX_NAME_BYTES)
        if key in metadata:
            damaged(path, f"has the key {key} twice", "each key once")
        metadata[key] = cursor.value(key)
    entries = [_entry(cursor, i, n_tensors) for i in range(n_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment % 8 or not 8 <= alignment <= 1 << 20:
        damaged(path, f"has general.alignment = {alignment}", "a multiple of 8, at most a million")
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    end = start
    for name, shape, kind, offset in sorted(entries, key=lambda entry: entry[3]):
        if name in tensors:
            damaged(path, f"has the tensor {name} twice", "each tensor once")
        nbytes = _nbytes(path, name, shape, kind)
        at = start + offset
        if offset % alignment:
            damaged(path, f"has a wrong header: {name} lies at {offset}", f"a multiple of {alignment}")
        if at < end:
            damaged(path, f"has a wrong header: {name} at byte {at} overlaps its neighbour", f"byte {end} or later")
        end = at + nbytes
        if end > state.nbytes:
            damaged(path, f"is truncated: {name} ends at byte {end}, the file at {state.nbytes}", "a complete file")
        tensors[name] = GgufTensor(name, shape, kind, at, nbytes, path)
    return GgufFile(path, metadata, tensors, {path: state})


def _name(cursor: _Cursor, what: str, limit: int) -> str:
    length = cursor.u64(what)
    if not 0 < length <= limit:
        damaged(cursor.path, f"has a name of {length} bytes: {what}", f"1 to {limit}")
    name = cursor._text(cursor.take(length, what), what)
    if not name.isprintable():  # it appears in messages
        damaged(cursor.path, f"has a name with control characters: {name!r}", "printable characters")
    return name


def _entry(cursor: _Cursor, i: int, n_tensors: int) -> tuple[str, tuple[int, ...], BlockType, int]:
    name = _name(cursor, f"tensor {i} of {n_tensors}", 64)
    n_dimensions = cursor.u32(name)
    if not 1 <= n_dimensions <= MAX_DIMENSIONS:
        damaged(cursor.path, f"has a wrong header: {name} has {n_dimensions} dimensions", f"1 to {MAX_DIMENSIONS}")
    shape = tuple(cursor.u64(name) for _ in range(n_dimensions))[::-1]
    number = cursor.u32(name)
    if number not in TYPES:
        type_names = ", ".join(t.name for t in TYPES.values())
        fix = "choose a file of one of these types, or quantise the model again (Q4_K_M, Q8_0, ...)"
        damaged(cursor.path, f"has {name} of type {type_name(number)}, which is not read", type_names, fix)
    return name, shape, TYPES[number], cursor.u64(name)


def _nbytes(path: Path, name: str, shape: tuple[int, ...], kind: BlockType) -> int:
    count = math.prod(shape)
    if not 0 < count < 2**48 or shape[-1] % kind.weights:
        expected = f"rows of a multiple of {kind.weights} weights, the block size of {kind.name}"
        damaged(path, f"has a wrong header: {name} is {shape}", expected)
    return count // kind.weights * kind.nbytes
