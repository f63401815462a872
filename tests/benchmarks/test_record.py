"""Result files: no run replaces another, and each says what it was to reach."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.record import judged, provenance, write_result


def test_no_run_replaces_another(tmp_path: Path) -> None:
    result: dict[str, Any] = {**provenance("benchmarks"), "time": "2026-01-31T12:00:00Z", "commit": "abc1234", "x": 1}
    path = write_result("alone-shape-w4a8", result, tmp_path)
    assert path.name == "alone-shape-w4a8-20260131T120000Z-abc1234.json"
    with pytest.raises(FileExistsError):
        write_result("alone-shape-w4a8", {**result, "x": 2}, tmp_path)
    assert json.loads(path.read_text())["x"] == 1
    later = write_result("alone-shape-w4a8", {**result, "time": "2026-01-31T12:00:01Z"}, tmp_path)
    assert later != path


def test_a_result_says_where_it_is_from_and_nothing_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["page", "--model", "/somewhere/of/mine/model.gguf"])
    told = provenance("benchmarks")
    assert {"date", "time", "commit", "command", "machine"} == set(told) and told["time"].startswith(told["date"])
    assert told["command"] == "python -m benchmarks --model model.gguf"
    assert re.fullmatch(r"(\d+\.\d+)?", told["machine"]["cpu_number"]), "two numbers, where the kernel tells them"


@pytest.mark.parametrize(
    ("reached", "at_most", "verdict"),
    [
        (0.81, False, "goal met"), (0.75, False, "milestone met, goal missed"), (0.5, False, "missed"),
        (0.69, True, "goal met"), (0.75, True, "milestone met, goal missed"), (0.9, True, "missed"),
    ],
)  # fmt: skip
def test_a_goal_is_judged_when_it_is_measured(reached: float, at_most: bool, verdict: str) -> None:
    goal, milestone = (0.7, 0.8) if at_most else (0.8, 0.7)
    assert judged("x", reached, goal, milestone, at_most=at_most)["verdict"] == verdict
