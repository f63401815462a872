"""Files of traces: JSON that can be read at any time, and that ends at a number of bytes."""

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path

MOST_BYTES = 1 << 30  # of all files of one server
MOST_FILES = 1000  # of one path, where some traces each make a file
_BUFFERED = 64  # traces that wait to be written where one file takes all
_BUFFERED_BYTES = 1 << 20
FLUSH_S = 1.0  # after which the first of them is written: whoever tries a few requests finds them
log = logging.getLogger(__name__)
Later = Callable[[float, Callable[[], None]], object]  # seconds, and what is called then


class TraceFiles:
    """Of one server. A file that cannot be written, or too many bytes, end tracing and not the server."""

    def __init__(self, later: Later | None = None) -> None:
        """later: None: what waits is written when there is enough of it, and by `write`"""
        self._files: dict[str, _TraceFile] = {}
        self._later = later
        self._n_bytes, self.is_full = 0, False

    def add(self, path: str, frequency: int, records: list[bytes]) -> None:
        """One trace. frequency: so many make a file of their own, PATH.0, PATH.1, ..., in turn; 0: all are in one"""
        if self.is_full:
            return
        file = self._files.setdefault(path, _TraceFile(path))
        file.records += records
        file.n_traces += 1
        file.frequency = frequency
        file.n_buffered_bytes += sum(map(len, records))
        if file.n_traces >= (frequency or _BUFFERED) or file.n_buffered_bytes > _BUFFERED_BYTES:
            self._write(file)
        elif self._later is not None and not frequency and not file.is_due:
            file.is_due = True
            self._later(FLUSH_S, partial(self._when_due, file))

    def write(self) -> None:
        """What is not written yet."""
        for file in self._files.values():
            self._write(file)

    def _when_due(self, file: "_TraceFile") -> None:
        file.is_due = False
        if not file.frequency:  # it may have changed since
            self._write(file)

    def _write(self, file: "_TraceFile") -> None:
        if not file.records or self.is_full:
            return
        try:
            self._n_bytes += file.write()
        except OSError as error:
            self._end(f"{file.path} cannot be written ({error.strerror})")
        if self._n_bytes > MOST_BYTES:
            self._end(f"the files have {MOST_BYTES} bytes")

    def _end(self, why: str) -> None:
        self.is_full = True
        log.warning("nothing more is traced: %s", why)


class _TraceFile:
    def __init__(self, path: str) -> None:
        self.path = path
        self.records: list[bytes] = []
        self.n_traces = self.n_buffered_bytes = 0
        self.frequency = 0  # of the last trace
        self.is_due = False  # it is written soon
        self._n_files = 0  # that have so many
        self._is_begun = False  # the one that has all

    def write(self) -> int:
        """So many bytes. raises OSError"""
        data = b",\n".join(self.records)
        self.records, self.n_traces, self.n_buffered_bytes = [], 0, 0
        if self.frequency:
            self._whole(Path(f"{self.path}.{self._n_files % MOST_FILES}"), data)
            self._n_files += 1
            if self._n_files == MOST_FILES:
                log.warning("%s: there are %d files of traces: the oldest are overwritten", self.path, MOST_FILES)
        elif self._is_begun:
            with Path(self.path).open("r+b", buffering=0) as opened:
                _write_at(opened, opened.seek(-1, 2), b",\n%b]" % data, otherwise=b"]")  # over the bracket that ends it
        else:
            self._whole(Path(self.path), data)
            self._is_begun = True
        return len(data)

    def _whole(self, path: Path, data: bytes) -> None:
        with path.open("wb", buffering=0) as opened:
            _write_at(opened, 0, b"[%b]" % data, otherwise=b"[]")


def _write_at(file: FileIO, at: int, data: bytes, otherwise: bytes) -> None:
    """To its end; a disk that gets full takes what it has room for. raises OSError; `otherwise` ends the file then"""
    left = data
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        with suppress(OSError):
            file.truncate(at + len(otherwise))
            file.seek(at)
            file.write(otherwise)
        raise
