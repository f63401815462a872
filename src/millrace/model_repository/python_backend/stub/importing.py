"""Importing a model's own files: the path and the table of modules are the process's, so one model has them at a time.

A model that is never done with it must not keep the others from being loaded: after PATIENCE_S its turn goes to the
next that waits, and what it had put there is taken away. It may still come to its end; but it finds no further files of
its own.

What a model imports later, inside of its functions, it finds by an `__import__` of its own, which its files have among
their built-ins: there a turn is taken again, for whatever was not imported before. A process of a model's own has its
folder on the path for good.
"""

import builtins
import importlib.util
import itertools
import logging
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

PATIENCE_S = 60.0
log = logging.getLogger(__name__)
_numbers = itertools.count()


class _Loader(SourceFileLoader):
    """A file whose imports are those of its model."""

    built_in: Mapping[str, Any]

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = self.built_in
        super().exec_module(module)


class _Files:
    """The files of one model, and what it made of them; while it has its turn it is a finder of `sys.meta_path`."""

    def __init__(
        self, file: Path, given: Mapping[str, ModuleType], later: Mapping[str, ModuleType], is_alone: bool
    ) -> None:
        """given: modules that it finds under these names. later: those that are found there after its turn

        is_alone: in a process of its own, where its turn has no end
        """
        self.model, self._given, self._later, self._is_alone = file.parent.parent, given, later, is_alone
        self._folders = [str(file.parent), str(self.model)]
        self.package = f"millrace_model_{next(_numbers)}"
        self._modules: dict[str, ModuleType] = {}  # by the names under which it imports them
        self._is_file: dict[str, bool] = {}
        self._built_in = {**vars(builtins), "__import__": self._import}
        self._before: dict[str, ModuleType] = {}
        self.since_s = 0.0

    # ------------------------------------------------------------------ its turn

    def begin(self) -> None:
        self.since_s = time.monotonic()
        self._before = dict(sys.modules)
        sys.modules.update({**self._given, **self._modules})
        sys.path[:0] = self._folders
        sys.meta_path.insert(0, self)

    def end(self) -> None:
        """Put the path and the modules back, but for its package."""
        if self._is_alone:
            sys.meta_path.remove(self)
            return
        # `copy` is one step. A list of its items is not: garbage may be collected amid it, and others import then.
        for name, module in sys.modules.copy().items():
            is_new = self._before.get(name) is not module
            if is_new and self._is_own(module) and name.partition(".")[0] != self.package:
                self._modules[name] = module
                del sys.modules[name]
                if name in self._before:
                    sys.modules[name] = self._before[name]
        sys.meta_path.remove(self)
        for folder in self._folders:
            with suppress(ValueError):  # the model may have changed it, too
                sys.path.remove(folder)
        sys.modules.update(self._later)
        self._before = {}

    def _is_own(self, module: ModuleType) -> bool:
        """Of its files, or a folder without __init__.py."""
        return any(place.startswith(f"{self.model}/") for place in _places(module))

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        spec = None if name in sys.builtin_module_names else PathFinder.find_spec(name, path, target)
        if spec is None or not str(spec.origin).startswith(f"{self.model}/"):
            return None  # whoever finds it otherwise
        return self._with_imports(spec)

    def _with_imports(self, spec: ModuleSpec) -> ModuleSpec:
        if type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
            spec.loader.built_in = self._built_in
        return spec

    # ------------------------------------------------------------------ what it imports

    def executed(self, file: Path) -> ModuleType:
        """model.py, a module of a package that has the files beside it. raises whatever it raises"""
        package = ModuleType(self.package)
        package.__path__ = [str(file.parent)]
        name = f"{self.package}.{file.stem}"
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None, file
        module = importlib.util.module_from_spec(self._with_imports(spec))
        with _turns.of(self):
            sys.modules |= {self.package: package, name: module}  # its dataclasses look for it there
            spec.loader.exec_module(module)
        return module

    def _import(
        self, name: str, of: Any = None, local: Any = None, wanted: Sequence[str] | None = (), level: int = 0
    ) -> Any:
        """As `__import__`."""
        top = name.partition(".")[0]
        if level or self._is_alone or not self._has(top) or _turns.is_of(self):
            return builtins.__import__(name, of, local, wanted or (), level)
        there = self._modules.get(name)
        if there is not None and all(hasattr(there, one) for one in wanted or ()):
            return there if wanted else self._modules[top]
        with _turns.of(self):
            return builtins.__import__(name, of, local, wanted or ())

    def _has(self, top: str) -> bool:
        """Whether a file or a folder beside it, or above its version, has that name."""
        if top not in self._is_file:
            paths = [Path(folder, top) for folder in self._folders]
            self._is_file[top] = top not in sys.stdlib_module_names and any(
                path.is_dir() or path.with_name(f"{top}.py").is_file() for path in paths
            )
        return self._is_file[top]


def _places(module: object) -> list[str]:
    """The file and the folders of whatever is in `sys.modules`, without running any code of it.

    A lazy module imports others, or raises, where an attribute is read; and what is there may be no module at all.
    """
    try:
        known = object.__getattribute__(module, "__dict__")
    except AttributeError:
        return []
    if not isinstance(known, dict):
        return []
    path = known.get("__path__")
    if type(path).__name__ == "_NamespacePath":  # of a folder without __init__.py; iterating over it imports
        path = vars(path).get("_path")
    found = [known.get("__file__"), *(path if isinstance(path, list | tuple) else ())]
    return [place for place in found if isinstance(place, str)]


class _ImportLock:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._now: _Files | None = None

    def is_of(self, files: _Files) -> bool:
        return self._now is files

    @contextmanager
    def of(self, files: _Files) -> Iterator[None]:
        with self._changed:
            while self._now is not None:
                left_s = self._now.since_s + PATIENCE_S - time.monotonic()
                if left_s <= 0:
                    what = "model.py of %s is still being imported after %g s: other models are imported now"
                    log.warning(what, self._now.model.name, PATIENCE_S)
                    self._now.end()
                    break
                self._changed.wait(left_s)
            self._now = files
            files.begin()
        try:
            yield
        finally:
            with self._changed:
                if self._now is files:  # otherwise it was taken away
                    files.end()
                    self._now = None
                    self._changed.notify_all()


_turns = _ImportLock()


def imported(
    file: Path, given: Mapping[str, ModuleType], later: Mapping[str, ModuleType], is_alone: bool
) -> ModuleType:
    """model.py, executed; `sys.modules` has it until it is forgotten. raises whatever it raises

    given, later, is_alone: as `_Files` has them
    """
    files = _Files(file, given, later, is_alone)
    try:
        return files.executed(file)
    except BaseException:
        forget(files.package)
        raise


def forget(module: str) -> None:
    """A model's module by its name, with the others of its package."""
    package = module.partition(".")[0]
    for name in [name for name in list(sys.modules) if name.partition(".")[0] == package]:
        sys.modules.pop(name, None)
