"""`millrace doctor MODEL`: which implementation runs a model, and what it lacks for the native one."""

from dataclasses import asdict, dataclass
from pathlib import Path

import click

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.gguf.reader import is_gguf
from millrace.checkpoint.tokenizer.tokenizer_files import no_tokenizer
from millrace.checkpoint.weights.safetensors import INDEX, SINGLE, Tensors
from millrace.checkpoint.weights.torch_folder import torch_weight_files
from millrace.cli.console import heading, note, pairs, print_json
from millrace.compile.resolve_model import model_folder
from millrace.compile.source import Source
from millrace.engine.artifact.engine import Engine
from millrace.engine.artifact.manifest import MANIFEST
from millrace.engine.transformers.engine import SLOW, transformers_engine
from millrace.env import Env
from millrace.errors import MillraceError
from millrace.kernels.catalogue import operators
from millrace.model.module import trace_model
from millrace.runtime.settings import NATIVE, TRANSFORMERS


@dataclass(frozen=True, slots=True)
class ModelReport:
    """lacks: by implementation that cannot run it, the reason. implementation: that runs it; None: nothing does"""

    model: str
    architecture: str | None
    implementation: str | None
    lacks: dict[str, str]
    command: str | None


def examine_model(model: str, env: Env, as_json: bool) -> None:
    """Print how MODEL would run. raises CheckpointError, HubError if there is no such model"""
    name, folder = model_folder(model, env)
    report = _examine(model, folder)
    if as_json:
        print_json(asdict(report))
        return
    heading(name)
    pairs([
        ("architecture", report.architecture or "unknown"),
        *((title, report.lacks.get(implementation, _RUNS[implementation]))
          for title, implementation in (("native", NATIVE), ("transformers", TRANSFORMERS))
          if implementation in (report.implementation, *report.lacks)),
    ])  # fmt: skip
    if report.command is None and _has_torch_weights(folder):
        note(f"Convert it first: {click.style(f'millrace convert {model} -o FOLDER', bold=True)}")
        return
    note(f"Run it: {click.style(report.command, bold=True)}" if report.command else "Nothing here runs it.")


_RUNS = {NATIVE: "runs", TRANSFORMERS: f"runs, if asked for: {SLOW}"}


def _examine(model: str, folder: Path) -> ModelReport:
    lacks: dict[str, str] = {}
    try:
        return ModelReport(model, _native_architecture(folder), NATIVE, lacks, f"millrace serve {model}")
    except MillraceError as error:
        lacks[NATIVE] = f"{error.what}; expected: {error.expected}"
    if is_gguf(folder):
        lacks[TRANSFORMERS] = "a GGUF file, and only folders in Hugging Face's format run through transformers"
        return ModelReport(model, None, None, lacks, None)
    try:
        engine = transformers_engine(folder.name, folder, Tensors.open(folder), "")
    except MillraceError as error:
        lacks[TRANSFORMERS] = f"{error.what}; {error.fix}"
        return ModelReport(model, None, None, lacks, None)
    engine.close()
    command = f"millrace serve {model} --model-impl {TRANSFORMERS}"
    return ModelReport(model, engine.manifest.architecture, TRANSFORMERS, lacks, command)


def _has_torch_weights(folder: Path) -> bool:
    """Return whether the weights are files of PyTorch only, which are not read as they are."""
    is_other = any((folder / name).is_file() for name in (SINGLE, INDEX, MANIFEST))
    return folder.is_dir() and not is_other and bool(torch_weight_files(folder))


def _native_architecture(folder: Path) -> str:
    """Return the architecture of a model that runs natively. No weight is read. raises MillraceError for another"""
    if (folder / MANIFEST).is_file():
        engine = Engine.open(folder)
        engine.close()
        return engine.manifest.architecture
    checkpoint = Checkpoint.open(folder)
    if not checkpoint.has_tokenizer:
        raise no_tokenizer(folder)
    source = Source.from_checkpoint(checkpoint)
    trace_model(source.module, source.weights, operators())
    return checkpoint.config.architecture
