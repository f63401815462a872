"""Locks between real processes: a wait that lasts is said and has an end, and what is being begun is never swept."""

import fcntl
import logging
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from millrace.compile.cache import engine_cache as cache
from millrace.compile.cache import timing_cache
from millrace.compile.cache.engine_cache import EngineCache
from millrace.compile.cache.timing_cache import TimingCache
from millrace.engine.artifact import folder_lock as hold_module
from millrace.engine.artifact.folder_lock import building, hold, lock, sweep
from millrace.engine.artifact.manifest import MANIFEST
from millrace.errors import MachineError

SPAWN = multiprocessing.get_context("spawn")


def keep(path: Path, kept: Event, release_after_s: float) -> None:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        kept.set()
        time.sleep(release_after_s)


def write(folder: Path) -> None:
    folder.mkdir()
    (folder / MANIFEST).touch()


@contextmanager
def kept_by_another(path: Path, seconds: float = 60) -> Iterator[None]:
    """A process has the lock of `path` for itself alone, for so long."""
    kept = SPAWN.Event()
    process = SPAWN.Process(target=keep, args=(path, kept, seconds), daemon=True)
    process.start()
    assert kept.wait(60)
    try:
        yield
    finally:
        process.kill()
        process.join()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hold_module, "REMOVING_S", 0.3)
    monkeypatch.setattr(hold_module, "_REPORT_AFTER_S", 0.1)
    monkeypatch.setattr(cache, "BUILDING_S", 0.3)
    monkeypatch.setattr(timing_cache, "WRITING_S", 0.3)


@pytest.mark.usefixtures("impatient")
def test_a_lock_that_is_never_given_back_is_one_line_then_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / MANIFEST).touch()
    with kept_by_another(tmp_path / MANIFEST), caplog.at_level(logging.WARNING):
        with pytest.raises(MachineError, match=f"waited 0.3 s for {tmp_path}") as error:
            hold(tmp_path)
        assert "lslocks" in error.value.fix
        assert [r.message for r in caplog.records] == [
            f"waiting for {tmp_path}, which another process is removing (at most 0.3 s)"
        ]
    assert hold(tmp_path) is not None, "the lock ends with its process"


@pytest.mark.nightly
@pytest.mark.usefixtures("impatient")
def test_waiting_for_a_builder_and_for_the_timing_cache_ends_too(tmp_path: Path) -> None:
    engines = EngineCache(tmp_path)
    with engines.get_or_build("tiny", "key", write) as (folder, _):
        name = folder.name
    assert engines.remove([name])
    with (
        kept_by_another(tmp_path / "engines" / f".{name}.lock"),
        pytest.raises(MachineError, match=f"which is building .*{name}"),
        engines.get_or_build("tiny", "key", lambda path: pytest.fail("built beside another builder")),
    ):
        pass
    with kept_by_another(tmp_path / ".t.json.lock"), pytest.raises(MachineError, match=r"which is writing .*t\.json"):
        TimingCache(tmp_path / "t.json").merge("machine", {})


def test_a_lock_that_is_given_back_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with kept_by_another(tmp_path / "file", 0.3), (tmp_path / "file").open() as file:
        lock(file.fileno(), fcntl.LOCK_SH, "a test", 60)
        with (tmp_path / "file").open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert not caplog.records, "a short wait is not worth a line"


def keep_sweeping(parent: Path, stop: Event) -> None:
    while not stop.is_set():
        sweep(parent, "e")


@pytest.mark.nightly
def test_a_folder_that_is_just_begun_is_not_swept_away(tmp_path: Path) -> None:
    """With two processes that do nothing but sweep: a folder without its lock yet looks like a killed builder's."""
    stop = SPAWN.Event()
    sweepers = [SPAWN.Process(target=keep_sweeping, args=(tmp_path, stop), daemon=True) for _ in range(2)]
    for process in sweepers:
        process.start()
    left = tmp_path / ".e.00.unfinished"
    left.mkdir()
    until_s = time.monotonic() + 60
    while left.exists():  # from here on both are at it, or one is
        assert time.monotonic() < until_s
    until_s, n = time.monotonic() + 1.5, 0
    while time.monotonic() < until_s:
        with suppress(InterruptedError), building(tmp_path / "e") as path:
            for _ in range(30):
                assert (path / MANIFEST).exists(), f"folder {n} was swept away"
            n += 1
            raise InterruptedError
    stop.set()
    for process in sweepers:
        process.join()
        assert process.exitcode == 0
    assert n > 50 and not any(tmp_path.iterdir())


def test_what_a_removal_left_is_swept(tmp_path: Path) -> None:
    """It was killed between the manifest and the rest."""
    left = tmp_path / ".e.01.unfinished"
    left.mkdir()
    (left / "weights.bin").write_bytes(b"x")
    sweep(tmp_path)
    assert not left.exists()
