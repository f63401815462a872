"""Calibration statistics of the inputs of a model's matmuls, in a folder that methods read repeatedly.

    about.json     the model, text and precision; also the lock of the run that writes
    piece-007      a line of JSON (_Head), then for each distinct input of a matmul, as float32 without gaps,
                   gram (K, K), amax (K,) and mean (K,); a checksum for each is in the head
    carried-007    the input of the piece with this number; removed at the end

A piece is the attention of a layer or its MLP. Its file is written atomically.
"""

import fcntl
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from millrace.errors import ConfigError, MachineError
from millrace.settings import read_bounded

VERSION = 1
ABOUT = "about.json"
_MAX_HEAD = 1 << 20
_MAX_INPUTS = 1 << 17
_AGAIN = "remove the folder, and collect again: what pieces take in is gone when all are done"
Floats = NDArray[np.float32]


class StatisticsInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """model: its identity; text: a digest of the token ids; tokens: their number; pieces: files of a complete folder"""

    model: str
    text: str
    tokens: Annotated[int, msgspec.Meta(ge=1)]
    precision: str
    pieces: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    version: int = VERSION

    @property
    def recorded(self) -> dict[str, str | int]:
        """Return what the record of a compressed folder stores about its statistics."""
        return {"text": self.text, "tokens": self.tokens, "precision": self.precision}


class InputStatistics(NamedTuple):
    """Statistics over all tokens of one input x (K,) of the linear layers `linears`.

    gram: the mean of x x^T, (K, K); amax: the largest |x|, (K,); mean: the mean of |x|, (K,)
    """

    linears: tuple[str, ...]
    gram: Floats
    amax: Floats
    mean: Floats


class _ManifestEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    linears: list[str]
    size: Annotated[int, msgspec.Meta(ge=1, le=_MAX_INPUTS)]
    checksum: str

    @property
    def nbytes(self) -> int:
        return input_bytes(self.size)


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    about: str  # digest of about.json
    inputs: Annotated[list[_ManifestEntry], msgspec.Meta(max_length=4096)]


def input_bytes(size: int) -> int:
    """Return the bytes of the statistics of an input of size K."""
    return 4 * (size * size + 2 * size)


@dataclass(frozen=True, slots=True)
class _FilePlace:
    file: Path
    offset: int
    entry: _ManifestEntry


class CalibrationStatistics(Mapping[str, InputStatistics]):
    """A complete folder, by linear layer. Layers with the same input have the same statistics: see `shared`."""

    def __init__(self, about: StatisticsInfo, places: Mapping[str, _FilePlace]) -> None:
        self.about, self._places = about, places

    @classmethod
    def open(cls, folder: Path) -> "CalibrationStatistics":
        """Read the heads. raises ConfigError if the folder is missing, incomplete, damaged, or of another version"""
        about = read_about(folder)
        places: dict[str, _FilePlace] = {}
        for number in range(about.pieces):
            file = piece_file(folder, number)
            if not file.is_file():
                raise ConfigError(
                    f"the statistics in {folder} are not complete: {number} of {about.pieces} pieces are there",
                    "those of a whole model", "collect them again: it goes on from there",
                )  # fmt: skip
            offset, head = _read_head(file, about)
            for entry in head.inputs:
                places |= {name: _FilePlace(file, offset, entry) for name in entry.linears}
                offset += entry.nbytes
        return cls(about, places)

    def __getitem__(self, linear: str) -> InputStatistics:
        """Read statistics from the file. raises ConfigError if it is damaged, KeyError if there is no such layer"""
        place = self._places[linear]
        data = _read(place.file, place.offset, place.entry.nbytes)
        if _checksum(data) != place.entry.checksum:
            raise ConfigError(f"{place.file} is damaged: its checksum is another", "what was written", _AGAIN)
        K = place.entry.size
        values = data.view(np.float32)
        gram, amax, mean = values[: K * K].reshape(K, K), values[K * K : K * K + K], values[K * K + K :]
        if not np.isfinite(values).all() or (gram.diagonal() < 0).any():
            raise ConfigError(f"{place.file} has values that no inputs have", "means of squares, finite", _AGAIN)
        return InputStatistics(tuple(place.entry.linears), gram, amax, mean)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def size(self, linear: str) -> int:
        """Return K, from the head only."""
        return self._places[linear].entry.size

    @property
    def shared(self) -> list[tuple[str, ...]]:
        """Return groups of layers that read the same input, in the model's order."""
        return list(dict.fromkeys(tuple(place.entry.linears) for place in self._places.values()))


class StatisticsWriter:
    """A folder that this run writes, exclusively."""

    def __init__(self, folder: Path, about: StatisticsInfo) -> None:
        self.folder, self.about = folder, about

    @property
    def next(self) -> int:
        """Return the first piece to do: all before it are complete, and its input exists."""
        n_complete = 0
        while n_complete < self.about.pieces and self._is_whole(n_complete):
            n_complete += 1
        if n_complete == self.about.pieces:
            return n_complete
        return next((n for n in range(n_complete, 0, -1) if self.carried(n).is_file()), 0)

    def carried(self, number: int) -> Path:
        return self.folder / f"carried-{number:03}"

    def add(self, number: int, inputs: Sequence[InputStatistics]) -> None:
        """Write a piece's file atomically. raises MachineError if that fails"""
        bodies = [np.concatenate([x.gram.reshape(-1), x.amax, x.mean]).view(np.uint8) for x in inputs]
        entries = [
            _ManifestEntry(list(x.linears), len(x.amax), _checksum(body))
            for x, body in zip(inputs, bodies, strict=True)
        ]
        head = msgspec.json.encode(_Head(_digest(self.about), entries)) + b"\n"
        with whole_file(piece_file(self.folder, number)) as file:
            for part in (head, *bodies):
                file.write(part)

    def _is_whole(self, number: int) -> bool:
        file = piece_file(self.folder, number)
        return file.is_file() and bool(_read_head(file, self.about))


@contextmanager
def writing(folder: Path, about: StatisticsInfo) -> Iterator[StatisticsWriter]:
    """Create a folder, or resume one of the same model, text and precision.

    raises ConfigError if it is of another model, text, precision or version, if another run writes it, or if it is no
    folder
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / ABOUT, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        what = f"cannot keep statistics in {folder}: {error.strerror}"
        raise ConfigError(what, "a folder, or a name that is free", "name another folder") from error
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = f"the statistics in {folder} are being collected by another run"
            raise ConfigError(what, "a folder for each run", "wait for the other, or name another folder") from None
        line = msgspec.json.encode(about) + b"\n"
        stored = os.pread(file, _MAX_HEAD, 0)
        if line.startswith(stored):  # new, or truncated while it was written
            os.pwrite(file, line, 0)
            os.fsync(file)
        elif (other := read_about(folder)) != about:
            raise _of_another(folder, other, about)
        yield StatisticsWriter(folder, about)
    finally:
        os.close(file)


@contextmanager
def whole_file(path: Path) -> Iterator[Any]:
    """Open a file for writing that gets its name when it is complete. raises MachineError"""
    unfinished = path.with_name(path.name + ".part")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        what = f"cannot write {path}: {error.strerror}"
        raise MachineError(what, "a disk that takes it", "make room, and run it again: it goes on") from error


def piece_file(folder: Path, number: int) -> Path:
    return folder / f"piece-{number:03}"


def read_about(folder: Path) -> StatisticsInfo:
    """Read about.json. raises ConfigError if it is missing, or of another version"""
    path, expected = folder / ABOUT, "a folder of statistics"
    try:
        stored = msgspec.json.decode(read_bounded(path, _MAX_HEAD), type=dict[str, Any])
        version = stored.get("version")
        if version != VERSION:
            fix = "collect them again, into another folder"
            raise ConfigError(f"{path} is of version {version!r:.20}", f"version {VERSION}", fix)
        return msgspec.convert(stored, StatisticsInfo)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", expected, "name another folder") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is damaged: {error}", expected, "collect them again, into another folder") from error


def _read_head(file: Path, about: StatisticsInfo) -> tuple[int, _Head]:
    """Return the offset of the data and the head. raises ConfigError if it is damaged, or of another collection"""
    try:
        with file.open("rb") as opened:
            line = opened.readline(_MAX_HEAD)
            size = os.fstat(opened.fileno()).st_size
        head = msgspec.json.decode(line, type=_Head)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", "statistics of a piece", _AGAIN) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is damaged: {error}", "statistics of a piece", _AGAIN) from error
    if head.about != _digest(about):
        raise ConfigError(f"{file} is of another collection than its folder", "one collection in a folder", _AGAIN)
    expected = len(line) + sum(entry.nbytes for entry in head.inputs)
    if size != expected:
        raise ConfigError(f"{file} is damaged: {size:,} bytes", f"{expected:,} by its first line", _AGAIN)
    return len(line), head


def _read(file: Path, offset: int, nbytes: int) -> NDArray[np.uint8]:
    try:
        data = np.fromfile(file, np.uint8, nbytes, offset=offset)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", "statistics of a piece", _AGAIN) from error
    if data.size != nbytes:
        raise ConfigError(f"{file} is damaged: it ends early", "what was written", _AGAIN)
    return data


def _checksum(data: NDArray[np.uint8]) -> str:
    return hashlib.blake2b(data.data, digest_size=16).hexdigest()


def _digest(about: StatisticsInfo) -> str:
    return hashlib.blake2b(msgspec.json.encode(about), digest_size=16).hexdigest()


def _of_another(folder: Path, stored: StatisticsInfo, expected: StatisticsInfo) -> ConfigError:
    name = next(n for n in StatisticsInfo.__struct_fields__ if getattr(stored, n) != getattr(expected, n))
    words = {"model": "another model", "text": "another text", "tokens": "another text"}
    what = words.get(name, f"the {name} {getattr(stored, name)}")
    return ConfigError(
        f"the statistics in {folder} are of {what}", f"{name} {getattr(expected, name)}", "name another folder"
    )
