"""Checks that an engine's folder is new, and that the disk has room for it."""

import errno
import os
import shutil
from pathlib import Path

from millrace.errors import EngineError, MachineError


def cannot_write(folder: Path, nbytes: int, error: OSError) -> MachineError:
    """Return the error. nbytes: of the weights, which are all but a few megabytes of an engine"""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    what = f"the engine {folder} cannot be written: {error.strerror or error}"
    if full:
        what += f"; its weights need {nbytes:,} bytes, and {_free(folder):,} are free there"
    return MachineError(
        what,
        "room for the engine, also by quotas and limits" if full else "a folder that can be written",
        "make room, or build on another disk (-o; XDG_CACHE_HOME for the cache)" if full else "check the rights",
    )


def _free(folder: Path) -> int:
    """Return the free bytes at a folder that may not exist yet."""
    existing_parent = next(parent for parent in folder.absolute().parents if parent.is_dir())
    return shutil.disk_usage(existing_parent).free


def check_room(folder: Path, nbytes: int) -> None:
    """Check that there is room for `nbytes` bytes of weights, before anything slow. raises MachineError"""
    if _free(folder) < nbytes:
        raise cannot_write(folder, nbytes, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def check_new(folder: Path) -> None:
    """Check that a folder does not exist yet. raises EngineError"""
    if folder.exists():
        raise EngineError(
            f"{folder} is already there", "a folder that does not exist yet", "remove it, or name another"
        )
