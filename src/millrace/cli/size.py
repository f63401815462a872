"""`millrace size`: from a business question to the systems to buy."""

import sys
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import click

from millrace.cli import size_fit, size_verify
from millrace.cli.options import json_option, settings_options
from millrace.cli.page_file import check_page, write_page
from millrace.cli.screen import note, print_json, progress, size
from millrace.cli.size_asked import ask
from millrace.cli.size_told import show, show_shared
from millrace.compile.rooflines import kept_roofline
from millrace.env import Env
from millrace.errors import ConfigError
from millrace.kernels.library import usable_isas
from millrace.machine.cpu import usable_cores
from millrace.machine.roofline import Roofline
from millrace.size.answer import answered
from millrace.size.hardware import measured_here
from millrace.size.page import size_page
from millrace.size.question import GROUPS, Question, read_answers
from millrace.size.shared import shared
from millrace.size.told import told

EPILOG = """\b
Examples:
  millrace size --model llama-3-8b --isl 2000 --osl 200 --rate 70 --ttft-ms 500 --hardware H100
  millrace size --model llama-3-70b --preset rag --users 100000 --hours 8 --reading read --ttft-ms 1000
  millrace size --model llama-3-8b --input "3500 words" --output "500 words" --calls 30M/year --burst 7 --ttft-ms 500
  millrace size --model llama-3-8b --isl 2000 --osl 200 --systems 4 --ttft-ms 500
  millrace size --measured runs.csv --isl 2000 --osl 200 --rate 70 --ttft-ms 500 --of p95
  millrace size --answers question.yaml --report page.html
  millrace size                                      asks one after the other
  millrace size fit --help                           benchmarks of your own beside what is computed"""


class _ByQuestion(click.Group):
    """Its help has the flags of each question below what is asked there."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        told = {param.name: record for param in self.get_params(ctx) if (record := param.get_help_record(ctx))}
        for group in GROUPS:
            with formatter.section(str(group.__doc__).partition(".")[0]):
                formatter.write_dl([told.pop(f.name) for f in fields(group)])
        with formatter.section("Where answers come from, and go"):
            formatter.write_dl(list(told.values()))
        self.format_commands(ctx, formatter)


@click.group(cls=_ByQuestion, invoke_without_command=True, epilog=EPILOG)
@settings_options(*GROUPS)
@click.option(
    "--answers",
    type=Path,
    multiple=True,
    metavar="FILE",
    help="YAML of these names and values; flags come before it. Several: models that share systems.",
)
@click.option("--report", type=Path, metavar="FILE", help="Write all of it as one page for a browser, with plots.")
@json_option
@click.pass_context
def command(
    ctx: click.Context, /, answers: tuple[Path, ...], report: Path | None, as_json: bool, **given: Any
) -> None:  # fmt: skip
    """Say how many of which machine serve a load, and why.

    Six questions: which model; tokens in; tokens out; requests a second at the peak; what users may wait for; which
    hardware. Every figure says where it comes from and how far it may be off.
    """
    said = {name: list(v) if isinstance(v, tuple) else v for name, v in given.items() if _is_said(ctx, name)}
    if ctx.invoked_subcommand is not None:
        if said or answers or report or as_json:
            raise ConfigError(f"answers before `{ctx.invoked_subcommand}`", "its own flags behind it", "move them")
        return
    if report is not None:
        check_page(report)
        if len(answers) > 1:
            raise ConfigError("--report with several models", "one of them", "write a page for each")
    asked = [{**read_answers(file), **said} for file in answers] or [said]
    if not answers and not said:
        if not _is_terminal() or as_json:
            raise ConfigError("nothing is asked", "answers as flags or in a file; in a terminal they are asked for",
                              "`millrace size --help` has examples")  # fmt: skip
        asked = [ask()]
    questions = [Question.of(one) for one in asked]
    with progress(quiet=as_json) as tell:
        found = [answered(one, here=partial(_here, ctx.obj), tell=tell) for one in questions]
    together = shared(found) if len(found) > 1 else None
    if as_json:
        print_json(
            {"models": [told(one) for one in found], "together": asdict(together)} if together else told(found[0])
        )
    else:
        for one in found:
            show(one)
        if together:
            show_shared(together)
    if report is not None:
        note(f"{report}: {size(write_page(report, size_page(found[0])))}, for a browser")


command.add_command(size_fit.command, "fit")
command.add_command(size_verify.command, "verify")


def _here(env: Env) -> Roofline:
    """This machine's, as `millrace doctor` has kept it; else measured now."""
    kept = kept_roofline(env.cache, usable_isas()[0], usable_cores())
    if kept is None:
        note("Measuring this machine: some seconds (`millrace doctor` keeps what it finds) ...")
    return kept or measured_here()


def _is_said(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()
