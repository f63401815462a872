"""Shared memory between two processes: each creates segments that the other maps, and reports released pieces.

Segments are anonymous (memfd), so nothing is left behind when both processes end, however they end. They are sealed, so
that neither process can shrink a segment that the other has mapped.
"""

import fcntl
import mmap
import os
import threading
import weakref
from collections import deque

import numpy as np

from .bytes_tensors import Array

SEGMENT_BYTES = 64 << 20  # of address space; pages are allocated on first write
_ALIGNED = 64
# linux/fcntl.h: Python has their names only where its C library had them.
_ADD_SEALS, _GET_SEALS, _SEALS = 1033, 1034, 0x0001 | 0x0002 | 0x0004  # no more seals, no shrinking, no growing
Place = tuple[int, int]  # segment, and the offset in it


class _Segment:
    """A segment. free: pieces [offset, size] by offset, never adjacent. used: sizes by offset

    raises OSError if no file, or none of that size, can be opened
    """

    def __init__(self, size: int) -> None:
        self.fd = os.memfd_create("millrace", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.fd)  # first, because the next calls may fail
        os.ftruncate(self.fd, size)
        fcntl.fcntl(self.fd, _ADD_SEALS, _SEALS)
        self.size, self.memory = size, mmap.mmap(self.fd, size)
        self.free, self.used = [[0, size]], dict[int, int]()

    def take(self, n: int) -> int | None:
        for i, (offset, size) in enumerate(self.free):
            if size >= n:
                self.used[offset] = n
                if size == n:
                    del self.free[i]
                else:
                    self.free[i] = [offset + n, size - n]
                return offset
        return None

    def give_back(self, offset: int) -> None:
        n = self.used.pop(offset)
        i = next((i for i, (other, _) in enumerate(self.free) if other > offset), len(self.free))
        self.free.insert(i, [offset, n])
        for left in (i, i - 1):
            if 0 <= left < len(self.free) - 1 and sum(self.free[left]) == self.free[left + 1][0]:
                self.free[left][1] += self.free.pop(left + 1)[1]


class Arena:
    """The segments of this process, bounded by max_bytes in total. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._lock = max_bytes, threading.Lock()
        self._segments: dict[int, _Segment] = {}
        self._n_made = 0
        self._can = hasattr(os, "memfd_create")

    def put(self, array: Array) -> tuple[Place, tuple[int, int] | None] | None:
        """Copy an array; return its place and, for a new segment, descriptor and size. None if there is no room."""
        if not self._can:
            return None
        n = max(_ALIGNED, -(-array.nbytes // _ALIGNED) * _ALIGNED)
        with self._lock:
            number, offset = next(
                ((i, at) for i, segment in self._segments.items() if (at := segment.take(n)) is not None), (0, 0)
            )
            new = None
            if not number:
                size = max(SEGMENT_BYTES, -(-n // mmap.PAGESIZE) * mmap.PAGESIZE)
                if size + sum(segment.size for segment in self._segments.values()) > self._max_bytes:
                    return None
                try:
                    segment = _Segment(size)
                except OSError:  # not fatal: the tensor is sent inline
                    return None
                self._n_made += 1
                number = self._n_made
                self._segments[number] = segment
                offset = segment.take(n) or 0
                new = (segment.fd, size)
            memory = self._segments[number].memory
        target = np.frombuffer(memory, array.dtype, array.size, offset).reshape(array.shape)
        np.copyto(target, array)
        return (number, offset), new

    def give_back(self, places: list[list[int]]) -> list[int]:
        """Free places the peer has released; return the numbers of segments deleted thereby."""
        gone = []
        with self._lock:
            for number, offset in places:
                segment = self._segments[number]
                segment.give_back(offset)
                if not segment.used and len(self._segments) > 1:
                    del self._segments[number]
                    gone.append(number)
        return gone

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return sum(sum(segment.used.values()) for segment in self._segments.values())


class Mapped:
    """The mapped segments of the other process."""

    def __init__(self, writable: bool) -> None:
        self._access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._segments: dict[int, mmap.mmap] = {}
        self.released: deque[Place] = deque()  # places without an array here any more; filled by destructors

    def add(self, number: int, fd: int, size: int) -> None:
        """Map a segment and close its descriptor. raises ValueError if it could shrink, OSError"""
        try:
            if fcntl.fcntl(fd, _GET_SEALS) & _SEALS != _SEALS or os.fstat(fd).st_size != size:
                raise ValueError("a segment of shared memory is not sealed, or of another size than was said")
            self._segments[number] = mmap.mmap(fd, size, access=self._access)
        finally:
            os.close(fd)

    def view(self, place: Place, n_bytes: int) -> Array:
        """Return bytes of a place as an array; the place is released once no array refers to it."""
        number, offset = place
        view = np.frombuffer(self._segments[number], np.uint8, n_bytes, offset)
        weakref.finalize(view, self.released.append, place).atexit = False
        return view

    def remove(self, number: int) -> None:
        """Unmap a segment that its owner has deleted."""
        self._segments.pop(number)
