"""Runs `millrace size`, whose options are in `options.py`: `--help` imports nothing else."""

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from millrace.cli.console import note, print_json, progress, size
from millrace.cli.html_output import check_page, write_page
from millrace.cli.size.interview import ask
from millrace.cli.size.output import print_answer, show_shared
from millrace.compile.cache.rooflines import kept_roofline
from millrace.env import Env
from millrace.errors import ConfigError
from millrace.kernels.library import usable_isas
from millrace.machine.cpu import usable_cores
from millrace.machine.roofline import Roofline
from millrace.size.answer.answer import answered
from millrace.size.answer.multi_model import shared
from millrace.size.performance.hardware import measured_here
from millrace.size.question.question import Question, read_answers
from millrace.size.report.answer_json import answer_to_dict
from millrace.size.report.page import size_page


def run(
    ctx: click.Context, /, answers: tuple[Path, ...], report: Path | None, as_json: bool, **given: Any
) -> None:  # fmt: skip
    """Run `millrace size`. given: what is on the command line"""
    said = {name: list(v) if isinstance(v, tuple) else v for name, v in given.items()}
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
            {"models": [answer_to_dict(one) for one in found], "together": asdict(together)}
            if together
            else answer_to_dict(found[0])
        )
    else:
        for one in found:
            print_answer(one)
        if together:
            show_shared(together)
    if report is not None:
        note(f"{report}: {size(write_page(report, size_page(found[0])))}, for a browser")


def _here(env: Env) -> Roofline:
    """This machine's, as `millrace doctor` has kept it; else measured now."""
    kept = kept_roofline(env.cache, usable_isas()[0], usable_cores())
    if kept is None:
        note("Measuring this machine: some seconds (`millrace doctor` keeps what it finds) ...")
    return kept or measured_here()


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()
