"""The engine cache: built once whoever asks, the least recently used go first, failures leave nothing."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from millrace.compile.cache import EngineCache, age
from millrace.engine.manifest import MANIFEST
from millrace.errors import ConfigError

MIB = 1 << 20


def write(folder: Path, nbytes: int = MIB) -> None:
    folder.mkdir()
    (folder / "weights.bin").write_bytes(bytes(nbytes))
    (folder / MANIFEST).write_text("{}")


def names(cache: EngineCache) -> list[str]:
    return [e.name.rpartition("-")[0] for e in cache.entries()]


def test_built_once_and_then_found(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path)
    assert cache.entries() == []
    first, built = cache.get_or_build("tiny", "key", write)
    again, rebuilt = cache.get_or_build("tiny", "key", write)
    assert (built, rebuilt) == (True, False) and first == again
    other, _ = cache.get_or_build("tiny", "another key", write)
    assert other != first and len(cache.entries()) == 2


def slow_builder(root: Path, log: Path) -> None:
    def build(folder: Path) -> None:
        with log.open("a") as lines:
            lines.write(f"{os.getpid()}\n")
        time.sleep(0.5)
        write(folder)

    folder, _ = EngineCache(root).get_or_build("tiny", "key", build)
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
    _, built = EngineCache(tmp_path / "cache").get_or_build("tiny", "key", write)
    assert built


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        raise ConfigError("what", "expected", "mend")

    cache = EngineCache(tmp_path)
    with pytest.raises(ConfigError):
        cache.get_or_build("tiny", "key", fail)
    assert cache.entries() == []
    assert cache.get_or_build("tiny", "key", write)[1]


def test_what_a_killed_builder_left_is_swept_away(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path)
    folder, _ = cache.get_or_build("tiny", "key", write)
    (folder / MANIFEST).unlink()  # half an engine
    unfinished = folder.with_name(f".{folder.name}.123.unfinished")
    write(unfinished)
    assert cache.get_or_build("tiny", "key", write)[1]
    assert not unfinished.exists() and (folder / MANIFEST).is_file()


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path, limit_bytes=3 * MIB + 100)
    for i, name in enumerate(["a", "b", "c"]):
        folder, _ = cache.get_or_build(name, "key", write)
        os.utime(folder, (i, i))
    cache.get_or_build("a", "key", write)  # used again, so b is now the oldest
    assert names(cache) == ["a", "c", "b"]
    cache.get_or_build("d", "key", write)
    assert names(cache) == ["d", "a", "c"]


def test_an_engine_larger_than_the_limit_stays_while_it_is_the_one_in_use(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path, limit_bytes=MIB)
    cache.get_or_build("small", "key", write)
    cache.get_or_build("large", "key", lambda folder: write(folder, 4 * MIB))
    assert names(cache) == ["large"]


def test_removing(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path)
    cache.get_or_build("tiny", "key", write)
    (entry,) = cache.entries()
    assert entry.nbytes == MIB + 2 and cache.remove(entry.name) == entry and cache.entries() == []
    with pytest.raises(ConfigError, match="the cache is empty"):
        cache.remove(entry.name)


@pytest.mark.parametrize("name", ["../../up", "org/model", "", "...", "a b\nc"])
def test_any_model_name_makes_one_folder_of_the_cache(tmp_path: Path, name: str) -> None:
    cache = EngineCache(tmp_path)
    folder, _ = cache.get_or_build(name, "key", write)
    assert folder.parent == tmp_path / "engines" and len(cache.entries()) == 1


def test_ages_are_said_for_people() -> None:
    now = time.time()
    assert [age(now - s) for s in (60, 7200, 5 * 86400)] == ["1 min", "2 h", "5 days"]
