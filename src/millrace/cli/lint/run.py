"""Runs `millrace lint`, whose options are in `options.py`: `--help` imports nothing else."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from millrace.cli.console import heading, note, pairs, print_json
from millrace.cli.main import MISTAKE
from millrace.errors import sanitize
from millrace.model_repository.backends import missing_backend_problems
from millrace.model_repository.config.enums import DataType
from millrace.model_repository.config.problems import ConfigProblem, Level
from millrace.model_repository.repository.multi_repository import autocompletes_batching, read_repositories
from millrace.model_repository.repository.python_code_check import code_problems
from millrace.model_repository.repository.repository_reader import ModelFolder, Repository

_COLOURS = {Level.ERROR: "red", Level.WARNING: "yellow", Level.IGNORED: "blue"}
_AT_LOAD = "as its backend finds them when it loads the model"
_LISTED = 8  # versions, files: of more, how many there are


def run(folders: tuple[Path, ...], model_config_name: str, *, namespacing: bool, as_json: bool) -> int:
    """Run `millrace lint`; return its exit code."""
    repositories = read_repositories(folders, model_config_name, namespacing=namespacing)
    for model in (model for repository in repositories for model in repository.models):
        model.problems.extend([*missing_backend_problems(model), *code_problems(model)])
    if as_json:
        print_json([_as_json(r) for r in repositories])
    else:
        for repository in repositories:
            _show(repository)
    levels = [p.level for r in repositories for p in _problems(r)]
    return MISTAKE if Level.ERROR in levels or Level.WARNING in levels else 0


def _problems(repository: Repository) -> Iterator[ConfigProblem]:
    yield from repository.problems
    for model in repository.models:
        yield from model.problems


def _show(repository: Repository) -> None:
    for problem in repository.problems:
        _tell(problem)
    for model in repository.models:
        heading(sanitize(model.name))
        pairs(list(_rows(model)))
        for problem in sorted(model.problems, key=_order):
            _tell(problem)
        click.echo()
    served = sum(m.is_servable for m in repository.models)
    counts = [(sum(p.level is level for p in _problems(repository)), level.value) for level in Level]
    remarks = ", ".join(f"{n} {word}{'s' if n != 1 and word != 'ignored' else ''}" for n, word in counts if n)
    summary = f"{served} of {len(repository.models)} models can be served; {remarks or 'no remarks'}"
    note(f"{sanitize(str(repository.root))}: {summary}")


def _order(problem: ConfigProblem) -> tuple[int, int, int]:
    """Return the sort key of problems: severity, then position in the file."""
    place = problem.place
    return list(Level).index(problem.level), place.line if place else 0, place.column if place else 0


def _tell(problem: ConfigProblem) -> None:
    word = click.style(problem.level.value, fg=_COLOURS[problem.level])
    if problem.level is Level.IGNORED:
        click.echo(f"  {problem.location}: {word}: {problem.what}: {problem.expected}")
        return
    click.echo(f"  {problem.location}: {word}: {problem.what}")
    click.echo(f"    expected: {problem.expected}\n    to fix:   {problem.fix}")


def _rows(model: ModelFolder) -> Iterator[tuple[str, str]]:
    """Yield the description of a model as it would be served."""
    config = model.config
    left = [v for v in model.versions if v not in model.served]
    yield "versions", _listed(model.served) + (f" (of the policy left out: {_listed(left)})" if left else "")
    yield "runs on", _backend(model)
    for word, tensors in (("inputs", config.input), ("outputs", config.output)):
        described = ", ".join(sanitize(f"{t.name} {_type(t.data_type)} {list(t.dims)}") for t in tensors)
        yield word, described or _AT_LOAD
    yield "batches", _batches(model)
    if config.instance_group:
        kinds = [f"{g.count} on {g.kind.name.removeprefix('KIND_')}" for g in config.instance_group]
        yield "instances", ", ".join(kinds)
    if model.labels:
        yield "labels", ", ".join(sanitize(f"{name}: {len(labels)}") for name, labels in model.labels.items())
    if model.added:
        yield "completed", sanitize("; ".join(model.added))


def _type(data_type: DataType) -> str:
    return data_type.name.removeprefix("TYPE_") if data_type is not DataType.TYPE_INVALID else "?"


def _listed(versions: Sequence[int]) -> str:
    if not versions:
        return "none"
    more = f", ... ({len(versions)} in all)" if len(versions) > _LISTED else ""
    return ", ".join(map(str, versions[:_LISTED])) + more


def _backend(model: ModelFolder) -> str:
    config = model.config
    if config.ensemble_scheduling:
        return sanitize("its steps: " + " -> ".join(s.model_name for s in config.ensemble_scheduling.step))
    file = f", {config.default_model_filename}" if config.default_model_filename else ""
    return sanitize((config.backend or "nothing that is known") + file)


def _batches(model: ModelFolder) -> str:
    config = model.config
    size = f"up to {config.max_batch_size}" if config.max_batch_size > 0 else "none: its shapes are whole"
    if autocompletes_batching(model):
        size = _AT_LOAD
    if config.dynamic_batching:
        wait = config.dynamic_batching.max_queue_delay_microseconds
        return f"{size}, of requests that wait at most {wait:,} us" if config.max_batch_size > 0 else size
    return f"{size}, of sequences" if config.sequence_batching else size


def _as_json(repository: Repository) -> dict[str, Any]:
    return {
        "folder": str(repository.root),
        "models": [_model(m) for m in repository.models],
        "problems": [_problem(p) for p in repository.problems],
    }


def _model(model: ModelFolder) -> dict[str, Any]:
    config = model.config
    return {
        "name": model.name, "servable": model.is_servable, "versions": model.versions, "served": model.served,
        "backend": config.backend, "platform": config.platform, "file": config.default_model_filename,
        "max_batch_size": config.max_batch_size,
        "inputs": [{"name": t.name, "data_type": t.data_type.name, "dims": t.dims} for t in config.input],
        "outputs": [{"name": t.name, "data_type": t.data_type.name, "dims": t.dims} for t in config.output],
        "instances": [
            {"kind": g.kind.name, "count": g.count, "name": g.name} for g in config.instance_group
        ],
        "completed": model.added, "problems": [_problem(p) for p in model.problems],
    }  # fmt: skip


def _problem(problem: ConfigProblem) -> dict[str, Any]:
    place = problem.place
    return {
        "level": problem.level.value, "file": sanitize(str(problem.file)), "line": place.line if place else None,
        "column": place.column if place else None, "what": problem.what, "expected": problem.expected,
        "fix": problem.fix,
    }  # fmt: skip
