"""Large files written at known places, where a full disk is an OSError before anything is lost, and never a signal."""

import errno
import os

_MAX_WRITE = 1 << 30  # bytes a call: the system takes less than 2 GiB


def reserve(file: int, nbytes: int) -> None:
    """Room for so many bytes of an open file. raises OSError where the disk has too little"""
    try:
        os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(file, nbytes)  # this file system does not reserve: then writing will say where it is full


def write_at(file: int, data: memoryview, offset: int) -> None:
    """The whole of it, from `offset` on. raises OSError"""
    while data:
        n = os.pwrite(file, data[:_MAX_WRITE], offset)
        data, offset = data[n:], offset + n
