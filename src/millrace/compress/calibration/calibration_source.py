"""Source of calibration statistics for a recipe: a text, a folder, or both, checked before any long work."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.settings import Progress
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
from millrace.compress.presets import SAMPLES
from millrace.errors import ConfigError
from millrace.evaluate.calibration import Calibration
from millrace.evaluate.sizes import LENGTH
from millrace.evaluate.text_windows import Windows


@dataclass(frozen=True, slots=True)
class CalibrationSource:
    """Where calibration statistics come from: a text to collect them on, a folder that keeps them, or both.

    samples_from: the text file; samples: number of samples, None for the default; statistics: the folder
    """

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

    def check(self, user: str, needed: bool, calibration: str | None, dry_run: bool = False) -> None:
        """Check options against whether statistics are needed. user: what needs them, for errors. raises ConfigError"""
        if not needed:
            if self != CalibrationSource(None, None, None):
                raise ConfigError(
                    f"{user} needs no statistics", "no text or folder for any",
                    "leave out --samples-from, --samples and --statistics, or choose another recipe",
                )  # fmt: skip
            return
        if self.samples_from is None:
            if self.samples is not None:
                raise ConfigError("--samples is given without a text", "both", "name one: --samples-from")
            if self.statistics is None and not dry_run:
                raise ConfigError(
                    f"{user} needs a text to collect statistics on",
                    f"about {self.n * LENGTH:,} tokens of what the model is for, in UTF-8", "name it: --samples-from",
                )  # fmt: skip
        elif calibration is not None and same_file(self.samples_from, calibration):
            raise ConfigError(
                "--samples-from and --calibration are one text", "two: what is fitted to a text looks better on it",
                "name another, or leave --calibration out",
            )  # fmt: skip

    def check_folder(self, out: Path, *, replaces: bool) -> None:
        """Refuse statistics inside the output. replaces: `out` is moved into place at the end. raises ConfigError"""
        if self.statistics is None:
            return
        folder, output = self.statistics.resolve(), out.resolve()
        if folder == output or (replaces and output in folder.parents):
            raise ConfigError(
                f"--statistics {self.statistics} is {'in ' if folder != output else ''}the folder of -o",
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
            raise same_text_error(measured)

    def text_digest(self, checkpoint: Checkpoint) -> str:
        """Return the digest of the calibration text, without collecting statistics. raises ConfigError if unknown"""
        if self.samples_from is not None:
            return digest_of(sampled(checkpoint, self.samples_from, self.n))
        assert self.statistics is not None, "checked before"
        return statistics_of(checkpoint, None, self.statistics, lambda *_: None).about.text

    def temporary_bytes(self, plan: CompressionPlan) -> int:
        """Return the bytes of temporary statistics next to the output."""
        if self.statistics is not None:
            return 0
        requirements = needs(plan, self.n * LENGTH)
        return requirements.disk_bytes + requirements.carried_bytes


def same_text_error(measured: Calibration) -> ConfigError:
    """Create the error if the loss would be measured on the calibration text."""
    name = "the bundled text" if measured.file is None else f"--calibration {measured.file}"
    return ConfigError(
        f"{name} is the text that statistics are of", "two: what is fitted to a text looks better on it",
        "name another with --calibration, or measure nothing: --no-evaluate",
    )  # fmt: skip


@contextmanager
def statistics_for(
    plan: CompressionPlan, out: Path, source: CalibrationSource, progress: Progress
) -> Iterator[CalibrationStatistics]:
    """Collect or read the statistics of a plan's model; temporary ones are next to `out`, and removed at the end."""
    text: Windows | None = None
    if source.samples_from is not None:
        text = sampled(plan.checkpoint, source.samples_from, source.n)
    if source.statistics is not None:
        yield statistics_of(plan.checkpoint, text, source.statistics, progress)
        return
    with staging_folder(out, "statistics") as folder:
        yield statistics_of(plan.checkpoint, text, folder / "kept", progress)
