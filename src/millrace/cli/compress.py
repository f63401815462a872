"""`millrace compress`: a float checkpoint becomes a smaller one, with the proof beside it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from millrace.cli.compress_advise import or_advised
from millrace.cli.compress_asked import Sampling, command_line, opened, recorded, statistics_for
from millrace.cli.compress_budget import or_searched
from millrace.cli.compression import Proof, measure_again, proof_options, rows_of, said_if_ended
from millrace.cli.options import json_option
from millrace.cli.screen import count, heading, note, pairs, print_json, progress, size
from millrace.cli.signals import ended_in_order
from millrace.compress.calibrated import by_statistics, needs
from millrace.compress.collect import SAMPLES
from millrace.compress.compress import Method, Result, by_rounding, compress
from millrace.compress.folder import check_place
from millrace.compress.measure import memory_bytes, why_not
from millrace.compress.page import write_page
from millrace.compress.plan import Job, plan
from millrace.compress.recipe import PRESETS, read_recipe
from millrace.env import Env
from millrace.errors import ConfigError
from millrace.evaluate.windows import LENGTH

_WORST = 3  # layers that are named
_MOST_SAMPLES = 4096
EPILOG = "\n".join([
    "\b", "Examples:",
    "  millrace compress ./llama-3.2-1b -o llama-int4 --recipe int4-wo-mse",
    "  millrace compress ./llama-3.2-1b -o llama-gptq --recipe int4-gptq --samples-from text.txt",
    "  millrace compress ./llama-3.2-1b -o llama-mix --recipe mix.toml --dry-run",
    "  millrace compress ./llama-3.2-1b -o llama-1pc --max-loss 1% --target latency --samples-from text.txt",
    "  millrace compress ./llama-3.2-1b -o advice --advise --samples-from text.txt",
    "  millrace serve llama-int4",
    "", "\b", "Presets:", *(f"  {recipe.name:14} {recipe.about}" for recipe in PRESETS.values()),
    "", "docs/compress.md has what a recipe file holds.",
])  # fmt: skip


@click.command(epilog=EPILOG)
@click.argument("model")
@click.option("-o", "--output", type=Path, required=True, metavar="FOLDER", help="The folder to write; must not exist.")
@click.option("--recipe", metavar="NAME|FILE", help="A preset, or a recipe as .toml or .json; see below.")
@click.option("--measure", "again", is_flag=True,
              help="Make nothing: measure the folder that is there, as after a run that was ended.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Say what would be done and what it needs, from the headers alone.")
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
@proof_options
@json_option
@click.pass_obj
@or_advised
@or_searched
def command(
    env: Env, /, model: str, output: Path, recipe: str | None, dry_run: bool, as_json: bool, again: bool, **more: Any
) -> None:
    """Make a smaller checkpoint of one, and prove it.

    MODEL is a checkpoint folder, a GGUF file, a hub id or `tiny`. The new folder has the format of compressed-tensors;
    it is read again before it counts.
    """
    started_s, asked = time.perf_counter(), Sampling(*map(more.pop, ("samples_from", "samples", "statistics")))
    calibration: str | None = more["calibration"]
    proof = Proof.asked(**more)
    if again:
        _measure_again(model, output, _Again(recipe, dry_run, asked, proof), env, as_json)
        return
    if recipe is None:
        raise ConfigError(
            "no recipe is named",
            "a preset, or a file",
            "name one: --recipe int4-wo-mse; or say what may be lost: --max-loss 1%",
        )
    with ended_in_order(), progress(as_json) as report:
        checkpoint = opened(model, env, report)
        job = plan(checkpoint, read_recipe(recipe))
        asked.check(f"the recipe {job.recipe.name}", job.calibrated, calibration, dry_run)
        check_place(output, job.bytes_after + (asked.temporary_bytes(job) if job.calibrated else 0))
        read = proof.windows(checkpoint)  # a text too short is said at once, by a dry run too
        if job.calibrated and proof.text is not None and not dry_run:
            asked.check_text(checkpoint, proof.text)
        if not dry_run:
            with _method(job, output, asked, report) as (method, about):
                made = compress(job, output, method, report)
                seconds = time.perf_counter() - started_s
                write_page(output, {**about, "command": command_line(model), "seconds": seconds})
            with said_if_ended(model, output):
                found = proof.loss(model, checkpoint, output, read, report)
    if dry_run:
        _show_plan(job, asked, more["evaluate"] and not why_not(checkpoint), as_json)
        return
    with said_if_ended(model, output):
        found |= proof.more(model, output, env, as_json)
    said = {**_about(job), "folder": str(output), "seconds": time.perf_counter() - started_s, **found,
            "worst": dict(made.worst[:_WORST])}  # fmt: skip
    if as_json:
        print_json(said)
        return
    heading(f"{output} ({job.recipe.name}), read again and found right")
    pairs([*_sizes(job), *rows_of(found), *_worst(made), ("time", f"{said['seconds']:.1f} s")])
    _notes(job)


@dataclass(frozen=True, slots=True)
class _Again:
    """What was asked together with --measure."""

    recipe: str | None
    dry_run: bool
    asked: Sampling
    proof: Proof

    def check(self) -> None:
        """raises ConfigError for what makes a folder, and where nothing is to be measured"""
        if self.recipe is not None or self.dry_run or self.asked != Sampling(None, None, None):
            raise ConfigError(
                "--measure is given with what makes a folder", "a folder that is there, and nothing of how to make it",
                "leave --recipe, --dry-run and statistics out, or leave out --measure",
            )  # fmt: skip
        if self.proof == replace(self.proof, text=None, measure_speed=False, mmlu=None):
            raise ConfigError("--measure is given, and nothing is to be measured", "one of both",
                              "leave --no-evaluate out")  # fmt: skip


def _measure_again(model: str, out: Path, again: _Again, env: Env, as_json: bool) -> None:
    again.check()
    with ended_in_order(), progress(as_json) as report:
        found = measure_again(model, opened(model, env, report), out, again.proof, report)
    found |= again.proof.more(model, out, env, as_json)
    if as_json:
        print_json({"folder": str(out), **found})
        return
    heading(f"{out}, measured beside {model}")
    pairs(rows_of(found))


@contextmanager
def _method(job: Job, out: Path, asked: Sampling, report: Any) -> Iterator[tuple[Method, dict[str, Any]]]:
    """How the job is done, and what is to be recorded of it."""
    if not job.calibrated:
        yield by_rounding, {}
        return
    with statistics_for(job, out, asked, report) as found:
        yield by_statistics(found), recorded(found)


def _about(job: Job) -> dict[str, Any]:
    return {
        "recipe": job.recipe.name, "layers": len(job.treated), "kept": _kept(job), "weights": job.n_weights,
        "bits_per_weight": job.bits_per_weight, "bytes_before": job.bytes_before, "bytes_after": job.bytes_after,
        "notes": list(job.notes),
    }  # fmt: skip


def _show_plan(job: Job, asked: Sampling, measures: bool, as_json: bool) -> None:
    tokens = asked.n * LENGTH
    first = needs(job, tokens) if job.calibrated else None
    memory = job.memory_bytes + (first.memory_bytes if first else 0)
    measuring = memory_bytes(job.checkpoint, fp8=any(form.meets_fp8 for _, form in job.layers.values()))
    if as_json:
        more: dict[str, Any] = {"statistics": asdict(first)} if first else {}
        more |= {"measuring_memory_bytes": measuring} if measures else {}
        print_json({**_about(job), "memory_bytes": memory, "seconds": job.seconds, **more})
        return
    heading(f"{job.recipe.name}: nothing was written")
    afterwards = f", to measure it {size(measuring)}" if measures else ""
    pairs([*_sizes(job), ("memory", f"about {size(memory)}{afterwards}"), ("time", f"about {job.seconds:.0f} s")])
    if first:
        disk = f"{size(first.disk_bytes)} on disk, {size(first.carried_bytes)} more meanwhile"
        said = f"of {tokens:,} tokens: about {first.seconds:.0f} s more on two cores, {disk}"
        pairs([("statistics", said)])
    _notes(job)


def _sizes(job: Job) -> list[tuple[str, str]]:
    kept = f", {', '.join(_kept(job)[:4])} left as floats" if _kept(job) else ""
    return [
        ("layers", f"{len(job.treated)} linear layers of {count(job.n_weights)} weights{kept}"),
        ("bits", f"{job.bits_per_weight:.3f} a weight of these, scales included"),
        ("bytes", f"{size(job.bytes_before)} -> {size(job.bytes_after)}"),
    ]  # fmt: skip


def _kept(job: Job) -> list[str]:
    """Linear layers to which nothing is done."""
    return [name for name in job.ignored if name not in job.sparse]


def _notes(job: Job) -> None:
    for text in job.notes:
        note(f"note: {text}")


def _worst(made: Result) -> list[tuple[str, str]]:
    rows = [f"{name} {error:.2%}" for name, error in made.worst[:_WORST]]
    return [("lost most", ", ".join(rows) + " of their energy")] if rows else []
