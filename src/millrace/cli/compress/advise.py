"""`millrace compress --advise`: compares all methods for a model on this machine, and recommends one."""

import shlex
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.cli.compress.output import show_advice
from millrace.cli.compress.request import (
    CompressOptions,
    Sampling,
    open_checkpoint,
    require_loss,
    statistics_for,
    warn_if_unpredictable,
)
from millrace.cli.console import Progress, heading, note, pairs, print_json, progress, size, table
from millrace.cli.eval.request import precision_of
from millrace.cli.signals import raise_on_sigterm
from millrace.compile.builder import asked_precision, build_engine
from millrace.compile.resolve_model import model_folder
from millrace.compile.settings import BuildSettings
from millrace.compile.source import Source
from millrace.compress.calibration.calibrated_methods import by_statistics
from millrace.compress.calibration.calibration_pass import digest_of
from millrace.compress.calibration.statistics import CalibrationStatistics
from millrace.compress.checkpoint.checkpoint_writer import staging_folder
from millrace.compress.compress import by_rounding, compress
from millrace.compress.compression_plan import CompressionPlan, plan
from millrace.compress.measure.accuracy import Loss, Reference, loss_of, windows_for
from millrace.compress.measure.speed import ROUNDS, Speeds, paces
from millrace.compress.presets import BATCH
from millrace.compress.recipe import PRESETS
from millrace.compress.report.method_comparison import (
    HEADER,
    PAGE,
    ComparisonInputs,
    MethodRow,
    advice,
    cells,
    open_folder,
    precisions_of,
    read_row,
    write_page,
    write_row,
)
from millrace.env import Env
from millrace.errors import CheckpointError, ConfigError, nearest
from millrace.evaluate.calibration import Calibration
from millrace.kernels.library import usable_isas
from millrace.machine.cpu import cpu_model, usable_cores
from millrace.runtime.open_engine import RunningModel, open_engine
from millrace.runtime.settings import RunSettings

_TUNE_S, _MAX_BATCH = 2.0, 1024


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
    trials = _Trials(_names(presets), batch or BATCH, options.output, calibration, options.sampling)
    if dry_run:
        with progress(options.as_json) as report:
            checkpoint = require_loss(open_checkpoint(options.model, options.env, report))
        options.sampling.check("--advise", _calibrated(trials), calibration, dry_run=True)
        show_advice(checkpoint, trials.names, options.sampling, options.as_json)
        return
    with raise_on_sigterm(), progress(options.as_json) as report:
        rows, about = _measure_methods(options.model, trials, options.env, report)
    if options.as_json:
        advice_by_target = {a.target: a.words for a in advice(rows, about)}
        commands = _commands(options.model, rows, about, options.sampling)
        print_json(
            msgspec.to_builtins({"about": about, "rows": rows, "advice": advice_by_target, "commands": commands})
        )
    else:
        _show(options.model, rows, about, trials)


@dataclass(frozen=True, slots=True)
class _Trials:
    names: Sequence[str]
    batch: int
    folder: Path
    calibration: str | None
    sampling: Sampling


def _names(presets: str | None) -> list[str]:
    names = [*PRESETS] if presets is None else [name.strip() for name in presets.split(",")]
    for name in names:
        if name not in PRESETS:
            raise ConfigError(f"--presets has {name!r:.60}", nearest(name, PRESETS), "correct it")
    return list(dict.fromkeys(names))


def _calibrated(trials: _Trials) -> bool:
    """Whether any method needs calibration statistics."""
    return any(PRESETS[name].usual.calibrated for name in trials.names)


def _measure_methods(
    model: str, trials: _Trials, env: Env, report: Progress
) -> tuple[list[MethodRow], ComparisonInputs]:
    checkpoint = require_loss(open_checkpoint(model, env, report))
    calibrated = _calibrated(trials)
    trials.sampling.check("--advise", calibrated, trials.calibration)
    measured = Calibration.open(trials.calibration)
    text = windows_for(checkpoint, measured)
    if calibrated:
        trials.sampling.check_text(checkpoint, measured)
    text_digest = trials.sampling.text(checkpoint) if calibrated else ""
    about = ComparisonInputs(
        model=checkpoint.identity(),
        source=checkpoint.folder.name,
        batch=trials.batch,
        machine=cpu_model(),
        text=digest_of(text),
        threads=usable_cores(),
        isa=usable_isas()[0],
        bytes_before=checkpoint.tensors.nbytes,
    )
    open_folder(trials.folder, about)  # before anything that takes minutes
    variants = [(name, precision) for name in trials.names for precision in precisions_of(PRESETS[name])]
    left: dict[str, list[str]] = {}
    for name, precision in variants:
        own = read_row(trials.folder, name, text_digest)
        if not (own and own.refused) and read_row(trials.folder, name, text_digest, precision) is None:
            left.setdefault(name, []).append(precision)
    with ExitStack() as stack:
        statistics, seconds = None, None
        if any(PRESETS[name].usual.calibrated for name in left):
            fresh = trials.sampling.statistics is None or not trials.sampling.statistics.exists()
            started_s = time.perf_counter()
            job = plan(checkpoint, PRESETS["int8-wo"])
            statistics = stack.enter_context(statistics_for(job, trials.folder, trials.sampling, report))
            seconds = time.perf_counter() - started_s if fresh else None
        if left:
            work = stack.enter_context(staging_folder(trials.folder / "methods", "search"))
            _, folder = model_folder(model, env, report)
            source = stack.enter_context(_engine(folder, work / "source", trials.batch, report))
            trial = _Trial(checkpoint, Reference.of(checkpoint, text, report), source, statistics, work, trials.batch)
            for number, name in enumerate(left):
                report(name, number, len(left))
                for measured_row in trial.rows(name, left[name], seconds, report):
                    write_row(trials.folder, measured_row)
                    seconds = None if measured_row.statistics else seconds
        rows = [row for name, precision in variants if (row := read_row(trials.folder, name, text_digest, precision))]
        write_page(trials.folder, rows, about, size, _commands(model, rows, about, trials.sampling))
    warn_if_unpredictable(
        max((row.loss.source_perplexity for row in rows if row.loss is not None), default=0.0), checkpoint
    )
    return rows, about


@dataclass(frozen=True, slots=True)
class _Trial:
    """The reference for all methods. work: a temporary folder"""

    checkpoint: Checkpoint
    reference: Reference
    source: RunningModel
    statistics: CalibrationStatistics | None
    work: Path
    batch: int

    def rows(
        self, name: str, precisions: Sequence[str], statistics_s: float | None, report: Progress
    ) -> Iterator[MethodRow]:
        """Yield a row for each precision of a method. statistics_s: time to collect statistics, for the first row"""
        try:
            job = plan(self.checkpoint, PRESETS[name])
        except CheckpointError as error:  # a method that a layer of this model cannot take
            yield MethodRow(name=name, refused=error.what)
            return

        def report_step(label: str, done: int, total: int) -> None:
            report(f"{name}: {label}", done, total)

        with tempfile.TemporaryDirectory(dir=self.work) as folder:
            out, started_s = Path(folder) / name, time.perf_counter()
            self._compress(job, out, report_step)
            seconds = time.perf_counter() - started_s
            used = self.statistics.about.text if self.statistics and job.calibrated else ""
            for precision in precisions:
                yield MethodRow(
                    name=name,
                    precision=precision,
                    statistics=used,
                    bits_per_weight=job.bits_per_weight,
                    bytes=job.bytes_after,
                    seconds=seconds,
                    statistics_s=statistics_s if job.calibrated else None,
                    loss=self._loss(out, precision, report_step),
                    speed=self._speed(out, precision, Path(folder), report_step),
                )
                statistics_s = None

    def _compress(self, job: CompressionPlan, out: Path, report: Progress) -> None:
        if job.calibrated:
            assert self.statistics is not None, "asked for before"
            compress(job, out, by_statistics(self.statistics), report)
        else:
            compress(job, out, by_rounding, report)

    def _loss(self, out: Path, precision: str, report: Progress) -> Loss:
        compressed, build = Checkpoint.open(out), BuildSettings(precision=precision or None)
        precision_map = asked_precision(build, Source.from_checkpoint(compressed).own_precision)
        return loss_of(self.reference, compressed, report, precision_map)

    def _speed(self, out: Path, precision: str, folder: Path, report: Progress) -> Speeds:
        with _engine(out, folder / f"engine{precision}", self.batch, report, precision or None) as compressed:
            measured = paces(self.source.native, compressed.native, report, ROUNDS, (1, self.batch))
            return Speeds(
                machine=cpu_model(),
                threads=usable_cores(),
                isa=compressed.isa,
                paces=measured,
                source_precision=precision_of(self.source),
                made_precision=precision_of(compressed),
            )


@contextmanager
def _engine(
    checkpoint: Path, folder: Path, batch: int, report: Progress, precision: str | None = None
) -> Iterator[RunningModel]:
    """Build an engine tuned for this machine, and load it. raises MachineError if memory is insufficient"""
    build = BuildSettings(precision=precision, tune=_TUNE_S, evaluate=False, max_batch=max(batch, 1))
    engine = build_engine(checkpoint.name, checkpoint, folder, build, progress=report)
    with closing(open_engine(checkpoint.name, engine, RunSettings(), batch)) as model:
        yield model


def _commands(model: str, rows: Sequence[MethodRow], about: ComparisonInputs, sampling: Sampling) -> list[str]:
    """Return the commands that produce the recommended checkpoints, each once."""
    commands: dict[str, None] = {}
    for row in (row for each in advice(rows, about) for row in each.rows):
        output = f"{about.source.removesuffix('.gguf')}-{row.name}"
        text = sampling.options if PRESETS[row.name].usual.calibrated else []
        commands[shlex.join(["millrace", "compress", model, "-o", output, "--recipe", row.name, *text])] = None
        if row.precision:
            build = ["millrace", "build", output, "-o", f"{output}.engine", "--precision", row.precision]
            commands[shlex.join(build)] = None
    return list(commands)


def _show(model: str, rows: Sequence[MethodRow], about: ComparisonInputs, trials: _Trials) -> None:
    heading(f"{about.source} on {about.machine}, {about.threads} threads, {about.isa}")
    table([h.replace("N", str(about.batch)) for h in HEADER], cells(rows, about, size))
    note("speeds: tokens a second, and in brackets times the source's in the same rounds")
    if any(row.precision for row in rows):
        note("as w4a8: the same checkpoint, its 4-bit weights with 8-bit activations; its own are 16-bit")
    heading("which to take")
    pairs([(each.target, each.words) for each in advice(rows, about)])
    commands = _commands(model, rows, about, trials.sampling)
    if commands:
        heading("to make it")
        pairs([("", line) for line in commands])
    note(f"{trials.folder / PAGE} has it as a page")
