"""Imports of a model's own files. sys.path and sys.modules are shared, so models import one at a time.

A model whose import hangs must not block other loads: after IMPORT_LOCK_TIMEOUT_S the import lock passes to the next
model, and the entries of the hanging one are removed. It may still finish, but finds no further files of its own.

Later imports inside of functions use a custom `__import__` in the built-ins of the model's files, which takes the lock
again for modules that were not imported before. In a stub process the model's folder stays on sys.path.
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

IMPORT_LOCK_TIMEOUT_S = 60.0
log = logging.getLogger(__name__)
_numbers = itertools.count()


class _Loader(SourceFileLoader):
    """Loader of a file that imports through its model's `__import__`."""

    built_in: Mapping[str, Any]

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = self.built_in
        super().exec_module(module)


class _Files:
    """Files and modules of one model; a finder on `sys.meta_path` while it holds the import lock."""

    def __init__(
        self, file: Path, aliases: Mapping[str, ModuleType], later_aliases: Mapping[str, ModuleType], is_alone: bool
    ) -> None:
        """aliases: modules visible under these names while importing. later_aliases: the same afterwards

        is_alone: in a stub process, where the lock is never passed on
        """
        self.model, self._aliases, self._later_aliases, self._is_alone = (
            file.parent.parent,
            aliases,
            later_aliases,
            is_alone,
        )
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
        sys.modules.update({**self._aliases, **self._modules})
        sys.path[:0] = self._folders
        sys.meta_path.insert(0, self)

    def end(self) -> None:
        """Restore sys.path and sys.modules, except for the model's package."""
        if self._is_alone:
            sys.meta_path.remove(self)
            return
        # `copy` is atomic; listing the items is not, because a garbage collection may run code that imports.
        for name, module in sys.modules.copy().items():
            is_new = self._before.get(name) is not module
            if is_new and self._is_own(module) and name.partition(".")[0] != self.package:
                self._modules[name] = module
                del sys.modules[name]
                if name in self._before:
                    sys.modules[name] = self._before[name]
        sys.meta_path.remove(self)
        for folder in self._folders:
            with suppress(ValueError):  # the model may have changed it
                sys.path.remove(folder)
        sys.modules.update(self._later_aliases)
        self._before = {}

    def _is_own(self, module: ModuleType) -> bool:
        """Return whether a module comes from the model's files or folders."""
        return any(place.startswith(f"{self.model}/") for place in _places(module))

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        spec = None if name in sys.builtin_module_names else PathFinder.find_spec(name, path, target)
        if spec is None or not str(spec.origin).startswith(f"{self.model}/"):
            return None  # left to the other finders
        return self._with_imports(spec)

    def _with_imports(self, spec: ModuleSpec) -> ModuleSpec:
        if type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
            spec.loader.built_in = self._built_in
        return spec

    # ------------------------------------------------------------------ what it imports

    def execute(self, file: Path) -> ModuleType:
        """Execute model.py as a module of a package of its folder. raises whatever it raises"""
        package = ModuleType(self.package)
        package.__path__ = [str(file.parent)]
        name = f"{self.package}.{file.stem}"
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None, file
        module = importlib.util.module_from_spec(self._with_imports(spec))
        with _import_lock.hold(self):
            sys.modules |= {self.package: package, name: module}  # dataclasses look up their module there
            spec.loader.exec_module(module)
        return module

    def _import(
        self, name: str, globals_: Any = None, locals_: Any = None, fromlist: Sequence[str] | None = (), level: int = 0
    ) -> Any:
        """Import a module, with the signature of `__import__`."""
        top = name.partition(".")[0]
        if level or self._is_alone or not self._has(top) or _import_lock.is_held_by(self):
            return builtins.__import__(name, globals_, locals_, fromlist or (), level)
        existing = self._modules.get(name)
        if existing is not None and all(hasattr(existing, attribute) for attribute in fromlist or ()):
            return existing if fromlist else self._modules[top]
        with _import_lock.hold(self):
            return builtins.__import__(name, globals_, locals_, fromlist or ())

    def _has(self, top: str) -> bool:
        """Return whether the version's folder or the model's has a file or folder of that name."""
        if top not in self._is_file:
            paths = [Path(folder, top) for folder in self._folders]
            self._is_file[top] = top not in sys.stdlib_module_names and any(
                path.is_dir() or path.with_name(f"{top}.py").is_file() for path in paths
            )
        return self._is_file[top]


def _places(module: object) -> list[str]:
    """Return file and folders of an entry of `sys.modules`, without running its code.

    Reading an attribute of a lazy module may import others or raise, and an entry need not be a module.
    """
    try:
        attributes = object.__getattribute__(module, "__dict__")
    except AttributeError:
        return []
    if not isinstance(attributes, dict):
        return []
    path = attributes.get("__path__")
    if type(path).__name__ == "_NamespacePath":  # of a namespace package; iterating over it imports
        path = vars(path).get("_path")
    paths = [attributes.get("__file__"), *(path if isinstance(path, list | tuple) else ())]
    return [place for place in paths if isinstance(place, str)]


class _ImportLock:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._now: _Files | None = None

    def is_held_by(self, files: _Files) -> bool:
        return self._now is files

    @contextmanager
    def hold(self, files: _Files) -> Iterator[None]:
        with self._changed:
            while self._now is not None:
                left_s = self._now.since_s + IMPORT_LOCK_TIMEOUT_S - time.monotonic()
                if left_s <= 0:
                    message = "model.py of %s is still being imported after %g s: other models are imported now"
                    log.warning(message, self._now.model.name, IMPORT_LOCK_TIMEOUT_S)
                    self._now.end()
                    break
                self._changed.wait(left_s)
            self._now = files
            files.begin()
        try:
            yield
        finally:
            with self._changed:
                if self._now is files:  # otherwise the lock was passed on
                    files.end()
                    self._now = None
                    self._changed.notify_all()


_import_lock = _ImportLock()


def import_model(
    file: Path, aliases: Mapping[str, ModuleType], later_aliases: Mapping[str, ModuleType], is_alone: bool
) -> ModuleType:
    """Execute model.py; it stays in `sys.modules` until `remove_modules`. raises whatever it raises

    aliases, later_aliases, is_alone: as for `_Files`
    """
    files = _Files(file, aliases, later_aliases, is_alone)
    try:
        return files.execute(file)
    except BaseException:
        remove_modules(files.package)
        raise


def remove_modules(module: str) -> None:
    """Remove a model's module and the other modules of its package from `sys.modules`."""
    package = module.partition(".")[0]
    for name in [name for name in list(sys.modules) if name.partition(".")[0] == package]:
        sys.modules.pop(name, None)
