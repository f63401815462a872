"""Digests of weight files: the content's, read once, and read again when anything has changed."""

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from millrace.checkpoint import files
from millrace.checkpoint.files import FileState, file_digest
from millrace.compile.cache import file_digests
from millrace.compile.cache.file_digests import FileDigests
from millrace.errors import CheckpointError

BLOCK = 16 << 20


def seen(path: Path) -> FileState:
    with path.open("rb") as file:
        return FileState.from_file(file)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(np.random.default_rng(1).bytes(5000))
    return path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read in whole."""
    found: list[Path] = []

    def counted(path: Path, *rest: object) -> str:
        found.append(path)
        return file_digest(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(file_digests, "file_digest", counted)
    return found


def ask(table: Path, file: Path) -> str:
    return FileDigests(table, settled_s=0).digest(file, seen(file))


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_a_digest_is_that_of_the_blocks(tmp_path: Path, nbytes: int) -> None:
    data = np.random.default_rng(nbytes).bytes(nbytes)
    (tmp_path / "f").write_bytes(data)
    blocks = [hashlib.blake2b(data[i : i + BLOCK], digest_size=16).digest() for i in range(0, nbytes, BLOCK)]
    read: list[int] = []
    found = file_digest(tmp_path / "f", seen(tmp_path / "f"), read.append)
    assert found == hashlib.blake2b(b"".join(blocks), digest_size=16).hexdigest() and sum(read) == nbytes


def test_reading_goes_on_where_a_call_gave_less(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_READ", 7)
    assert files.read_span(weights, seen(weights), 3, 100).tobytes() == weights.read_bytes()[3:103]
    with pytest.raises(CheckpointError, match="has changed"):
        files.read_span(weights, seen(weights), 4990, 11)


def test_a_file_is_read_once(tmp_path: Path, weights: Path, reads: list[Path]) -> None:
    first = ask(tmp_path / "t", weights)
    assert ask(tmp_path / "t", weights) == first and reads == [weights]
    link = tmp_path / "link"
    link.symlink_to(weights)  # as in the hub's cache
    assert ask(tmp_path / "t", link) == first and reads == [weights]


def in_place(path: Path) -> None:
    """As many bytes as before, and the time of modification set back."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(2500)
        file.write(bytes([path.read_bytes()[2500] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.with_name("new").write_bytes(data)
    path.with_name("new").replace(path)


@pytest.mark.parametrize("change", [in_place, replaced, lambda path: path.write_bytes(bytes(4999))])
def test_a_change_is_noticed(
    tmp_path: Path, weights: Path, reads: list[Path], change: Callable[[Path], object]
) -> None:
    first = ask(tmp_path / "t", weights)
    time.sleep(0.02)  # two ticks of the clock that files are stamped with
    change(weights)
    assert ask(tmp_path / "t", weights) != first and len(reads) == 2


def test_what_was_just_written_is_not_remembered(tmp_path: Path, weights: Path, reads: list[Path]) -> None:
    for _ in range(2):
        FileDigests(tmp_path / "t").digest(weights, seen(weights))
    assert len(reads) == 2 and not (tmp_path / "t").exists()


def test_nor_what_was_just_changed_and_made_to_look_old(tmp_path: Path, weights: Path, reads: list[Path]) -> None:
    """A program can set the time of modification, as copying does; the time of change cannot be set."""
    os.utime(weights, ns=(1, 1))
    for _ in range(2):
        FileDigests(tmp_path / "t", settled_s=60).digest(weights, seen(weights))
    assert len(reads) == 2 and not (tmp_path / "t").exists()


def test_what_claims_to_be_from_the_future_is_not_remembered(tmp_path: Path, weights: Path, reads: list[Path]) -> None:
    later = time.time_ns() + 3600 * 10**9
    os.utime(weights, ns=(later, later))
    for _ in range(2):
        FileDigests(tmp_path / "t", settled_s=0).digest(weights, seen(weights))
    assert len(reads) == 2 and not (tmp_path / "t").exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"\xf3": 1}', b'{"1:2": {"nbytes": "many"}}', bytes(2 << 20)])
def test_a_damaged_table_costs_time_only(tmp_path: Path, weights: Path, reads: list[Path], content: bytes) -> None:
    (tmp_path / "t").write_bytes(content)
    assert ask(tmp_path / "t", weights) == ask(tmp_path / "t", weights) and len(reads) == 1


def test_a_table_that_cannot_be_written_costs_time_only(tmp_path: Path, weights: Path, reads: list[Path]) -> None:
    assert ask(weights / "t", weights) == ask(weights / "t", weights) and len(reads) == 2


def test_the_table_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[Path]) -> None:
    monkeypatch.setattr(file_digests, "MAX_ENTRIES", 3)
    paths = [tmp_path / str(i) for i in range(5)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes([i]))
        ask(tmp_path / "t", path)
    for path in paths[2:]:
        ask(tmp_path / "t", path)
    assert len(reads) == 5
    ask(tmp_path / "t", paths[0])
    assert len(reads) == 6


def test_a_file_that_changed_since_it_was_opened(tmp_path: Path, weights: Path) -> None:
    before = seen(weights)
    weights.write_bytes(bytes(10))
    with pytest.raises(CheckpointError, match="has changed"):
        FileDigests(tmp_path / "t", settled_s=0).digest(weights, before)
    weights.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        FileDigests(tmp_path / "t", settled_s=0).digest(weights, before)
