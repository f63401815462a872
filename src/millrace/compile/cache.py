"""The cache of built engines: one folder an engine, one builder at a time, the least recently used go first."""

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from millrace.engine.manifest import MANIFEST
from millrace.errors import ConfigError, MachineError, nearest

DEFAULT_LIMIT = 50 << 30


@dataclass(frozen=True, slots=True)
class CacheEntry:
    name: str
    folder: Path
    nbytes: int
    last_used: float  # seconds since the epoch


class EngineCache:
    """Engines under `root/engines`. `limit_bytes` bounds them together; the one in use is never removed."""

    def __init__(self, root: Path, limit_bytes: int = DEFAULT_LIMIT) -> None:
        self._engines, self._limit_bytes = root / "engines", limit_bytes

    def get_or_build(self, name: str, key: str, build: Callable[[Path], object]) -> tuple[Path, bool]:
        """The engine's folder, and whether it was built now. `build` writes into the path that it is given."""
        folder = self._engines / f"{_safe(name)}-{hashlib.blake2b(key.encode(), digest_size=6).hexdigest()}"
        try:
            self._engines.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MachineError(
                f"the cache of engines cannot be made: {error}", "a folder that can be written",
                "set XDG_CACHE_HOME to one",
            ) from error  # fmt: skip
        with self._locked(folder):
            fresh = not (folder / MANIFEST).is_file()
            if fresh:
                self._sweep(folder)
                build(folder)
            os.utime(folder)
        if fresh:
            self._shrink(keep=folder)
        return folder, fresh

    def entries(self) -> list[CacheEntry]:
        """Most recently used first."""
        if not self._engines.is_dir():
            return []
        found = []
        for folder in self._engines.iterdir():
            if folder.name.startswith(".") or not folder.is_dir():
                continue
            with suppress(FileNotFoundError):  # another process has just removed it
                nbytes = sum(p.stat().st_size for p in folder.iterdir())
                found.append(CacheEntry(folder.name, folder, nbytes, folder.stat().st_mtime))
        return sorted(found, key=lambda e: -e.last_used)

    def check(self, names: Iterable[str]) -> None:
        """raises ConfigError where one of them is not there"""
        known = [e.name for e in self.entries()]
        for name in names:
            if name not in known:
                expected = nearest(name, known) if known else "the cache is empty"
                raise ConfigError(f'the cache has no engine "{name}"', expected, "name one that `millrace list` shows")

    def remove(self, name: str) -> CacheEntry:
        """raises ConfigError where there is no such engine"""
        self.check([name])
        entry = next(e for e in self.entries() if e.name == name)
        with self._locked(entry.folder):
            shutil.rmtree(entry.folder)
        return entry

    def _sweep(self, folder: Path) -> None:
        """What a builder that was killed left behind; called with the lock held, so nobody is building."""
        for left in (folder, *self._engines.glob(f".{folder.name}.*.unfinished")):
            shutil.rmtree(left, ignore_errors=True)

    def _shrink(self, keep: Path) -> None:
        entries = self.entries()
        total = sum(e.nbytes for e in entries)
        for entry in reversed(entries):
            if total <= self._limit_bytes:
                return
            if entry.folder != keep:
                shutil.rmtree(entry.folder, ignore_errors=True)
                total -= entry.nbytes

    @contextmanager
    def _locked(self, folder: Path) -> Iterator[None]:
        """Two processes that want the same engine: the second waits, then finds it built. Dies with the process."""
        with (folder.parent / f".{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in name).strip("-.") or "model"


def age(seconds_since_epoch: float) -> str:
    """How long ago, for people."""
    minutes = (time.time() - seconds_since_epoch) / 60
    if minutes < 90:
        return f"{minutes:.0f} min"
    return f"{minutes / 60:.0f} h" if minutes < 48 * 60 else f"{minutes / 1440:.0f} days"
