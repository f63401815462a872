"""Options of `millrace eval`, and helpers shared by its tasks."""

import math
from dataclasses import dataclass
from pathlib import Path

from millrace.compile.resolve_model import model_folder
from millrace.compile.settings import BuildSettings
from millrace.engine.artifact.manifest import MANIFEST
from millrace.env import Env
from millrace.evaluate.divergence import Mean
from millrace.evaluate.multiple_choice import digest
from millrace.evaluate.resumable_results import ResultsInputs
from millrace.runtime.settings import RunSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """The command line; None and (): not given."""

    model: str
    task: str
    build: BuildSettings
    run: RunSettings
    env: Env
    as_json: bool
    data: Path | None = None
    definition: str = ""
    shots: int | None = None
    subject: tuple[str, ...] = ()
    window: int | None = None
    limit: int | None = None
    against: str | None = None
    out: Path | None = None

    def results_file(self, about: ResultsInputs, out: Path | None) -> Path:
        return out or self.env.cache / "eval" / f"{digest((about.engine, about.task, about.data))}.jsonl"

    def build_of_other(self, model: str, precision: str | None = None) -> BuildSettings:
        """Return the build settings of a model to compare with: the same context and tuning time, otherwise its own."""
        _, folder = model_folder(model, self.env)
        if (folder / MANIFEST).is_file():
            return BuildSettings()
        return BuildSettings(precision=precision, max_context=self.build.max_context, tune=self.build.tune)


def as_json(mean: Mean) -> dict[str, float | None]:
    """Convert a mean to JSON; non-finite values become null."""
    return {name: x if x is not None and math.isfinite(x) else None for name, x in mean._asdict().items()}


def with_error(mean: Mean, digits: str = ",.4f") -> str:
    """Format a mean with its error: "12.3456 ± 0.0123". digits: as in format()"""
    return f"{mean.value:{digits}}" + ("" if mean.error is None else f" ± {mean.error:{digits}}")
