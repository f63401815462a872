"""KV offload at its edges: forgotten while it writes, a key that is put twice, every part of a page."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from millrace.runtime.kv.kv_offload import HEADER, RECORD, KvOffloadStore, PageMemory
from tests.runtime.test_kv_offload import RECORD_BYTES, Store, key

Write = Callable[[int, bytes, int], int]


class SlowDisk:
    """Each write of a record waits until it may; those of headers do not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_writing, self.may_write = threading.Event(), threading.Event()
        self.fault = ""
        self._pwrite: Write = os.pwrite
        monkeypatch.setattr(os, "pwrite", self._write)

    def _write(self, file: int, data: bytes, at: int) -> int:
        if at:
            self.is_writing.set()
            assert self.may_write.wait(20)
            if self.fault == "full":
                raise OSError(28, "No space left on device")
            if self.fault == "short":
                return self._pwrite(file, data[:50], at)
        return self._pwrite(file, data, at)


def sizes(folder: Path) -> list[int]:
    return [path.stat().st_size for path in sorted(folder.iterdir())]


@pytest.mark.parametrize("fault", ["", "full", "short"])
@pytest.mark.parametrize("n_before", [0, 2])
def test_what_is_forgotten_while_it_is_written_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, n_before: int, fault: str
) -> None:
    """Neither now nor after a restart, and nothing is said to be damaged then; also where the disk is full."""
    store = Store(tmp_path / "tier")
    for i in range(n_before):
        store.tier.put(key(i), i)
    store.settle()
    disk = SlowDisk(monkeypatch)
    for i in range(n_before, n_before + 3):
        store.tier.put(key(i), i)
    assert disk.is_writing.wait(20)
    disk.fault = fault
    store.tier.clear()
    disk.may_write.set()
    assert len(store.tier) == 0 and not any(key(i) in store.tier for i in range(5))
    store.tier.close()
    monkeypatch.undo()
    assert store.tier.n_stored == n_before and sizes(tmp_path) == [HEADER.size, HEADER.size]
    again = Store(tmp_path / "tier")
    assert len(again.tier) == 0 == again.tier.n_damaged and "damaged" not in caplog.text
    again.memory[:] = 7
    again.tier.put(key(1), 1)
    again.settle()
    assert again.tier.fill(key(1), 2) and again.tier.stats.pages == 1
    again.tier.close()


def test_what_is_not_written_whole_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "tier")
    store.tier.put(key(0), 0)
    store.settle()
    disk = SlowDisk(monkeypatch)
    disk.fault = "short"
    disk.may_write.set()
    store.tier.put(key(1), 1)
    store.tier.close()
    assert (store.tier.n_stored, store.tier.n_dropped) == (1, 1) and key(1) not in store.tier
    assert sizes(tmp_path) == [HEADER.size + RECORD_BYTES, HEADER.size]


def test_what_is_put_again_after_it_was_forgotten_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write under way is of what was forgotten: its end is not that of the new one, which still waits."""
    store, disk = Store(tmp_path / "tier"), SlowDisk(monkeypatch)
    store.tier.put(key(1), 1)
    assert disk.is_writing.wait(20)
    store.tier.clear()
    store.memory[:, 2] = 9
    store.tier.put(key(1), 2)
    disk.is_writing.clear()
    disk.may_write.set()
    disk.may_write.clear()
    assert disk.is_writing.wait(20), "the second one is written"
    assert key(1) in store.tier and store.tier.fill(key(1), 3) and (store.memory[:, 3] == 9).all()
    disk.may_write.set()
    store.tier.close()
    assert store.tier.n_stored == 1
    again = Store(tmp_path / "tier")
    assert again.tier.fill(key(1), 5) and (again.memory[:, 5] == 9).all()
    again.tier.close()


@pytest.mark.parametrize("is_written", [False, True])
def test_a_key_that_is_put_twice_is_kept_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    """While it waits to be written, and when it is there."""
    store, disk = Store(tmp_path / "tier"), SlowDisk(monkeypatch)
    if is_written:
        disk.may_write.set()
    store.memory[:, 0], store.memory[:, 1] = 5, 6
    store.tier.put(key(1), 0)
    if is_written:
        store.settle()
    store.tier.put(key(1), 1)
    assert len(store.tier) == 1
    disk.may_write.set()
    store.tier.close()
    assert store.tier.n_stored == 1 and sizes(tmp_path) == [HEADER.size + RECORD_BYTES, HEADER.size]
    again = Store(tmp_path / "tier")
    assert again.tier.fill(key(1), 3) and (again.memory[:, 3] == 5).all()
    again.tier.close()


def caches() -> list[NDArray[np.uint8]]:
    """Keys, values and scales, say: of other depths and sizes each, and no byte like another page's."""
    rng = np.random.default_rng(3)
    return [rng.integers(0, 256, shape).astype(np.uint8) for shape in ((3, 6, 32), (3, 6, 48), (1, 6, 7), (2, 6, 1))]


@pytest.mark.parametrize("way", ["waiting to be written", "from the file", "after a restart"])
def test_every_part_of_every_layer_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """And no other page is touched."""
    kept = caches()
    before = [cache.copy() for cache in kept]
    disk = SlowDisk(monkeypatch)
    if way != "waiting to be written":
        disk.may_write.set()
    room = 2 * (HEADER.size + 10 * (RECORD.size + 3 * 32 + 3 * 48 + 7 + 2))
    tier = KvOffloadStore(tmp_path / "tier", "an engine", PageMemory(kept), room)
    for page in (1, 4):
        tier.put(key(page), page)
    if way == "from the file":
        while tier.n_stored < 2:
            pass
    if way == "after a restart":
        tier.close()
        tier = KvOffloadStore(tmp_path / "tier", "an engine", PageMemory(kept), room)
    for cache in kept:
        cache[:, [1, 3, 4]] = 0
    assert tier.fill(key(4), 3) and tier.fill(key(1), 5) and tier.n_found == 2
    for cache, was in zip(kept, before, strict=True):
        assert (cache[:, 3] == was[:, 4]).all() and (cache[:, 5] == was[:, 1]).all()
        assert (cache[:, [1, 4]] == 0).all() and (cache[:, [0, 2]] == was[:, [0, 2]]).all()
    disk.may_write.set()
    tier.close()
