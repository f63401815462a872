"""KV offload: pages come back as they went, also after a restart; what is damaged or foreign is left out."""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from millrace.api.offline_generate import generate
from millrace.errors import ConfigError
from millrace.runtime.kv.kv_offload import HEADER, RECORD, KvOffloadStore, PageMemory
from millrace.runtime.kv.pages import PageKey, PagePool
from millrace.runtime.loop import EngineLoop
from millrace.runtime.request.sampling_params import SamplingParams
from tests.runtime.fakes import limits, make_loop
from tests.support.drawn import examples

N_PAGES, LAYERS, PAGE_BYTES = 8, 3, 96
RECORD_BYTES = RECORD.size + PAGE_BYTES


def key(i: int) -> bytes:
    return i.to_bytes(32, "little")


def content(i: int) -> NDArray[np.uint8]:
    return np.random.default_rng(i).integers(0, 256, (LAYERS, PAGE_BYTES // LAYERS)).astype(np.uint8)


def told(i: int) -> PageKey:
    """Of its tokens, four in a page."""
    return PageKey(b"before" + key(i), np.arange(i, i + 4, dtype=np.int32), 4)


class Store:
    """A pool with its tier; chain i has the keys 100 i, 100 i + 1, ..."""

    def __init__(self, path: Path, engine: str = "an engine", n_records: int = 40) -> None:
        self.memory = np.zeros((LAYERS, N_PAGES, PAGE_BYTES // LAYERS), np.uint8)
        self.tier = KvOffloadStore(
            path, engine, PageMemory([self.memory]), 2 * (HEADER.size + n_records // 2 * RECORD_BYTES)
        )
        self.pool = PagePool(N_PAGES, self.tier)

    def computes(self, chain: int, n: int) -> None:
        """Its pages, of which nobody is the owner afterwards."""
        pages = self.pool.reserve(n)
        assert pages is not None
        for at, page in enumerate(pages):
            self.memory[:, page] = content(100 * chain + at)
            i = 100 * chain + at
            self.pool.publish(page, key(i), pages[at - 1] if at else None, told(i))
        self.pool.release(pages)

    def finds(self, chain: int, n: int) -> int:
        """How many of its first n pages, each of which must be right."""
        keys = [key(100 * chain + at) for at in range(n)]
        owned = self.pool.share(self.pool.index.find(keys))
        pages = self.pool.promote(keys, owned, lambda at: told(100 * chain + at))
        for at, page in enumerate(pages):
            assert self.pool.index.find_part(told(100 * chain + at)) == (page, 4), "in part, too"
            assert (self.memory[:, page] == content(100 * chain + at)).all(), f"page {at} of chain {chain}"
        self.pool.release(pages)
        return len(pages)

    def settle(self) -> None:
        while self.tier._queued:
            pass


def test_what_the_pool_gives_up_is_found(tmp_path: Path) -> None:
    store = Store(tmp_path / "tier")
    store.computes(1, 5)
    store.computes(2, 5)
    assert store.pool.index.n_evicted == 2 and store.finds(2, 5) == 5
    assert store.finds(1, 5) == 5, "two of its pages come from the file"
    assert store.tier.n_found == 2 and store.pool.n_used == 0
    store.tier.close()


def test_a_restart_changes_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "tier")
    for chain in range(6):
        store.computes(chain, 4)
    store.tier.close()
    assert {path.name for path in tmp_path.iterdir()} == {"tier.0", "tier.1"}
    assert (tmp_path / "tier.0").stat().st_mode & 0o777 == 0o600
    again = Store(tmp_path / "tier")
    assert [again.finds(chain, 4) for chain in range(4)] == [4] * 4, "those of the last two were not given up"
    assert again.finds(9, 4) == 0
    again.tier.close()


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(3, 9))])
def test_any_order_of_chains_finds_what_it_should(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    store = Store(tmp_path / "tier", n_records=rng.choice([6, 20, 400]))
    for _ in range(200):
        chain, n = rng.randrange(12), rng.randint(1, 6)
        if store.finds(chain, n) == 0:
            store.computes(chain, n)
        if rng.random() < 0.05:
            store.tier.close()
            store = Store(tmp_path / "tier", n_records=400)
        assert store.pool.n_used == 0
    store.tier.close()


def test_the_size_is_kept_to(tmp_path: Path) -> None:
    store = Store(tmp_path / "tier", n_records=10)
    for chain in range(40):
        store.computes(chain, 4)
        store.settle()
    store.tier.close()
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert max(sizes) <= HEADER.size + 5 * RECORD_BYTES
    assert sum(sizes) > 6 * RECORD_BYTES


@pytest.mark.parametrize("n_halves", [2, 3, 4])
def test_after_a_restart_the_older_half_goes_first(tmp_path: Path, n_halves: int) -> None:
    """Both halves are full, and whichever was begun last is kept."""
    store = Store(tmp_path / "tier", n_records=8)
    for chain in range(
        n_halves + 2
    ):  # of four pages, a half each; what the pool still holds of the last two is not there
        store.computes(chain, 4)
        store.settle()
    store.tier.cached_pages = tuple  # as where it is killed
    store.tier.close()
    again = Store(tmp_path / "tier", n_records=8)
    stats = again.tier.stats
    assert stats.pages == 8 and stats.bytes == sum(p.stat().st_size for p in tmp_path.iterdir())
    newer = {key(100 * (n_halves - 1) + at) for at in range(4)}
    assert newer < again.tier._places.keys()
    for chain in (90, 91, 92):  # the third puts a page of the first there
        again.computes(chain, 4)
    again.settle()
    assert newer < again.tier._places.keys(), "the half that was begun last is still there"
    assert again.tier.stats.pages == 8 and again.tier.stats.stored_total == 4
    again.tier.close()


def test_a_generation_that_cannot_be_is_begun_anew(tmp_path: Path) -> None:
    store = Store(tmp_path / "tier", n_records=8)
    for chain in range(4):
        store.computes(chain, 4)
    store.tier.close()
    path = tmp_path / "tier.0"
    data = path.read_bytes()
    path.write_bytes(data[: HEADER.size - 8] + b"\xff" * 8 + data[HEADER.size :])
    again = Store(tmp_path / "tier", n_records=8)
    assert again.tier.stats.pages == 4
    for chain in range(10, 16):
        again.computes(chain, 4)
    again.tier.close()


def asked(loop: EngineLoop, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in generate(loop, [{"prompt_token_ids": p} for p in prompts], params)]


def test_a_preempted_sequence_comes_back_from_the_tier(tmp_path: Path) -> None:
    """Swapping: what others' answers took of its pages is in the file, and nothing is computed twice."""
    of = limits(page_tokens=4, n_pages=18, max_context=60, max_sequences=2, max_step_tokens=32)
    prompts, params = [[2] * 9, [3] * 9], SamplingParams(max_tokens=40, ignore_eos=True, temperature=0)
    plain = [asked(make_loop(limits(page_tokens=4), prefix_cache=False), [p], params)[0] for p in prompts]
    n_computed = []
    for tier in (None, tmp_path / "tier"):
        loop = make_loop(of, tier=tier)
        assert (loop.stats().tier is None) == (tier is None), "an empty one is seen, too"
        assert asked(loop, prompts, params) == plain
        stats = loop.stats()
        assert stats.preemptions_total > 0 and stats.pages_evicted_total > 0 and stats.pages_used == 0
        n_computed.append(stats.step_tokens_total)
        if isinstance(loop._pool.tier, KvOffloadStore):
            assert stats.tier is not None and stats.tier.found_total > 0
            loop._pool.tier.close()
    recomputed, swapped = n_computed
    least = 2 * (9 + 40 - 1)
    assert least <= swapped < least + 2 * 4 < recomputed, "but for the page that was not full, and the last token"


@settings(max_examples=examples(12, by_night=2))
@given(st.data())
def test_p1_the_tier_changes_no_answer(data: st.DataObject) -> None:
    """Any requests with few pages for them, parts of pages copied, and a restart with what the files hold."""
    part = st.sampled_from([[1, 2, 3, 4, 5, 6], [11, 12, 13], [21, 22, 23, 24, 25]])
    prompt = st.lists(part, min_size=1, max_size=5).map(lambda parts: [t for p in parts for t in p])
    prompts = data.draw(st.lists(prompt, min_size=2, max_size=8))
    params = SamplingParams(max_tokens=data.draw(st.integers(1, 16)), ignore_eos=True, temperature=0)
    of = limits(page_tokens=4, n_pages=data.draw(st.sampled_from([13, 18])), max_context=52, max_sequences=3)
    plain = [asked(make_loop(limits(page_tokens=4), prefix_cache=False), [p], params)[0] for p in prompts]
    with TemporaryDirectory() as folder:
        for _ in range(2):
            loop = make_loop(of, tier=Path(folder) / "tier")
            assert asked(loop, prompts, params) == plain == asked(loop, prompts, params)
            assert loop.stats().pages_used == 0 and isinstance(loop._pool.tier, KvOffloadStore)
            loop._pool.tier.close()


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a bit of a page": lambda data: _flipped(data, HEADER.size + 2 * RECORD_BYTES + RECORD.size + 7),
    "a checksum": lambda data: _flipped(data, HEADER.size + 2 * RECORD_BYTES + 5),
    "a mark": lambda data: _flipped(data, HEADER.size + 2 * RECORD_BYTES),
    "a key": lambda data: _flipped(data, HEADER.size + 2 * RECORD_BYTES + 12),
    "its end": lambda data: data[: HEADER.size + 2 * RECORD_BYTES + 50],
    "its header": lambda data: _flipped(data, 20),
}


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_left_out_and_said(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path / "tier")
    for chain in range(3):
        store.computes(chain, 4)
        store.settle()
    store.tier.close()
    path = tmp_path / "tier.0"
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    again = Store(tmp_path / "tier")
    found = again.finds(0, 4)
    assert found < 4, "no page of it may be given for one that is right"
    again.computes(5, 2)
    assert again.finds(5, 2) == 2
    again.tier.close()
    assert damage == "a key" or "left out" in caplog.text or "starting a new one" in caplog.text


def test_pages_of_another_engine_are_of_no_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path / "tier")
    store.computes(1, 6)
    store.computes(2, 6)
    store.tier.close()
    other = Store(tmp_path / "tier", engine="another")
    assert other.finds(1, 6) == 0 and "belongs to another engine" in caplog.text
    other.tier.close()


def test_one_server_a_file(tmp_path: Path) -> None:
    store = Store(tmp_path / "tier")
    with pytest.raises(ConfigError, match="in use by another process"):
        Store(tmp_path / "tier")
    store.tier.close()
    with pytest.raises(ConfigError, match="cannot be opened"):
        Store(tmp_path / "none" / "tier")
    with pytest.raises(ConfigError, match="may have"):
        KvOffloadStore(tmp_path / "small", "e", PageMemory([np.zeros((2, 4, 48), np.uint8)]), 100)


def test_a_full_disk_costs_the_tier_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path / "tier")

    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    for chain in range(4):
        store.computes(chain, 4)
    store.settle()
    assert store.finds(3, 4) == 4 and store.finds(0, 4) == 0 and store.tier.n_dropped >= 8
    assert caplog.text.count("cannot be written") == 1
    monkeypatch.undo()
    store.tier.close()


def test_forgetting_forgets_the_tier(tmp_path: Path) -> None:
    store = Store(tmp_path / "tier")
    for chain in range(3):
        store.computes(chain, 4)
    assert store.pool.clear_index() and store.finds(0, 4) == 0 and len(store.tier) == 0
    store.tier.close()


@pytest.mark.parametrize("kind", ["a log", "another's", "a second name", "a link", "a folder's"])
def test_what_is_not_ours_is_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tier.1"
    path.write_bytes(b"" if kind == "another's" else b"my precious log\n")
    path.chmod(0o666 if kind == "another's" else 0o600)
    if kind == "a second name":
        (tmp_path / "other").hardlink_to(path)
    if kind == "a link":  # to a file of ours, which somebody else's folder may hold
        ours = Store(tmp_path / "ours")
        ours.tier.close()
        path.rename(tmp_path / "log")
        path.symlink_to(tmp_path / "ours.1")
    with pytest.raises(ConfigError, match="KV offload file"):
        Store(Path("/") if kind == "a folder's" else tmp_path / "tier")
    kept = tmp_path / "log" if kind == "a link" else path
    assert kind == "another's" or kept.read_bytes() == b"my precious log\n"


def test_a_disk_that_cannot_be_read_costs_the_tier_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "tier")
    for chain in range(3):
        store.computes(chain, 4)
    store.settle()

    def broken(*arguments: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", broken)
    assert store.finds(0, 4) == 0 and store.tier.n_damaged > 0
    monkeypatch.undo()
    store.tier.close()


def test_at_the_end_the_most_worth_goes_first(tmp_path: Path) -> None:
    """Of three chains a file with room for four pages in a half keeps the last two left, from their beginnings."""
    store = Store(tmp_path / "tier", n_records=8)
    for chain in (1, 2, 3):
        store.computes(chain, 2)
    assert [k for k, _ in store.pool.index.by_value()] == [key(i) for i in (300, 301, 200, 201, 100, 101)]
    store.tier.close()
    again = Store(tmp_path / "tier", n_records=8)
    assert [again.finds(chain, 2) for chain in (1, 2, 3)] == [0, 2, 2]
    again.tier.close()


def test_an_end_does_not_wait_for_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, write = Store(tmp_path / "tier"), KvOffloadStore._write
    monkeypatch.setattr("millrace.runtime.kv.kv_offload.CLOSE_S", 0.2)
    store.tier._work.maxsize = 1

    def slow(tier: KvOffloadStore, *given: Any) -> None:
        time.sleep(0.15)
        write(tier, *given)

    monkeypatch.setattr(KvOffloadStore, "_write", slow)
    store.computes(1, 8)
    began_s = time.monotonic()
    store.tier.close()
    assert time.monotonic() - began_s < 1.0
    monkeypatch.undo()
    assert 1 <= Store(tmp_path / "tier").finds(1, 8) < 8
