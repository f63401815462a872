"""Reads files of a checkpoint, so that a weight file that changes meanwhile causes an error instead of a signal.

Data is read, not mapped: access to a mapped page of a truncated file, or on a failing disk, raises SIGBUS.
"""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace.errors import CheckpointError
from millrace.machine.cpu import usable_cores

MAX_SMALL_BYTES = 256 << 20  # the largest tokenizer.json in use has 35 MB
_READ = 1 << 30  # bytes per call: the system's limit is below 2 GiB
_DIGEST_BLOCK = 16 << 20
Report = Callable[[int], None]  # bytes read since the last call


class FileState(NamedTuple):
    """Detects that a file was written or replaced. The inode is not used: not all network file systems keep it."""

    nbytes: int
    modified_ns: int

    @classmethod
    def from_file(cls, file: BinaryIO) -> "FileState":
        """Return the state of an open file. raises OSError"""
        status = os.fstat(file.fileno())
        return cls(status.st_size, status.st_mtime_ns)


def read_small(path: Path) -> bytes:
    """Read a small file completely. raises CheckpointError if it is unreadable or too large"""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_SMALL_BYTES + 1)
    except OSError as error:
        raise unreadable(path, error) from error
    if len(data) > MAX_SMALL_BYTES:
        what = f"{path} has more than {MAX_SMALL_BYTES >> 20} MiB"
        raise CheckpointError(what, "a file of a few megabytes", "download or copy the file again")
    return data


def read_span(path: Path, state: FileState, offset: int, nbytes: int) -> NDArray[np.uint8]:
    """Read (nbytes,) at `offset`. raises CheckpointError if the file has changed since `state` was taken"""
    data = np.empty(nbytes, np.uint8)
    try:
        with path.open("rb") as file:
            done = _read_into(file.fileno(), data.data, offset)
            now = FileState.from_file(file)
    except OSError as error:
        raise unreadable(path, error) from error
    if done < nbytes or now != state:
        raise _changed(path, state, now)
    return data


def _read_into(file: int, view: memoryview, offset: int) -> int:
    """Read into a buffer, and return the number of bytes: fewer at the end of the file."""
    done = 0
    while done < len(view):
        n = os.preadv(file, [view[done : done + _READ]], offset + done)
        if n == 0:
            break
        done += n
    return done


def file_digest(path: Path, state: FileState, report: Report | None = None) -> str:
    """Return blake2b (16 bytes, hex) over the blake2b of every 16 MiB, which are read on all cores. raises
    CheckpointError"""

    def block(offset: int) -> tuple[int, bytes]:
        data = read_span(path, state, offset, min(_DIGEST_BLOCK, state.nbytes - offset))
        return len(data), hashlib.blake2b(data.data, digest_size=16).digest()

    hasher = hashlib.blake2b(digest_size=16)
    pool = ThreadPoolExecutor(usable_cores())  # reading and hashing release the interpreter lock
    try:
        for nbytes, digest in pool.map(block, range(0, state.nbytes, _DIGEST_BLOCK)):
            hasher.update(digest)
            if report:
                report(nbytes)
    finally:
        pool.shutdown(cancel_futures=True)
    return hasher.hexdigest()


def unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read: {error.strerror}", "a file that can be read", "check the file")


def _changed(path: Path, state: FileState, now: FileState) -> CheckpointError:
    sizes = f"{state.nbytes} bytes then, {now.nbytes} now"
    how = sizes if state.nbytes != now.nbytes else "it was written, or replaced"
    return CheckpointError(
        f"{path} has changed since it was opened: {how}",
        "a file that stays as it is while it is read",
        "wait until its download or conversion is done, and ask again",
    )
