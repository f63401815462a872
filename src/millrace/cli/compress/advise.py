"""`millrace compress --advise`: compares all methods for a model on this machine, and recommends one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from millrace.cli.compress.output import show_advice
from millrace.cli.compress.request import CompressOptions, open_checkpoint, warn_if_unpredictable
from millrace.cli.console import heading, note, pairs, print_json, progress, size, table
from millrace.cli.signals import raise_on_sigterm
from millrace.compress.measure.accuracy import require_measurable
from millrace.compress.presets import BATCH
from millrace.compress.report.method_comparison import HEADER, PAGE, ComparisonInputs, MethodRow, advice, cells
from millrace.compress.report.method_trials import ComparisonOptions, commands, measure_methods, parse_presets
from millrace.errors import ConfigError

_MAX_BATCH = 1024


def run_advice(
    options: CompressOptions,
    /,
    presets: str | None,
    batch: int | None,
    calibration: str | None,
    dry_run: bool,
    **_: Any,
) -> None:
    """Run `--advise`. raises ConfigError for a batch out of range, or unknown presets"""
    if batch is not None and not 2 <= batch <= _MAX_BATCH:
        raise ConfigError(
            f"--batch is {batch}: --advise measures one sequence and a large batch", f"2 to {_MAX_BATCH}", "correct it"
        )
    compared = ComparisonOptions(parse_presets(presets), batch or BATCH, options.output, calibration, options.samples)
    if dry_run:
        with progress(options.as_json) as report:
            checkpoint = require_measurable(open_checkpoint(options.model, options.env, report))
        options.samples.check("--advise", compared.calibrated, calibration, dry_run=True)
        show_advice(checkpoint, compared.presets, options.samples, options.as_json)
        return
    with raise_on_sigterm(), progress(options.as_json) as report:
        checkpoint = open_checkpoint(options.model, options.env, report)
        rows, about = measure_methods(options.model, checkpoint, compared, size, report)
    warn_if_unpredictable(
        max((row.loss.source_perplexity for row in rows if row.loss is not None), default=0.0), checkpoint
    )
    lines = commands(options.model, rows, about, options.samples)
    if options.as_json:
        advice_by_target = {a.target: a.words for a in advice(rows, about)}
        print_json(msgspec.to_builtins({"about": about, "rows": rows, "advice": advice_by_target, "commands": lines}))
    else:
        _show(rows, about, lines, options.output)


def _show(rows: Sequence[MethodRow], about: ComparisonInputs, lines: Sequence[str], folder: Path) -> None:
    heading(f"{about.source} on {about.machine}, {about.threads} threads, {about.isa}")
    table([h.replace("N", str(about.batch)) for h in HEADER], cells(rows, about, size))
    note("speeds: tokens a second, and in brackets times the source's in the same rounds")
    if any(row.precision for row in rows):
        note("as w4a8: the same checkpoint, its 4-bit weights with 8-bit activations; its own are 16-bit")
    heading("which to take")
    pairs([(advised.target, advised.words) for advised in advice(rows, about)])
    if lines:
        heading("to make it")
        pairs([("", line) for line in lines])
    note(f"{folder / PAGE} has it as a page")
