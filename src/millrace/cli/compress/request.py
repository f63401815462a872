"""Common options of `millrace compress`: the checkpoint, and calibration statistics of a text."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
from click.core import ParameterSource

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.cli.console import Progress, note
from millrace.compile.resolve_model import model_folder
from millrace.compress.calibration.calibrated_methods import (
    is_of,
    needs,
    read_sampled,
    same_file,
    sampled,
    statistics_of,
)
from millrace.compress.calibration.calibration_pass import digest_of
from millrace.compress.calibration.statistics import ABOUT, CalibrationStatistics, read_about
from millrace.compress.checkpoint.checkpoint_writer import staging_folder
from millrace.compress.compression_plan import CompressionPlan
from millrace.compress.measure.accuracy import unmeasurable_reason
from millrace.compress.presets import SAMPLES
from millrace.engine.artifact.manifest import MANIFEST
from millrace.env import Env
from millrace.errors import CheckpointError, ConfigError
from millrace.evaluate.calibration import Calibration
from millrace.evaluate.sizes import LENGTH
from millrace.evaluate.text_windows import Windows


@dataclass(frozen=True, slots=True)
class CompressOptions:
    """Options of all forms of `millrace compress`. model: as typed; sampling: source of calibration statistics

    engine: folder of an engine to build from the result, or None
    """

    env: Env
    model: str
    output: Path
    as_json: bool
    sampling: "Sampling"
    engine: Path | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """Source of calibration statistics."""

    samples_from: str | None
    samples: int | None
    statistics: Path | None

    @property
    def n(self) -> int:
        return self.samples or SAMPLES

    @property
    def options(self) -> list[str]:
        """Return the flags that reuse the same statistics."""
        statistics_flags = [] if self.statistics is None else ["--statistics", str(self.statistics)]
        if self.samples_from is None:
            return statistics_flags
        n = [] if self.samples is None else ["--samples", str(self.samples)]
        return ["--samples-from", self.samples_from, *n, *statistics_flags]

    def check(self, asks: str, needed: bool, calibration: str | None, dry_run: bool = False) -> None:
        """Check options against whether statistics are needed. asks: what needs them, for errors. raises ConfigError"""
        if not needed:
            if self != Sampling(None, None, None):
                raise ConfigError(
                    f"{asks} needs no statistics", "no text or folder for any",
                    "leave out --samples-from, --samples and --statistics, or choose another recipe",
                )  # fmt: skip
            return
        if self.samples_from is None:
            if self.samples is not None:
                raise ConfigError("--samples is given without a text", "both", "name one: --samples-from")
            if self.statistics is None and not dry_run:
                raise ConfigError(
                    f"{asks} needs a text to collect statistics on",
                    f"about {self.n * LENGTH:,} tokens of what the model is for, in UTF-8", "name it: --samples-from",
                )  # fmt: skip
        elif calibration is not None and same_file(self.samples_from, calibration):
            raise ConfigError(
                "--samples-from and --calibration are one text", "two: what is fitted to a text looks better on it",
                "name another, or leave --calibration out",
            )  # fmt: skip

    def check_folder(self, out: Path, *, makes: bool) -> None:
        """Refuse statistics inside the output. makes: `out` is moved into place at the end. raises ConfigError"""
        if self.statistics is None:
            return
        place, output = self.statistics.resolve(), out.resolve()
        if place == output or (makes and output in place.parents):
            raise ConfigError(
                f"--statistics {self.statistics} is {'in ' if place != output else ''}the folder of -o",
                "two: what statistics are kept in is there before the output is", "name another folder for statistics",
            )  # fmt: skip

    def check_text(self, checkpoint: Checkpoint, measured: Calibration) -> None:
        """Refuse statistics of the same text that the loss is measured on, whatever its name. raises ConfigError"""
        has_statistics = self.statistics is not None and (self.statistics / ABOUT).is_file()
        if self.statistics is not None and has_statistics:
            about = read_about(self.statistics)
            same = is_of(checkpoint, measured.content, about.text, about.tokens)
        else:
            same = self.samples_from is not None and read_sampled(self.samples_from) == measured.content
        if same:
            raise one_text(measured)

    def text(self, checkpoint: Checkpoint) -> str:
        """Return the digest of the calibration text, without collecting statistics. raises ConfigError if unknown"""
        if self.samples_from is not None:
            return digest_of(sampled(checkpoint, self.samples_from, self.n))
        assert self.statistics is not None, "checked before"
        return statistics_of(checkpoint, None, self.statistics, lambda *_: None).about.text

    def temporary_bytes(self, job: CompressionPlan) -> int:
        """Return the bytes of temporary statistics next to the output."""
        if self.statistics is not None:
            return 0
        requirements = needs(job, self.n * LENGTH)
        return requirements.disk_bytes + requirements.carried_bytes


def one_text(measured: Calibration) -> ConfigError:
    name = "the bundled text" if measured.file is None else f"--calibration {measured.file}"
    return ConfigError(
        f"{name} is the text that statistics are of", "two: what is fitted to a text looks better on it",
        "name another with --calibration, or measure nothing: --no-evaluate",
    )  # fmt: skip


@contextmanager
def statistics_for(
    job: CompressionPlan, out: Path, sampling: Sampling, report: Progress
) -> Iterator[CalibrationStatistics]:
    """Collect or read statistics of the job's model; temporary ones lie next to the output and are removed."""
    text: Windows | None = None
    if sampling.samples_from is not None:
        text = sampled(job.checkpoint, sampling.samples_from, sampling.n)
    if sampling.statistics is not None:
        yield statistics_of(job.checkpoint, text, sampling.statistics, report)
        return
    with staging_folder(out, "statistics") as folder:
        yield statistics_of(job.checkpoint, text, folder / "kept", report)


def warn_if_unpredictable(perplexity: float, source: Checkpoint) -> None:
    """Warn if the source itself predicts the text worse than chance. perplexity: of the source on that text"""
    if perplexity > source.decoder.vocab_size:
        note("The source itself tells this text worse than guessing among all its tokens does: perplexities say "
             "little. Measure on a text of the kind it knows (--calibration)")  # fmt: skip


def open_checkpoint(model: str, env: Env, report: Progress) -> Checkpoint:
    """Open a checkpoint. raises ConfigError for an engine"""
    _, folder = model_folder(model, env, report)
    if (folder / MANIFEST).is_file():
        raise ConfigError(f"{folder} is an engine", "a checkpoint", "name the checkpoint it was built from")
    return Checkpoint.open(folder)


def require_loss(checkpoint: Checkpoint) -> Checkpoint:
    """Refuse models whose loss cannot be measured. raises CheckpointError"""
    without = unmeasurable_reason(checkpoint)
    if without:
        raise CheckpointError(f"no loss can be measured: {without}", "a model that reads texts", "name a --recipe")
    return checkpoint


def command_line(model: str) -> str:
    """Return the command line, in the order of --help."""
    context, words = click.get_current_context(), ["millrace", "compress", model]
    for option in context.command.params:
        name = option.name or ""
        if isinstance(option, click.Option) and context.get_parameter_source(name) == ParameterSource.COMMANDLINE:
            value = context.params[name]
            words += [option.secondary_opts[0] if value is False else option.opts[-1]]
            words += [] if isinstance(value, bool) else [str(value)]
    return shlex.join(words)
