"""Dry run of a load: reports which versions, settings and files would change, without changing anything."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from millrace.model_repository.config.config_json import config_json
from millrace.model_repository.config.problems import ConfigProblem, Level
from millrace.model_repository.lifecycle.model_index import ModelEntry, ModelIndex
from millrace.model_repository.repository.ensemble_tensor_check import tensor_mismatches
from millrace.model_repository.repository.file_mtimes import changed_files
from millrace.model_repository.repository.model_names import ModelId
from millrace.model_repository.repository.multi_repository import known_config
from millrace.model_repository.repository.repository_reader import ModelFolder
from millrace.model_repository.request.status_code import StatusError

_MAX_DIFFERENCES = 200  # reported differences
_MISSING = None  # stands for a missing setting


def diff_load(name: str, entry: ModelEntry | None, file_stamp: object, read: ModelFolder | None) -> dict[str, Any]:
    """Return the changes as JSON. read: the model as a load would find it now"""
    served = sorted(entry.models) if entry is not None else []
    if read is None:
        return {"name": name, "would": "fail", "problems": [_NOWHERE], "serves": _numbers(served)}
    errors = [p for p in read.problems if p.level is Level.ERROR]
    report: dict[str, Any] = {
        "name": name,
        "would": "fail" if errors else "reload" if served else "load",
        "problems": [
            {"where": p.location, "level": p.level.value, "what": p.what, "expected": p.expected, "fix": p.fix}
            for p in read.problems if p.level is not Level.IGNORED
        ][:_MAX_DIFFERENCES],
    }  # fmt: skip
    if errors:
        return report | {"serves": _numbers(served)}
    would = sorted(read.served)
    report["versions"] = {
        "added": _numbers(v for v in would if v not in served),
        "removed": _numbers(v for v in served if v not in would),
        "loaded anew": _numbers(v for v in would if v in served),
    }
    if entry is None or entry.read is None or not served:
        return report
    report["config"] = list(_differences("", config_json(entry.read.config), config_json(read.config)))[
        :_MAX_DIFFERENCES
    ]
    folders = read.folder, entry.read.folder
    report["files"] = [_below(path, folders) for path in changed_files(entry.stamp, file_stamp)][:_MAX_DIFFERENCES]
    if not report["config"] and not report["files"] and entry.read.served == read.served:
        report["would"] = "change nothing"
    return report


def orphaned_ensembles(entries: ModelIndex, model_id: ModelId, read: ModelFolder) -> Iterator[ConfigProblem]:
    """Yield a warning for each ensemble that a load of the model would unload, because tensors no longer fit."""
    new = known_config(model_id, {model_id: read})  # computed once, because it may read files
    for other in entries.ensembles_of(model_id):
        for ensemble in entries[other].ensembles:
            try:
                members = [ensemble.find(step.model, step.version) for step in ensemble.steps]
            except StatusError:  # a member is not served
                continue
            ids = [ModelId(model.namespace, model.name) for model in members]
            member_configs = [(member_id, model.config) for member_id, model in zip(ids, members, strict=True)]
            steps = [new if step[0] == model_id else step for step in member_configs]
            broken = next(tensor_mismatches(other, ensemble.config, steps), None)
            if broken is not None:
                message = f"ensemble '{other}' would be unloaded: {broken.what}"
                yield ConfigProblem(Level.WARNING, read.file or read.folder, None, message, broken.expected, broken.fix)
                break


_NOWHERE = {"what": "no repository has a folder of that name", "level": "error"}


def _numbers(versions: Any) -> list[str]:
    return [str(version) for version in versions]


def _below(path: str, folders: tuple[Path, ...]) -> str:
    """Return a path relative to the model folder that contains it."""
    for folder in folders:
        if Path(path).is_relative_to(folder):
            return str(Path(path).relative_to(folder))
    return path


def _differences(path: str, before: Any, after: Any) -> Iterator[dict[str, Any]]:
    """Yield the differences between two JSON values, each with its path."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            inner = f"{path}.{key}" if path else key
            yield from _differences(inner, before.get(key, _MISSING), after.get(key, _MISSING))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for i, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from _differences(f"{path}[{i}]", old, new)
    elif before != after:
        yield {"field": path, "is": before, "would be": after}
