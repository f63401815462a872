"""A model as a load finds it: in the repository's folders, or as a client brings it."""

from collections.abc import Collection, Mapping
from typing import Any

from millrace.errors import RequestError
from millrace.serve.inference.backends import without_backend
from millrace.serve.inference.brought import Brought, Files
from millrace.serve.inference.environment import check_given
from millrace.serve.inference.flags import RepositoryFlags
from millrace.serve.inference.status import Code, StatusError, invalid
from millrace.serve.repository import folders
from millrace.serve.repository.from_json import text_of
from millrace.serve.repository.problems import Level, Problem
from millrace.serve.repository.stamps import stamp


def read_now(flags: RepositoryFlags, name: str, given: Brought) -> tuple[object, folders.Model | None]:
    """What its files are, as a stamp, and what they say. raises StatusError for what a client may not bring"""
    roots, which = [given.folder.root] if given.folder else flags.roots, flags.model_config_name
    of_files, read = stamp(roots, name), folders.read_model(roots, name, which, given.config)
    if given.config is not None and read is not None:
        own = folders.read_model(flags.roots, name, which)
        check_given(read.config, own.config if own is not None else None, with_files=given.folder is not None)
    return of_files, read


def read_to_tell(
    flags: RepositoryFlags, name: str, given: Brought, served: Collection[str]
) -> tuple[object, folders.Model | None]:
    """As `read_now`; what a load would meet only later is among the problems. served: models that it would not load"""
    of_files, read = read_now(flags, name, given)
    if read is None:
        return of_files, read
    steps, problems = folders.steps_of(read, flags.roots, flags.model_config_name, served)
    read.problems += [*without_backend(read), *problems]
    for step in (step for of_step, step in steps.items() if of_step not in {*served, name}):
        errors = (p for p in [*step.problems, *without_backend(step)] if p.level is Level.ERROR)
        if (why := next(errors, None)) is not None:
            what = f"ensemble '{name}' depends on '{step.name}', which cannot be loaded: {why.where}: {why.what}"
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
        folders.check_model_name(name)
    except RequestError as error:
        raise StatusError(Code.INVALID_ARG, error.what) from None
