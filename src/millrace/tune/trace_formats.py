"""Lines of traces, as every reader of one takes them: what `serve --record` writes, Mooncake's, Azure's.

Lengths are in tokens. An id stands for BLOCK tokens of a prompt, and prompts of equal ids begin alike. Azure's times
without a zone are taken for UTC. Every mistake names file and line.
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
MOST_TOKENS = 10_000_000  # of a prompt, or of an answer
MOST_LINE, MOST_FILE = 16 << 20, 2 << 30  # bytes
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
Lines = Iterator[tuple[int, bytes]]  # each with its number, from 1
_BOM = b"\xef\xbb\xbf"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SHOWN = 80  # characters of a line


@dataclass(frozen=True, slots=True)
class Row:
    """Of Azure's table. at_s: since 1970"""

    number: int
    at_s: float
    n_input: int
    n_output: int


def _at_once(path: str, flags: int) -> int:
    """Also a pipe that nobody writes into."""
    return os.open(path, flags | os.O_NONBLOCK)


@contextmanager
def opened(path: Path, expected: str) -> Iterator[IO[bytes]]:
    """raises ConfigError where the file cannot be read, there or later, or is too large"""
    try:
        with open(path, "rb", opener=_at_once) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):  # which may have no end, and is gone through twice
                raise ConfigError(f"{path} is no file", f"{expected}, as a file", "write what comes out of it to one")
            if found.st_size > MOST_FILE:
                raise ConfigError(f"{path} has {found.st_size} bytes", f"at most {MOST_FILE}", "split it")
            yield file
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", expected, "check the path") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason}", "UTF-8 text", "convert it with iconv") from None


def numbered(file: IO[bytes], path: Path) -> Lines:
    """All but empty ones, without a byte order mark. raises ConfigError for one that is too long"""
    number = 0
    while line := file.readline(MOST_LINE + 1):
        number += 1
        if len(line) > MOST_LINE:
            wrong(path, number, f"more than {MOST_LINE} bytes", "a request")
        line = line.removeprefix(_BOM) if number == 1 else line
        if line.strip():
            yield number, line


def begins(file: IO[bytes]) -> bytes:
    """What the file begins with but for white space, one byte; b"" where it holds nothing else."""
    first = b""
    while not first and (part := file.read(1 << 16)):
        first = part.removeprefix(_BOM).lstrip()[:1]
    file.seek(0)
    return first


def rows(lines: Lines, path: Path) -> Iterator[Row]:
    """Of Azure's table, its head among the lines. raises ConfigError"""
    number, head = next(lines)
    if _fields(path, number, head) != AZURE.split(","):
        wrong(path, number, _shown(head), AZURE)
    for number, line in lines:
        fields = _fields(path, number, line)
        try:
            at, n_input, n_output = datetime.fromisoformat(fields[0]), *map(int, fields[1:])
        except ValueError:
            wrong(path, number, _shown(line), AZURE)
        if not (0 <= n_input <= MOST_TOKENS and 0 <= n_output <= MOST_TOKENS):
            wrong(path, number, f"{n_input} and {n_output} tokens", f"0 to {MOST_TOKENS}")
        at_s = ((at if at.tzinfo else at.replace(tzinfo=UTC)) - _EPOCH).total_seconds()
        yield Row(number, at_s, n_input, n_output)


def _fields(path: Path, number: int, line: bytes) -> list[str]:
    try:
        return next(csv.reader([line.decode(errors="replace").strip()]))
    except csv.Error as error:  # such as a field of more than 131,072 characters
        wrong(path, number, f"no CSV: {error}", AZURE)


def _shown(line: bytes) -> str:
    return sanitize(line.decode(errors="replace").strip()[:_SHOWN])


def wrong(path: Path, line: int, what: str, expected: str) -> NoReturn:
    raise ConfigError(f"{path}, line {line}: {what}", expected, "correct the line, or leave it out")
