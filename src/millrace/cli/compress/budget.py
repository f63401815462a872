"""`millrace compress --max-loss`: searches, measures and records the cheapest mix of formats within a loss bound."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.cli.compress.engine import build_output
from millrace.cli.compress.output import show_search
from millrace.cli.compress.request import CompressOptions, command_line, open_checkpoint, warn_if_unpredictable
from millrace.cli.console import Progress, heading, pairs, print_json, progress, size, table
from millrace.cli.signals import raise_on_sigterm
from millrace.compress.calibration.calibration_source import CalibrationSource, statistics_for
from millrace.compress.checkpoint.checkpoint_writer import check_place
from millrace.compress.compression_plan import CompressionPlan, plan_compression
from millrace.compress.measure.accuracy import Loss, held_out_for, require_measurable, windows_for
from millrace.compress.presets import ROWS, CompressionTarget
from millrace.compress.recipe import PRESETS
from millrace.compress.report.page import write_page
from millrace.compress.search.candidates import RoundedMatrixStore
from millrace.compress.search.loss_bound import MaxLoss
from millrace.compress.search.search import (
    RECIPE,
    SearchGoal,
    SearchResult,
    SearchWindows,
    described,
    max_bytes,
    search,
)
from millrace.errors import ConfigError
from millrace.evaluate.calibration import Calibration
from millrace.kernels.library import usable_isas
from millrace.machine.cpu import usable_cores

_SHOWN = 12  # mixes of a table


def run_search(
    options: CompressOptions,
    /,
    max_loss: str,
    target: str | None,
    batch: int | None,
    calibration: str | None,
    dry_run: bool,
    **_: Any,
) -> None:
    """Run `--max-loss`. raises ConfigError for options that do not go together"""
    started_s, out = time.perf_counter(), options.output
    budget = _BudgetOptions(
        _goal(MaxLoss.parse(max_loss), CompressionTarget(target or CompressionTarget.LATENCY), batch), out, calibration
    )
    with raise_on_sigterm(), progress(options.as_json) as report:
        checkpoint = open_checkpoint(options.model, options.env, report)
        plan, texts = _ready(checkpoint, budget, options.samples, dry_run)
        result = None if dry_run else _search(plan, texts, budget, options.samples, report)
    if result is None:
        show_search(plan, budget.search, options.samples, options.as_json)
        return
    seconds = time.perf_counter() - started_s
    write_page(out, {"command": command_line(options.model), "seconds": seconds})
    warn_if_unpredictable(result.loss.source_perplexity, result.result.plan.checkpoint)
    engine = build_output(options)
    if options.as_json:
        print_json(_as_json(result, out, seconds) | ({} if engine is None else {"engine": engine.summary()}))
        return
    _show(result, out, seconds)
    if engine is not None:
        engine.show()


@dataclass(frozen=True, slots=True)
class _BudgetOptions:
    """Options of a search. calibration: the text to measure on"""

    search: SearchGoal
    out: Path
    calibration: str | None


def _goal(bound: MaxLoss, target: CompressionTarget, batch: int | None) -> SearchGoal:
    """Create the search goal. raises ConfigError for --batch with a memory target"""
    if target == CompressionTarget.MEMORY and batch is not None:
        raise ConfigError("--batch is given for --target memory", "a target of time", "leave --batch out")
    rows = 0 if target == CompressionTarget.MEMORY else batch or ROWS[target]
    return SearchGoal(bound, target, rows, usable_isas()[0], usable_cores())


def _ready(
    checkpoint: Checkpoint, budget: _BudgetOptions, samples: CalibrationSource, dry_run: bool
) -> tuple[CompressionPlan, SearchWindows]:
    """Return the layers and texts, and raise before any long work if the search cannot be done."""
    samples.check("--max-loss", True, budget.calibration, dry_run)
    plan = plan_compression(require_measurable(checkpoint), PRESETS["int8-wo"])
    check_place(budget.out, max_bytes(plan) + samples.temporary_bytes(plan))
    text = Calibration.open(budget.calibration)
    texts = SearchWindows(text, windows_for(checkpoint, text), held_out_for(checkpoint, text))
    if not dry_run:
        samples.check_text(checkpoint, text)
    return plan, texts


def _search(
    plan: CompressionPlan, texts: SearchWindows, budget: _BudgetOptions, samples: CalibrationSource, report: Progress
) -> SearchResult:
    with statistics_for(plan, budget.out, samples, report) as statistics:
        store = RoundedMatrixStore.next_to(samples.statistics) if samples.statistics else None
        return search(plan, budget.search, statistics, texts, budget.out, report, store)


def _as_json(result: SearchResult, out: Path, seconds: float) -> dict[str, Any]:
    plan = result.result.plan
    return {
        "folder": str(out), "recipe": str(out / RECIPE), "seconds": seconds, "formats": _formats(result),
        "bits_per_weight": plan.bits_per_weight, "bytes_before": plan.bytes_before, "bytes_after": plan.bytes_after,
        "loss": asdict(result.loss), **described(result),
    }  # fmt: skip


def _formats(result: SearchResult) -> dict[str, int]:
    """Count the layers of each format."""
    return dict(Counter(candidate.format for candidate in result.mix.chosen.values()).most_common())


def _show(result: SearchResult, out: Path, seconds: float) -> None:
    goal, bound, loss = result.goal, result.goal.bound, result.loss
    plan, cost = result.result.plan, partial(_cost, result.goal)
    heading(f"{out}: the cheapest that was found within {bound.format_value(bound.bound)} ({bound.kind})")
    rows = "one row" if goal.rows == 1 else f"{goal.rows} rows"
    basis = f"of a step of {rows}, on {goal.threads} threads ({goal.isa})" if goal.rows else "in bytes"
    _frontier(result, cost)
    formats = ", ".join(f"{n} {format}" for format, n in _formats(result).items())
    pairs([
        ("cost", f"{cost(result.mix.cost)} {basis}, all linear layers; as floats {cost(result.floats)}"),
        ("layers", formats),
        ("bytes", f"{size(plan.bytes_before)} -> {size(plan.bytes_after)}, {plan.bits_per_weight:.3f} bits a weight of "
                  "what is compressed"),
        ("chosen by", _loss_text(result, result.choice)),
        ("proven", _loss_text(result, result.proof) + ", on other windows" if result.proof else
                   "not on other windows: the text has no more"),
        ("perplexity", f"{loss.perplexity:.3f}, the source's {loss.source_perplexity:.3f}, in fp32"),
        ("same token", f"{loss.agreement:.1%} of the likeliest"),
        ("again", f"--recipe {out / RECIPE}" + (", with the same --statistics" if plan.calibrated else "")),
        ("time", f"{seconds:.0f} s"),
    ])  # fmt: skip


def _loss_text(result: SearchResult, loss: Loss) -> str:
    """Format a loss with its error, and whether it exceeds the bound."""
    bound, off = result.goal.bound, "" if loss.kl_error is None else f" ± {loss.kl_error:.1g}"
    beyond = "" if bound.loss_value(loss) <= bound.bound else ", BEYOND THE BOUND"
    value = bound.format_value(bound.loss_value(loss))
    return f"{value} ({bound.kind}{beyond}), KL {loss.kl:.3g}{off} on {loss.tokens:,} tokens"


def _frontier(result: SearchResult, cost: Callable[[float], str]) -> None:
    """Print the measured mixes, and some between them."""
    mixes, measured = result.search.mixes, result.search.measured
    between = {round(i * (len(mixes) - 1) / (_SHOWN - 1)) for i in range(_SHOWN)}

    def text(value: float | None) -> str:
        return "" if value is None else result.goal.bound.format_value(value)

    table(("mix", "cost", "predicted loss", "measured", ""), [
        (str(i), cost(mixes[i].cost), text(result.search.predicted(i)), text(measured.get(i)),
         "<- found" if i == result.search.cheapest else "")
        for i in sorted(between | measured.keys())
    ])  # fmt: skip


def _cost(goal: SearchGoal, value: float) -> str:
    return size(value) if not goal.rows else f"{value * 1e3:.3f} ms"
