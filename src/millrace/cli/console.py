"""Terminal output: aligned plain text, with colours only in a terminal."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from millrace.env import is_plain_terminal
from millrace.errors import ConfigError, sanitize
from millrace.report.format_numbers import is_number

_BYTES = 1 << 16  # a total from here on is one of bytes; smaller ones are rounds and shapes
Progress = Callable[[str, int, int], None]  # what is being done, bytes done, bytes in all


def print_json(data: Any) -> None:
    click.echo(json.dumps(data, indent=2, default=str))


def decode_stdin(data: bytes) -> str:
    """Decode text from a pipe. raises ConfigError if it is not UTF-8"""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"stdin is not UTF-8: byte 0x{data[error.start]:02x} at {error.start}",
            "UTF-8 text",
            "convert it with iconv",
        ) from None


def print_line(text: str, *, err: bool = False) -> None:
    """Print a line that is not the result; if the pipe is closed (`| head -1`) it is lost and the work continues."""
    try:
        click.echo(text, err=err)
    except BrokenPipeError:
        with Path(os.devnull).open("w") as nowhere:  # else what the stream still holds fails again at the end
            os.dup2(nowhere.fileno(), (sys.stderr if err else sys.stdout).fileno())


def note(text: str) -> None:
    """Print a line on stderr; stdout stays clean for results."""
    print_line(text, err=True)


def heading(text: str, *, err: bool = False) -> None:
    _echo(click.style(text, bold=True), err)


def pairs(rows: Sequence[tuple[str, str]], *, err: bool = False) -> None:
    """Print names and values; a row without a name continues the one above."""
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        _echo(f"  {click.style(name.ljust(width), fg='cyan')}  {value}", err)


def _echo(text: str, err: bool) -> None:
    """Print a line of the result; a closed pipe on stdout ends the command."""
    note(text) if err else click.echo(text)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns; numeric ones are aligned right."""
    widths = [max(len(str(r[i])) for r in (header, *rows)) for i in range(len(header))]
    right = [bool(rows) and all(is_number(r[i]) for r in rows) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        aligned = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right, strict=True))
        return ("  " + "  ".join(aligned)).rstrip()

    click.echo(click.style(line(header), fg="cyan"))
    for row in rows:
        click.echo(line(row))


def size(nbytes: float) -> str:
    """Format bytes with two or three digits: "8.8 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1000 or unit == "GiB":
            digits = f"{nbytes:.0f}" if unit == "B" or nbytes >= 100 else f"{nbytes:.1f}".removesuffix(".0")
            return f"{digits} {unit}"
        nbytes /= 1024
    raise AssertionError("unreachable")


@contextmanager
def progress(quiet: bool = False) -> Iterator[Progress]:
    """Show bars on stderr during long work; lines if stderr is no terminal, or one without escapes. quiet: neither"""
    if quiet:
        yield lambda what, done, total: None
        return
    if not sys.stderr.isatty() or is_plain_terminal():
        yield Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description:<44.44}"),
        BarColumn(),
        TextColumn("{task.fields[of]}"),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=None, visible=False, of="")

        def report(label: str, done: int, total: int) -> None:
            bars.update(
                task, description=label, completed=done, total=total or None, visible=True, of=_so_far(done, total)
            )

        yield report


class Lines:
    """Progress for a log: a line when a phase starts, and about every EVERY_S seconds.

    Reports that continue counting to the same total are one phase, whatever their labels (a build names each weight).
    """

    EVERY_S = 10.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._reported_s = clock, 0.0
        self._what, self._done, self._total = "", 0, -1

    def __call__(self, label: str, done: int, total: int) -> None:
        counts_on = total == self._total and done >= self._done
        if not counts_on and label != self._what:
            self._what, self._reported_s = label, self._clock()
            note(f"{sanitize(label)} ...")
        elif self._clock() - self._reported_s >= self.EVERY_S:
            self._reported_s = self._clock()
            note(f"  {sanitize(label)}: {_so_far(done, total)}")
        self._done, self._total = done, total


def _so_far(done: int, total: int) -> str:
    return f"{size(done)} of {size(total)}" if total >= _BYTES else f"{done} of {total}"
