"""Trace files: JSON that is valid at any time, with a bound on the total size."""

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path

MAX_BYTES = 1 << 30  # of all trace files of one server
MAX_FILES = 1000  # per path, if every few traces get their own file
_BUFFERED = 64  # traces buffered before a write to a single file
_BUFFERED_BYTES = 1 << 20
FLUSH_S = 1.0  # maximum delay of a write, so that a few test requests show up
log = logging.getLogger(__name__)
CallLater = Callable[[float, Callable[[], None]], object]  # delay in seconds, and the function to call


class TraceFiles:
    """Trace files of one server. A write error or too many bytes end tracing, not the server."""

    def __init__(self, later: CallLater | None = None) -> None:
        """later: schedules delayed writes; None: write only full buffers, and in `write`"""
        self._files: dict[str, _TraceFile] = {}
        self._later = later
        self._n_bytes, self.is_full = 0, False

    def add(self, path: str, frequency: int, records: list[bytes]) -> None:
        """Add a trace. frequency: traces per file PATH.0, PATH.1, ...; 0: a single file"""
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
        """Write all buffered traces."""
        for file in self._files.values():
            self._write(file)

    def _when_due(self, file: "_TraceFile") -> None:
        file.is_due = False
        if not file.frequency:  # it may have changed meanwhile
            self._write(file)

    def _write(self, file: "_TraceFile") -> None:
        if not file.records or self.is_full:
            return
        try:
            self._n_bytes += file.write()
        except OSError as error:
            self._end(f"{file.path} cannot be written ({error.strerror})")
        if self._n_bytes > MAX_BYTES:
            self._end(f"the files have {MAX_BYTES} bytes")

    def _end(self, reason: str) -> None:
        self.is_full = True
        log.warning("nothing more is traced: %s", reason)


class _TraceFile:
    def __init__(self, path: str) -> None:
        self.path = path
        self.records: list[bytes] = []
        self.n_traces = self.n_buffered_bytes = 0
        self.frequency = 0  # of the last trace
        self.is_due = False  # a delayed write is scheduled
        self._n_files = 0  # files written with a frequency
        self._is_begun = False  # whether the single file exists

    def write(self) -> int:
        """Write the buffered traces and return their bytes. raises OSError"""
        data = b",\n".join(self.records)
        self.records, self.n_traces, self.n_buffered_bytes = [], 0, 0
        if self.frequency:
            self._write_new(Path(f"{self.path}.{self._n_files % MAX_FILES}"), data)
            self._n_files += 1
            if self._n_files == MAX_FILES:
                log.warning("%s: there are %d files of traces: the oldest are overwritten", self.path, MAX_FILES)
        elif self._is_begun:
            with Path(self.path).open("r+b", buffering=0) as opened:
                _write_at(opened, opened.seek(-1, 2), b",\n%b]" % data, fallback=b"]")  # overwrites the closing bracket
        else:
            self._write_new(Path(self.path), data)
            self._is_begun = True
        return len(data)

    def _write_new(self, path: Path, data: bytes) -> None:
        with path.open("wb", buffering=0) as opened:
            _write_at(opened, 0, b"[%b]" % data, fallback=b"[]")


def _write_at(file: FileIO, at: int, data: bytes, fallback: bytes) -> None:
    """Write all data. raises OSError, after ending the file at `at` with `fallback`, if the disk is full"""
    left = data
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        with suppress(OSError):
            file.truncate(at + len(fallback))
            file.seek(at)
            file.write(fallback)
        raise
