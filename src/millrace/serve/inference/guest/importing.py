"""Importing a model's own files: the path and the table of modules are the process's, so one model has them at a time.

A model that is never done with it must not keep the others from being loaded: after PATIENCE_S its turn goes to the
next that waits, and what it had put there is taken away. It may still come to its end; but it finds no further files of
its own.
"""

import importlib.util
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType

PATIENCE_S = 60.0
log = logging.getLogger(__name__)
_numbers = itertools.count()


class _Turn:
    def __init__(self, file: Path, given: Mapping[str, ModuleType], later: Mapping[str, ModuleType]) -> None:
        """given: modules that it finds under these names. later: those that are found there after its turn"""
        self.model, self.since_s, self._later = file.parent.parent, time.monotonic(), later
        sys.modules.update(given)
        self._before = set(sys.modules)
        self._folders = [str(file.parent), str(self.model)]
        sys.path[:0] = self._folders

    def end(self, keep: str) -> None:
        """Put the path and the modules back. keep: the name of the model's own module"""
        sys.modules.update(self._later)
        for folder in self._folders:
            with suppress(ValueError):  # the model may have changed it, too
                sys.path.remove(folder)
        for name in set(sys.modules) - self._before - {keep}:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(f"{self.model}/"):
                del sys.modules[name]


class _Turns:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._now: _Turn | None = None
        self._name = ""

    def take(self, make: Callable[[], _Turn], name: str) -> _Turn:
        with self._changed:
            while self._now is not None:
                left_s = self._now.since_s + PATIENCE_S - time.monotonic()
                if left_s <= 0:
                    what = "model.py of %s is still being imported after %g s: other models are imported now"
                    log.warning(what, self._now.model.name, PATIENCE_S)
                    self._now.end(self._name)
                    break
                self._changed.wait(left_s)
            self._now, self._name = make(), name
            return self._now

    def give_back(self, turn: _Turn, name: str) -> None:
        with self._changed:
            if self._now is turn:  # otherwise it was taken away
                turn.end(name)
                self._now = None
                self._changed.notify_all()


_turns = _Turns()


def imported(file: Path, given: Mapping[str, ModuleType], later: Mapping[str, ModuleType]) -> ModuleType:
    """model.py, executed; `sys.modules` has it until whoever asked takes it out. raises whatever it raises

    given, later: as `_Turn` has them
    """
    name = f"millrace_model_{next(_numbers)}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    turn = _turns.take(lambda: _Turn(file, given, later), name)
    sys.modules[name] = module  # its dataclasses look for it there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        _turns.give_back(turn, name)
    return module
