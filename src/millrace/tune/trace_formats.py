"""Line-level parsing of traces: files of `serve --record`, Mooncake's and Azure's traces.

Lengths are in tokens. An id stands for BLOCK tokens of a prompt; equal leading ids mean equal prefixes. Azure's times
without a time zone are taken as UTC. Errors name file and line.
"""

import csv
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, NoReturn

from millrace.errors import ConfigError, sanitize

BLOCK = 512  # tokens of an id
MAX_TOKENS = 10_000_000  # of a prompt, or of an answer
MAX_LINE, MAX_FILE = 16 << 20, 2 << 30  # bytes
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
Lines = Iterator[tuple[int, bytes]]  # each with its number, from 1
_BOM = b"\xef\xbb\xbf"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SHOWN = 80  # characters of a line


@dataclass(frozen=True, slots=True)
class AzureRow:
    """A row of Azure's trace. at_s: Unix time"""

    number: int
    at_s: float
    n_input: int
    n_output: int


def _at_once(path: str, flags: int) -> int:
    """Open a file without blocking on a pipe that has no writer."""
    return os.open(path, flags | os.O_NONBLOCK)


@contextmanager
def open_trace(path: Path, expected: str) -> Iterator[IO[bytes]]:
    """Open a regular file. raises ConfigError if it is too large, or cannot be read, now or in the context"""
    try:
        with open(path, "rb", opener=_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):  # it may be endless, and is read twice
                raise ConfigError(f"{path} is no file", f"{expected}, as a file", "write what comes out of it to one")
            if status.st_size > MAX_FILE:
                raise ConfigError(f"{path} has {status.st_size} bytes", f"at most {MAX_FILE}", "split it")
            yield file
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", expected, "check the path") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason}", "UTF-8 text", "convert it with iconv") from None


def numbered_lines(file: IO[bytes], path: Path) -> Lines:
    """Yield numbered non-empty lines without a byte order mark. raises ConfigError for an overlong line"""
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise_line_error(path, number, f"more than {MAX_LINE} bytes", "a request")
        line = line.removeprefix(_BOM) if number == 1 else line
        if line.strip():
            yield number, line


def first_byte(file: IO[bytes]) -> bytes:
    """Return the first byte of the file that is not white space; b"" if there is none."""
    first = b""
    while not first and (part := file.read(1 << 16)):
        first = part.removeprefix(_BOM).lstrip()[:1]
    file.seek(0)
    return first


def rows(lines: Lines, path: Path) -> Iterator[AzureRow]:
    """Yield the rows of Azure's trace; the first line is its header. raises ConfigError"""
    number, head = next(lines)
    if _fields(path, number, head) != AZURE.split(","):
        raise_line_error(path, number, _printable(head), AZURE)
    for number, line in lines:
        fields = _fields(path, number, line)
        try:
            at, n_input, n_output = datetime.fromisoformat(fields[0]), *map(int, fields[1:])
        except ValueError:
            raise_line_error(path, number, _printable(line), AZURE)
        if not (0 <= n_input <= MAX_TOKENS and 0 <= n_output <= MAX_TOKENS):
            raise_line_error(path, number, f"{n_input} and {n_output} tokens", f"0 to {MAX_TOKENS}")
        at_s = ((at if at.tzinfo else at.replace(tzinfo=UTC)) - _EPOCH).total_seconds()
        yield AzureRow(number, at_s, n_input, n_output)


def _fields(path: Path, number: int, line: bytes) -> list[str]:
    try:
        return next(csv.reader([line.decode(errors="replace").strip()]))
    except csv.Error as error:  # such as a field of more than 131,072 characters
        raise_line_error(path, number, f"no CSV: {error}", AZURE)


def _printable(line: bytes) -> str:
    return sanitize(line.decode(errors="replace").strip()[:_SHOWN])


def raise_line_error(path: Path, line: int, problem: str, expected: str) -> NoReturn:
    raise ConfigError(f"{path}, line {line}: {problem}", expected, "correct the line, or leave it out")
