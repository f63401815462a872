"""Output of `millrace compress`, including `--dry-run`, which uses only the checkpoint's headers."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.cli.console import heading, note, pairs, print_json, size, table
from millrace.compress.calibration.calibrated_methods import Needs, needs
from millrace.compress.calibration.calibration_source import CalibrationSource
from millrace.compress.compress import CompressionResult
from millrace.compress.compression_plan import CompressionPlan, plan
from millrace.compress.measure.accuracy import memory_bytes
from millrace.compress.recipe import PRESETS
from millrace.compress.report.method_comparison import precisions_of
from millrace.compress.search.candidates import rounding_seconds, stored_formats
from millrace.compress.search.search import SearchGoal, most_bytes
from millrace.errors import CheckpointError
from millrace.evaluate.sizes import LENGTH
from millrace.report.format_numbers import count

WORST = 3  # layers that are named


def about(job: CompressionPlan) -> dict[str, Any]:
    return {
        "recipe": job.recipe.name, "layers": len(job.treated), "kept": _untreated(job), "weights": job.n_weights,
        "bits_per_weight": job.bits_per_weight, "bytes_before": job.bytes_before, "bytes_after": job.bytes_after,
        "notes": list(job.notes),
    }  # fmt: skip


def show_plan(job: CompressionPlan, samples: CalibrationSource, measures: bool, as_json: bool) -> None:
    tokens = samples.n * LENGTH
    first = needs(job, tokens) if job.calibrated else None
    memory = job.memory_bytes + (first.memory_bytes if first else 0)
    measuring = memory_bytes(job.checkpoint, fp8=any(form.meets_fp8 for _, form in job.layers.values()))
    if as_json:
        more: dict[str, Any] = {"statistics": asdict(first)} if first else {}
        more |= {"measuring_memory_bytes": measuring} if measures else {}
        print_json({**about(job), "memory_bytes": memory, "seconds": job.seconds, **more})
        return
    heading(f"{job.recipe.name}: nothing was written")
    afterwards = f", to measure it {size(measuring)}" if measures else ""
    pairs([*sizes(job), ("memory", f"about {size(memory)}{afterwards}"), ("time", f"about {job.seconds:.0f} s")])
    if first:
        pairs([("statistics", _statistics(first, tokens))])
    notes(job)


def show_search(job: CompressionPlan, goal: SearchGoal, samples: CalibrationSource, as_json: bool) -> None:
    """Print the plan of `--max-loss`: all formats of all layers are rounded once, then some mixes are measured."""
    tokens = samples.n * LENGTH
    first, formats = needs(job, tokens), stored_formats(job)
    seconds, disk = rounding_seconds(job), most_bytes(job)
    memory, measuring = job.memory_bytes + first.memory_bytes, memory_bytes(job.checkpoint, fp8=True)
    if as_json:
        print_json({
            "formats": formats, "layers": len(job.layers), "weights": job.n_weights, "bytes_before": job.bytes_before,
            "disk_bytes": disk, "memory_bytes": memory, "measuring_memory_bytes": measuring, "seconds": seconds,
            "statistics": asdict(first),
        })  # fmt: skip
        return
    heading(f"--max-loss {goal.bound.format_value(goal.bound.bound)}: nothing was written")
    pairs([
        ("layers", f"{len(job.layers)} linear layers of {count(job.n_weights)} weights, each as {', '.join(formats)}"),
        ("disk", f"at most {size(disk)} meanwhile"),
        ("memory", f"about {size(memory)}, to measure mixes {size(measuring)}"),
        ("time", f"about {seconds:.0f} s to round all of them on two cores, then some mixes are made and measured"),
        ("statistics", _statistics(first, tokens)),
    ])  # fmt: skip


def show_advice(checkpoint: Checkpoint, names: Sequence[str], samples: CalibrationSource, as_json: bool) -> None:
    """Print the plan of `--advise`: the result of each method, or why a layer cannot use it."""
    rows: dict[str, CompressionPlan | str] = {name: _plan_or_reason(checkpoint, name) for name in names}
    jobs = [job for job in rows.values() if isinstance(job, CompressionPlan)]
    tokens = samples.n * LENGTH
    first = needs(jobs[0], tokens) if any(job.calibrated for job in jobs) else None
    if as_json:
        methods = {name: {"refused": row} if isinstance(row, str) else _figures(row) for name, row in rows.items()}
        print_json({"methods": methods, "statistics": None if first is None else asdict(first)})
        return
    heading(f"--advise: {len(jobs)} of {len(rows)} methods can be tried, nothing was written")
    table(("method", "bits a weight", "bytes", "memory", "seconds to make", ""), [
        (name, "", "", "", "", row) if isinstance(row, str) else
        (name, f"{row.bits_per_weight:.3f}", size(row.bytes_after), size(row.memory_bytes), f"{row.seconds:.0f}",
         "with statistics" if row.calibrated else "")
        for name, row in rows.items()
    ])  # fmt: skip
    if first is not None:
        pairs([("statistics", _statistics(first, tokens))])
    note("each is then measured and timed beside the source, which takes longer than making most of them")
    if any(len(precisions_of(job.recipe)) > 1 for job in jobs):
        note("4-bit weights are measured twice: as they are, with 16-bit activations, and as w4a8, with 8-bit ones")


def _plan_or_reason(checkpoint: Checkpoint, name: str) -> CompressionPlan | str:
    try:
        return plan(checkpoint, PRESETS[name])
    except CheckpointError as error:  # a method that a layer of this model cannot take
        return error.what


def _figures(job: CompressionPlan) -> dict[str, Any]:
    return {
        "bits_per_weight": job.bits_per_weight, "bytes_after": job.bytes_after, "memory_bytes": job.memory_bytes,
        "seconds": job.seconds, "statistics": job.calibrated,
    }  # fmt: skip


def _statistics(first: Needs, tokens: int) -> str:
    disk = f"{size(first.disk_bytes)} on disk, {size(first.carried_bytes)} more meanwhile"
    return f"of {tokens:,} tokens: about {first.seconds:.0f} s more on two cores, {disk}"


def sizes(job: CompressionPlan) -> list[tuple[str, str]]:
    ignored_text = f", {', '.join(_untreated(job)[:4])} left as floats" if _untreated(job) else ""
    return [
        ("layers", f"{len(job.treated)} linear layers of {count(job.n_weights)} weights{ignored_text}"),
        ("bits", f"{job.bits_per_weight:.3f} a weight of these, scales included"),
        ("bytes", f"{size(job.bytes_before)} -> {size(job.bytes_after)}"),
    ]  # fmt: skip


def _untreated(job: CompressionPlan) -> list[str]:
    """Return the linear layers that stay unchanged."""
    return [name for name in job.ignored if name not in job.sparse]


def notes(job: CompressionPlan) -> None:
    for text in job.notes:
        note(f"note: {text}")


def worst(result: CompressionResult) -> list[tuple[str, str]]:
    rows = [f"{name} {error:.2%}" for name, error in result.worst[:WORST]]
    return [("lost most", ", ".join(rows) + " of their energy")] if rows else []
