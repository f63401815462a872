"""Memory that two processes share: each makes segments that the other maps, and tells which pieces it has let go of.

Segments are anonymous (memfd): nothing has a name, and nothing is left when both processes are gone, however they went.
They are sealed, so that neither can shrink under the other's feet.
"""

import fcntl
import mmap
import os
import threading
import weakref
from collections import deque

import numpy as np

from .bytes_tensors import Array

SEGMENT_BYTES = 64 << 20  # of addresses; pages come as they are written to, the lowest first
_ALIGNED = 64
# linux/fcntl.h: Python has their names only where its C library had them.
_ADD_SEALS, _GET_SEALS, _SEALS = 1033, 1034, 0x0001 | 0x0002 | 0x0004  # no more seals, no shrinking, no growing
Place = tuple[int, int]  # segment, and the offset in it


class _Segment:
    """free: pieces as [offset, size], by offset, none beside another. used: sizes by offset

    raises OSError where the process may open no more files, or none of that size
    """

    def __init__(self, size: int) -> None:
        self.fd = os.memfd_create("millrace", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.fd)  # first, for what follows may fail
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
    """The segments of this process, of at most so many bytes together. From any thread."""

    def __init__(self, most_bytes: int) -> None:
        self._most, self._lock = most_bytes, threading.Lock()
        self._segments: dict[int, _Segment] = {}
        self._n_made = 0
        self._can = hasattr(os, "memfd_create")

    def put(self, array: Array) -> tuple[Place, tuple[int, int] | None] | None:
        """Copy it there: its place, and where it lies in a new segment, its file and size; None: there is no room."""
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
                if size + sum(segment.size for segment in self._segments.values()) > self._most:
                    return None
                try:
                    segment = _Segment(size)
                except OSError:  # the other side is well: without this the tensor goes with its frame
                    return None
                self._n_made += 1
                number = self._n_made
                self._segments[number] = segment
                offset = segment.take(n) or 0
                new = (segment.fd, size)
            memory = self._segments[number].memory
        there = np.frombuffer(memory, array.dtype, array.size, offset).reshape(array.shape)
        np.copyto(there, array)
        return (number, offset), new

    def give_back(self, places: list[list[int]]) -> list[int]:
        """Nobody reads there any more; numbers of the segments that went with it."""
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
    """The segments of the other process."""

    def __init__(self, writable: bool) -> None:
        self._access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._segments: dict[int, mmap.mmap] = {}
        self.released: deque[Place] = deque()  # what no array is seen of here any more; filled by destructors

    def add(self, number: int, fd: int, size: int) -> None:
        """Takes the file. raises ValueError for one that could shrink, OSError"""
        try:
            if fcntl.fcntl(fd, _GET_SEALS) & _SEALS != _SEALS or os.fstat(fd).st_size != size:
                raise ValueError("a segment of shared memory is not sealed, or of another size than was said")
            self._segments[number] = mmap.mmap(fd, size, access=self._access)
        finally:
            os.close(fd)

    def view(self, place: Place, n_bytes: int) -> Array:
        """Bytes; once neither it nor an array made of it is held any more, its place is released."""
        number, offset = place
        seen = np.frombuffer(self._segments[number], np.uint8, n_bytes, offset)
        weakref.finalize(seen, self.released.append, place).atexit = False
        return seen

    def remove(self, number: int) -> None:
        """Its owner is done with it, and nothing is seen of it any more."""
        self._segments.pop(number)
