"""The answer of `millrace size` on a screen."""

import click

from millrace.cli.console import heading, pairs, table
from millrace.report.format_numbers import format_4_digits
from millrace.size.answer.answer import Answer
from millrace.size.answer.multi_model import Shared
from millrace.size.report.answer_json import cut_short, headline
from millrace.size.report.answer_tables import in_short, tables
from millrace.size.report.table import Table


def print_answer(answer: Answer) -> None:
    heading(headline(answer))
    pairs(in_short(answer))
    if answer.not_simulated:
        click.echo(f"  {cut_short(answer)}")
    for one in answer.there:
        click.echo(
            f"  {one.systems} existing of {one.device} serve {format_4_digits(one.rate)} requests/s within the limits"
        )
    for part in tables(answer):
        _show(part)


def _show(part: Table) -> None:
    _heading(part.name + (f" ({part.more})" if part.more else ""))
    if part.header:
        table(part.header, part.rows)
    else:
        pairs([(name, value) for name, value in part.rows])
    for note in part.notes:
        click.echo(f"  {note}")


def _heading(text: str) -> None:
    click.echo()
    heading(text)


def show_shared(together: Shared) -> None:
    _heading("Together (all peaks at once)")
    pairs([
        ("systems", f"{together.systems} for all models, of {together.device}; {together.apart} were each by itself"),
        ("devices", f"{together.devices} are needed"),
    ])  # fmt: skip
