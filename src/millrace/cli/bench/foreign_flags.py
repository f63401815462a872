"""Flags of other benchmark tools (docs/bench.md lists them), translated before they are parsed."""

import os
import re
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click

from millrace.bench.names import READING
from millrace.bench.settings import ALIASES, LoadSettings
from millrace.cli.console import note
from millrace.errors import ConfigError, MachineError
from millrace.report.png import check_png

png_option = click.option("--png", "as_png", is_flag=True, help="Draw the page's plots as pictures beside it, too.")
certify_option = click.option(
    "--certify-s", type=click.FloatRange(0, 600), default=2.0, show_default=True, metavar="X",
    help="Seconds in which this client proves itself on a server of known timing, at this load; 0: not.",
)  # fmt: skip
_LIMIT = re.compile(rf"[a-z_0-9]+:[0-9.]+|{READING}")


class ForeignFlags(click.Command):
    """A command that also accepts the flags of other tools; they are listed in docs/bench.md, not in its help."""

    aliases: Mapping[str, str] = ALIASES

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, translate_flags(args, self.aliases))


def check_pictures(output: Path | None, as_png: bool) -> None:
    """Check before the run that plots can be written as PNG. raises ConfigError, MachineError"""
    if as_png and output is None:
        raise ConfigError("--png without --output", "where to put the pictures", "name it with -o")
    if as_png:
        check_png()


def ready_folder(output: Path | None, names: Collection[str]) -> None:
    """Create the folder for files of these names before the run, and check that it is writable. raises ConfigError"""
    if output is None:
        return
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output {output} is a file", "a folder", "name another")
    _try(output, output, names)
    if (output / "summary.json").exists():
        note(f"  {output} holds an earlier result; its files will be overwritten")


def ready_file(output: Path | None, *files: Path) -> None:
    """Check before the run that a file and those next to it can be written. raises ConfigError"""
    if output is None:
        return
    _try(output, output.parent, [path.name for path in (output, *files)])
    if output.is_file():
        note(f"  {output} is there; it will be overwritten")


def _try(output: Path, folder: Path, names: Collection[str]) -> None:
    expected, fix = "a place that can be written to", "name another"
    existing = [path for path in (folder / name for name in names) if path.exists()]
    for path in existing:
        if path.is_dir():
            raise ConfigError(f"--output {output}: {path} is a folder", "a file, or nothing of that name", fix)
        if not os.access(path, os.W_OK):
            raise ConfigError(f"--output {output}: {path} cannot be written", expected, fix)
    if len(existing) == len(names):  # a device, for one, is in a folder where nothing can be made
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written: {error.strerror}", expected, fix) from None


def show_and_write(tell: Callable[[], None], output: Path | None, write: Callable[[Path], Sequence[str]]) -> None:
    """Print the results, then write files, so that neither a full disk nor a closed pipe loses the other.

    write: returns the names of its files. raises MachineError if files cannot be written
    """
    try:
        tell()
    finally:
        if output is not None:
            try:
                names = write(output)
            except OSError as error:
                raise MachineError(
                    f"--output {output} is not whole: {error.strerror or error}", "room, and leave to write there",
                    "the figures above are all there is; measure again with another -o",
                ) from None  # fmt: skip
            note(f"  {len(names)} files in {output}" if output.is_dir() else f"  written to {output}")


def reseed(load: LoadSettings, n: int) -> LoadSettings:
    """Return the load of the n-th of several runs: with other texts than the earlier ones, but reproducible."""
    return replace(load, random_seed=(load.random_seed + n) % 2**63)


def translate_flags(arguments: Sequence[str], aliases: Mapping[str, str] = ALIASES) -> list[str]:
    """Translate `--request-count=5` as well as `--request-count 5`; several limits may follow one --goodput."""
    translated: list[str] = []
    in_goodput = False
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if in_goodput and translated[-1] != "--goodput" and _LIMIT.fullmatch(argument):
            translated += ["--goodput", argument]
            continue
        in_goodput = argument == "--goodput" or (in_goodput and translated[-1] == "--goodput")
        ours = aliases.get(flag) if flag.startswith("-") else None
        if ours is None:
            translated.append(argument)
        elif ours:  # "": a flag that says what is so here anyway
            translated.append(ours + equals + value)
    return translated
