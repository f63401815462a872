"""Writing an engine: whole or not at all, whatever happens to the disk, the checkpoint and the builder."""

import errno
import multiprocessing
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.build import BuildOptions, plan_engine, write_engine
from millrace.compile.resolve_model import BUNDLED
from millrace.compile.source import Source
from millrace.engine.artifact.folder_lock import building, hold, in_use, remove
from millrace.engine.artifact.manifest import MANIFEST, WEIGHTS, Manifest
from millrace.errors import CheckpointError, MachineError
from tests.support.gguf_files import write_gguf

TINY = BUNDLED / "tiny"


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """What is longer cannot be written, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def build(checkpoint: Path, folder: Path) -> Manifest:
    source = Source.from_checkpoint(Checkpoint.open(checkpoint), 128)
    return write_engine(source, plan_engine(source, BuildOptions()), folder, name="tiny")


def no_reserving(file: int, offset: int, nbytes: int) -> None:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


@pytest.mark.parametrize("reserves", [True, False])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reserves: bool) -> None:
    if not reserves:
        monkeypatch.setattr(os, "posix_fallocate", no_reserving)
    with largest_file(1 << 20), pytest.raises(MachineError) as caught:
        build(TINY, tmp_path / "engine")
    free = shutil.disk_usage(tmp_path).free
    assert f"{tmp_path / 'engine'} cannot be written: File too large; its weights need" in caught.value.what
    assert "are free there" in caught.value.what and free > 1 << 20
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_space_is_reserved_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """So a disk that is too small is known at once, and no later than the first weight."""
    done: list[tuple[str, int]] = []
    reserve, write = os.posix_fallocate, os.pwrite

    def reserved(file: int, offset: int, nbytes: int) -> None:
        assert offset == 0 and os.fstat(file).st_size == 0
        done.append(("reserve", nbytes))
        reserve(file, offset, nbytes)

    def written(file: int, data: memoryview, offset: int) -> int:
        done.append(("write", len(data)))
        return write(file, data, offset)

    def full(file: int, offset: int, nbytes: int) -> None:
        done.append(("refuse", nbytes))
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", written)
    monkeypatch.setattr(os, "posix_fallocate", reserved)
    manifest = build(TINY, tmp_path / "engine")
    weights = manifest.cpu.weights_bytes
    assert done[0] == ("reserve", weights) and {what for what, _ in done[1:]} == {"write"}
    assert (tmp_path / "engine" / WEIGHTS).stat().st_size == weights
    done.clear()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MachineError) as caught:
        build(TINY, tmp_path / "another")
    assert done == [("refuse", weights)], "nothing was written"
    assert f"{tmp_path / 'another'} cannot be written: {os.strerror(code)}; its weights need" in caught.value.what
    assert f"{weights:,} bytes" in caught.value.what and "make room" in caught.value.fix
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


def test_a_file_system_that_does_not_reserve_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(TINY, tmp_path / "reserved")
    monkeypatch.setattr(os, "posix_fallocate", no_reserving)
    assert build(TINY, tmp_path / "not") == first
    assert (tmp_path / "reserved" / WEIGHTS).read_bytes() == (tmp_path / "not" / WEIGHTS).read_bytes()


def test_writing_goes_on_where_a_call_wrote_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network's file system, and beyond 2 GiB everywhere."""
    write, sizes = os.pwrite, []

    def less(file: int, data: memoryview, offset: int) -> int:
        sizes.append(len(data))
        return write(file, data[: max(1, len(data) // 3)], offset)

    whole = build(TINY, tmp_path / "whole")
    monkeypatch.setattr(os, "pwrite", less)
    assert build(TINY, tmp_path / "pieces") == whole and min(sizes) == 1
    assert (tmp_path / "pieces" / WEIGHTS).read_bytes() == (tmp_path / "whole" / WEIGHTS).read_bytes()


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_a_checkpoint_that_is_truncated_meanwhile(tmp_path: Path, kind: str) -> None:
    copy = Path(shutil.copytree(TINY, tmp_path / "tiny"))
    file = copy / "model.safetensors" if kind == "safetensors" else write_gguf(tmp_path / "tiny.gguf", copy)
    source = Source.from_checkpoint(Checkpoint.open(copy if kind == "safetensors" else file), 128)
    plan = plan_engine(source, BuildOptions())
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="has changed since it was opened"):
        write_engine(source, plan, tmp_path / "out" / "engine", name="tiny")
    assert not list((tmp_path / "out").glob("*"))


def test_an_engine_is_identified_by_what_it_computes(tmp_path: Path) -> None:
    """Two builds of one checkpoint are one; two fine-tunes of one shape are two."""
    copy = Path(shutil.copytree(TINY, tmp_path / "another-name"))
    os.utime(copy / "model.safetensors", ns=(1, 1))
    first, again = build(TINY, tmp_path / "1"), build(copy, tmp_path / "2")
    assert first.identity == again.identity and first.source == again.source and len(first.source) == 32
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    tuned = build(copy, tmp_path / "3")
    assert tuned.files["program.bin"] == first.files["program.bin"]
    assert tuned.identity != first.identity and tuned.source != first.source
    (copy / "generation_config.json").write_text('{"temperature": 0.5}')
    assert build(copy, tmp_path / "4").identity != tuned.identity


def builder(folder: Path, begun: Event, never: Event) -> None:
    with building(folder) as path:
        (path / "weights.bin").write_bytes(b"some")
        begun.set()
        never.wait(60)


def test_what_a_killed_builder_left_goes_with_the_next_build(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    begun, never = context.Event(), context.Event()
    process = context.Process(target=builder, args=(tmp_path / "e", begun, never))
    process.start()
    assert begun.wait(60)
    (left,) = tmp_path.iterdir()
    with building(tmp_path / "e") as mine:
        assert {*tmp_path.iterdir()} == {left, mine}, "a builder at work is left alone"
    assert (tmp_path / "e" / MANIFEST).is_file() and remove(tmp_path / "e")
    process.kill()
    process.join()
    assert [*tmp_path.iterdir()] == [left]
    others = [tmp_path / name for name in (".e.x.unfinished", ".ee.12.unfinished", "e.12.unfinished")]
    for other in others:
        other.mkdir()
    (tmp_path / ".e.00.unfinished").mkdir()  # killed before its first file
    with building(tmp_path / "e") as mine:
        assert {*tmp_path.iterdir()} == {*others, mine}
    with pytest.raises(KeyboardInterrupt), building(tmp_path / "f"):
        raise KeyboardInterrupt
    assert {*tmp_path.iterdir()} == {*others, tmp_path / "e"}


def test_who_holds_an_engine_keeps_it(tmp_path: Path) -> None:
    build(TINY, tmp_path / "e")
    first, second = hold(tmp_path / "e"), hold(tmp_path / "e")
    assert first and second and in_use(tmp_path / "e")
    first.release()
    assert not remove(tmp_path / "e") and (tmp_path / "e" / WEIGHTS).is_file()
    second.release()
    assert not in_use(tmp_path / "e") and remove(tmp_path / "e")
    assert list(tmp_path.iterdir()) == [] and hold(tmp_path / "e") is None


def test_a_hold_ends_with_its_object(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).touch()
    held = hold(tmp_path)
    assert in_use(tmp_path)
    del held
    assert not in_use(tmp_path)
