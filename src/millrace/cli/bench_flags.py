"""Flags as users of other tools write them (docs/bench.md lists them), made ours before they are parsed."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from millrace.bench.goodput import READING
from millrace.bench.settings import ALIASES
from millrace.errors import ConfigError
from millrace.report.png import check_png

png_option = click.option("--png", "as_png", is_flag=True, help="Draw the page's plots as pictures beside it, too.")
certify_option = click.option(
    "--certify-s", type=click.FloatRange(0, 600), default=2.0, show_default=True, metavar="X",
    help="Seconds in which this client proves itself on a server of known timing, at this load; 0: not.",
)  # fmt: skip
_LIMIT = re.compile(rf"[a-z_0-9]+:[0-9.]+|{READING}")


class TheirFlags(click.Command):
    """A command that takes them, too; its help does not list them, docs/bench.md does."""

    aliases: Mapping[str, str] = ALIASES

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, as_ours(args, self.aliases))


def check_output(output: Path | None, as_png: bool) -> None:
    """raises ConfigError, MachineError for what would show only when the run is over"""
    if as_png and output is None:
        raise ConfigError("--png without --output", "where to put the pictures", "name it with -o")
    if as_png:
        check_png()


def as_ours(arguments: Sequence[str], aliases: Mapping[str, str] = ALIASES) -> list[str]:
    """`--request-count=5` and `--request-count 5` both; several limits may follow one --goodput."""
    found: list[str] = []
    in_goodput = False
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if in_goodput and found[-1] != "--goodput" and _LIMIT.fullmatch(argument):
            found += ["--goodput", argument]
            continue
        in_goodput = argument == "--goodput" or (in_goodput and found[-1] == "--goodput")
        ours = aliases.get(flag) if flag.startswith("-") else None
        if ours is None:
            found.append(argument)
        elif ours:  # "": a flag that says what is so here anyway
            found.append(ours + equals + value)
    return found
