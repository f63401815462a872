"""Two versions side by side: neighbours in time are compared, and tokens that differ are said."""

from typing import Any

import pytest

from benchmarks import page_rows
from benchmarks.versions import taken_in_turns


def test_neighbours_are_compared() -> None:
    """A machine that gets slower for everybody changes no ratio of neighbours; they take turns in being first."""
    asked: list[str] = []

    def side(name: str, speed: float) -> Any:
        def ask(work: str) -> dict[str, Any]:
            asked.append(name)
            turn = (len(asked) - 4) // 3  # after the warm-up
            return {"seconds": 2.0**turn / speed, "tokens": "abc" if name != "old" or turn < 5 else "other"}

        return ask

    sides = {"old": side("old", 1.0), "new": side("new", 1.1), "new again": side("new again", 1.1)}
    found = taken_in_turns(sides, "decode-1", 4)
    assert (found["speed_of_old"], found["speed_of_itself"], found["same_tokens"]) == (1.1, 1.0, True)
    firsts = asked[3::3]
    assert firsts == ["old", "new", "new again", "old"] and len(found["samples_s"]["new"]) == 4
    asked.clear()
    assert not taken_in_turns(sides, "decode-1", 7)["same_tokens"]


def test_a_run_is_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"work": "decode-1", "speed_of_old": 1.004, "speed_of_itself": 0.998, "same_tokens": False}
    result = {
        "old": "abc", "runs": [{"shape": "s", "precision": "w4a8", "work": [one]}], "date": "2026-01-31",
        "commit": "def", "file": "file.json", "machine": {"cpu": "c", "cores": 2},
    }  # fmt: skip
    monkeypatch.setattr(page_rows, "of_kind", lambda name: [("file.json", result)] if name == "versions" else [])
    (row,) = page_rows.other_rows()
    assert row[0] == "s w4a8, decode-1: speed of this commit, of abc's"
    assert row[1] == "1.004; of itself in a second process 0.998; OTHER TOKENS"
    assert row[2].endswith(", `file.json`")
