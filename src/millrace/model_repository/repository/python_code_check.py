"""Static checks of a model.py: its syntax, and the required class."""

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path

from millrace.model_repository.config.problems import ConfigProblem, Level, SourcePosition
from millrace.model_repository.lifecycle.override_checks import CODE, ENVIRONMENT
from millrace.model_repository.repository.repository_reader import ModelFolder
from millrace.settings import read_bounded

CLASS = "TritonPythonModel"
_MAX_BYTES = 4 << 20  # a larger file is not parsed
_EXPECTED = f"Python code with a class {CLASS}"


def code_problems(model: ModelFolder) -> Iterator[ConfigProblem]:
    """Yield what keeps the files of a Python model from being loaded.

    A model with an environment of its own may have another version of Python: its syntax is not judged.
    """
    if model.config.backend not in CODE or not model.is_servable:
        return
    name = model.config.default_model_filename or "model.py"
    is_ours = ENVIRONMENT not in model.config.parameters
    for version in model.served:
        file = model.folder / str(version) / name
        problem = _problem(file) if file.is_file() and is_ours else None
        if problem is not None:
            yield problem


def _problem(file: Path) -> ConfigProblem | None:
    try:
        code = read_bounded(file, _MAX_BYTES)
        if len(code) > _MAX_BYTES:
            return None
        with warnings.catch_warnings():  # of escapes in its strings
            warnings.simplefilter("ignore")
            tree = ast.parse(code)
    except OSError as error:
        return ConfigProblem(
            Level.ERROR, file, None, f"it cannot be read: {error.strerror}", _EXPECTED, "check its rights"
        )
    except SyntaxError as error:
        place = SourcePosition(error.lineno, error.offset or 1) if error.lineno else None
        return ConfigProblem(Level.ERROR, file, place, f"SyntaxError: {error.msg}", _EXPECTED, "correct the line")
    except (ValueError, RecursionError, MemoryError) as error:  # a null byte; expressions that are nested too deeply
        return ConfigProblem(Level.ERROR, file, None, f"it cannot be parsed: {error}", _EXPECTED, "correct the file")
    if any(_may_have_it(node) for node in ast.walk(tree)):
        return None
    return ConfigProblem(
        Level.ERROR, file, None, f"it has no class {CLASS}", _EXPECTED, f"add class {CLASS}, with execute"
    )


def _may_have_it(node: ast.AST) -> bool:
    """Whether a statement gives the name, or may do so: `from base import *`, `globals()[...]`."""
    match node:
        case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
            return name == CLASS
        case ast.alias(name=name, asname=other):
            return name == "*" or CLASS in (other, name if other is None else "")
        case ast.Constant(value=value):  # in globals(), setattr or exec
            return isinstance(value, str) and CLASS in value
    return False
