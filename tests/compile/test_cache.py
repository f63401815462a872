"""The engine cache: built once whoever asks, the least recently used go first, failures leave nothing."""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from millrace.compile.cache.engine_cache import EngineCache, age
from millrace.engine.artifact.folder_lock import hold
from millrace.engine.artifact.manifest import MANIFEST
from millrace.errors import ConfigError, MachineError

MIB = 1 << 20


def write(folder: Path, nbytes: int = MIB) -> None:
    folder.mkdir()
    (folder / "weights.bin").write_bytes(bytes(nbytes))
    (folder / MANIFEST).write_text("{}")


def get(cache: EngineCache, name: str, key: str, build: Callable[[Path], None] = write) -> tuple[Path, bool]:
    with cache.get_or_build(name, key, build) as found:
        return found


def names(cache: EngineCache) -> list[str]:
    return [e.name.rpartition("-")[0] for e in cache.entries()]


def test_built_once_and_then_found(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path)
    assert cache.entries() == []
    first, built = get(cache, "tiny", "key")
    again, rebuilt = get(cache, "tiny", "key")
    assert (built, rebuilt) == (True, False) and first == again
    other, _ = get(cache, "tiny", "another key")
    assert other != first and len(cache.entries()) == 2


def slow_builder(root: Path, log: Path) -> None:
    def build(folder: Path) -> None:
        with log.open("a") as lines:
            lines.write(f"{os.getpid()}\n")
        time.sleep(0.5)
        write(folder)

    folder, _ = get(EngineCache(root), "tiny", "key", build)
    assert (folder / MANIFEST).is_file()


def test_two_processes_that_want_the_same_build_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    builders = [context.Process(target=slow_builder, args=(tmp_path / "cache", tmp_path / "log")) for _ in range(3)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(60)
    assert [b.exitcode for b in builders] == [0, 0, 0]
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def test_a_builder_that_dies_lets_the_next_one_build(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    builder = context.Process(target=slow_builder, args=(tmp_path / "cache", tmp_path / "log"))
    builder.start()
    until_s = time.monotonic() + 30
    while not (tmp_path / "log").exists() and time.monotonic() < until_s:
        time.sleep(0.01)
    builder.kill()
    builder.join()
    _, built = get(EngineCache(tmp_path / "cache"), "tiny", "key")
    assert built


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        raise ConfigError("what", "expected", "fix")

    cache = EngineCache(tmp_path)
    with pytest.raises(ConfigError):
        get(cache, "tiny", "key", fail)
    assert cache.entries() == []
    assert get(cache, "tiny", "key")[1]


def test_half_an_engine_is_built_again(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path)
    folder, _ = get(cache, "tiny", "key")
    (folder / MANIFEST).unlink()
    assert get(cache, "tiny", "key")[1] and (folder / MANIFEST).is_file()


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path, limit_bytes=3 * MIB + 100)
    for i, name in enumerate(["a", "b", "c"]):
        folder, _ = get(cache, name, "key")
        os.utime(folder, (i, i))
    get(cache, "a", "key")  # used again, so b is now the oldest
    assert names(cache) == ["a", "c", "b"]
    get(cache, "d", "key")
    assert names(cache) == ["d", "a", "c"]


def test_an_engine_larger_than_the_limit_stays_while_it_is_the_one_in_use(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path, limit_bytes=MIB)
    get(cache, "small", "key")
    get(cache, "large", "key", lambda folder: write(folder, 4 * MIB))
    assert names(cache) == ["large"]


def test_removing(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path)
    get(cache, "tiny", "key")
    (entry,) = cache.entries()
    assert entry.nbytes == MIB + 2 and cache.remove([entry.name]) == [entry] and cache.entries() == []
    with pytest.raises(ConfigError, match="the cache is empty"):
        cache.remove([entry.name])


def test_a_models_name_means_all_its_engines(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path)
    for key in "ab":
        get(cache, "tiny", key)
    get(cache, "tiny-chat", "a")
    assert sorted(e.model for e in cache.entries()) == ["tiny", "tiny", "tiny-chat"]
    with pytest.raises(ConfigError, match='did you mean "tiny"'):
        cache.remove(["tiny", "tinny"])
    assert len(cache.entries()) == 3, "all or none"
    assert len(cache.remove(["tiny", *(e.name for e in cache.entries() if e.model == "tiny")])) == 2, "each once"
    assert [e.model for e in cache.entries()] == ["tiny-chat"]


def test_what_killed_processes_left_of_other_engines_goes_with_the_next_build(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path)
    folder, _ = get(cache, "tiny", "key")
    left, at_work = (folder.with_name(f".{name}-01.{name}00.unfinished") for name in ("a", "b"))
    write(left)
    write(at_work)
    held = hold(at_work)
    get(cache, "tiny", "key")
    assert left.exists()
    get(cache, "other", "key")
    assert held and not left.exists() and at_work.exists()


def test_an_engine_in_use_stays(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path, limit_bytes=MIB)
    with cache.get_or_build("used", "key", write) as (folder, _):
        (entry,) = cache.entries()
        for name in (entry.name, entry.model):
            with pytest.raises(ConfigError, match=f'"{entry.name}" is in use'):
                cache.remove([name])
        get(cache, "other", "key", write)  # the limit is for one of them only
        assert names(cache) == ["other", "used"] and (folder / "weights.bin").is_file()
    get(cache, "third", "key", write)
    assert names(cache) == ["third"]


def hold_until(folder: Path, held: Event, done: Event) -> None:
    kept = hold(folder)
    held.set()
    done.wait(60)
    del kept


def test_a_hold_of_another_process_ends_with_it_even_if_it_is_killed(tmp_path: Path) -> None:
    cache, context = EngineCache(tmp_path), multiprocessing.get_context("spawn")
    folder, _ = get(cache, "tiny", "key")
    held, done = context.Event(), context.Event()
    process = context.Process(target=hold_until, args=(folder, held, done))
    process.start()
    assert held.wait(60)
    with pytest.raises(ConfigError, match="is in use"):
        cache.remove([folder.name])
    process.kill()
    process.join()
    assert [e.folder for e in cache.remove([folder.name])] == [folder]


@contextmanager
def read_only(root: Path) -> Iterator[None]:
    """Nobody may write below `root`: an administrator may anyway, and is somebody else meanwhile."""
    root.chmod(0o555)
    (root / "engines").chmod(0o555)
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        yield
    finally:
        os.seteuid(user)
        root.chmod(0o755)
        (root / "engines").chmod(0o755)


def test_a_cache_that_may_only_be_read() -> None:
    with tempfile.TemporaryDirectory() as folder:  # others may look into it, unlike pytest's
        root = Path(folder)
        root.chmod(0o755)
        cache = EngineCache(root / "cache")
        built, _ = get(cache, "tiny", "key")
        with read_only(root / "cache"):
            assert get(cache, "tiny", "key") == (built, False)
            with pytest.raises(MachineError, match="cannot be written"):
                get(cache, "another", "key")


@pytest.mark.parametrize("name", ["../../up", "org/model", "", "...", "a b\nc"])
def test_any_model_name_makes_one_folder_of_the_cache(tmp_path: Path, name: str) -> None:
    cache = EngineCache(tmp_path)
    folder, _ = get(cache, name, "key")
    assert folder.parent == tmp_path / "engines" and len(cache.entries()) == 1


def test_ages_are_said_for_people() -> None:
    now = time.time()
    assert [age(now - s) for s in (60, 7200, 5 * 86400)] == ["1 min", "2 h", "5 days"]
