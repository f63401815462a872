"""Stamps of a model's files, to detect changes."""

import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from millrace.model_repository.repository.model_names import ModelId
from millrace.model_repository.repository.multi_repository import Repositories
from millrace.model_repository.repository.repository_reader import leaves_root

_Files = frozenset[tuple[str, int, int]]
_MAX_FILES = 10_000  # of one model


def stamps(repositories: Repositories) -> dict[ModelId, object]:
    """Return the stamps of all models. raises OSError if a repository cannot be read"""
    for root in repositories.folders:
        with os.scandir(root):
            pass
    return {model_id: stamp(repositories.roots_of(model_id), model_id.name) for model_id in repositories.ids()}


def changed_files(before: object, after: object) -> list[str]:
    """Return the paths that differ between two stamps of a model."""
    old, new = (_Files(file_stamp if isinstance(file_stamp, tuple) else ()) for file_stamp in (before, after))
    return sorted({path for path, *_ in old ^ new})


def stamp(roots: Sequence[Path], name: str) -> object:
    """Return a stamp of names, sizes and times, equal as long as no file of the model changes.

    Links inside the repository are followed; of links that leave it only the link itself counts. `__pycache__` is
    skipped, because importing writes it.
    """
    files: list[tuple[str, int, int]] = []
    for root in roots:
        left, visited = [root / name], set[tuple[int, int]]()
        while left and len(files) < _MAX_FILES:
            path = left.pop()
            with suppress(OSError):  # deleted meanwhile, which the next stamp shows
                about = path.lstat()
                if stat.S_ISLNK(about.st_mode) and not leaves_root(root, path):
                    about = path.stat()
                if not stat.S_ISDIR(about.st_mode):
                    files.append((str(path), about.st_size, about.st_mtime_ns))
                elif (about.st_dev, about.st_ino) not in visited:  # links may form a cycle
                    visited.add((about.st_dev, about.st_ino))
                    files.append((str(path), 0, 0))
                    with os.scandir(path) as entries:
                        names = sorted(entry.name for entry in islice(entries, _MAX_FILES))
                    left.extend(path / entry for entry in names if entry != "__pycache__")
    return tuple(files)
