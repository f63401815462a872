"""`millrace serve --model-repository DIR`: checks the flags and opens the repository."""

import time

from millrace.errors import ConfigError
from millrace.model_repository.config.problems import Level
from millrace.model_repository.lifecycle.operation_flags import OperationFlags
from millrace.model_repository.models.repository_context import RepositoryContext
from millrace.model_repository.repository.multi_repository import read_repositories
from millrace.model_repository.repository.repository_flags import RepositoryFlags
from millrace.model_repository.repository.repository_reader import Repository
from millrace.serve.protocols.kserve.grpc.grpc_dependency import check_grpc
from millrace.serve.protocols.kserve.repository_backend import RepositoryModel
from millrace.serve.protocols.kserve.restricted_apis import RestrictionFlags


def repository_model(
    flags: RepositoryFlags, guards: RestrictionFlags, operations: OperationFlags
) -> RepositoryModel | None:
    """Open the repository; None if none is given. raises ConfigError if not all of its models can be served"""
    for guard in (guards.http, guards.grpc):  # so that a mistake in them is said at once
        guard()
    RepositoryContext.from_flags(operations)
    if not flags.model_repository:
        if guards != RestrictionFlags():
            message = "parts of KServe's protocols are restricted or headers forwarded, and there are no tensor models"
            raise ConfigError(message, "--model-repository DIR", "name one, or leave these flags out")
        if operations != OperationFlags():
            message = "it is said how tensor models are operated, and there are none"
            raise ConfigError(message, "--model-repository DIR", "name one, or leave these flags out")
        if flags.grpc_port is not None:
            message = f"--grpc-port {flags.grpc_port} is for tensor models, and there are none"
            raise ConfigError(message, "--model-repository DIR", "name one, or leave --grpc-port out")
        chosen = flags.load_model or flags.model_config_name or flags.model_namespacing
        if chosen or flags.model_control_mode != "none":
            message = "models of a repository are chosen, and there is none"
            raise ConfigError(message, "--model-repository DIR", "name one, or leave the other flags out")
        return None
    if flags.load_model and flags.model_control_mode != "explicit":
        message = f"--load-model with --model-control-mode {flags.model_control_mode}"
        raise ConfigError(message, "--model-control-mode explicit", "add it, or leave --load-model out")
    if flags.grpc_port is not None:
        check_grpc("--grpc-port", "leave --grpc-port out")
    source = flags.repositories  # read, so that a mistake is said before a port is taken
    repositories = read_repositories(source.folders, source.config_name, namespacing=source.namespacing)
    if flags.model_control_mode == "none":
        _check(repositories)
    return RepositoryModel(
        name="repository", created=int(time.time()), max_context=0, flags=flags, guards=guards, operations=operations
    )


def _check(repositories: list[Repository]) -> None:
    for repository in repositories:
        problems = [*repository.problems, *(p for model in repository.models for p in model.problems)]
        errors = [p for p in problems if p.level is Level.ERROR]
        if errors:
            first, more = errors[0], f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
            fix = f"{first.fix}; `millrace lint {repository.root}` says everything that is wrong"
            raise ConfigError(f"{first.location}: {first.what}{more}", first.expected, fix)
