"""Runs `millrace compress`, whose options are in `options.py`: `--help` imports nothing else."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from millrace.cli.compress.advise import run_advice
from millrace.cli.compress.budget import run_search
from millrace.cli.compress.engine import build_output, check_engine
from millrace.cli.compress.output import WORST, about, notes, show_plan, sizes, worst
from millrace.cli.compress.proof import AccuracyProofOptions, measure_again, note_if_interrupted, rows_of
from millrace.cli.compress.request import CompressOptions, command_line, open_checkpoint
from millrace.cli.console import heading, pairs, print_json, progress
from millrace.cli.signals import raise_on_sigterm
from millrace.compress.calibration.calibrated_methods import by_statistics
from millrace.compress.calibration.calibration_source import CalibrationSource, statistics_for
from millrace.compress.checkpoint.checkpoint_writer import check_place
from millrace.compress.compress import CompressionMethod, by_rounding, compress
from millrace.compress.compression_plan import CompressionPlan, plan_compression
from millrace.compress.measure.accuracy import unmeasurable_reason
from millrace.compress.recipe import read_recipe
from millrace.compress.report.page import write_page
from millrace.env import Env
from millrace.errors import ConfigError

# Modes by the option that selects them, and the options of each in addition to MODEL, -o and --json.
_MODES = {"--recipe": "recipe", "--measure": "again", "--max-loss": "max_loss", "--advise": "advise"}
_TEXTS, _PROOF = ("samples_from", "samples", "statistics"), ("measure_speed", "mmlu", "questions", "evaluate")
_TAKES = {
    "--recipe": ("dry_run", "calibration", "engine", *_TEXTS, *_PROOF),
    "--measure": ("calibration", *_PROOF),
    "--max-loss": ("dry_run", "target", "batch", "calibration", "engine", *_TEXTS),
    "--advise": ("dry_run", "presets", "batch", "calibration", *_TEXTS),
}


def run(env: Env, /, model: str, output: Path, as_json: bool, **options: Any) -> None:
    """Run `millrace compress`."""
    run: dict[str, Callable[..., None]] = {
        "--recipe": _by_recipe, "--measure": _measure_again, "--max-loss": run_search, "--advise": run_advice,
    }  # fmt: skip
    mode = _mode(options)
    samples = CalibrationSource(*map(options.pop, _TEXTS))
    samples.check_folder(output, replaces=mode != "--advise")
    engine: Path | None = options.pop("engine")
    check_engine(engine, output)
    run[mode](CompressOptions(env, model, output, as_json, samples, engine), **options)


def _mode(options: dict[str, Any]) -> str:
    """Return the selected mode. raises ConfigError for none, several, or options that it does not take"""
    chosen = [mode for mode, name in _MODES.items() if options[name] not in (None, False)]
    if not chosen:
        raise ConfigError(
            "no recipe is named", "a preset, or a file",
            "name one: --recipe int4-wo-mse; or say what may be lost: --max-loss 1%",
        )  # fmt: skip
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} are given", "one of them", "leave the others out")
    (mode,) = chosen
    takes, context = (_MODES[mode], *_TAKES[mode]), click.get_current_context()
    flags = {option.name: option.opts[-1] for option in context.command.params if isinstance(option, click.Option)}
    for name in options:
        if name not in takes and context.get_parameter_source(name) == ParameterSource.COMMANDLINE:
            flag = "--no-evaluate" if name == "evaluate" and not options[name] else flags[name]
            raise ConfigError(
                f"{flag} is given, and {mode} does not take it",
                "of options " + ", ".join(flags[name] for name in _TAKES[mode]),
                f"leave it out, or ask with {' or '.join(other for other in _TAKES if name in _TAKES[other])}",
            )  # fmt: skip
    return mode


def _by_recipe(options: CompressOptions, /, recipe: str, dry_run: bool, **more: Any) -> None:
    started_s, model, output, samples = time.perf_counter(), options.model, options.output, options.samples
    proof = AccuracyProofOptions.from_flags(**_of_proof(more))
    calibration: str | None = more["calibration"]
    with raise_on_sigterm(), progress(options.as_json) as report:
        checkpoint = open_checkpoint(model, options.env, report)
        plan = plan_compression(checkpoint, read_recipe(recipe))
        samples.check(f"the recipe {plan.recipe.name}", plan.calibrated, calibration, dry_run)
        check_place(output, plan.bytes_after + (samples.temporary_bytes(plan) if plan.calibrated else 0))
        read = proof.windows(checkpoint)  # reports a text that is too short at once, also in a dry run
        if plan.calibrated and proof.text is not None and not dry_run:
            samples.check_text(checkpoint, proof.text)
        if not dry_run:
            with _way_of(plan, output, samples, report) as (mode, used):
                result = compress(plan, output, mode, report)
                seconds = time.perf_counter() - started_s
                write_page(output, {**used, "command": command_line(model), "seconds": seconds})
            with note_if_interrupted(model, output):
                losses = proof.loss(model, checkpoint, output, read, report)
    if dry_run:
        show_plan(plan, samples, more["evaluate"] and not unmeasurable_reason(checkpoint), options.as_json)
        return
    with note_if_interrupted(model, output):
        losses |= proof.more(model, output, options.env, options.as_json)
    seconds, engine = time.perf_counter() - started_s, build_output(options)
    document = {**about(plan), "folder": str(output), "seconds": seconds, **losses, "worst": dict(result.worst[:WORST])}
    document |= {} if engine is None else {"engine": engine.summary()}
    if options.as_json:
        print_json(document)
        return
    heading(f"{output} ({plan.recipe.name}), read again and found right")
    pairs([*sizes(plan), *rows_of(losses), *worst(result), ("time", f"{seconds:.1f} s")])
    notes(plan)
    if engine is not None:
        engine.show()


def _of_proof(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in ("calibration", *_PROOF)}


def _measure_again(options: CompressOptions, /, **more: Any) -> None:
    model, out = options.model, options.output
    proof = AccuracyProofOptions.from_flags(**_of_proof(more))
    if not proof.asks:
        raise ConfigError("--measure is given, and nothing is to be measured", "one of both", "leave --no-evaluate out")
    with raise_on_sigterm(), progress(options.as_json) as report:
        results = measure_again(model, open_checkpoint(model, options.env, report), out, proof, report)
    results |= proof.more(model, out, options.env, options.as_json)
    if options.as_json:
        print_json({"folder": str(out), **results})
        return
    heading(f"{out}, measured beside {model}")
    pairs(rows_of(results))


@contextmanager
def _way_of(
    plan: CompressionPlan, out: Path, samples: CalibrationSource, report: Any
) -> Iterator[tuple[CompressionMethod, dict[str, Any]]]:
    """Yield the compression method, and what to record about it."""
    if not plan.calibrated:
        yield by_rounding, {}
        return
    with statistics_for(plan, out, samples, report) as statistics:
        yield by_statistics(statistics), {"statistics": statistics.about.recorded}
