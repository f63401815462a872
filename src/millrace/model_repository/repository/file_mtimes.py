"""Whether a model's files have changed since they were last looked at."""

import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from millrace.model_repository.repository.model_names import ModelId
from millrace.model_repository.repository.multi_repository import Repositories
from millrace.model_repository.repository.repository_reader import walk_files

_Files = frozenset[tuple[str, int, int]]
_MOST_FILES = 10_000  # of one model


def stamps(of: Repositories) -> dict[ModelId, object]:
    """Of every model. raises OSError where a repository itself cannot be read: nothing is known then"""
    for root in of.folders:
        with os.scandir(root):
            pass
    return {one: stamp(of.of(one), one.name) for one in of.ids()}


def changed_files(before: object, after: object) -> list[str]:
    """Paths that are not in both of two stamps of a model, or are not the same."""
    old, new = (_Files(found if isinstance(found, tuple) else ()) for found in (before, after))
    return sorted({path for path, *_ in old ^ new})


def stamp(roots: Sequence[Path], name: str) -> object:
    """Equal as long as no file of the model has changed: names, sizes, times.

    A link inside the repository is followed; of one that leads out of it nothing is looked at but itself. Python's own
    cache is none of the model's files: importing writes it.
    """
    found: list[tuple[str, int, int]] = []
    for root in roots:
        left, seen = [root / name], set[tuple[int, int]]()
        while left and len(found) < _MOST_FILES:
            path = left.pop()
            with suppress(OSError):  # it went away meanwhile, which the next look sees
                about = path.lstat()
                if stat.S_ISLNK(about.st_mode) and not walk_files(root, path):
                    about = path.stat()
                if not stat.S_ISDIR(about.st_mode):
                    found.append((str(path), about.st_size, about.st_mtime_ns))
                elif (about.st_dev, about.st_ino) not in seen:  # links may lead in a circle
                    seen.add((about.st_dev, about.st_ino))
                    found.append((str(path), 0, 0))
                    with os.scandir(path) as entries:
                        names = sorted(entry.name for entry in islice(entries, _MOST_FILES))
                    left.extend(path / entry for entry in names if entry != "__pycache__")
    return tuple(found)
