"""Options of `millrace compress`, by what takes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from millrace.compress.presets import BATCH, ROWS, CompressionTarget

QUESTIONS = 10  # of each subject, where nobody says: some minutes for a small model
_MOST_ROWS = 4096
Command = Callable[..., Any]
_OF_ADVICE = (
    click.option("--advise", is_flag=True, help="Make no checkpoint: compare methods on this machine, and recommend "
                 "one for each workload. -o is the folder of results; an interrupted run continues there."),
    click.option("--presets", metavar="NAME,...", help="Presets that --advise tries; default: all."),
)  # fmt: skip


def advise_options(command: Command) -> Command:
    for option in reversed(_OF_ADVICE):
        command = option(command)
    return command


_OF_BUDGET = (
    click.option("--max-loss", metavar="1%|kl:0.01",
                 help="Instead of --recipe: search the cheapest mix of formats that loses at most so much. 1%: growth "
                      "of perplexity, on the text and as KL foretells it; kl:0.01: nats a token."),
    click.option("--target", type=click.Choice([*map(str, CompressionTarget)]),
                 help="What to minimise with --max-loss: "
                 "the time of a step of few rows or of many, timed on this machine, or bytes; default: latency."),
    click.option("--batch", type=click.IntRange(1, _MOST_ROWS), metavar="N",
                 help=f"Rows of a step, with --max-loss; default: {ROWS[CompressionTarget.LATENCY]} for latency, "
                      f"{ROWS[CompressionTarget.THROUGHPUT]} for throughput. "
                      "With --advise: sequences of the large batch; "
                      f"default: {BATCH}."),
)  # fmt: skip


def budget_options(command: Command) -> Command:
    for option in reversed(_OF_BUDGET):
        command = option(command)
    return command


def proof_options(command: Command) -> Command:
    """Those that `AccuracyProofOptions` takes."""
    for option in (
        click.option("--questions", type=click.IntRange(1), metavar="N",
                     help=f"Of each subject of MMLU; default: {QUESTIONS}."),
        click.option("--mmlu", type=click.Path(path_type=Path), metavar="FOLDER",
                     help="Also ask both models MMLU's questions, and tell which answers flipped."),
        click.option("--measure-speed", is_flag=True,
                     help="Also measure prefill and decode of both: two engines are built and cached for it."),
        click.option("--calibration", metavar="FILE",
                     help="Text in UTF-8 to measure the loss on; default: some pages that come along."),
        click.option("--evaluate/--no-evaluate", default=True,
                     help="Measure what it costs in answers, beside the source."),
    ):  # fmt: skip
        command = option(command)
    return command
