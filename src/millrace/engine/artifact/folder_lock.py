"""Who uses an engine's folder: each process that has it open holds a shared lock on its manifest, its builder included.

Only who gets the lock for itself alone removes a folder, so what is in use stays. Locks end with their process, however
that ends, and need no right to write. A manifest is the first file of a folder, and is never replaced by another file.
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

REMOVING_S = 30.0  # an engine's folder is locked for itself alone only while its files are removed
WRITING_S = 30.0  # and a table of timings or tactics only while it is merged
_SAID_S = 1.0  # who waits longer is told for what
log = logging.getLogger(__name__)


class FolderLock:
    """A shared lock, until `release` or the end of this object."""

    def __init__(self, file: int) -> None:
        self._release = weakref.finalize(self, os.close, file)

    def release(self) -> None:
        self._release()


def hold(folder: Path) -> FolderLock | None:
    """None where there is no such engine, or no longer.

    raises OSError where its manifest may not be read, MachineError where another process keeps it locked
    """
    path = folder / MANIFEST
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # else a pipe of that name would block
    except (FileNotFoundError, NotADirectoryError):
        return None
    folder_lock = FolderLock(file)
    with suppress(OSError):  # a file system without locks: there nobody gets the one that removing takes
        lock(file, fcntl.LOCK_SH, f"{folder}, which another process is removing", REMOVING_S)
    try:
        return folder_lock if os.path.samestat(os.fstat(file), path.stat()) else None
    except (FileNotFoundError, NotADirectoryError):
        return None


def lock(file: int, kind: int, what: str, limit_s: float) -> None:
    """Waits for `fcntl.LOCK_SH` or `LOCK_EX` on an open file; a wait that lasts is said, with `what` it is for.

    raises MachineError after `limit_s`, OSError where the file system has no locks
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
        if waited_s >= _SAID_S and not waited:
            log.warning("waiting for %s (at most %g s)", what, limit_s)
            waited = True
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)


def remove(folder: Path) -> bool:
    """Removes an engine's folder; False where somebody holds it. raises OSError"""
    with _alone(folder) as free:
        if free:
            gone = _unfinished(folder)
            folder.rename(gone)  # from here on nobody finds it, even if we do not get to the end
            shutil.rmtree(gone)
    return free


def in_use(folder: Path) -> bool:
    """raises OSError"""
    with _alone(folder) as free:
        return not free


@contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Whether nobody else holds the folder; nobody gets hold of it in the block."""
    try:
        file = os.open(folder / MANIFEST, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:  # what somebody left of an engine
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
    """An empty folder that becomes `folder` at the end of the block, or goes if that fails; held meanwhile.

    Removes first what builders of the same folder left that were killed.
    """
    sweep(folder.parent, folder.name)
    lock = None
    while lock is None:  # until no other builder has swept it away in the moment before it was held
        path = _unfinished(folder)
        path.mkdir()
        with suppress(FileNotFoundError):
            (path / MANIFEST).touch()
        lock = hold(path)
    try:
        yield path
        path.rename(folder)
    except BaseException:  # also Ctrl-C: nothing half-written stays behind
        shutil.rmtree(path, ignore_errors=True)
        raise
    finally:
        lock.release()


def _unfinished(folder: Path) -> Path:
    """A new name beside `folder`."""
    return folder.with_name(f".{folder.name}.{secrets.token_hex(6)}.unfinished")


def sweep(parent: Path, name: str | None = None) -> None:
    """Removes what killed processes left of the engine `name` in `parent`, None: of all there."""
    whose = re.compile((r"\..+\." if name is None else re.escape(f".{name}.")) + r"[0-9a-f]+\.unfinished", re.DOTALL)
    for left in [p for p in parent.iterdir() if whose.fullmatch(p.name)]:
        with suppress(OSError):  # another user's, or another process was faster
            _sweep_away(left)


def _sweep_away(left: Path) -> None:
    """Unless somebody is at work there, or has made the folder this very moment and is about to be."""
    manifest = left / MANIFEST
    if manifest.exists():
        with _alone(left) as free:
            if free:
                shutil.rmtree(left)
    elif any(left.iterdir()) and not manifest.exists():  # no builder's first file is another: the rest of a removal
        shutil.rmtree(left)
    else:
        left.rmdir()  # fails where a builder has begun meanwhile; one that is too late to begin makes another
