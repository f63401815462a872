"""Output of `millrace compress`, including `--dry-run`, which uses only the checkpoint's headers."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.cli.console import heading, note, pairs, print_json, size, table
from millrace.compress.calibration.calibrated_methods import StatisticsCost, needs
from millrace.compress.calibration.calibration_source import CalibrationSource
from millrace.compress.compress import CompressionResult
from millrace.compress.compression_plan import CompressionPlan, plan_compression
from millrace.compress.measure.accuracy import memory_bytes
from millrace.compress.recipe import PRESETS
from millrace.compress.report.method_comparison import precisions_of
from millrace.compress.search.candidates import rounding_seconds, stored_formats
from millrace.compress.search.search import SearchGoal, max_bytes
from millrace.errors import CheckpointError
from millrace.evaluate.sizes import LENGTH
from millrace.report.format_numbers import format_count

WORST = 3  # layers that are named


def about(plan: CompressionPlan) -> dict[str, Any]:
    return {
        "recipe": plan.recipe.name, "layers": len(plan.treated), "kept": _untreated(plan), "weights": plan.n_weights,
        "bits_per_weight": plan.bits_per_weight, "bytes_before": plan.bytes_before, "bytes_after": plan.bytes_after,
        "notes": list(plan.notes),
    }  # fmt: skip


def show_plan(plan: CompressionPlan, samples: CalibrationSource, measures: bool, as_json: bool) -> None:
    tokens = samples.n * LENGTH
    first = needs(plan, tokens) if plan.calibrated else None
    memory = plan.memory_bytes + (first.memory_bytes if first else 0)
    measuring = memory_bytes(plan.checkpoint, fp8=any(form.meets_fp8 for _, form in plan.layers.values()))
    if as_json:
        more: dict[str, Any] = {"statistics": asdict(first)} if first else {}
        more |= {"measuring_memory_bytes": measuring} if measures else {}
        print_json({**about(plan), "memory_bytes": memory, "seconds": plan.seconds, **more})
        return
    heading(f"{plan.recipe.name}: nothing was written")
    afterwards = f", to measure it {size(measuring)}" if measures else ""
    pairs([*sizes(plan), ("memory", f"about {size(memory)}{afterwards}"), ("time", f"about {plan.seconds:.0f} s")])
    if first:
        pairs([("statistics", _statistics(first, tokens))])
    notes(plan)


def show_search(plan: CompressionPlan, goal: SearchGoal, samples: CalibrationSource, as_json: bool) -> None:
    """Print the plan of `--max-loss`: all formats of all layers are rounded once, then some mixes are measured."""
    tokens = samples.n * LENGTH
    first, formats = needs(plan, tokens), stored_formats(plan)
    seconds, disk = rounding_seconds(plan), max_bytes(plan)
    memory, measuring = plan.memory_bytes + first.memory_bytes, memory_bytes(plan.checkpoint, fp8=True)
    if as_json:
        print_json({
            "formats": formats, "layers": len(plan.layers), "weights": plan.n_weights,
            "bytes_before": plan.bytes_before,
            "disk_bytes": disk, "memory_bytes": memory, "measuring_memory_bytes": measuring, "seconds": seconds,
            "statistics": asdict(first),
        })  # fmt: skip
        return
    heading(f"--max-loss {goal.bound.format_value(goal.bound.bound)}: nothing was written")
    pairs([
        ("layers", f"{len(plan.layers)} linear layers of {format_count(plan.n_weights)} weights"),
        ("formats of each", ", ".join(formats)),
        ("disk", f"at most {size(disk)} meanwhile"),
        ("memory", f"about {size(memory)}, to measure mixes {size(measuring)}"),
        ("time", f"about {seconds:.0f} s to round all of them on two cores, then some mixes are made and measured"),
        ("statistics", _statistics(first, tokens)),
    ])  # fmt: skip


def show_advice(checkpoint: Checkpoint, names: Sequence[str], samples: CalibrationSource, as_json: bool) -> None:
    """Print the plan of `--advise`: the result of each method, or why a layer cannot use it."""
    rows: dict[str, CompressionPlan | str] = {name: _plan_or_reason(checkpoint, name) for name in names}
    jobs = [plan for plan in rows.values() if isinstance(plan, CompressionPlan)]
    tokens = samples.n * LENGTH
    first = needs(jobs[0], tokens) if any(plan.calibrated for plan in jobs) else None
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
    if any(len(precisions_of(plan.recipe)) > 1 for plan in jobs):
        note("4-bit weights are measured twice: as they are, with 16-bit activations, and as w4a8, with 8-bit ones")


def _plan_or_reason(checkpoint: Checkpoint, name: str) -> CompressionPlan | str:
    try:
        return plan_compression(checkpoint, PRESETS[name])
    except CheckpointError as error:  # a method that a layer of this model cannot take
        return error.what


def _figures(plan: CompressionPlan) -> dict[str, Any]:
    return {
        "bits_per_weight": plan.bits_per_weight, "bytes_after": plan.bytes_after, "memory_bytes": plan.memory_bytes,
        "seconds": plan.seconds, "statistics": plan.calibrated,
    }  # fmt: skip


def _statistics(first: StatisticsCost, tokens: int) -> str:
    disk = f"{size(first.disk_bytes)} on disk, {size(first.carried_bytes)} more meanwhile"
    return f"of {tokens:,} tokens: about {first.seconds:.0f} s more on two cores, {disk}"


def sizes(plan: CompressionPlan) -> list[tuple[str, str]]:
    ignored_text = f", {', '.join(_untreated(plan)[:4])} left as floats" if _untreated(plan) else ""
    return [
        ("layers", f"{len(plan.treated)} linear layers of {format_count(plan.n_weights)} weights{ignored_text}"),
        ("bits", f"{plan.bits_per_weight:.3f} a weight of these, scales included"),
        ("bytes", f"{size(plan.bytes_before)} -> {size(plan.bytes_after)}"),
    ]  # fmt: skip


def _untreated(plan: CompressionPlan) -> list[str]:
    """Return the linear layers that stay unchanged."""
    return [name for name in plan.ignored if name not in plan.sparse]


def notes(plan: CompressionPlan) -> None:
    for text in plan.notes:
        note(f"note: {text}")


def worst(result: CompressionResult) -> list[tuple[str, str]]:
    rows = [f"{name} {error:.2%}" for name, error in result.worst[:WORST]]
    return [("lost most", ", ".join(rows) + " of their energy")] if rows else []
