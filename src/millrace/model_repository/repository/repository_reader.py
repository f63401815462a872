"""Reads a repository's folders: models with versions, labels and files, and all problems with them.

Each folder is a model, with its versions below it. An invalid model does not affect others. Nothing outside of the
repository is read: links and names that leave it are refused. Clients' names are checked by `model_names.py`.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from millrace.errors import ConfigError
from millrace.model_repository.config.autocomplete import backend_violation, complete_config
from millrace.model_repository.config.config_rules import (
    ENSEMBLE,
    RuleViolation,
    rule_violations,
    unsupported_settings,
    unused_settings,
)
from millrace.model_repository.config.data_files_check import data_violations, short_file
from millrace.model_repository.config.ensemble_rules import ensemble_violations
from millrace.model_repository.config.message_fields import empty
from millrace.model_repository.config.model_config import InitialState, ModelConfig, WarmupInput
from millrace.model_repository.config.pbtxt_binder import ParsedConfig, Path_, TooManyProblems, place_of, read_config
from millrace.model_repository.config.pbtxt_parser import MAX_BYTES
from millrace.model_repository.config.problems import ConfigProblem, Level, SourcePosition
from millrace.model_repository.repository.model_names import may_be_folder
from millrace.settings import read_bounded

CONFIG = "config.pbtxt"
_KNOWN_FOLDERS = ("configs", "warmup", "initial_state")  # folders next to the versions
_MAX_ENTRIES, _MAX_LABEL_BYTES = 10_000, 16 << 20
_HIGHEST_VERSION = (1 << 63) - 1


@dataclass(slots=True)
class ModelFolder:
    """A model's folder. config: completed, with its valid part. served: the `versions` its policy selects"""

    name: str
    folder: Path
    config: ModelConfig = field(default_factory=lambda: empty(ModelConfig))
    versions: tuple[int, ...] = ()
    served: tuple[int, ...] = ()
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by output
    added: tuple[str, ...] = ()  # what completion added, in words
    file: Path | None = None  # the configuration file that was read
    places: Mapping[Path_, SourcePosition] = field(default_factory=dict)  # positions in it, by path
    problems: list[ConfigProblem] = field(default_factory=list)

    def add_error(self, broken: RuleViolation) -> None:
        """Add a violation as an error with its position."""
        file, place = self.file or self.folder, place_of(self.places, broken.path)
        self.problems.append(ConfigProblem(Level.ERROR, file, place, broken.what, broken.expected, broken.fix))

    @property
    def is_servable(self) -> bool:
        return not any(p.level is Level.ERROR for p in self.problems)


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository. problems: those of the folder as a whole"""

    root: Path
    models: tuple[ModelFolder, ...]
    problems: tuple[ConfigProblem, ...]


def read_repository(root: Path, config_name: str = "") -> Repository:
    """Read every model; `multi_repository.py` checks the steps of ensembles. raises ConfigError

    config_name: `<model>/configs/<config_name>.pbtxt` is used if it exists
    """
    if config_name and (not _is_plain(config_name) or "/" in config_name):
        raise ConfigError(f"--model-config-name {config_name}", "a file's name without .pbtxt", "h100, for h100.pbtxt")
    if not root.is_dir():
        raise ConfigError(f"{root} is no folder", "a model repository: a folder with one a model", "check the path")
    problems: list[ConfigProblem] = []
    models = []
    entries = _entries(root, problems)
    if any(name == CONFIG for name, _ in entries) and any(name.isdecimal() for name, _ in entries):
        message = f"{root} is the folder of one model: it has {CONFIG} and versions"
        raise ConfigError(message, "the model repository that it is in", f"say {root.absolute().parent}")
    for name, path in entries:
        if name.startswith("."):
            problems.append(_ignored(path, "its name begins with a dot, so it is no model"))
        elif not path.is_dir() and path.exists():
            problems.append(_ignored(path, "only folders are models"))
        else:
            models.append(_model(root, path, config_name))
    if not models:
        problems.append(ConfigProblem(Level.ERROR, root, None, "no model", "a folder for each model", "check the path"))
    return Repository(root, tuple(models), tuple(problems))


def read_model(
    roots: Sequence[Path], name: str, config_name: str = "", override: bytes | None = None
) -> ModelFolder | None:
    """Read one model, if any repository has it, without checking the steps of an ensemble.

    override: replaces the configuration file
    """
    present = [root for root in roots if has_model(root, name)]
    if not present:
        return None
    model = _model(present[0], present[0] / name, config_name, override)
    if len(present) > 1:
        expected = f"{present[0] / name} to be the only one"
        message = "model appears in two or more repositories"
        fix = "rename one of them, or give --model-namespacing"
        model.problems.append(ConfigProblem(Level.ERROR, model.folder, None, message, expected, fix))
    return model


def has_model(root: Path, name: str) -> bool:
    """Return whether a model's folder exists. name: from a client or an ensemble step"""
    return may_be_folder(name) and (root / name).is_dir()


def model_names(roots: Sequence[Path]) -> list[str]:
    """Return the names of all folders that may be models."""
    names = {name for root in roots for name, path in _entries(root, []) if path.is_dir() and not name.startswith(".")}
    return sorted(names)


def _ignored(path: Path, reason: str) -> ConfigProblem:
    return ConfigProblem(Level.IGNORED, path, None, "not read", reason, "it may stay or go")


def _entries(folder: Path, problems: list[ConfigProblem]) -> list[tuple[str, Path]]:
    """List a folder: sorted names with their paths."""
    try:
        with os.scandir(folder) as scan:
            names = [entry.name for _, entry in zip(range(_MAX_ENTRIES + 1), scan, strict=False)]
    except OSError as error:
        fix = "check its rights"
        problems.append(ConfigProblem(Level.ERROR, folder, None, f"{error.strerror}", "a folder that can be read", fix))
        return []
    if len(names) > _MAX_ENTRIES:
        message = f"more than {_MAX_ENTRIES:,} entries"
        problems.append(
            ConfigProblem(Level.ERROR, folder, None, message, "a folder of a repository", "is it the right one?")
        )
    return [(name, folder / name) for name in sorted(names[:_MAX_ENTRIES])]


def leaves_root(root: Path, path: Path) -> bool:
    """Return whether a link leaves the repository, is broken or forms a cycle."""
    try:
        return not path.resolve(strict=True).is_relative_to(root.resolve())
    except (OSError, RuntimeError):
        return True


def _is_plain(name: str) -> bool:
    """Return whether a file name of a configuration stays below its folder."""
    return bool(name) and "\0" not in name and not name.startswith("/") and ".." not in name.split("/")


def _model(root: Path, folder: Path, config_name: str, override: bytes | None = None) -> ModelFolder:
    model = ModelFolder(folder.name, folder)
    if leaves_root(root, folder):
        _add_outside_problem(model, folder)
        return model
    given_file = folder / "(given).pbtxt"
    read = _read(root, model, config_name) if override is None else read_config(override, given_file)
    entries = _entries(folder, model.problems)
    versions = tuple(sorted(_versions(root, model, entries)))
    first = _entries(folder / str(versions[0]), model.problems) if versions else []
    parsed = read.config
    config, added = complete_config(parsed, folder.name, [name for name, _ in first])
    model.config, model.versions = config, versions
    model.file, model.places = read.file, read.places
    model.added = added if read.places else ("config.pbtxt, from the folder", *added)
    is_read = not any(p.level is Level.ERROR for p in read.problems)
    with suppress(TooManyProblems):
        _apply_version_policy(model, read)
        if is_read:  # otherwise missing values would violate most rules
            rules = rule_violations(config), data_violations(config), unsupported_settings(config)
            for broken in chain(_identity_violations(model), ensemble_violations(config), *rules):
                _add_violation(read, broken)
            for broken in unused_settings(config):
                _add_violation(read, broken, Level.IGNORED)
            _files(root, model, read)
    model.problems.extend(read.problems)
    return model


def _add_outside_problem(model: ModelFolder, path: Path) -> None:
    expected = "files and folders of the repository itself"
    message = "a link that leads out of the repository, or nowhere"
    model.problems.append(ConfigProblem(Level.ERROR, path, None, message, expected, "copy or move what it leads to"))


def _add_violation(read: ParsedConfig, broken: RuleViolation, level: Level = Level.ERROR) -> None:
    read.add(level, read.place(broken.path), broken.what, broken.expected, broken.fix)


def _read(root: Path, model: ModelFolder, config_name: str) -> ParsedConfig:
    """Read the configuration file; without one, return an empty configuration."""
    file = model.folder / CONFIG
    if config_name and (other := model.folder / "configs" / f"{config_name}.pbtxt").is_file():
        file = other
    if not os.path.lexists(file):
        return ParsedConfig(file)
    if leaves_root(root, file):
        _add_outside_problem(model, file)
        return ParsedConfig(file)
    try:
        data = read_bounded(file, MAX_BYTES) if file.is_file() else None
    except OSError as error:
        read = ParsedConfig(file)
        read.add(Level.ERROR, None, f"{error.strerror}", "a file that can be read", "check its rights")
        return read
    if data is None:
        read = ParsedConfig(file)
        read.add(Level.ERROR, None, "not a file", "a text file", "remove or replace it")
        return read
    return read_config(data, file)


def _versions(root: Path, model: ModelFolder, entries: Sequence[tuple[str, Path]]) -> Iterator[int]:
    for name, path in entries:
        if not path.is_dir() or name in _KNOWN_FOLDERS or name.startswith((".", "__")):
            continue
        digits = name.isascii() and name.isdigit()
        if not digits or name.startswith("0") or len(name) > 19 or int(name) > _HIGHEST_VERSION:
            reason = "a version is a whole number from 1, without a zero before it"
            model.problems.append(_ignored(path, reason))
        elif leaves_root(root, path):
            _add_outside_problem(model, path)
        else:
            yield int(name)


def _apply_version_policy(model: ModelFolder, read: ParsedConfig) -> None:
    """Determine the versions that the policy serves."""
    policy, present = model.config.version_policy, model.versions
    assert policy is not None, "completed() gives one"
    if policy.specific is not None:
        requested = frozenset(policy.specific.versions)
        model.served = tuple(v for v in present if v in requested)
        for i, version in enumerate(policy.specific.versions):
            if version not in present:
                place = read.place(("version_policy", "specific", "versions", i))
                message = f"version {version} is specified, and there is no folder {version}"
                expected = f"one of: {', '.join(map(str, present)) or '(there is none)'}"
                read.add(Level.WARNING, place, message, expected, "make the folder, or remove the version")
    elif policy.latest is not None:
        model.served = present[-policy.latest.num_versions :] if policy.latest.num_versions else ()
    else:
        model.served = present
    if not model.served:
        message = f"at least one version must be available under the version policy of model '{model.name}'"
        fix = f"make {model.folder.name}/1 with the model in it" if not present else "correct version_policy"
        if model.config.platform == ENSEMBLE and not present:
            fix = f"make an empty folder {model.folder.name}/1: ensembles have a version, too"
        expected = f"one of the versions {', '.join(map(str, present))}" if present else "a folder named 1, 2, ..."
        read.add(Level.ERROR, read.place(("version_policy",)), message, expected, fix)


def _identity_violations(model: ModelFolder) -> Iterator[RuleViolation]:
    config = model.config
    if config.name != model.name:
        message = (
            f"unexpected directory name '{model.name}' for model '{config.name}', directory name must equal model name"
        )
        yield RuleViolation(
            ("name",), message, f'name: "{model.name}", or no name', "rename the folder, or remove name"
        )
    backend = backend_violation(config)
    if backend is not None:  # a completed value has no position: use that of its source
        paths: list[Path_] = [backend.path, ("platform",), ("backend",), ("default_model_filename",)]
        at = next((path for path in paths if path in model.places), backend.path)
        yield replace(backend, path=at if backend.path else ())


def _files(root: Path, model: ModelFolder, read: ParsedConfig) -> None:
    """Check the files that a configuration names: model, labels, warm-up data, initial states."""
    config, folder = model.config, model.folder
    name = config.default_model_filename
    if name and not _is_plain(name):
        _add_violation(
            read,
            RuleViolation(
                ("default_model_filename",), f"{name} leaves the model's folder", "a name in it", "correct it"
            ),
        )
    elif name:
        for version in model.versions:
            _file(root, read, ("default_model_filename",), folder / str(version) / name)
    for i, output in enumerate(config.output):
        path = ("output", i, "label_filename")
        labels = _inner(root, read, path, folder, output.label_filename) if output.label_filename else None
        if labels is not None:
            model.labels[output.name] = _labels(read, path, labels)
    for i, warmup in enumerate(config.model_warmup):
        for key, tensor in warmup.inputs.items():
            if tensor.input_data_file:
                at: Path_ = ("model_warmup", i, "inputs", key, "value", "input_data_file")
                _data(root, read, at, folder / "warmup", tensor.input_data_file, tensor)
    for i, state in enumerate(config.sequence_batching.state if config.sequence_batching else ()):
        for j, initial in enumerate(state.initial_state):
            if initial.data_file:
                at = ("sequence_batching", "state", i, "initial_state", j, "data_file")
                _data(root, read, at, folder / "initial_state", initial.data_file, initial)


def _data(
    root: Path, read: ParsedConfig, path: Path_, folder: Path, name: str, tensor: InitialState | WarmupInput
) -> None:
    file = _inner(root, read, path, folder, name)
    if file is None:
        return
    if not file.is_file():
        _add_violation(read, RuleViolation(path, f"{file} is not a file", "the tensor's bytes", "replace it"))
    elif (message := short_file(tensor, name, file.stat().st_size)) is not None:
        _add_violation(
            read,
            RuleViolation(
                path, message, "the tensor's bytes, one element after the other", "replace the file, or its dims"
            ),
        )


def _inner(root: Path, read: ParsedConfig, path: Path_, folder: Path, name: str) -> Path | None:
    if not _is_plain(name):
        _add_violation(
            read, RuleViolation(path, f"{name} leaves the model's folder", f"a name in {folder.name}/", "correct it")
        )
        return None
    return _file(root, read, path, folder / name)


def _file(root: Path, read: ParsedConfig, path: Path_, file: Path) -> Path | None:
    """Return a file if it exists inside of the repository; otherwise add an error."""
    if not os.path.lexists(file):
        _add_violation(
            read,
            RuleViolation(path, f"there is no {file}", "the file that the configuration names", "add it, or rename"),
        )
    elif leaves_root(root, file):
        message = f"{file} is a link that leads out of the repository, or nowhere"
        _add_violation(
            read, RuleViolation(path, message, "files of the repository itself", "copy or move what it leads to")
        )
    else:
        return file
    return None


def _labels(read: ParsedConfig, path: Path_, file: Path) -> tuple[str, ...]:
    """Read labels, one per line, for the classification extension."""
    if not file.is_file():
        _add_violation(read, RuleViolation(path, f"{file} is not a file", "UTF-8 text, a label a line", "replace it"))
        return ()
    try:
        data = read_bounded(file, _MAX_LABEL_BYTES)
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        _add_violation(
            read,
            RuleViolation(path, f"{file} has no labels: {error}", "UTF-8 text, a label a line", "correct the file"),
        )
        return ()
    if len(data) > _MAX_LABEL_BYTES:
        message = f"{file} has more than {_MAX_LABEL_BYTES:,} bytes"
        _add_violation(read, RuleViolation(path, message, "labels", "is it the right file?"))
    return tuple(line.rstrip("\r") for line in text.removesuffix("\n").split("\n"))
