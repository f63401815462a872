"""Reads a model for a load: from the repository's folders, or from the request's overrides."""

from collections.abc import Mapping
from typing import Any

from millrace.errors import RequestError
from millrace.model_repository.backends import missing_backend_problems
from millrace.model_repository.config.json_to_pbtxt import to_pbtxt
from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.config.problems import ConfigProblem, Level
from millrace.model_repository.lifecycle.load_override import Files, LoadOverride
from millrace.model_repository.lifecycle.override_checks import check_config_override
from millrace.model_repository.repository import repository_reader
from millrace.model_repository.repository.file_mtimes import stamp
from millrace.model_repository.repository.model_names import ModelId, check_model_name
from millrace.model_repository.repository.multi_repository import Repositories
from millrace.model_repository.request.status_code import Code, StatusError, invalid


def read_for_load(
    repositories: Repositories, model_id: ModelId, override: LoadOverride
) -> tuple[object, repository_reader.ModelFolder | None]:
    """Return the stamp of a model's files and the model read from them. raises StatusError for refused overrides"""
    roots = [override.folder.root] if override.folder else repositories.roots_of(model_id)
    file_stamp, read = (
        stamp(roots, model_id.name),
        repository_reader.read_model(roots, model_id.name, repositories.config_name, override.config),
    )
    if override.config is not None and read is not None:
        own = repositories.read(model_id)
        check_config_override(
            read.config, own.config if own is not None else None, with_files=override.folder is not None
        )
    return file_stamp, read


def read_for_dry_run(
    repositories: Repositories, model_id: ModelId, override: LoadOverride, served: Mapping[ModelId, ModelConfig]
) -> tuple[object, repository_reader.ModelFolder | None]:
    """Read like `read_for_load`, adding problems that a load would find later. served: models already loaded"""
    file_stamp, read = read_for_load(repositories, model_id, override)
    if read is None:
        return file_stamp, read
    read.problems += missing_backend_problems(read)
    for step_id, step in repositories.steps_of(read, model_id, served).items():
        errors = (p for p in [*step.problems, *missing_backend_problems(step)] if p.level is Level.ERROR)
        if step_id not in served and step_id != model_id and (problem := next(errors, None)) is not None:
            message = f"ensemble '{model_id}' depends on '{step_id}', which cannot be loaded: "
            message += f"{problem.location}: {problem.what}"
            read.problems.append(
                ConfigProblem(Level.ERROR, read.file or read.folder, None, message, problem.expected, problem.fix)
            )
    return file_stamp, read


def config_text(name: str, config: Mapping[str, Any] | None, files: Files | None) -> bytes | None:
    """Return a load request's configuration as the text of config.pbtxt. raises StatusError"""
    if files and config is None:
        raise invalid(f"failed to load '{name}', override files are given without the parameter 'config'")
    return None if config is None else to_pbtxt(config).encode("utf-8", "surrogatepass")


def check_name(name: str) -> None:
    """Check a client's model name. raises StatusError"""
    try:
        check_model_name(name)
    except RequestError as error:
        raise StatusError(Code.INVALID_ARG, error.what) from None
