"""A model as a load finds it: in the repository's folders, or as a client brings it."""

from collections.abc import Mapping
from typing import Any

from millrace.errors import RequestError
from millrace.model_repository.backends import without_backend
from millrace.model_repository.config.json_to_pbtxt import text_of
from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.config.problems import Level, Problem
from millrace.model_repository.lifecycle.load_override import Files, LoadOverride
from millrace.model_repository.lifecycle.override_checks import check_config_override
from millrace.model_repository.repository import repository_reader
from millrace.model_repository.repository.file_mtimes import stamp
from millrace.model_repository.repository.model_names import ModelId, check_model_name
from millrace.model_repository.repository.multi_repository import Repositories
from millrace.model_repository.request.status_code import Code, StatusError, invalid


def read_for_load(of: Repositories, one: ModelId, given: LoadOverride) -> tuple[object, repository_reader.Model | None]:
    """What its files are, as a stamp, and what they say. raises StatusError for what a client may not bring"""
    roots = [given.folder.root] if given.folder else of.of(one)
    of_files, read = stamp(roots, one.name), repository_reader.read_model(roots, one.name, of.config_name, given.config)
    if given.config is not None and read is not None:
        own = of.read(one)
        check_config_override(read.config, own.config if own is not None else None, with_files=given.folder is not None)
    return of_files, read


def read_for_dry_run(
    of: Repositories, one: ModelId, given: LoadOverride, served: Mapping[ModelId, ModelConfig]
) -> tuple[object, repository_reader.Model | None]:
    """Like `read_for_load`, with the problems that a load would find later. served: models that it would not load"""
    of_files, read = read_for_load(of, one, given)
    if read is None:
        return of_files, read
    read.problems += without_backend(read)
    for of_step, step in of.steps_of(read, one, served).items():
        errors = (p for p in [*step.problems, *without_backend(step)] if p.level is Level.ERROR)
        if of_step not in served and of_step != one and (why := next(errors, None)) is not None:
            what = f"ensemble '{one}' depends on '{of_step}', which cannot be loaded: {why.where}: {why.what}"
            read.problems.append(Problem(Level.ERROR, read.file or read.folder, None, what, why.expected, why.mend))
    return of_files, read


def config_text(name: str, config: Mapping[str, Any] | None, files: Files | None) -> bytes | None:
    """A configuration that comes with a load, as the text of config.pbtxt. raises StatusError"""
    if files and config is None:
        raise invalid(f"failed to load '{name}', override files are given without the parameter 'config'")
    return None if config is None else text_of(config).encode("utf-8", "surrogatepass")


def check_name(name: str) -> None:
    """raises StatusError"""
    try:
        check_model_name(name)
    except RequestError as error:
        raise StatusError(Code.INVALID_ARG, error.what) from None
