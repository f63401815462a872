"""Writes large files at given offsets: a full disk is an OSError before anything is lost, never a signal."""

import errno
import os

_MAX_WRITE = 1 << 30  # bytes per call: the system accepts less than 2 GiB


def reserve(file: int, nbytes: int) -> None:
    """Reserve `nbytes` bytes for an open file. raises OSError if the disk is too full"""
    try:
        os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(file, nbytes)  # this file system cannot reserve: a full disk shows when writing


def write_at(file: int, data: memoryview, offset: int) -> None:
    """Write all data from `offset` on. raises OSError"""
    while data:
        n = os.pwrite(file, data[:_MAX_WRITE], offset)
        data, offset = data[n:], offset + n
