"""Several repositories together: resolution of model names, and checks of ensemble steps across models.

Without namespacing, a name may occur in only one repository. With namespacing, the repository is part of the model's
id: a step of an ensemble refers to the model in the same repository, or to the only one of that name elsewhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from millrace.model_repository.config.autocomplete import ADDING_NOTHING, NETWORKS
from millrace.model_repository.config.config_rules import RuleViolation
from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.config.pbtxt_binder import MAX_PROBLEMS, MORE, Path_
from millrace.model_repository.config.problems import ConfigProblem, Level
from millrace.model_repository.repository.cycles import find_cycles
from millrace.model_repository.repository.ensemble_tensor_check import tensor_mismatches
from millrace.model_repository.repository.model_names import ModelId, resolve_step
from millrace.model_repository.repository.repository_reader import (
    ModelFolder,
    Repository,
    has_model,
    model_names,
    read_model,
    read_repository,
)
from millrace.settings import read_bounded

_Models = Mapping[ModelId, ModelFolder]
_MAX_MODEL_BYTES = 1 << 20  # of a model.py that is searched


@dataclass(frozen=True, slots=True)
class Repositories:
    """Repositories. config_name: as for `read_repository`. namespacing: whether names may occur in several"""

    folders: tuple[Path, ...]
    config_name: str = ""
    namespacing: bool = False

    def ids(self) -> list[ModelId]:
        """Return the ids of all folders that may be models, in order."""
        if not self.namespacing:
            return [ModelId("", name) for name in model_names(self.folders)]
        return sorted({ModelId(str(root), name) for root in self.folders for name in model_names([root])})

    def find_by_name(self, name: str) -> list[ModelId]:
        """Return the models of a name; without any folder, one id without a namespace."""
        ids = [ModelId(str(root), name) for root in self.folders if has_model(root, name)] if self.namespacing else []
        return sorted(set(ids)) or [ModelId("", name)]

    def roots_of(self, model_id: ModelId) -> Sequence[Path]:
        """Return the repositories that are searched for a model's folder."""
        return [Path(model_id.namespace)] if model_id.namespace else self.folders

    def read(self, model_id: ModelId, override: bytes | None = None) -> ModelFolder | None:
        """Read a model as `read_model` does."""
        return read_model(self.roots_of(model_id), model_id.name, self.config_name, override)

    def steps_of(self, model: ModelFolder, ensemble_id: ModelId, served: Mapping[ModelId, ModelConfig]) -> _Models:
        """Read all members of an ensemble, also nested ones, as a load would; add problems with them to `model`.

        served: loaded models, which are used as they are
        """
        members: dict[ModelId, ModelFolder] = {}
        left = [(ensemble_id, model)]
        while left:
            by, ensemble = left.pop()
            for name in _step_names(ensemble):
                candidates = {*self.find_by_name(name), *(model_id for model_id in served if model_id.name == name)}
                step = resolve_step(ModelId(by.namespace, name), candidates)
                if step is None or step in members:
                    continue
                is_served = step in served and step != ensemble_id
                read = ModelFolder(name, self.roots_of(step)[0] / name, served[step]) if is_served else self.read(step)
                if read is not None:
                    members[step] = read
                    left.append((step, read))
        _check_steps(ensemble_id, model, ModelLookup({**members, ensemble_id: model}))
        return members


def read_repositories(folders: Sequence[Path], config_name: str = "", *, namespacing: bool = False) -> list[Repository]:
    """Read several repositories with Triton's rules. raises ConfigError"""
    repositories = [read_repository(root, config_name) for root in folders]
    models_by_id: dict[ModelId, list[ModelFolder]] = {}
    for repository in repositories:
        for model in repository.models:
            models_by_id.setdefault(_id(repository, model, namespacing), []).append(model)
    for models in models_by_id.values():
        for model, other in zip(models, [*models[1:], models[0]], strict=True):
            if other is not model:
                _add_duplicate_problem(model, other)
    firsts = ModelLookup({model_id: models[0] for model_id, models in models_by_id.items()})
    for model_id, models in models_by_id.items():
        for model in models:
            _check_steps(model_id, model, firsts)
    return repositories


class ModelLookup:
    """Lookup of models by the names in ensemble steps, built once for possibly thousands of ensembles."""

    def __init__(self, models: _Models) -> None:
        self._models = models
        self._by_name: dict[str, list[ModelId]] = {}
        for model_id in models:
            self._by_name.setdefault(model_id.name, []).append(model_id)
        resolved = {
            model_id: [self.resolve(model_id, name) for name in _step_names(model)]
            for model_id, model in models.items()
        }
        self._cycles = find_cycles(
            {model_id: [step for step in steps if step is not None] for model_id, steps in resolved.items()}
        )
        self._known_configs: dict[ModelId, tuple[ModelId, ModelConfig] | None] = {}

    def resolve(self, ensemble_id: ModelId, name: str) -> ModelId | None:
        """Resolve a step of ensemble `by`; None if there is no such model, or several."""
        return resolve_step(ModelId(ensemble_id.namespace, name), self._by_name.get(name, ()))

    def cycle_of(self, model_id: ModelId, model: ModelFolder) -> ModelId | None:
        """Return a model on a cycle with this ensemble, or None. Duplicates of a name are not reported."""
        return self._cycles.get(model_id) if model is self._models[model_id] else None

    def known_config(self, model_id: ModelId | None) -> tuple[ModelId, ModelConfig] | None:
        """Return `known_config` of a model, cached, because it may read files."""
        if (
            model_id is None or self._models[model_id].config.ensemble_scheduling is not None
        ):  # an ensemble's problems may still change
            return known_config(model_id, self._models)
        if model_id not in self._known_configs:
            self._known_configs[model_id] = known_config(model_id, self._models)
        return self._known_configs[model_id]


def _id(repository: Repository, model: ModelFolder, namespacing: bool) -> ModelId:
    return ModelId(str(repository.root) if namespacing else "", model.name)


def _add_duplicate_problem(model: ModelFolder, other: ModelFolder) -> None:
    message = "model appears in two or more repositories"
    expected, fix = f"{other.folder} to be the only one", "rename one of them, or give --model-namespacing"
    model.problems.append(ConfigProblem(Level.ERROR, model.folder, None, message, expected, fix))


def _step_names(model: ModelFolder) -> list[str]:
    scheduling = model.config.ensemble_scheduling
    return sorted({step.model_name for step in scheduling.step}) if scheduling else []


def _check_steps(ensemble_id: ModelId, model: ModelFolder, names: ModelLookup) -> None:
    """Check that an ensemble's steps exist, form no cycle, and have matching tensors."""
    scheduling = model.config.ensemble_scheduling
    if scheduling is None:
        return
    missing = [name for name in _step_names(model) if name and names.resolve(ensemble_id, name) is None]
    if missing:
        message = f"ensemble {ensemble_id} contains models that are not available or ambiguous: {', '.join(missing)}"
        first = next(i for i, step in enumerate(scheduling.step) if step.model_name == missing[0])
        path: Path_ = ("ensemble_scheduling", "step", first, "model_name")
        model.add_error(RuleViolation(path, message, "models of this repository", "add them, or correct model_name"))
    if (by := names.cycle_of(ensemble_id, model)) is not None:
        message = f"circular dependency between ensembles: {ensemble_id} -> ... -> {by} -> {ensemble_id}"
        expected = "steps that need one another in one direction"
        model.add_error(RuleViolation(("ensemble_scheduling",), message, expected, "cut the circle"))
    elif not missing and model.is_servable:
        steps = [names.known_config(names.resolve(ensemble_id, step.model_name)) for step in scheduling.step]
        for i, broken in enumerate(tensor_mismatches(ensemble_id, model.config, steps)):
            model.add_error(broken if i < MAX_PROBLEMS else RuleViolation(broken.path, *MORE))
            if i == MAX_PROBLEMS:
                break


def known_config(model_id: ModelId | None, models: _Models) -> tuple[ModelId, ModelConfig] | None:
    """Return the model's configuration if all tensors are known before a load; None if not, or if it is invalid."""
    if model_id is None or not models[model_id].is_servable:
        return None
    config = models[model_id].config
    says_all = bool(config.input and config.output)
    if not says_all or not (config.ensemble_scheduling or _adds_nothing(models[model_id])):
        return None
    return model_id, config


def autocompletes_batching(model: ModelFolder) -> bool:
    """Return whether the backend may enable batching at a load because the configuration is silent."""
    config = model.config
    if config.max_batch_size or config.ensemble_scheduling is not None or not config.backend:
        return False
    return not (config.input or config.output) if config.backend in NETWORKS else not _adds_nothing(model)


def _adds_nothing(model: ModelFolder) -> bool:
    """Return whether the backend adds nothing to the configured inputs and outputs."""
    config = model.config
    if config.backend != "python":
        return config.backend in ADDING_NOTHING
    for version in model.served:
        try:
            text = read_bounded(model.folder / str(version) / config.default_model_filename, _MAX_MODEL_BYTES)
        except OSError:
            return False
        if b"auto_complete_config" in text or len(text) > _MAX_MODEL_BYTES:
            return False
    return True
