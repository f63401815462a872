"""Terminal output of `millrace size`."""

import click

from millrace.cli.console import heading, pairs, table
from millrace.report.format_numbers import format_4_digits
from millrace.size.answer.answer import SizingAnswer
from millrace.size.answer.multi_model import Shared
from millrace.size.report.answer_json import cut_short, headline
from millrace.size.report.answer_tables import summary_rows, tables
from millrace.size.report.table import TextTable


def print_answer(answer: SizingAnswer) -> None:
    heading(headline(answer))
    pairs(summary_rows(answer))
    if answer.not_simulated:
        click.echo(f"  {cut_short(answer)}")
    for system in answer.existing:
        click.echo(
            f"  {system.systems} existing of {system.device} serve {format_4_digits(system.rate)} requests/s "
            "within the limits"
        )
    for part in tables(answer):
        _show(part)


def _show(part: TextTable) -> None:
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


def show_shared(shared: Shared) -> None:
    _heading("Together (all peaks at once)")
    pairs([
        ("systems", f"{shared.systems} for all models, of {shared.device}; {shared.apart} were each by itself"),
        ("devices", f"{shared.devices} are needed"),
    ])  # fmt: skip
