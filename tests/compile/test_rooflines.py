"""The kept roofline: of one machine and number of threads, and never in anybody's way."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.compile.cache import rooflines
from millrace.compile.cache.rooflines import load_roofline, store_roofline
from millrace.machine.roofline import Compute, MemoryLevel, Rate, Roofline

RATE = Rate(3.0, 4.0, 2.0)
ROOFLINE = Roofline(2, (MemoryLevel("DRAM", None, RATE, RATE),), (Compute("w8a8", RATE, RATE, None),))


def test_it_comes_back_as_it_was_for_the_same_run_only(tmp_path: Path) -> None:
    assert load_roofline(tmp_path, "avx2", 2) is None
    path = store_roofline(tmp_path / "new", "avx2", ROOFLINE)
    assert load_roofline(tmp_path / "new", "avx2", 2) == ROOFLINE
    assert load_roofline(tmp_path / "new", "avx2", 1) is None and load_roofline(tmp_path / "new", "scalar", 2) is None
    again = replace(ROOFLINE, compute=())
    store_roofline(tmp_path / "new", "avx2", again)
    assert load_roofline(tmp_path / "new", "avx2", 2) == again and len(json.loads(path.read_text())) == 1


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"x": 1}', b'{"\xf3": 1}', b"\xff", b" " * (1 << 19)])
def test_a_damaged_file_is_as_good_as_none(tmp_path: Path, content: bytes) -> None:
    path = store_roofline(tmp_path, "avx2", ROOFLINE)
    path.write_bytes(content)
    assert load_roofline(tmp_path, "avx2", 2) is None
    store_roofline(tmp_path, "avx2", ROOFLINE)
    assert load_roofline(tmp_path, "avx2", 2) == ROOFLINE


def test_the_file_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(40):
        monkeypatch.setattr(rooflines, "machine_key", lambda isa, threads, i=i: f"machine {i}")
        path = store_roofline(tmp_path, "avx2", ROOFLINE)
    assert list(json.loads(path.read_text())) == [f"machine {i}" for i in range(24, 40)]
