"""Measures all compression methods for a model on this machine: loss and speed compared with the source."""

import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.builder import build_engine, requested_precision
from millrace.compile.settings import BuildSettings, Progress
from millrace.compile.source import Source
from millrace.compress.calibration.calibrated_methods import by_statistics
from millrace.compress.calibration.calibration_pass import digest_of
from millrace.compress.calibration.calibration_source import CalibrationSource, statistics_for
from millrace.compress.calibration.statistics import CalibrationStatistics
from millrace.compress.checkpoint.checkpoint_writer import staging_folder
from millrace.compress.compress import by_rounding, compress
from millrace.compress.compression_plan import CompressionPlan, plan_compression
from millrace.compress.measure.accuracy import Loss, Reference, loss_of, require_measurable, windows_for
from millrace.compress.measure.speed import ROUNDS, Speeds, paces
from millrace.compress.recipe import PRESETS
from millrace.compress.report.method_comparison import (
    ComparisonInputs,
    MethodRow,
    advice,
    open_folder,
    precisions_of,
    read_row,
    write_page,
    write_row,
)
from millrace.errors import CheckpointError, ConfigError, nearest
from millrace.evaluate.calibration import Calibration
from millrace.evaluate.resumable_results import precision_summary
from millrace.kernels.library import usable_isas
from millrace.machine.cpu import cpu_model, usable_cores
from millrace.runtime.open_engine import RunningModel, open_engine
from millrace.runtime.settings import RunSettings

_TUNE_S = 2.0


@dataclass(frozen=True, slots=True)
class ComparisonOptions:
    """What to compare, and where to keep results.

    presets: names of the methods; batch: sequences of the large batch; folder: where rows and the page are written
    calibration: file of the text to measure on, None for the bundled one; samples: source of calibration statistics
    """

    presets: Sequence[str]
    batch: int
    folder: Path
    calibration: str | None
    samples: CalibrationSource

    @property
    def calibrated(self) -> bool:
        """Whether any method needs calibration statistics."""
        return any(PRESETS[name].usual.calibrated for name in self.presets)


def parse_presets(presets: str | None) -> list[str]:
    """Split a list of presets; None means all. raises ConfigError for an unknown one"""
    names = [*PRESETS] if presets is None else [name.strip() for name in presets.split(",")]
    for name in names:
        if name not in PRESETS:
            raise ConfigError(f"--presets has {name!r:.60}", nearest(name, PRESETS), "correct it")
    return list(dict.fromkeys(names))


def measure_methods(
    model: str,
    checkpoint: Checkpoint,
    options: ComparisonOptions,
    format_bytes: Callable[[float], str],
    progress: Progress,
) -> tuple[list[MethodRow], ComparisonInputs]:
    """Measure all methods that have no row yet, and write the page. model: as typed, for the commands on the page

    raises ConfigError for options that do not go together, CheckpointError if no loss can be measured
    """
    require_measurable(checkpoint)
    samples = options.samples
    samples.check("--advise", options.calibrated, options.calibration)
    measured_text = Calibration.open(options.calibration)
    text = windows_for(checkpoint, measured_text)
    if options.calibrated:
        samples.check_text(checkpoint, measured_text)
    text_digest = samples.text_digest(checkpoint) if options.calibrated else ""
    about = ComparisonInputs(
        model=checkpoint.identity(),
        source=checkpoint.folder.name,
        batch=options.batch,
        machine=cpu_model(),
        text=digest_of(text),
        threads=usable_cores(),
        isa=usable_isas()[0],
        bytes_before=checkpoint.tensors.nbytes,
    )
    open_folder(options.folder, about)  # before anything that takes minutes
    variants = [(name, precision) for name in options.presets for precision in precisions_of(PRESETS[name])]
    missing: dict[str, list[str]] = {}
    for name, precision in variants:
        own = read_row(options.folder, name, text_digest)
        if not (own and own.refused) and read_row(options.folder, name, text_digest, precision) is None:
            missing.setdefault(name, []).append(precision)
    with ExitStack() as stack:
        statistics, seconds = None, None
        if any(PRESETS[name].usual.calibrated for name in missing):
            fresh = samples.statistics is None or not samples.statistics.exists()
            started_s = time.perf_counter()
            plan = plan_compression(checkpoint, PRESETS["int8-wo"])
            statistics = stack.enter_context(statistics_for(plan, options.folder, samples, progress))
            seconds = time.perf_counter() - started_s if fresh else None
        if missing:
            work = stack.enter_context(staging_folder(options.folder / "methods", "search"))
            source = stack.enter_context(_engine(checkpoint.folder, work / "source", options.batch, progress))
            reference = Reference.from_checkpoint(checkpoint, text, progress)
            trial = _Trial(checkpoint, reference, source, statistics, work, options.batch)
            for number, name in enumerate(missing):
                progress(name, number, len(missing))
                for measured_row in trial.rows(name, missing[name], seconds, progress):
                    write_row(options.folder, measured_row)
                    seconds = None if measured_row.statistics else seconds
        rows = [row for name, precision in variants if (row := read_row(options.folder, name, text_digest, precision))]
        write_page(options.folder, rows, about, format_bytes, commands(model, rows, about, samples))
    return rows, about


@dataclass(frozen=True, slots=True)
class _Trial:
    """Compresses the checkpoint with one method after another, and compares each result with the source.

    source: the engine of the uncompressed checkpoint; work: a temporary folder
    """

    checkpoint: Checkpoint
    reference: Reference
    source: RunningModel
    statistics: CalibrationStatistics | None
    work: Path
    batch: int

    def rows(
        self, name: str, precisions: Sequence[str], statistics_s: float | None, progress: Progress
    ) -> Iterator[MethodRow]:
        """Yield a row for each precision of a method. statistics_s: time to collect statistics, for the first row"""
        try:
            plan = plan_compression(self.checkpoint, PRESETS[name])
        except CheckpointError as error:  # a layer of this model does not support the method
            yield MethodRow(name=name, refused=error.what)
            return

        def report_step(label: str, done: int, total: int) -> None:
            progress(f"{name}: {label}", done, total)

        with tempfile.TemporaryDirectory(dir=self.work) as folder:
            out, started_s = Path(folder) / name, time.perf_counter()
            self._compress(plan, out, report_step)
            seconds = time.perf_counter() - started_s
            used = self.statistics.about.text if self.statistics and plan.calibrated else ""
            for precision in precisions:
                yield MethodRow(
                    name=name,
                    precision=precision,
                    statistics=used,
                    bits_per_weight=plan.bits_per_weight,
                    bytes=plan.bytes_after,
                    seconds=seconds,
                    statistics_s=statistics_s if plan.calibrated else None,
                    loss=self._loss(out, precision, report_step),
                    speed=self._speed(out, precision, Path(folder), report_step),
                )
                statistics_s = None

    def _compress(self, plan: CompressionPlan, out: Path, progress: Progress) -> None:
        if plan.calibrated:
            assert self.statistics is not None, "collected if any method needs them"
            compress(plan, out, by_statistics(self.statistics), progress)
        else:
            compress(plan, out, by_rounding, progress)

    def _loss(self, out: Path, precision: str, progress: Progress) -> Loss:
        compressed, build = Checkpoint.open(out), BuildSettings(precision=precision or None)
        precision_map = requested_precision(build, Source.from_checkpoint(compressed).own_precision)
        return loss_of(self.reference, compressed, progress, precision_map)

    def _speed(self, out: Path, precision: str, folder: Path, progress: Progress) -> Speeds:
        with _engine(out, folder / f"engine{precision}", self.batch, progress, precision or None) as compressed:
            measured = paces(self.source.native, compressed.native, progress, ROUNDS, (1, self.batch))
            return Speeds(
                machine=cpu_model(),
                threads=usable_cores(),
                isa=compressed.isa,
                paces=measured,
                source_precision=precision_summary(self.source),
                made_precision=precision_summary(compressed),
            )


@contextmanager
def _engine(
    checkpoint: Path, folder: Path, batch: int, progress: Progress, precision: str | None = None
) -> Iterator[RunningModel]:
    """Build an engine tuned for this machine, and load it. raises MachineError if memory is insufficient"""
    build = BuildSettings(precision=precision, tune=_TUNE_S, evaluate=False, max_batch=max(batch, 1))
    engine = build_engine(checkpoint.name, checkpoint, folder, build, progress=progress)
    with closing(open_engine(checkpoint.name, engine, RunSettings(), batch)) as model:
        yield model


def commands(model: str, rows: Sequence[MethodRow], about: ComparisonInputs, samples: CalibrationSource) -> list[str]:
    """Return the commands that produce the recommended checkpoints, each once."""
    lines: dict[str, None] = {}
    for row in (row for advised in advice(rows, about) for row in advised.rows):
        output = f"{about.source.removesuffix('.gguf')}-{row.name}"
        text = samples.options if PRESETS[row.name].usual.calibrated else []
        lines[shlex.join(["millrace", "compress", model, "-o", output, "--recipe", row.name, *text])] = None
        if row.precision:
            build = ["millrace", "build", output, "-o", f"{output}.engine", "--precision", row.precision]
            lines[shlex.join(build)] = None
    return list(lines)
