"""What the page of performance must not keep to itself: missed goals, engines left out, how peers were built."""

from typing import Any

import pytest

from benchmarks import page as pages
from benchmarks.page import page
from benchmarks.runs import kind, left_out, remarks, results

MACHINE = {"cpu": "a CPU", "cores": 2}


def given(monkeypatch: pytest.MonkeyPatch, **result: Any) -> list[str]:
    """The page's lines where this is the only result with goals."""
    whole = {"date": "2026-01-31", "commit": "abc", "command": "python -m benchmarks.peers", "shape": "s", **result}
    monkeypatch.setattr(pages, "results", lambda: [("file.json", {**whole, "machine": MACHINE})])
    return page().splitlines()


def test_every_kind_of_result_and_every_engine_left_out_is_on_the_page() -> None:
    told = page()
    for name, result in results():
        assert result["commit"] in told, name
        if kind(result) == "peers":
            assert all(line in told for line in (*left_out(result), *remarks(result))), name
    assert {kind(r) for _, r in results()} - {"hadamard"} == {
        "alone", "contexts", "embeddings", "peers", "perplexity", "products", "serving", "start", "versions"
    }  # fmt: skip
    for shown in ("operations/s by rows", "sampling of 16 rows", "over HTTP", "decode by depth", "build, s"):
        assert shown in told


@pytest.mark.parametrize(("share", "verdict"), [(0.81, "goal met"), (0.5, "missed")])
def test_files_older_than_their_goals_are_judged(monkeypatch: pytest.MonkeyPatch, share: float, verdict: str) -> None:
    result = {
        "command": "python -m benchmarks.contexts", "decode": {"share": share}, "kv_cache_dtype": "int8",
        "mixed": {"p99_to_median_gap": 1.0, "total_to_one_after_the_other": 1.0},
    }  # fmt: skip
    goal = next(line for line in given(monkeypatch, **result) if line.startswith("| s: decode at 4,096"))
    assert goal == f"| s: decode at 4,096 as a share of decode at 128, KV in int8 | {share:.2f} | 0.8 | " + (
        f"{verdict}, judged later | `file.json` |"
    )
    written = [{"what": "x", "reached": 0.5, "goal": 0.8, "verdict": "missed"}]
    assert "| s: x | 0.50 | 0.8 | missed | `file.json` |" in given(monkeypatch, **result, goals=written)


@pytest.mark.parametrize("start_s", [0.5, 1.5])
def test_old_starts_are_judged(monkeypatch: pytest.MonkeyPatch, start_s: float) -> None:
    result = {"build_s": 1.0, "start_to_first_token_s": start_s, "resident_beyond_bytes": 1 << 20}
    told = given(monkeypatch, command="python -m benchmarks.start --shape s", **result)
    verdict = "goal met" if start_s < 1 else "missed"
    assert (
        f"| s: process start to first token, seconds | {start_s:.2f} | at most 1.0 | {verdict}, judged later "
        "| `file.json` |"
    ) in told


def test_an_impossible_share_in_an_old_file_takes_the_others_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    goals = [
        {"what": f"decode-1: {what}", "reached": reached, "goal": 0.9, "verdict": "goal met"}
        for what, reached in (
            ("a, share of the read bandwidth", 0.95),
            ("b, share of the read bandwidth", 1.02),
            ("a to c", 2.0),
        )
    ]
    for most, impossible in ((1.02, True), (0.99, False)):
        summary = [{"workload": "decode-1", "share_of_limit": s} for s in (0.95, most, None)]
        told = [line for line in given(monkeypatch, goals=goals, summary=summary) if line.startswith("| s: decode-1")]
        assert ["no measurement" in line for line in told] == [impossible, impossible, False]
