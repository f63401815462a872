"""Locks on engine folders: each process that uses one, its builder included, holds a shared lock on its manifest.

A folder is removed only under an exclusive lock, so folders in use stay. Locks end with their process, however it ends,
and need no write permission. A manifest is the first file of a folder, and is never replaced by another file.
"""

import fcntl
import logging
import os
import re
import secrets
import shutil
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from millrace.engine.artifact.manifest import MANIFEST
from millrace.errors import MachineError

REMOVING_S = 30.0  # an engine's folder is locked exclusively only while its files are removed
WRITING_S = 30.0  # a table of timings or tactics is locked only while it is merged
_REPORT_AFTER_S = 1.0  # after which a wait is reported
log = logging.getLogger(__name__)


class FolderLock:
    """A shared lock, held until `release` or the end of this object."""

    def __init__(self, file: int) -> None:
        self._release = weakref.finalize(self, os.close, file)

    def release(self) -> None:
        self._release()


def hold(folder: Path) -> FolderLock | None:
    """Lock an engine's folder; None if there is no such engine any more.

    raises OSError if its manifest is not readable, MachineError if another process keeps it locked
    """
    path = folder / MANIFEST
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # O_NONBLOCK: a pipe of that name would block
    except (FileNotFoundError, NotADirectoryError):
        return None
    folder_lock = FolderLock(file)
    with suppress(OSError):  # a file system without locks, on which no folder is removed
        lock(file, fcntl.LOCK_SH, f"{folder}, which another process is removing", REMOVING_S)
    try:
        return folder_lock if os.path.samestat(os.fstat(file), path.stat()) else None
    except (FileNotFoundError, NotADirectoryError):
        return None


def lock(file: int, kind: int, what: str, limit_s: float) -> None:
    """Wait for `fcntl.LOCK_SH` or `LOCK_EX` on an open file; report a long wait, with its purpose `what`.

    raises MachineError after `limit_s`, OSError if the file system has no locks
    """
    start_s, waited, pause_s = time.monotonic(), False, 0.001
    while True:
        try:
            return fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            waited_s = time.monotonic() - start_s
        if waited_s >= limit_s:
            raise MachineError(
                f"waited {limit_s:g} s for {what}", "a lock that its holder gives back",
                "see what that process does (lslocks names it), or end it",
            )  # fmt: skip
        if waited_s >= _REPORT_AFTER_S and not waited:
            log.warning("waiting for %s (at most %g s)", what, limit_s)
            waited = True
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)


def remove(folder: Path) -> bool:
    """Remove an engine's folder; False if it is in use. raises OSError"""
    with _locked_exclusively(folder) as free:
        if free:
            gone = _unfinished(folder)
            folder.rename(gone)  # from here on it cannot be found, even if the removal is interrupted
            shutil.rmtree(gone)
    return free


def in_use(folder: Path) -> bool:
    """Return whether an engine's folder is in use. raises OSError"""
    with _locked_exclusively(folder) as free:
        return not free


@contextmanager
def _locked_exclusively(folder: Path) -> Iterator[bool]:
    """Yield whether the folder could be locked exclusively, which lasts until the end of the block."""
    try:
        file = os.open(folder / MANIFEST, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:  # a partly removed engine
        yield True
        return
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(file)


@contextmanager
def building(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that is renamed to `folder` at the end of the block, or removed on failure; locked
    meanwhile.

    First removes what killed builders of the same folder left.
    """
    sweep(folder.parent, folder.name)
    lock = None
    while lock is None:  # another builder may sweep it away before it is locked
        path = _unfinished(folder)
        path.mkdir()
        with suppress(FileNotFoundError):
            (path / MANIFEST).touch()
        lock = hold(path)
    try:
        yield path
        path.rename(folder)
    except BaseException:  # Ctrl-C included: nothing incomplete stays
        shutil.rmtree(path, ignore_errors=True)
        raise
    finally:
        lock.release()


def _unfinished(folder: Path) -> Path:
    """Return a new name next to `folder`."""
    return folder.with_name(f".{folder.name}.{secrets.token_hex(6)}.unfinished")


def sweep(parent: Path, name: str | None = None) -> None:
    """Remove what killed processes left of the engine `name` in `parent`; None: of all engines."""
    whose = re.compile((r"\..+\." if name is None else re.escape(f".{name}.")) + r"[0-9a-f]+\.unfinished", re.DOTALL)
    for left in [p for p in parent.iterdir() if whose.fullmatch(p.name)]:
        with suppress(OSError):  # another user's, or another process was faster
            _sweep_away(left)


def _sweep_away(left: Path) -> None:
    """Remove an unfinished folder, unless it is in use or was made just now."""
    manifest = left / MANIFEST
    if manifest.exists():
        with _locked_exclusively(left) as free:
            if free:
                shutil.rmtree(left)
    elif any(left.iterdir()) and not manifest.exists():  # a builder writes it first: this is a removal's rest
        shutil.rmtree(left)
    else:
        left.rmdir()  # fails if a builder has started meanwhile; a builder that is too late makes another one
