"""Option groups of `millrace compress`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from millrace.compress.presets import BATCH, ROWS, CompressionTarget

QUESTIONS = 10  # default per subject: some minutes for a small model
_MAX_ROWS = 4096
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
    click.option(
        "--max-loss",
        metavar="1%|kl:0.01",
        help="Instead of --recipe: search the cheapest mix of formats within this loss. 1%: increase of "
        "perplexity, both measured and predicted from KL; kl:0.01: nats per token.",
    ),
    click.option(
        "--target",
        type=click.Choice([*map(str, CompressionTarget)]),
        help="What --max-loss minimises: the time of a "
        "step with few or many rows, measured on this machine, or bytes; default: latency.",
    ),
    click.option(
        "--batch",
        type=click.IntRange(1, _MAX_ROWS),
        metavar="N",
        help=f"With --max-loss, rows of a step; default: {ROWS[CompressionTarget.LATENCY]} for latency, "
        f"{ROWS[CompressionTarget.THROUGHPUT]} for throughput. With --advise, sequences of the large batch; "
        f"default: {BATCH}.",
    ),
)


def budget_options(command: Command) -> Command:
    for option in reversed(_OF_BUDGET):
        command = option(command)
    return command


def proof_options(command: Command) -> Command:
    """Add the options of `AccuracyProofOptions`."""
    for option in (
        click.option("--questions", type=click.IntRange(1), metavar="N",
                     help=f"Questions per subject of MMLU; default: {QUESTIONS}."),
        click.option("--mmlu", type=click.Path(path_type=Path), metavar="FOLDER",
                     help="Also run MMLU on both models, and report the answers that changed."),
        click.option("--measure-speed", is_flag=True,
                     help="Also measure prefill and decode speed of both models, which builds and caches two engines."),
        click.option("--calibration", metavar="FILE",
                     help="UTF-8 text to measure the loss on; default: a bundled text."),
        click.option("--evaluate/--no-evaluate", default=True,
                     help="Measure the accuracy loss compared with the source."),
    ):  # fmt: skip
        command = option(command)
    return command
