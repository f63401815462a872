"""Verdicts on result files are by today's rules, whatever their files say."""

from typing import Any

import pytest

from benchmarks import verdicts
from benchmarks.peers.goals import no_worse
from benchmarks.runs import Numbers, kind, results
from benchmarks.verdicts import goals_of

SAID = {"milestone": 1.0, "goal": 2.0, "reached": 3.0, "verdict": "goal met"}
ENGINE = {"weights": "", "activations": "", "head": ""}


def peers(rounds: int, what: str = "decode-1: ours to theirs", **more: Any) -> dict[str, Any]:
    return {
        "command": "python -m benchmarks.peers", "rounds": rounds, "engines": {"ours": ENGINE, "theirs": ENGINE},
        "goals": [{**SAID, "what": what, **more}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "theirs", "rounds", "verdict"),
    [
        (0.1, 0.1, 5, "goal met"),
        (0.46, 0.29, 5, "missed: KL 0.46 is worse than the peer's 0.29"),
        (None, 0.29, 5, "not counted: the KL of this engine is not known"),
        (0.1, 0.1, 3, "not decided: 3 rounds, a median of 5 decides"),
    ],
)
def test_old_files_are_judged_at_equal_quality(
    monkeypatch: pytest.MonkeyPatch, ours: float | None, theirs: float, rounds: int, verdict: str
) -> None:
    def kl(engine: str, _: Numbers) -> float | None:
        return {"ours": ours, "theirs": theirs}[engine]

    monkeypatch.setattr(verdicts, "kl_class", kl)
    (found,) = goals_of(peers(rounds, against="theirs"))
    assert found["verdict"] == verdict and found["reached"] == 3.0


def test_a_share_of_a_limit_needs_five_rounds_and_no_peer() -> None:
    what = "decode-1: ours, share of the read bandwidth"
    assert [goals_of(peers(n, what))[0]["verdict"].partition(":")[0] for n in (3, 5)] == ["not decided", "goal met"]


def test_batching_is_judged_by_all_rounds() -> None:
    """Two of seven rounds, those with the fastest runtime, would meet the goal; the median of all does not."""
    quiet = {"runtime_1": 1.0, "runtime_16": 3.0, "ours_16": 3.0}
    samples = [quiet] * 2 + [{"runtime_1": 1.0, "runtime_16": 2.0, "ours_16": 1.5}] * 5
    result = {"command": "python -m benchmarks.tensors.batching", "samples": samples, "quiet_rounds": [0, 1],
              "goals": [{**SAID, "what": "2 quiet rounds of 7"}]}  # fmt: skip
    (found,) = goals_of(result)
    assert (found["reached"], found["verdict"]) == (0.5, "missed") and "7 rounds" in found["what"]


def test_no_result_file_meets_a_goal_at_worse_quality_or_by_too_few_rounds() -> None:
    met = 0
    for name, result in results():
        for goal in goals_of(result):
            if kind(result) != "peers" or not goal["verdict"].startswith(("goal met", "milestone met")):
                continue
            met += 1
            assert result["rounds"] >= 5, name
            if goal["against"]:
                ours = goal["what"].split(": ")[1].split(" to ")[0]
                kls = [verdicts._kl(result, engine) for engine in (ours, goal["against"])]
                assert kls[0] is not None and kls[1] is not None and no_worse(kls[0], kls[1]), (name, goal)
    assert met
