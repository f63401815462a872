"""A repository's folders: its models with their versions, labels and files, and everything that is wrong with them.

One folder a model, its versions below it. A model that is wrong hides no other. Nothing outside of the repository is
read: what a link or a name leads out to is refused. Names that come from clients go through `model_names.py`.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from millrace.errors import ConfigError
from millrace.model_repository.config.autocomplete import broken_backend, completed
from millrace.model_repository.config.config_rules import ENSEMBLE, RuleViolation, broken_rules, not_yet, unused
from millrace.model_repository.config.data_files_check import broken_data, short_file
from millrace.model_repository.config.ensemble_rules import broken_ensemble
from millrace.model_repository.config.message_fields import empty
from millrace.model_repository.config.model_config import InitialState, ModelConfig, WarmupInput
from millrace.model_repository.config.pbtxt_binder import ParsedConfig, Path_, TooManyProblems, place_of, read_config
from millrace.model_repository.config.pbtxt_parser import MOST_BYTES
from millrace.model_repository.config.problems import Level, Place, Problem
from millrace.model_repository.repository.model_names import may_be_folder
from millrace.settings import read_given

CONFIG = "config.pbtxt"
_KNOWN_FOLDERS = ("configs", "warmup", "initial_state")  # beside the versions
_MOST_ENTRIES, _MOST_LABEL_BYTES = 10_000, 16 << 20
_HIGHEST_VERSION = (1 << 63) - 1


@dataclass(slots=True)
class Model:
    """A folder. config: completed, with what could be read of it; served: by its version policy, of `versions`"""

    name: str
    folder: Path
    config: ModelConfig = field(default_factory=lambda: empty(ModelConfig))
    versions: tuple[int, ...] = ()
    served: tuple[int, ...] = ()
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of an output
    added: tuple[str, ...] = ()  # what the configuration did not say
    file: Path | None = None  # of its configuration, as it was read
    places: Mapping[Path_, Place] = field(default_factory=dict)  # there, of what it says
    problems: list[Problem] = field(default_factory=list)

    def say(self, broken: RuleViolation) -> None:
        """An error, where it stands."""
        file, place = self.file or self.folder, place_of(self.places, broken.path)
        self.problems.append(Problem(Level.ERROR, file, place, broken.what, broken.expected, broken.mend))

    @property
    def is_servable(self) -> bool:
        return not any(p.level is Level.ERROR for p in self.problems)


@dataclass(frozen=True, slots=True)
class Repository:
    """problems: of the folder as a whole"""

    root: Path
    models: tuple[Model, ...]
    problems: tuple[Problem, ...]


def read_repository(root: Path, config_name: str = "") -> Repository:
    """Every model; `multi_repository.py` looks at the steps of ensembles. raises ConfigError

    config_name: `<model>/configs/<it>.pbtxt` is taken where there is one
    """
    if config_name and (not _is_plain(config_name) or "/" in config_name):
        raise ConfigError(f"--model-config-name {config_name}", "a file's name without .pbtxt", "h100, for h100.pbtxt")
    if not root.is_dir():
        raise ConfigError(f"{root} is no folder", "a model repository: a folder with one a model", "check the path")
    problems: list[Problem] = []
    models = []
    entries = _entries(root, problems)
    if any(name == CONFIG for name, _ in entries) and any(name.isdecimal() for name, _ in entries):
        what = f"{root} is the folder of one model: it has {CONFIG} and versions"
        raise ConfigError(what, "the model repository that it is in", f"say {root.absolute().parent}")
    for name, path in entries:
        if name.startswith("."):
            problems.append(_ignored(path, "its name begins with a dot, so it is no model"))
        elif not path.is_dir() and path.exists():
            problems.append(_ignored(path, "only folders are models"))
        else:
            models.append(_model(root, path, config_name))
    if not models:
        problems.append(Problem(Level.ERROR, root, None, "no model", "a folder for each model", "check the path"))
    return Repository(root, tuple(models), tuple(problems))


def read_model(roots: Sequence[Path], name: str, config_name: str = "", given: bytes | None = None) -> Model | None:
    """One of them, where it is in one of the repositories; the steps of an ensemble are not looked at.

    given: a configuration in place of the file's
    """
    there = [root for root in roots if has_model(root, name)]
    if not there:
        return None
    model = _model(there[0], there[0] / name, config_name, given)
    if len(there) > 1:
        expected = f"{there[0] / name} to be the only one"
        what = "model appears in two or more repositories"
        mend = "rename one of them, or give --model-namespacing"
        model.problems.append(Problem(Level.ERROR, model.folder, None, what, expected, mend))
    return model


def has_model(root: Path, name: str) -> bool:
    """Whether there is a folder that may be a model's. name: as a client, or a step of an ensemble, has it"""
    return may_be_folder(name) and (root / name).is_dir()


def model_names(roots: Sequence[Path]) -> list[str]:
    """Of every folder that may be a model's."""
    found = {name for root in roots for name, path in _entries(root, []) if path.is_dir() and not name.startswith(".")}
    return sorted(found)


def _ignored(path: Path, why: str) -> Problem:
    return Problem(Level.IGNORED, path, None, "not read", why, "it may stay or go")


def _entries(folder: Path, problems: list[Problem]) -> list[tuple[str, Path]]:
    """Names in order, with their paths."""
    try:
        with os.scandir(folder) as found:
            names = [entry.name for _, entry in zip(range(_MOST_ENTRIES + 1), found, strict=False)]
    except OSError as error:
        mend = "check its rights"
        problems.append(Problem(Level.ERROR, folder, None, f"{error.strerror}", "a folder that can be read", mend))
        return []
    if len(names) > _MOST_ENTRIES:
        what = f"more than {_MOST_ENTRIES:,} entries"
        problems.append(Problem(Level.ERROR, folder, None, what, "a folder of a repository", "is it the right one?"))
    return [(name, folder / name) for name in sorted(names[:_MOST_ENTRIES])]


def walk_files(root: Path, path: Path) -> bool:
    """Whether a link leads out of the repository, or nowhere, or in a circle."""
    try:
        return not path.resolve(strict=True).is_relative_to(root.resolve())
    except (OSError, RuntimeError):
        return True


def _is_plain(name: str) -> bool:
    """Whether a file that a configuration names lies below the folder that it is relative to."""
    return bool(name) and "\0" not in name and not name.startswith("/") and ".." not in name.split("/")


def _model(root: Path, folder: Path, config_name: str, given_config: bytes | None = None) -> Model:
    model = Model(folder.name, folder)
    if walk_files(root, folder):
        _outside(model, folder)
        return model
    given_file = folder / "(given).pbtxt"
    read = _read(root, model, config_name) if given_config is None else read_config(given_config, given_file)
    entries = _entries(folder, model.problems)
    versions = tuple(sorted(_versions(root, model, entries)))
    first = _entries(folder / str(versions[0]), model.problems) if versions else []
    given = read.config
    config, added = completed(given, folder.name, [name for name, _ in first])
    model.config, model.versions = config, versions
    model.file, model.places = read.file, read.places
    model.added = added if read.places else ("config.pbtxt, from the folder", *added)
    is_read = not any(p.level is Level.ERROR for p in read.problems)
    with suppress(TooManyProblems):
        _choose(model, read)
        if is_read:  # else most of the rules would fail for what is not read
            rules = broken_rules(config), broken_data(config), not_yet(config)
            for broken in chain(_whole(model), broken_ensemble(config), *rules):
                _say(read, broken)
            for broken in unused(config):
                _say(read, broken, Level.IGNORED)
            _files(root, model, read)
    model.problems.extend(read.problems)
    return model


def _outside(model: Model, path: Path) -> None:
    expected = "files and folders of the repository itself"
    what = "a link that leads out of the repository, or nowhere"
    model.problems.append(Problem(Level.ERROR, path, None, what, expected, "copy or move what it leads to"))


def _say(read: ParsedConfig, broken: RuleViolation, level: Level = Level.ERROR) -> None:
    read.add(level, read.place(broken.path), broken.what, broken.expected, broken.mend)


def _read(root: Path, model: Model, config_name: str) -> ParsedConfig:
    """The configuration's file; where there is none, an empty one."""
    file = model.folder / CONFIG
    if config_name and (other := model.folder / "configs" / f"{config_name}.pbtxt").is_file():
        file = other
    if not os.path.lexists(file):
        return ParsedConfig(file)
    if walk_files(root, file):
        _outside(model, file)
        return ParsedConfig(file)
    try:
        data = read_given(file, MOST_BYTES) if file.is_file() else None
    except OSError as error:
        read = ParsedConfig(file)
        read.add(Level.ERROR, None, f"{error.strerror}", "a file that can be read", "check its rights")
        return read
    if data is None:
        read = ParsedConfig(file)
        read.add(Level.ERROR, None, "not a file", "a text file", "remove or replace it")
        return read
    return read_config(data, file)


def _versions(root: Path, model: Model, entries: Sequence[tuple[str, Path]]) -> Iterator[int]:
    for name, path in entries:
        if not path.is_dir() or name in _KNOWN_FOLDERS or name.startswith((".", "__")):
            continue
        digits = name.isascii() and name.isdigit()
        if not digits or name.startswith("0") or len(name) > 19 or int(name) > _HIGHEST_VERSION:
            why = "a version is a whole number from 1, without a zero before it"
            model.problems.append(_ignored(path, why))
        elif walk_files(root, path):
            _outside(model, path)
        else:
            yield int(name)


def _choose(model: Model, read: ParsedConfig) -> None:
    """Which versions the policy serves."""
    policy, there = model.config.version_policy, model.versions
    assert policy is not None, "completed() gives one"
    if policy.specific is not None:
        wanted = frozenset(policy.specific.versions)
        model.served = tuple(v for v in there if v in wanted)
        for i, version in enumerate(policy.specific.versions):
            if version not in there:
                place = read.place(("version_policy", "specific", "versions", i))
                what = f"version {version} is specified, and there is no folder {version}"
                expected = f"one of: {', '.join(map(str, there)) or '(there is none)'}"
                read.add(Level.WARNING, place, what, expected, "make the folder, or remove the version")
    elif policy.latest is not None:
        model.served = there[-policy.latest.num_versions :] if policy.latest.num_versions else ()
    else:
        model.served = there
    if not model.served:
        what = f"at least one version must be available under the version policy of model '{model.name}'"
        mend = f"make {model.folder.name}/1 with the model in it" if not there else "correct version_policy"
        if model.config.platform == ENSEMBLE and not there:
            mend = f"make an empty folder {model.folder.name}/1: ensembles have a version, too"
        expected = f"one of the versions {', '.join(map(str, there))}" if there else "a folder named 1, 2, ..."
        read.add(Level.ERROR, read.place(("version_policy",)), what, expected, mend)


def _whole(model: Model) -> Iterator[RuleViolation]:
    config = model.config
    if config.name != model.name:
        what = (
            f"unexpected directory name '{model.name}' for model '{config.name}', directory name must equal model name"
        )
        yield RuleViolation(("name",), what, f'name: "{model.name}", or no name', "rename the folder, or remove name")
    backend = broken_backend(config)
    if backend is not None:  # what was completed has no place: what it was completed by has
        paths: list[Path_] = [backend.path, ("platform",), ("backend",), ("default_model_filename",)]
        at = next((path for path in paths if path in model.places), backend.path)
        yield replace(backend, path=at if backend.path else ())


def _files(root: Path, model: Model, read: ParsedConfig) -> None:
    """What the configuration names: the model itself, labels, warm-up, initial states."""
    config, folder = model.config, model.folder
    name = config.default_model_filename
    if name and not _is_plain(name):
        _say(
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
    root: Path, read: ParsedConfig, path: Path_, folder: Path, name: str, given: InitialState | WarmupInput
) -> None:
    file = _inner(root, read, path, folder, name)
    if file is None:
        return
    if not file.is_file():
        _say(read, RuleViolation(path, f"{file} is not a file", "the tensor's bytes", "replace it"))
    elif (what := short_file(given, name, file.stat().st_size)) is not None:
        _say(
            read,
            RuleViolation(
                path, what, "the tensor's bytes, one element after the other", "replace the file, or its dims"
            ),
        )


def _inner(root: Path, read: ParsedConfig, path: Path_, folder: Path, name: str) -> Path | None:
    if not _is_plain(name):
        _say(read, RuleViolation(path, f"{name} leaves the model's folder", f"a name in {folder.name}/", "correct it"))
        return None
    return _file(root, read, path, folder / name)


def _file(root: Path, read: ParsedConfig, path: Path_, file: Path) -> Path | None:
    """The file where it is there and inside; an error, with its place, where it is not."""
    if not os.path.lexists(file):
        _say(
            read,
            RuleViolation(path, f"there is no {file}", "the file that the configuration names", "add it, or rename"),
        )
    elif walk_files(root, file):
        what = f"{file} is a link that leads out of the repository, or nowhere"
        _say(read, RuleViolation(path, what, "files of the repository itself", "copy or move what it leads to"))
    else:
        return file
    return None


def _labels(read: ParsedConfig, path: Path_, file: Path) -> tuple[str, ...]:
    """One a line, as classification gives them back."""
    if not file.is_file():
        _say(read, RuleViolation(path, f"{file} is not a file", "UTF-8 text, a label a line", "replace it"))
        return ()
    try:
        data = read_given(file, _MOST_LABEL_BYTES)
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        _say(
            read,
            RuleViolation(path, f"{file} has no labels: {error}", "UTF-8 text, a label a line", "correct the file"),
        )
        return ()
    if len(data) > _MOST_LABEL_BYTES:
        what = f"{file} has more than {_MOST_LABEL_BYTES:,} bytes"
        _say(read, RuleViolation(path, what, "labels", "is it the right file?"))
    return tuple(line.rstrip("\r") for line in text.removesuffix("\n").split("\n"))
