"""KV offload: pages that the pool evicts are written to files, and found there again, also after a restart.

The store has two files of fixed-size records, `NAME.0` and `NAME.1`. Records are appended to the active file. When it
holds half of the allowed bytes, the other file is truncated and becomes the active one, so the oldest half is dropped
at once. A generation in the headers tells which file is newer, also after a restart. A record has the page's key, the
bytes of the page in all caches, and a checksum. A damaged or incomplete record is skipped, with one warning. The header
names the engine: the pages of another engine are useless, and their file is truncated.

The engine thread copies pages; another thread writes them. At most MAX_QUEUED pages wait; more are dropped. Because a
user who can write the files determines what answers continue from, only their owner may access them.
"""

import fcntl
import hashlib
import itertools
import logging
import os
import queue
import stat
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millrace.errors import ConfigError
from millrace.runtime.loop_stats import TierStats

Key = bytes  # 32 bytes, made by `pages.py`
PageBytes = NDArray[np.uint8]
MAGIC = b"millrace kv 1\n\0\0"
HEADER = struct.Struct("<16s32sQQ")  # magic, engine, bytes of a page; generation: the newer file has the higher one
GENERATION_BYTES, MAX_GENERATION = 8, 2**62
RECORD = struct.Struct("<4sI32s")  # mark, checksum of key and page, key
MARK = b"page"
MAX_QUEUED = 64
CLOSE_S = 5.0  # how long `close` writes the pages that are in memory
log = logging.getLogger(__name__)


class PageMemory:
    """The page bytes of an executor, (layers, pages, bytes) in each cache. Do not use while a step is in flight."""

    def __init__(self, caches: Sequence[NDArray[np.uint8]]) -> None:
        self._caches = caches
        self.page_bytes = sum(cache.shape[0] * cache.shape[2] for cache in caches)

    def read_page(self, page: int) -> PageBytes:
        """Return a copy of the page's bytes in all caches."""
        return np.concatenate([cache[:, page].ravel() for cache in self._caches])

    def write_page(self, page: int, data: PageBytes) -> None:
        """Write bytes that `read_page` returned for a page with the same key."""
        at = 0
        for cache in self._caches:
            layers, _, n_bytes = cache.shape
            cache[:, page] = data[at : at + layers * n_bytes].reshape(layers, n_bytes)
            at += layers * n_bytes


@dataclass(slots=True)
class _OffloadSegment:
    """One of the two files. n: number of records"""

    path: Path
    file: int
    n: int
    keys: list[Key]
    generation: int = 0


class KvOffloadStore:
    """Stores evicted pages in two files.

    raises ConfigError if the files cannot be used, or another process uses them
    engine: its identity; pages: access to their bytes; max_bytes: size of both files together
    """

    def __init__(self, path: Path, engine: str, pages: PageMemory, max_bytes: int) -> None:
        page_bytes = pages.page_bytes
        self._memory, self._record_bytes = pages, RECORD.size + page_bytes
        self._max_records = (max_bytes // 2 - HEADER.size) // self._record_bytes
        if self._max_records < 1:
            raise ConfigError(
                f"the KV offload file may have {max_bytes} bytes, and a page has {page_bytes}",
                f"at least {2 * (self._record_bytes + HEADER.size)} bytes", "raise --kv-tier-size",
            )  # fmt: skip
        if not path.name:
            raise ConfigError(f"the KV offload file is {path}", "a file", "name one with --kv-tier")
        digest = hashlib.blake2b(engine.encode(), digest_size=32).digest()
        self._header = HEADER.pack(MAGIC, digest, page_bytes, 0)[:-GENERATION_BYTES]
        self._places: dict[Key, tuple[int, int]] = {}  # segment, record; guarded by _lock, as are the following
        self._queued: dict[Key, PageBytes] = {}
        self._lock = threading.Lock()
        self._warned = False
        self.cached_pages: Callable[[], Iterable[tuple[Key, int]]] = tuple  # the pages of the pool, most valuable first
        self._n_clears = 0  # how often the store was cleared
        self.n_stored = self.n_found = self.n_damaged = self.n_dropped = 0
        try:
            self._segments = [self._open(path.with_name(f"{path.name}.{i}"), i) for i in (0, 1)]
        except OSError as error:
            what = f"the KV offload file cannot be opened: {error}"
            raise ConfigError(what, "a file that can be written", "name another with --kv-tier") from None
        # The newer one; if neither was truncated yet, the one that is not full.
        segments, limit = self._segments, self._max_records
        self._active = max((0, 1), key=lambda i: (segments[i].generation, segments[i].n < limit, segments[i].n))
        self._work: queue.Queue[tuple[int, Key, PageBytes] | None] = queue.Queue(MAX_QUEUED)
        self._writer = threading.Thread(target=self._write_all, name="millrace-kv-tier", daemon=True)
        self._writer.start()

    def __len__(self) -> int:
        """Number of pages that can be found."""
        with self._lock:
            return len(self._places.keys() | self._queued.keys())

    def __contains__(self, key: Key) -> bool:
        with self._lock:
            return key in self._places or key in self._queued

    @property
    def stats(self) -> TierStats:
        """A snapshot, for any thread, which does not wait for the disk."""
        n_bytes = sum(HEADER.size + segment.n * self._record_bytes for segment in self._segments)
        return TierStats(
            pages=len(self._places), bytes=n_bytes, stored_total=self.n_stored, found_total=self.n_found,
            damaged_total=self.n_damaged, dropped_total=self.n_dropped,
        )  # fmt: skip

    def put(self, key: Key, page: int, wait_s: float = 0) -> None:
        """Store a page that the pool evicts, unless it is stored already. wait_s: for space in the queue"""
        if key in self:
            return
        data = self._memory.read_page(page)
        with self._lock:
            self._queued[key] = data
        try:
            self._work.put((self._n_clears, key, data), block=wait_s > 0, timeout=wait_s or None)
        except queue.Full:
            with self._lock:
                del self._queued[key]
                self.n_dropped += 1

    def fill(self, key: Key, page: int) -> bool:
        """Load a stored page into `page`. Return False, and do nothing, if it is damaged or missing."""
        data = self._read(key)
        if data is None:
            return False
        self._memory.write_page(page, data)
        self.n_found += 1
        return True

    def clear(self) -> None:
        """Remove all pages."""
        with self._lock:
            self._n_clears += 1
            self._queued.clear()
            self._places.clear()
            for segment in self._segments:
                self._begin(segment, 0)

    def close(self) -> None:
        """Write what is queued and then, for CLOSE_S, the most valuable pages that are still in memory."""
        until_s = time.monotonic() + CLOSE_S
        for key, page in itertools.islice(self.cached_pages(), self._max_records):
            if (left_s := until_s - time.monotonic()) <= 0:
                break
            self.put(key, page, left_s)
        self._work.put(None)
        self._writer.join()
        for segment in self._segments:
            os.close(segment.file)

    def _read(self, key: Key) -> PageBytes | None:
        """Return a page's bytes; None if the record is damaged or gone."""
        with self._lock:
            if (queued := self._queued.get(key)) is not None:
                return queued
            place = self._places.get(key)
            if place is None:
                return None
            segment, record = self._segments[place[0]], place[1]
            try:
                data = os.pread(segment.file, self._record_bytes, HEADER.size + record * self._record_bytes)
            except OSError:
                data = b""
        if len(data) == self._record_bytes:
            mark, checksum, stored = RECORD.unpack_from(data)
            page = np.frombuffer(data, np.uint8, offset=RECORD.size)
            if mark == MARK and stored == key and checksum == _checksum(key, page):
                return page
        self._damaged(segment.path)
        with self._lock:
            self._places.pop(key, None)
        return None

    def _open(self, path: Path, index: int) -> _OffloadSegment:
        """Open a file and index its records by their keys; pages are verified when they are read."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            what = f"the KV offload file {path} is in use by another process"
            raise ConfigError(what, "a file for each server", "name another with --kv-tier") from None
        segment, begin = _OffloadSegment(path, file, 0, []), os.pread(file, HEADER.size, 0)
        _check_ours(path, os.fstat(file), begin)
        segment.generation = int.from_bytes(begin[len(self._header) :], "little")
        if begin[: len(self._header)] != self._header or segment.generation > MAX_GENERATION:
            if begin:
                log.warning("%s belongs to another engine or is not a KV offload file; starting a new one", path)
            self._begin(segment, 0)
            return segment
        n, cut_off = divmod(os.fstat(file).st_size - HEADER.size, self._record_bytes)
        n = min(n, self._max_records)
        if cut_off:
            self._damaged(path)
        for record in range(n):
            mark, _, key = RECORD.unpack(os.pread(file, RECORD.size, HEADER.size + record * self._record_bytes))
            if mark != MARK:
                self._damaged(path)
                break  # what follows was written after it
            segment.keys.append(key)
            self._places[key] = (index, record)
            segment.n += 1
        return segment

    def _begin(self, segment: _OffloadSegment, generation: int) -> None:
        os.ftruncate(segment.file, 0)
        os.pwrite(segment.file, self._header + generation.to_bytes(GENERATION_BYTES, "little"), 0)
        segment.n, segment.keys, segment.generation = 0, [], generation

    def _write_all(self) -> None:
        while (item := self._work.get()) is not None:
            age, key, data = item
            try:
                self._write(age, key, data)
            except OSError as error:
                with self._lock:
                    self.n_dropped += 1
                    warned, self._warned = self._warned, True
                if not warned:
                    log.warning("KV pages cannot be written to the KV offload file: %s; they will be recomputed", error)
            with self._lock:
                if self._queued.get(key) is data:  # otherwise it was removed meanwhile, and may have been stored again
                    del self._queued[key]

    def _write(self, age: int, key: Key, data: PageBytes) -> None:
        segment = self._segments[self._active]
        if segment.n >= self._max_records:
            last, self._active = segment.generation, 1 - self._active
            segment = self._segments[self._active]
            with self._lock:
                for old in segment.keys:
                    if self._places.get(old, (None,))[0] == self._active:
                        del self._places[old]
                self._begin(segment, last + 1)
        record = RECORD.pack(MARK, _checksum(key, data), key) + data.tobytes()
        n_bytes = os.pwrite(segment.file, record, HEADER.size + segment.n * self._record_bytes)
        with self._lock:
            if age == self._n_clears and n_bytes == len(record):
                segment.keys.append(key)
                self._places[key] = (self._active, segment.n)
                segment.n += 1
                self.n_stored += 1
                return
            # Removed meanwhile, or not completely written: it must not be found after a restart.
            os.ftruncate(segment.file, HEADER.size + segment.n * self._record_bytes)
            if age == self._n_clears:
                raise OSError("a record was not written whole")

    def _damaged(self, path: Path) -> None:
        self.n_damaged += 1
        if self.n_damaged == 1:
            log.warning("a record of %s is damaged: it is left out, and what it held is computed again", path)


def _check_ours(path: Path, state: os.stat_result, begin: bytes) -> None:
    """Check that the file belongs to this user and store. raises ConfigError"""
    if not stat.S_ISREG(state.st_mode) or state.st_nlink != 1:
        what = "is not a regular file with one name"
    elif state.st_uid != os.getuid() or state.st_mode & 0o077:
        what = "can be read or written by others"
    elif begin and not begin.startswith(MAGIC):
        what = "holds something else"
    else:
        return
    expected = "a new file, or an earlier KV offload file that only its owner may access"
    raise ConfigError(f"the KV offload file {path} {what}", expected, "name another with --kv-tier")


def _checksum(key: Key, page: PageBytes) -> int:
    return zlib.crc32(page.data, zlib.crc32(key))
