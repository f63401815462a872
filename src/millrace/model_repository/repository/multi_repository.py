"""Several repositories together: which model a name means, and whether the steps of ensembles are models there.

Without namespacing no name may occur in two of them. With it the folder that a model is in is part of what it is: a
step of an ensemble is the model beside it, or the only one of that name elsewhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from millrace.model_repository.config.autocomplete import ADDING_NOTHING, NETWORKS
from millrace.model_repository.config.config_rules import RuleViolation
from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.config.pbtxt_binder import MORE, MOST_PROBLEMS, Path_
from millrace.model_repository.config.problems import Level, Problem
from millrace.model_repository.repository.cycles import rings
from millrace.model_repository.repository.ensemble_tensor_check import tensor_mismatches
from millrace.model_repository.repository.model_names import ModelId, chosen
from millrace.model_repository.repository.repository_reader import (
    Model,
    Repository,
    has_model,
    model_names,
    read_model,
    read_repository,
)
from millrace.settings import read_given

_Models = Mapping[ModelId, Model]
_MOST_MODEL_BYTES = 1 << 20  # of a model.py that is looked into


@dataclass(frozen=True, slots=True)
class Repositories:
    """config_name: as `read_repository` has it. namespacing: a name may occur in several of them"""

    folders: tuple[Path, ...]
    config_name: str = ""
    namespacing: bool = False

    def ids(self) -> list[ModelId]:
        """Of every folder that may be a model's, in order."""
        if not self.namespacing:
            return [ModelId("", name) for name in model_names(self.folders)]
        return sorted({ModelId(str(root), name) for root in self.folders for name in model_names([root])})

    def named(self, name: str) -> list[ModelId]:
        """Those that a name means. Where no folder has it, none with a namespace."""
        found = [ModelId(str(root), name) for root in self.folders if has_model(root, name)] if self.namespacing else []
        return sorted(set(found)) or [ModelId("", name)]

    def of(self, one: ModelId) -> Sequence[Path]:
        """Where its folder is looked for."""
        return [Path(one.namespace)] if one.namespace else self.folders

    def read(self, one: ModelId, given: bytes | None = None) -> Model | None:
        """As `read_model` does."""
        return read_model(self.of(one), one.name, self.config_name, given)

    def steps_of(self, model: Model, of: ModelId, served: Mapping[ModelId, ModelConfig]) -> _Models:
        """Of an ensemble and those in it, each as a load would find it. What is wrong with it is said of `model`, too.

        served: what is there already, whatever folders say
        """
        found: dict[ModelId, Model] = {}
        left = [(of, model)]
        while left:
            by, ensemble = left.pop()
            for name in _step_names(ensemble):
                there = {*self.named(name), *(one for one in served if one.name == name)}
                step = chosen(ModelId(by.namespace, name), there)
                if step is None or step in found:
                    continue
                is_served = step in served and step != of
                read = Model(name, self.of(step)[0] / name, served[step]) if is_served else self.read(step)
                if read is not None:
                    found[step] = read
                    left.append((step, read))
        _check_steps(of, model, Names({**found, of: model}))
        return found


def read_repositories(folders: Sequence[Path], config_name: str = "", *, namespacing: bool = False) -> list[Repository]:
    """As Triton takes them. raises ConfigError"""
    found = [read_repository(root, config_name) for root in folders]
    everybody: dict[ModelId, list[Model]] = {}
    for repository in found:
        for model in repository.models:
            everybody.setdefault(_id(repository, model, namespacing), []).append(model)
    for models in everybody.values():
        for model, other in zip(models, [*models[1:], models[0]], strict=True):
            if other is not model:
                _twice(model, other)
    firsts = Names({one: models[0] for one, models in everybody.items()})
    for one, models in everybody.items():
        for model in models:
            _check_steps(one, model, firsts)
    return found


class Names:
    """Models, by what the steps of ensembles call them: made once for all of these, of which there may be thousands."""

    def __init__(self, models: _Models) -> None:
        self._models = models
        self._by_name: dict[str, list[ModelId]] = {}
        for one in models:
            self._by_name.setdefault(one.name, []).append(one)
        meant = {one: [self.meant(one, name) for name in _step_names(model)] for one, model in models.items()}
        self._rings = rings({one: [step for step in steps if step is not None] for one, steps in meant.items()})
        self._whole: dict[ModelId, tuple[ModelId, ModelConfig] | None] = {}

    def meant(self, by: ModelId, name: str) -> ModelId | None:
        """By a step of that ensemble; None: no model here, or several."""
        return chosen(ModelId(by.namespace, name), self._by_name.get(name, ()))

    def ring(self, one: ModelId, model: Model) -> ModelId | None:
        """Who needs the ensemble that needs it. model: of a second one of its name nothing is told"""
        return self._rings.get(one) if model is self._models[one] else None

    def whole(self, one: ModelId | None) -> tuple[ModelId, ModelConfig] | None:
        """As the function; files are looked into once."""
        if one is None or self._models[one].config.ensemble_scheduling is not None:  # what is said of that may change
            return whole(one, self._models)
        if one not in self._whole:
            self._whole[one] = whole(one, self._models)
        return self._whole[one]


def _id(repository: Repository, model: Model, namespacing: bool) -> ModelId:
    return ModelId(str(repository.root) if namespacing else "", model.name)


def _twice(model: Model, other: Model) -> None:
    what = "model appears in two or more repositories"
    expected, mend = f"{other.folder} to be the only one", "rename one of them, or give --model-namespacing"
    model.problems.append(Problem(Level.ERROR, model.folder, None, what, expected, mend))


def _step_names(model: Model) -> list[str]:
    scheduling = model.config.ensemble_scheduling
    return sorted({step.model_name for step in scheduling.step}) if scheduling else []


def _check_steps(of: ModelId, model: Model, names: Names) -> None:
    """Whether an ensemble's steps are models here, none is the ensemble itself, and their tensors fit one another."""
    scheduling = model.config.ensemble_scheduling
    if scheduling is None:
        return
    missing = [name for name in _step_names(model) if name and names.meant(of, name) is None]
    if missing:
        what = f"ensemble {of} contains models that are not available or ambiguous: {', '.join(missing)}"
        first = next(i for i, step in enumerate(scheduling.step) if step.model_name == missing[0])
        path: Path_ = ("ensemble_scheduling", "step", first, "model_name")
        model.say(RuleViolation(path, what, "models of this repository", "add them, or correct model_name"))
    if (by := names.ring(of, model)) is not None:
        what = f"circular dependency between ensembles: {of} -> ... -> {by} -> {of}"
        expected = "steps that need one another in one direction"
        model.say(RuleViolation(("ensemble_scheduling",), what, expected, "cut the circle"))
    elif not missing and model.is_servable:
        steps = [names.whole(names.meant(of, step.model_name)) for step in scheduling.step]
        for i, broken in enumerate(tensor_mismatches(of, model.config, steps)):
            model.say(broken if i < MOST_PROBLEMS else RuleViolation(broken.path, *MORE))
            if i == MOST_PROBLEMS:
                break


def whole(one: ModelId | None, models: _Models) -> tuple[ModelId, ModelConfig] | None:
    """None where its backend tells at a load what more it takes and makes, or its configuration is wrong."""
    if one is None or not models[one].is_servable:
        return None
    config = models[one].config
    says_all = bool(config.input and config.output)
    if not says_all or not (config.ensemble_scheduling or _adds_nothing(models[one])):
        return None
    return one, config


def autocompletes_batching(model: Model) -> bool:
    """Whether its backend may give it batches at a load, where its configuration says none."""
    config = model.config
    if config.max_batch_size or config.ensemble_scheduling is not None or not config.backend:
        return False
    return not (config.input or config.output) if config.backend in NETWORKS else not _adds_nothing(model)


def _adds_nothing(model: Model) -> bool:
    """Its backend, to the inputs and outputs that it says."""
    config = model.config
    if config.backend != "python":
        return config.backend in ADDING_NOTHING
    for version in model.served:
        try:
            text = read_given(model.folder / str(version) / config.default_model_filename, _MOST_MODEL_BYTES)
        except OSError:
            return False
        if b"auto_complete_config" in text or len(text) > _MOST_MODEL_BYTES:
            return False
    return True
