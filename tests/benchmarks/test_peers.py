"""Samples, goals and the turns of a race, with no peer at all; the engines' processes speak one line at a time."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.measure import counted
from benchmarks.peers import race as race_module
from benchmarks.peers.build import amx, cmake_args, undocumented, unused
from benchmarks.peers.child import Child, EngineFailedError
from benchmarks.peers.engine import CATALOGUE, Description, Entry
from benchmarks.peers.goals import GOALS, outcomes
from benchmarks.peers.race import EXACT, Course, Race, agreement, race
from benchmarks.peers.report import Findings
from benchmarks.peers.samples import Peaks, Sample, Samples
from benchmarks.peers.worker import serve
from benchmarks.peers.workloads import WORKLOADS, Workload
from benchmarks.runs import REAL
from benchmarks.shapes import SHAPES


def samples(**seconds: list[float]) -> Samples:
    """By engine, one a round, on "w", beside a bandwidth of 100 bytes a second."""
    return Samples([Sample(i, "w", e, s, 90, 110) for e, found in seconds.items() for i, s in enumerate(found)])


def test_ratios_are_taken_within_a_round() -> None:
    """The machine became three times as slow in the second round: for both, so the ratio does not change."""
    found = samples(ours=[1, 3, 1], theirs=[2, 6, 2.2])
    assert found.speedup("w", "ours", "theirs") == 2
    assert found.fastest("w", ["theirs", "ours", "absent"]) == "ours"
    assert found.speedup("w", "ours", "absent") is None and found.fastest("w", ["absent"]) is None
    assert found.share_of_bandwidth("w", "theirs", 110) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("speed", "share", "verdict"),
    [
        (1.2, 0.3, "goal met"),
        (1.05, 0.3, "milestone met, goal missed by 5%"),
        (0.5, 0.3, "missed: milestone by 50%, goal by 55%"),
        (0.5, 0.99, "missed: milestone by 50%, goal by 55%"),  # a share of the limit is another method
        (0.5, None, "missed: milestone by 50%, goal by 55%"),  # a share that could not be measured
        (None, None, "not measured"),
    ],
)
def test_a_goal_says_by_how_much_it_is_missed(speed: float | None, share: float | None, verdict: str) -> None:
    """The prefill goal in bfloat16."""
    found = outcomes("tinyllama-1.1b", lambda *_: speed, lambda _, peers: peers[0], lambda *_: share, lambda _: 0.1)
    told = [o.verdict for o in found if (o.goal.workload, o.goal.ours) == ("prefill-512", "millrace-bf16")]
    assert told == [verdict]


@pytest.mark.parametrize(("rounds", "decided"), [(1, False), (4, False), (5, True), (7, True)])
def test_the_median_of_five_rounds_decides(rounds: int, decided: bool) -> None:
    """Whether a goal or a milestone is met; fewer rounds may still show that it is missed."""
    for speed, share, few in ((9.0, 1.0, "not decided"), (0.1, 0.1, "missed")):
        found = outcomes(
            "tinyllama-1.1b", lambda *_, s=speed: s, lambda _, peers: peers[0], lambda *_, s=share: s, lambda _: 0.1,
            rounds,
        )  # fmt: skip
        starts = "goal met" if decided and speed > 1 else few
        assert found and all(o.verdict.startswith(starts) for o in found)


def test_more_than_the_limit_is_no_measurement() -> None:
    """The machine changed between a sample and the probes beside it: that is neither a success nor a failure."""
    fast = samples(ours=[0.8, 0.9, 0.85])
    over, below = (fast.share_of_bandwidth("w", "ours", read) for read in (100, 80))
    assert below == pytest.approx(80 / 0.85 / 100) and fast.share_of_bandwidth("w", "absent", 80) is None
    assert counted([below, over, None]) == [None, None, None], "the others were measured beside the same machine"
    assert counted([below, None, 1.0]) == [below, None, 1.0]
    found = outcomes("tinyllama-1.1b", lambda *_: 2.0, lambda _, peers: peers[0], lambda *_: None, lambda _: 0.1)
    shares = [o.verdict for o in found if not o.goal.peers]
    assert shares and set(shares) == {"not measured"}


def test_goals_are_about_what_is_measured() -> None:
    for goal in GOALS:
        assert set(goal.shapes) <= {*SHAPES, REAL} and goal.workload in WORKLOADS
        assert {goal.ours, *goal.peers} <= set(CATALOGUE) and goal.milestone <= goal.goal


class Fixed:
    """An engine that always takes half a second."""

    def describe(self) -> Description:
        return Description("1.0", "int4", "int8", head="int8", kv="bf16", weights_bytes=10, read_bytes_per_step=10)

    def warm_up(self, workload: Workload) -> None:
        pass

    def run(self, workload: Workload) -> float:
        return 0.5

    def logits(self, prompt: Sequence[int]) -> NDArray[np.float32]:
        return np.array([len(prompt), 2], np.float32)


def test_a_worker_answers_line_by_line() -> None:
    requests = [{"do": "warm_up", "workload": "decode-1"}, {"do": "run", "workload": "decode-1"}, {"do": "describe"}]
    replies = io.StringIO()
    rates = iter([100.0, 110.0])
    serve(Fixed(), io.StringIO("".join(json.dumps(r) + "\n" for r in requests)), replies, lambda: next(rates))
    described = {
        "version": "1.0", "weights": "int4", "activations": "int8", "head": "int8", "kv": "bf16", "weights_bytes": 10,
        "read_bytes_per_step": 10, "attention": "", "settings": {}, "huge_pages_bytes": ANY, "logits": [64, 2],
    }  # fmt: skip
    ran = {"seconds": 0.5, "read_before": 100.0, "read_after": 110.0}
    assert [json.loads(line) for line in replies.getvalue().splitlines()] == [{}, ran, described]


def test_whoever_is_fast_must_have_computed_the_model() -> None:
    exact = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    noisy = exact + 0.1 * np.random.default_rng(1).standard_normal(500).astype(np.float32)
    found = agreement({EXACT: exact, "rounded": noisy, "wrong": exact[::-1]})
    assert found[EXACT] == 1 and 0.98 < found["rounded"] < 1 and abs(found["wrong"]) < 0.2
    assert agreement({"rounded": noisy}) == {}, "there is nothing to compare it with"


class Told:
    """The process of an engine, by what it would answer: which workloads it ran, then its logits."""

    def __init__(self, logits: Sequence[float]) -> None:
        self.logits, self.ran, self.ready_s = [*logits], [""], 1.5

    def ask(self, do: str, workload: str = "") -> dict[str, Any]:
        if do == "describe":
            return {"logits": self.logits, "read_bytes_per_step": 1, "version": "1"}
        self.ran.append(do)
        return {"seconds": 1.0, "read_before": 10.0, "read_after": 10.0} if do == "run" else {}


@pytest.mark.parametrize("noise, kept", [(0.2, True), (1.0, True), (float("inf"), False)])
def test_a_peer_that_computes_another_model_has_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noise: float, kept: bool
) -> None:
    """Noise as large as the logits leaves 0.71 of the correlation, as four bits of random weights do."""
    exact, other = np.random.default_rng(0).standard_normal((2, 4000))
    logits = other if noise == float("inf") else exact + noise * other
    processes = {
        EXACT: Told(exact.tolist()), "millrace-w8a8": Told(exact.tolist()), "llama.cpp-q8_0": Told(logits.tolist()),
    }  # fmt: skip
    monkeypatch.setattr(race_module, "_start", lambda *_: dict(processes))
    monkeypatch.setattr(race_module, "_peaks", lambda _: Peaks(1, 1))
    course = Course("tinyllama-1.1b", list(processes), [WORKLOADS["decode-1"]], 2, 1, tmp_path)
    found = race(course, lambda _: None)
    result = Findings(course, found).result()
    told = ("llama.cpp-q8_0" in result["engines"], any(e["engine"] == "llama.cpp-q8_0" for e in result["summary"]))
    goals = {g["what"]: g["verdict"] for g in result["goals"]}
    assert told == (kept, kept) and ("llama.cpp-q8_0" in result["left_out"]) != kept
    assert (goals["decode-1: millrace-w8a8 to llama.cpp-q8_0"] == "not measured") != kept
    assert kept or "computes another model: its logits correlate 0.0" in result["left_out"]["llama.cpp-q8_0"]
    assert result["engines"][EXACT]["correlation"] == 1 and result["engines"][EXACT]["ready_s"] == 1.5


def test_a_race_has_one_round_more_than_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = Told([1, 2])
    monkeypatch.setattr(race_module, "_start", lambda *_: {"millrace-w8a8": process})
    monkeypatch.setattr(race_module, "_peaks", lambda _: Peaks(1, 1))
    found = race(Course("s", ["millrace-w8a8"], [WORKLOADS["decode-1"]], 3, 1, tmp_path), lambda _: None)
    assert process.ran == ["", "warm_up", "run", "run", "run", "run"]
    assert [s.round for s in found.samples] == [0, 1, 2] and len(found.load) == 3


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        (0.0039, 0.005, "goal met"),
        (0.00281, 0.00279, "goal met"),  # both 0.0028
        (0.0029, 0.0028, "missed: KL 0.0029 is worse than the peer's 0.0028"),
        (0.00019, 0.00014, "missed: KL 0.00019 is worse than the peer's 0.00014"),
        (0.46, 0.29, "missed: KL 0.46 is worse than the peer's 0.29"),
        (0.0001, None, "not counted: the KL of the peer is not known"),
        (None, 0.005, "not counted: the KL of this engine is not known"),
    ],
)
def test_speed_counts_at_equal_quality_only(ours: float | None, theirs: float | None, verdict: str) -> None:
    """All goals beside a peer, of the real model and of random weights, with a speed that would meet each."""
    for shape in (REAL, "tinyllama-1.1b"):
        found = outcomes(
            shape, lambda *_: 50.0, lambda _, peers: peers[0], lambda *_: 1.0,
            lambda e: ours if e.startswith("millrace") else theirs,
        )  # fmt: skip
        beside = [o for o in found if o.goal.peers]
        assert beside and {o.verdict for o in beside} == {verdict}
        assert all(o.as_dict()["kl"] == ours and o.as_dict()["kl_against"] == theirs for o in beside)
        assert {o.verdict for o in found if not o.goal.peers} <= {"goal met"}


def test_openvino_is_met_at_its_best_and_at_equal_groups() -> None:
    """Two lines, each against its own peers."""
    speed = {"openvino-int4": 1.1, "openvino-int4-asym-a128": 1.3}
    found = outcomes(
        "tinyllama-1.1b", lambda _, __, theirs: speed[theirs],
        lambda _, peers: next((p for p in peers if p in speed), None), lambda *_: 0.5, lambda _: 0.1,
    )  # fmt: skip
    told = {o.goal.how: (o.against, o.reached, o.verdict) for o in found if o.goal.how}
    assert told == {
        "at its best": ("openvino-int4", 1.1, "milestone met, goal missed by 4%"),
        "at equal groups": ("openvino-int4-asym-a128", 1.3, "goal met"),
    }


def test_a_process_that_cannot_load_says_why(tmp_path: Path) -> None:
    with Child("no-such-engine", "llama-143m", tmp_path, 1) as child, pytest.raises(EngineFailedError, match="no-such"):
        child.wait_until_ready()


def test_a_missing_peer_is_left_out_and_the_rest_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalogue = {
        "absent": Entry("absent_engine", "", ("no_such_package",), "int8"),
        "millrace-w4a8": CATALOGUE["millrace-w4a8"],
    }
    monkeypatch.setattr(race_module, "CATALOGUE", catalogue)
    said: list[str] = []
    course = Course("llama-143m", list(catalogue), [WORKLOADS["decode-1"]], 2, 2, tmp_path)
    found = race(course, said.append)
    assert list(found.left_out) == ["absent"] and "pip install 'millrace[peers]'" in found.left_out["absent"]
    assert [(s.round, s.engine) for s in found.samples] == [(0, "millrace-w4a8"), (1, "millrace-w4a8")]
    result = json.loads(json.dumps(Findings(course, found).result()))
    assert [e["engine"] for e in result["summary"]] == ["millrace-w4a8"]
    assert {g["verdict"] for g in result["goals"]} == {"not measured"}
    assert str(tmp_path) not in json.dumps(result)


def test_one_impossible_share_takes_the_others_of_its_run_with_it(tmp_path: Path) -> None:
    """Two engines read 100 and 60 bytes a step, beside a bandwidth of 80: the second alone looks like a measurement."""
    workload = WORKLOADS["decode-1"]
    described = {"read_bytes_per_step": 100}, {"read_bytes_per_step": 60}

    def shares(names: list[str]) -> list[float | None]:
        found = Race([Sample(0, workload.name, name, workload.steps, 80, 80) for name in names])
        found.engines = {n: e for n, e in zip(("fast", "slow"), described, strict=True) if n in names}
        findings = Findings(Course("llama-143m", names, [workload], 1, 1, tmp_path), found)
        return [findings.share(workload.name, name) for name in names]

    assert shares(["slow"]) == [0.75] and shares(["slow", "fast"]) == [None, None]


def test_a_build_says_what_it_leaves_unused() -> None:
    """System info as llama.cpp gives it."""
    told = "CPU : SSE3 = 1 | AVX = 1 | AVX2 = 1 | AVX512 = 1 | AVX512_VNNI = 1 | REPACK = 1"
    flags = {"sse3", "avx2", "avx512f", "avx512_vnni", "amx_int8"}
    assert unused(told, flags) == ["AMX_INT8"] and unused(told, flags - {"amx_int8"}) == []
    assert unused("CPU : AVX512_VNNI = 1", {"avx512f"}) == ["AVX512"], "not a part of another's name"


def test_a_build_says_whether_it_uses_amx_and_what_was_to_be_built_in() -> None:
    assert amx("CPU : AVX = 1 | AMX_INT8 = 1") == "AMX"
    assert amx("CPU : AVX = 1 | AMX_INT8 = 0") == amx("CPU : AVX = 1 | ") == "no AMX"
    flags = {"avx", "avx_vnni", "amx_int8"}
    assert undocumented("CPU : AVX = 1", flags) == ["AVX_VNNI"], "AMX is not asked for"
    assert undocumented("CPU : AVX = 1 | AVX_VNNI = 1", flags) == []


def test_llama_cpp_is_built_for_this_processor_without_what_crashes() -> None:
    flags = {"avx2", "amx_int8", "amx_tile", "amx_bf16"}
    assert "AMX" not in cmake_args(flags)
    assert cmake_args(flags, amx=True) == (
        "-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_AMX_TILE=ON -DGGML_AMX_INT8=ON -DGGML_AMX_BF16=ON"
    )
    assert cmake_args({"sse3", "avx2", "avx512f", "amx_int8", "amx_tile"}) == (
        "-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_AVX512=ON"
    )
    assert cmake_args({"asimd"}) == cmake_args(()) == "-DGGML_NATIVE=ON"
