"""Common options of `millrace compress`, and helpers shared by its modes."""

import shlex
from dataclasses import dataclass
from pathlib import Path

import click
from click.core import ParameterSource

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.cli.console import Progress, note
from millrace.compile.resolve_model import model_folder
from millrace.compress.calibration.calibration_source import CalibrationSource
from millrace.engine.artifact.manifest import MANIFEST
from millrace.env import Env
from millrace.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CompressOptions:
    """Options of all forms of `millrace compress`. model: as typed; samples: source of calibration statistics

    engine: folder of an engine to build from the result, or None
    """

    env: Env
    model: str
    output: Path
    as_json: bool
    samples: CalibrationSource
    engine: Path | None = None


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
