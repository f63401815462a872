"""The cache of built engines: one folder per engine, one builder at a time, least recently used evicted first."""

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from millrace.engine.artifact.folder_lock import FolderLock, hold, in_use, lock, remove, sweep
from millrace.errors import ConfigError, MachineError, nearest

DEFAULT_LIMIT = 50 << 30
BUILDING_S = 3600.0  # how long to wait for another process that builds the same engine


@dataclass(frozen=True, slots=True)
class CacheEntry:
    name: str  # folder name: the model's, and a digest of the build's inputs
    folder: Path
    nbytes: int
    last_used: float  # seconds since the epoch

    @property
    def model(self) -> str:
        """The model's name at build, adapted for a folder name."""
        return self.name.rpartition("-")[0]


class EngineCache:
    """Engines under `root/engines`. `limit_bytes` limits their total size; engines in use are never removed."""

    def __init__(self, root: Path, limit_bytes: int = DEFAULT_LIMIT) -> None:
        self._engines, self._limit_bytes = root / "engines", limit_bytes

    @contextmanager
    def get_or_build(self, name: str, key: str, build: Callable[[Path], object]) -> Iterator[tuple[Path, bool]]:
        """Yield the engine's folder, and whether it was built now; it is not removed within the block.

        `build` writes into the path that it gets. Using an existing engine needs no write permission.
        raises MachineError if the cache cannot be written, or another process builds for too long
        """
        folder = self._engines / f"{_safe(name)}-{hashlib.blake2b(key.encode(), digest_size=6).hexdigest()}"
        lock, fresh = hold(folder), False
        if lock is None:
            lock, fresh = self._build(folder, build)
        try:
            _used_now(folder)
            if fresh:
                self._shrink()
            yield folder, fresh
        finally:
            lock.release()

    def entries(self) -> list[CacheEntry]:
        """Return all entries, most recently used first."""
        if not self._engines.is_dir():
            return []
        result = []
        for folder in self._engines.iterdir():
            if folder.name.startswith(".") or not folder.is_dir():
                continue
            with suppress(FileNotFoundError):  # another process has just removed it
                nbytes = sum(p.stat().st_size for p in folder.iterdir())
                result.append(CacheEntry(folder.name, folder, nbytes, folder.stat().st_mtime))
        return sorted(result, key=lambda e: -e.last_used)

    def only(self, name: str) -> CacheEntry | None:
        """Return the engine of this name, or the model's only engine; None if there is none.

        raises ConfigError if the model has several
        """
        result = self._called(name)
        if len(result) > 1:
            shown = ", ".join(str(e.folder) for e in result[:6]) + (", ..." if len(result) > 6 else "")
            raise ConfigError(
                f'the cache has {len(result)} engines of "{name}", and the model itself is not there',
                f"one of them: {shown}", "name its folder; `millrace list` shows what they differ in",
            )  # fmt: skip
        for entry in result:
            _used_now(entry.folder)
            return entry
        return None

    def find_by_name(self, name: str) -> list[CacheEntry]:
        """Return the engine of this name, or all engines of the model. raises ConfigError if there is none"""
        result = self._called(name)
        if not result:
            names = self.names()
            if not names:
                what = f'the cache is empty, so it has no engine "{name}"'
                raise ConfigError(what, "engines that were built", "nothing: there is nothing to remove")
            fix = "name one that `millrace list` shows"
            raise ConfigError(f'the cache has no engine "{name}"', nearest(name, names), fix)
        return result

    def names(self) -> set[str]:
        """Return the names of all engines and of their models."""
        return {name for e in self.entries() for name in (e.name, e.model)}

    def _called(self, name: str) -> list[CacheEntry]:
        entries = self.entries()
        return [e for e in entries if e.name == name] or [e for e in entries if e.model == name]

    def remove(self, names: Iterable[str]) -> list[CacheEntry]:
        """Remove the engines of these names: all, or none if one is missing or in use. raises ConfigError"""
        entries = list({e.name: e for name in names for e in self.find_by_name(name)}.values())
        for entry in entries:
            if in_use(entry.folder):
                raise _in_use(entry.name)
        for entry in entries:
            if not remove(entry.folder):  # opened by another process just now
                raise _in_use(entry.name)
        return entries

    def _build(self, folder: Path, build: Callable[[Path], object]) -> tuple[FolderLock, bool]:
        try:
            self._engines.mkdir(parents=True, exist_ok=True)
            file = (self._engines / f".{folder.name}.lock").open("w")
        except OSError as error:
            raise MachineError(
                f"the cache of engines cannot be written: {error}", "a folder that can be written",
                "set XDG_CACHE_HOME to one",
            ) from error  # fmt: skip
        fresh = False
        with file:  # of two processes that need the same engine, the second waits, then finds it built
            lock(file.fileno(), fcntl.LOCK_EX, f"another process, which is building {folder}", BUILDING_S)
            while (folder_lock := hold(folder)) is None:
                shutil.rmtree(folder, ignore_errors=True)  # without a manifest it is not an engine
                build(folder)
                fresh = True
        return folder_lock, fresh

    def _shrink(self) -> None:
        sweep(self._engines)
        entries = self.entries()
        total = sum(e.nbytes for e in entries)
        for entry in reversed(entries):
            if total <= self._limit_bytes:
                return
            with suppress(OSError):  # another process was faster, or it is another user's
                total -= entry.nbytes if remove(entry.folder) else 0


def _used_now(folder: Path) -> None:
    with suppress(OSError):  # a read-only cache removes nothing, so it needs no times
        os.utime(folder)


def _in_use(name: str) -> ConfigError:
    return ConfigError(
        f'the engine "{name}" is in use', "one that no process has open", "end the server or program that runs it"
    )


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in name).strip("-.") or "model"


def age(seconds_since_epoch: float) -> str:
    """Return how long ago a time was, as text."""
    minutes = (time.time() - seconds_since_epoch) / 60
    if minutes < 90:
        return f"{minutes:.0f} min"
    return f"{minutes / 60:.0f} h" if minutes < 48 * 60 else f"{minutes / 1440:.0f} days"
