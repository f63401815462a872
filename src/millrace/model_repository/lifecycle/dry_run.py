"""What a load of a model would change, while nothing is changed: its versions, its configuration, its files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from millrace.model_repository.config.config_json import config_json
from millrace.model_repository.config.problems import Level, Problem
from millrace.model_repository.lifecycle.model_index import Entries, Entry
from millrace.model_repository.repository.ensemble_tensor_check import tensor_mismatches
from millrace.model_repository.repository.file_mtimes import changed_files
from millrace.model_repository.repository.model_names import ModelId
from millrace.model_repository.repository.multi_repository import whole
from millrace.model_repository.repository.repository_reader import Model
from millrace.model_repository.request.status_code import StatusError

_MOST = 200  # differences that are told
_MISSING = None  # what a configuration does not have


def diff_load(name: str, entry: Entry | None, of_files: object, read: Model | None) -> dict[str, Any]:
    """As JSON. read: the model as a load would find it now"""
    served = sorted(entry.models) if entry is not None else []
    if read is None:
        return {"name": name, "would": "fail", "problems": [_NOWHERE], "serves": _numbers(served)}
    errors = [p for p in read.problems if p.level is Level.ERROR]
    told: dict[str, Any] = {
        "name": name,
        "would": "fail" if errors else "reload" if served else "load",
        "problems": [
            {"where": p.where, "level": p.level.value, "what": p.what, "expected": p.expected, "mend": p.mend}
            for p in read.problems if p.level is not Level.IGNORED
        ][:_MOST],
    }  # fmt: skip
    if errors:
        return told | {"serves": _numbers(served)}
    would = sorted(read.served)
    told["versions"] = {
        "added": _numbers(v for v in would if v not in served),
        "removed": _numbers(v for v in served if v not in would),
        "loaded anew": _numbers(v for v in would if v in served),
    }
    if entry is None or entry.read is None or not served:
        return told
    told["config"] = list(_differences("", config_json(entry.read.config), config_json(read.config)))[:_MOST]
    folders = read.folder, entry.read.folder
    told["files"] = [_below(path, folders) for path in changed_files(entry.stamp, of_files)][:_MOST]
    if not told["config"] and not told["files"] and entry.read.served == read.served:
        told["would"] = "change nothing"
    return told


def orphaned_ensembles(entries: Entries, one: ModelId, read: Model) -> Iterator[Problem]:
    """Ensembles that would be unloaded with a load of that model, as its tensors would fit them no more."""
    new = whole(one, {one: read})  # once: it may look into files
    for other in entries.made_of(one):
        for ensemble in entries[other].ensembles:
            try:
                found = [ensemble.find(step.model, step.version) for step in ensemble.steps]
            except StatusError:  # it is not served as it is
                continue
            ids = [ModelId(model.namespace, model.name) for model in found]
            known = [(of, model.config) for of, model in zip(ids, found, strict=True)]
            steps = [new if step[0] == one else step for step in known]
            broken = next(tensor_mismatches(other, ensemble.config, steps), None)
            if broken is not None:
                what = f"ensemble '{other}' would be unloaded: {broken.what}"
                yield Problem(Level.WARNING, read.file or read.folder, None, what, broken.expected, broken.mend)
                break


_NOWHERE = {"what": "no repository has a folder of that name", "level": "error"}


def _numbers(versions: Any) -> list[str]:
    return [str(version) for version in versions]


def _below(path: str, folders: tuple[Path, ...]) -> str:
    """A file's path, from its model's folder on where it is in one."""
    for folder in folders:
        if Path(path).is_relative_to(folder):
            return str(Path(path).relative_to(folder))
    return path


def _differences(path: str, before: Any, after: Any) -> Iterator[dict[str, Any]]:
    """Of two values in JSON, by the path of each that is another one."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            inner = f"{path}.{key}" if path else key
            yield from _differences(inner, before.get(key, _MISSING), after.get(key, _MISSING))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for i, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from _differences(f"{path}[{i}]", old, new)
    elif before != after:
        yield {"field": path, "is": before, "would be": after}
