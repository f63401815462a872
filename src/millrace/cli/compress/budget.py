"""`millrace compress --max-loss`: the cheapest mix of formats within a loss, searched, measured, and written down."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.cli.compress.engine import built
from millrace.cli.compress.output import show_search
from millrace.cli.compress.request import (
    CompressOptions,
    Sampling,
    command_line,
    opened,
    readable,
    said_if_untold,
    statistics_for,
)
from millrace.cli.console import Progress, heading, pairs, print_json, progress, size, table
from millrace.cli.signals import raise_on_sigterm
from millrace.compress.checkpoint.checkpoint_writer import check_place
from millrace.compress.compression_plan import CompressionPlan, plan
from millrace.compress.measure.accuracy import Loss, held_out_for, windows_for
from millrace.compress.presets import ROWS, CompressionTarget
from millrace.compress.recipe import PRESETS
from millrace.compress.report.page import write_page
from millrace.compress.search.candidates import RoundedMatrixStore
from millrace.compress.search.loss_bound import MaxLoss
from millrace.compress.search.search import RECIPE, SearchGoal, SearchResult, Texts, described, most_bytes, search
from millrace.errors import ConfigError
from millrace.evaluate.calibration import Calibration
from millrace.kernels.library import usable_isas
from millrace.machine.cpu import usable_cores

_SHOWN = 12  # mixes of a table


def searched(
    asked: CompressOptions,
    /,
    max_loss: str,
    target: str | None,
    batch: int | None,
    calibration: str | None,
    dry_run: bool,
    **_: Any,
) -> None:
    """The cheapest mix within a loss. raises ConfigError for options that do not go together"""
    started_s, out = time.perf_counter(), asked.output
    given = _BudgetOptions(
        _goal(MaxLoss.parse(max_loss), CompressionTarget(target or CompressionTarget.LATENCY), batch), out, calibration
    )
    with raise_on_sigterm(), progress(asked.as_json) as report:
        checkpoint = opened(asked.model, asked.env, report)
        job, texts = _ready(checkpoint, given, asked.sampling, dry_run)
        found = None if dry_run else _searched(job, texts, given, asked.sampling, report)
    if found is None:
        show_search(job, given.search, asked.sampling, asked.as_json)
        return
    seconds = time.perf_counter() - started_s
    write_page(out, {"command": command_line(asked.model), "seconds": seconds})
    said_if_untold(found.loss.source_perplexity, found.result.job.checkpoint)
    engine = built(asked)
    if asked.as_json:
        print_json(_as_json(found, out, seconds) | ({} if engine is None else {"engine": engine.summary()}))
        return
    _show(found, out, seconds)
    if engine is not None:
        engine.show()


@dataclass(frozen=True, slots=True)
class _BudgetOptions:
    """calibration: the text to measure on"""

    search: SearchGoal
    out: Path
    calibration: str | None


def _goal(bound: MaxLoss, target: CompressionTarget, batch: int | None) -> SearchGoal:
    """raises ConfigError for rows of a target that has none"""
    if target == CompressionTarget.MEMORY and batch is not None:
        raise ConfigError("--batch is given for --target memory", "a target of time", "leave --batch out")
    rows = 0 if target == CompressionTarget.MEMORY else batch or ROWS[target]
    return SearchGoal(bound, target, rows, usable_isas()[0], usable_cores())


def _ready(
    checkpoint: Checkpoint, asked: _BudgetOptions, sampling: Sampling, dry_run: bool
) -> tuple[CompressionPlan, Texts]:
    """Which layers there are, and what is read. raises before anything that takes long, where it cannot be done"""
    sampling.check("--max-loss", True, asked.calibration, dry_run)
    job = plan(readable(checkpoint), PRESETS["int8-wo"])
    check_place(asked.out, most_bytes(job) + sampling.temporary_bytes(job))
    text = Calibration.open(asked.calibration)
    texts = Texts(text, windows_for(checkpoint, text), held_out_for(checkpoint, text))
    if not dry_run:
        sampling.check_text(checkpoint, text)
    return job, texts


def _searched(
    job: CompressionPlan, texts: Texts, asked: _BudgetOptions, sampling: Sampling, report: Progress
) -> SearchResult:
    with statistics_for(job, asked.out, sampling, report) as statistics:
        kept = RoundedMatrixStore.next_to(sampling.statistics) if sampling.statistics else None
        return search(job, asked.search, statistics, texts, asked.out, report, kept)


def _as_json(found: SearchResult, out: Path, seconds: float) -> dict[str, Any]:
    job = found.result.job
    return {
        "folder": str(out), "recipe": str(out / RECIPE), "seconds": seconds, "formats": _formats(found),
        "bits_per_weight": job.bits_per_weight, "bytes_before": job.bytes_before, "bytes_after": job.bytes_after,
        "loss": asdict(found.loss), **described(found),
    }  # fmt: skip


def _formats(found: SearchResult) -> dict[str, int]:
    """How many layers have each."""
    return dict(Counter(candidate.format for candidate in found.mix.chosen.values()).most_common())


def _show(found: SearchResult, out: Path, seconds: float) -> None:
    asked, bound, loss = found.goal, found.goal.bound, found.loss
    job, cost = found.result.job, partial(_cost, found.goal)
    heading(f"{out}: the cheapest that was found within {bound.format_value(bound.bound)} ({bound.kind})")
    rows = "one row" if asked.rows == 1 else f"{asked.rows} rows"
    what = f"of a step of {rows}, on {asked.threads} threads ({asked.isa})" if asked.rows else "in bytes"
    _frontier(found, cost)
    kept = ", ".join(f"{n} {format}" for format, n in _formats(found).items())
    pairs([
        ("cost", f"{cost(found.mix.cost)} {what}, all linear layers; as floats {cost(found.floats)}"),
        ("layers", kept),
        ("bytes", f"{size(job.bytes_before)} -> {size(job.bytes_after)}, {job.bits_per_weight:.3f} bits a weight of "
                  "what is compressed"),
        ("chosen by", _said(found, found.choice)),
        ("proven", _said(found, found.proof) + ", on other windows" if found.proof else
                   "not on other windows: the text has no more"),
        ("perplexity", f"{loss.perplexity:.3f}, the source's {loss.source_perplexity:.3f}, in fp32"),
        ("same token", f"{loss.agreement:.1%} of the likeliest"),
        ("again", f"--recipe {out / RECIPE}" + (", with the same --statistics" if job.calibrated else "")),
        ("time", f"{seconds:.0f} s"),
    ])  # fmt: skip


def _said(found: SearchResult, loss: Loss) -> str:
    """With its error, and whether it is within the bound."""
    bound, off = found.goal.bound, "" if loss.kl_error is None else f" ± {loss.kl_error:.1g}"
    beyond = "" if bound.of(loss) <= bound.bound else ", BEYOND THE BOUND"
    return (
        f"{bound.format_value(bound.of(loss))} ({bound.kind}{beyond}), KL {loss.kl:.3g}{off} on {loss.tokens:,} tokens"
    )


def _frontier(found: SearchResult, cost: Callable[[float], str]) -> None:
    """Those that were measured, and some between them."""
    mixes, measured = found.search.mixes, found.search.measured
    between = {round(i * (len(mixes) - 1) / (_SHOWN - 1)) for i in range(_SHOWN)}

    def said(value: float | None) -> str:
        return "" if value is None else found.goal.bound.format_value(value)

    table(("mix", "cost", "predicted loss", "measured", ""), [
        (str(i), cost(mixes[i].cost), said(found.search.predicted(i)), said(measured.get(i)),
         "<- found" if i == found.search.cheapest else "")
        for i in sorted(between | measured.keys())
    ])  # fmt: skip


def _cost(asked: SearchGoal, value: float) -> str:
    return size(value) if not asked.rows else f"{value * 1e3:.3f} ms"
