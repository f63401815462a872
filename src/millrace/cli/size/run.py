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
from millrace.compile.cache.rooflines import load_roofline
from millrace.env import Env
from millrace.errors import ConfigError
from millrace.kernels.library import usable_isas
from millrace.machine.cpu import usable_cores
from millrace.machine.roofline import Roofline
from millrace.size.answer.answer import answer_question
from millrace.size.answer.multi_model import share_systems
from millrace.size.performance.hardware import measured_here
from millrace.size.question.question import SizingQuestion, read_answers
from millrace.size.report.answer_json import answer_to_dict
from millrace.size.report.page import size_page


def run(
    ctx: click.Context, /, answers: tuple[Path, ...], report: Path | None, as_json: bool, **options: Any
) -> None:  # fmt: skip
    """Run `millrace size`. options: the flags of the command line"""
    flags = {name: list(v) if isinstance(v, tuple) else v for name, v in options.items()}
    if report is not None:
        check_page(report)
        if len(answers) > 1:
            raise ConfigError("--report with several models", "one of them", "write a page for each")
    answer_sets = [{**read_answers(file), **flags} for file in answers] or [flags]
    if not answers and not flags:
        if not _is_terminal() or as_json:
            raise ConfigError("nothing is asked", "answers as flags or in a file; in a terminal they are asked for",
                              "`millrace size --help` has examples")  # fmt: skip
        answer_sets = [ask()]
    questions = [SizingQuestion.from_answers(question) for question in answer_sets]
    with progress(quiet=as_json) as tell:
        results = [
            answer_question(question, local_roofline=partial(_local_roofline, ctx.obj), tell=tell)
            for question in questions
        ]
    together = share_systems(results) if len(results) > 1 else None
    if as_json:
        print_json(
            {"models": [answer_to_dict(answer) for answer in results], "together": asdict(together)}
            if together
            else answer_to_dict(results[0])
        )
    else:
        for answer in results:
            print_answer(answer)
        if together:
            show_shared(together)
    if report is not None:
        note(f"{report}: {size(write_page(report, size_page(results[0])))}, for a browser")


def _local_roofline(env: Env) -> Roofline:
    """Return the roofline saved by `millrace doctor`, or measure it."""
    saved = load_roofline(env.cache, usable_isas()[0], usable_cores())
    if saved is None:
        note("Measuring this machine: some seconds (`millrace doctor` keeps what it finds) ...")
    return saved or measured_here()


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()
