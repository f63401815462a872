"""`millrace compress`: a float checkpoint becomes a smaller one, with the proof beside it."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.cli.compress_asked import Sampling, opened, recorded, statistics_for
from millrace.cli.compress_budget import or_searched
from millrace.cli.options import json_option
from millrace.cli.screen import count, heading, note, pairs, print_json, progress, size
from millrace.cli.signals import ended_in_order
from millrace.compress.calibrated import by_statistics, needs
from millrace.compress.collect import SAMPLES
from millrace.compress.compress import RECORD, Method, Result, by_rounding, compress
from millrace.compress.folder import check_place
from millrace.compress.measure import Loss, measure, why_not, windows_for
from millrace.compress.plan import Job, plan
from millrace.compress.recipe import PRESETS, read_recipe
from millrace.engine.tactics import write_whole
from millrace.env import Env
from millrace.errors import ConfigError
from millrace.evaluate.calibration import Calibration
from millrace.evaluate.windows import LENGTH

_WORST = 3  # layers that are named
_MOST_SAMPLES = 4096
EPILOG = "\n".join([
    "\b", "Examples:",
    "  millrace compress ./llama-3.2-1b -o llama-int4 --recipe int4-wo-mse",
    "  millrace compress ./llama-3.2-1b -o llama-gptq --recipe int4-gptq --samples-from text.txt",
    "  millrace compress ./llama-3.2-1b -o llama-mix --recipe mix.toml --dry-run",
    "  millrace compress ./llama-3.2-1b -o llama-1pc --max-loss 1% --target latency --samples-from text.txt",
    "  millrace serve llama-int4",
    "", "\b", "Presets:", *(f"  {recipe.name:14} {recipe.about}" for recipe in PRESETS.values()),
    "", "docs/compress.md has what a recipe file holds.",
])  # fmt: skip


@click.command(epilog=EPILOG)
@click.argument("model")
@click.option("-o", "--output", type=Path, required=True, metavar="FOLDER", help="The folder to write; must not exist.")
@click.option("--recipe", metavar="NAME|FILE", help="A preset, or a recipe as .toml or .json; see below.")
@click.option("--dry-run", is_flag=True, help="Say what would be done and what it needs, from the headers alone.")
@click.option("--evaluate/--no-evaluate", default=True, help="Measure what it costs in answers, beside the source.")
@click.option("--calibration", metavar="FILE",
              help="Text in UTF-8 to measure on; default: some pages that come along.")  # fmt: skip
@click.option(
    "--samples-from",
    metavar="FILE",
    help="Text in UTF-8 to collect statistics on, for recipes that need some; not what is measured on.",
)
@click.option(
    "--samples",
    type=click.IntRange(1, _MOST_SAMPLES),
    metavar="N",
    help=f"Samples of {LENGTH} tokens, spread over it; default: {SAMPLES}.",
)
@click.option("--statistics", type=click.Path(path_type=Path), metavar="FOLDER",
              help="Keep statistics there: what is there is gone on with, and other recipes need no text.")  # fmt: skip
@json_option
@click.pass_obj
@or_searched
def command(
    env: Env, /, model: str, output: Path, recipe: str, dry_run: bool, evaluate: bool, calibration: str | None,
    as_json: bool, **sampling: Any,
) -> None:  # fmt: skip
    """Make a smaller checkpoint of one, and prove it.

    MODEL is a checkpoint folder, a GGUF file, a hub id or `tiny`. The new folder has the format of compressed-tensors;
    it is read again before it counts.
    """
    started_s = time.perf_counter()
    text, asked = _text(calibration, evaluate and not dry_run), Sampling(**sampling)
    with ended_in_order(), progress(as_json) as report:
        checkpoint = opened(model, env, report)
        job = plan(checkpoint, read_recipe(recipe))
        asked.check(f"the recipe {job.recipe.name}", job.calibrated, calibration, dry_run)
        check_place(output, job.bytes_after + (asked.temporary_bytes(job) if job.calibrated else 0))
        without = "--no-evaluate was given" if text is None else why_not(checkpoint)
        read = windows_for(checkpoint, text) if text and not without else None  # a text too short is said at once
        if not dry_run:
            with _method(job, output, asked, report) as (method, about):
                made = compress(job, output, method, report)
            loss = measure(checkpoint, Checkpoint.open(output), read, report) if read else without
    if dry_run:
        _show_plan(job, asked, as_json)
        return
    said = {**_about(job), "folder": str(output), "seconds": time.perf_counter() - started_s,
            "loss": asdict(loss) if isinstance(loss, Loss) else {"not_measured": loss},
            "worst": dict(made.worst[:_WORST])}  # fmt: skip
    _add_to_record(output, {**about, "loss": said["loss"]})
    if as_json:
        print_json(said)
    else:
        _show(made, loss, said["seconds"])


@contextmanager
def _method(job: Job, out: Path, asked: Sampling, report: Any) -> Iterator[tuple[Method, dict[str, Any]]]:
    """How the job is done, and what is to be recorded of it."""
    if not job.calibrated:
        yield by_rounding, {}
        return
    with statistics_for(job, out, asked, report) as found:
        yield by_statistics(found), recorded(found)


def _text(file: str | None, evaluate: bool) -> Calibration | None:
    if file is not None and not evaluate:
        raise ConfigError("--calibration is given, and nothing is measured", "one of both", "leave one out")
    return Calibration.open(file) if evaluate else None


def _add_to_record(folder: Path, more: dict[str, Any]) -> None:
    path = folder / RECORD
    write_whole(path, (json.dumps({**json.loads(path.read_bytes()), **more}, indent=1) + "\n").encode())


def _about(job: Job) -> dict[str, Any]:
    return {
        "recipe": job.recipe.name, "layers": len(job.layers), "kept": list(job.ignored), "weights": job.n_weights,
        "bits_per_weight": job.bits_per_weight, "bytes_before": job.bytes_before, "bytes_after": job.bytes_after,
        "notes": list(job.notes),
    }  # fmt: skip


def _show_plan(job: Job, asked: Sampling, as_json: bool) -> None:
    tokens = asked.n * LENGTH
    first = needs(job, tokens) if job.calibrated else None
    memory = job.memory_bytes + (first.memory_bytes if first else 0)
    if as_json:
        more = {"statistics": asdict(first)} if first else {}
        print_json({**_about(job), "memory_bytes": memory, "seconds": job.seconds, **more})
        return
    heading(f"{job.recipe.name}: nothing was written")
    pairs([*_sizes(job), ("memory", f"about {size(memory)}"), ("time", f"about {job.seconds:.0f} s")])
    if first:
        said = f"of {tokens:,} tokens: about {first.seconds:.0f} s more on two cores, {size(first.disk_bytes)} on disk"
        pairs([("statistics", said)])
    _notes(job)


def _sizes(job: Job) -> list[tuple[str, str]]:
    kept = f", {', '.join(job.ignored[:4])} left as floats" if job.ignored else ""
    return [
        ("layers", f"{len(job.layers)} linear layers of {count(job.n_weights)} weights{kept}"),
        ("bits", f"{job.bits_per_weight:.3f} a weight of these, scales included"),
        ("bytes", f"{size(job.bytes_before)} -> {size(job.bytes_after)}"),
    ]  # fmt: skip


def _notes(job: Job) -> None:
    for text in job.notes:
        note(f"note: {text}")


def _show(made: Result, loss: Loss | str, seconds: float) -> None:
    heading(f"{made.folder} ({made.job.recipe.name}), read again and found right")
    pairs([*_sizes(made.job), *_loss(loss), *_worst(made), ("time", f"{seconds:.1f} s")])
    _notes(made.job)


def _loss(loss: Loss | str) -> list[tuple[str, str]]:
    if isinstance(loss, str):
        return [("loss", f"not measured: {loss}")]
    return [
        ("KL", f"{loss.kl:.3g} nats a token, beside the source in fp32, on {loss.tokens:,} tokens ({loss.precision})"),
        ("perplexity", f"{loss.perplexity:.3f}, the source's {loss.source_perplexity:.3f}"),
        ("same token", f"{loss.agreement:.1%} of the likeliest"),
    ]  # fmt: skip


def _worst(made: Result) -> list[tuple[str, str]]:
    rows = [f"{name} {error:.2%}" for name, error in made.worst[:_WORST]]
    return [("lost most", ", ".join(rows) + " of their energy")] if rows else []
