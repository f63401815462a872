"""Differences and their intervals: simulated truths, files of results, and rounds in turns."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from millrace.bench.analysis.compare import (
    ComparedRun,
    Difference,
    compare_answers,
    compare_pairs,
    compare_rounds,
    compare_samples,
    more_failures,
    only_one_has,
    read_result,
    run_interleaved,
)  # fmt: skip
from millrace.bench.analysis.compare_goodput import (
    compare_goodput_results,
    compare_goodput_rounds,
    compare_shares,
    newcombe,
)
from millrace.bench.analysis.goodput import GoodputLimits
from millrace.bench.analysis.intervals import Z99, Z
from millrace.bench.client.client import BenchTarget, Client
from millrace.bench.client.endpoints import CHAT
from millrace.bench.client.request_record import BenchRecord, Failure
from millrace.bench.load.inputs import Turn
from millrace.bench.null_server.ledger import NullTiming
from millrace.bench.report.results import line_of
from millrace.bench.run.plan import BenchPlan, make_plan
from millrace.bench.run.run import Run, RunLoad, TurnRecord
from millrace.bench.settings import InputSettings, LoadSettings, SessionSettings, TargetSettings
from millrace.errors import ConfigError
from tests.bench.conftest import Null

RNG = np.random.default_rng(3)
ROUNDS = 400


def drawn_pairs(by: float, n: int = 8) -> Difference:
    """Rounds that drift together by tens of percent, and differ by `by` with noise of 3 %."""
    common = 100 * np.exp(RNG.normal(0, 0.3, n))
    return compare_pairs(
        "x", False, common.tolist(), (common * (1 + by / 100) * np.exp(RNG.normal(0, 0.03, n))).tolist()
    )


def answer(ttft_s: float, late_s: float = 0.0, failure: Failure | None = None) -> BenchRecord:
    return BenchRecord("x", 5 - late_s, 5, [5 + ttft_s, 6 + ttft_s], [], 7, 5, 10, failure=failure)


def rounds(*answers: list[BenchRecord]) -> ComparedRun:
    runs = []
    for part in answers:
        runs.append(run := Run(Client(BenchTarget("http://x:1", CHAT)), RunLoad()))
        run.records += [TurnRecord(Turn("a"), one, 0, 0) for one in part]
    return ComparedRun(runs)


def test_what_users_waited_is_compared_too() -> None:
    """Both answer 20 ms after they were asked, but B's requests had waited for a place, twice as long in all."""
    a, b = rounds(*[[answer(0.02)] * 4] * 3), rounds(*[[answer(0.02, late_s=0.02)] * 4] * 3)
    found = {d.name: d for d in compare_rounds(a, b)}
    for name, percent, verdict in (
        ("time_to_first_token", 0, "no difference seen"), ("time_to_first_token_from_intended", 100, "worse"),
        ("request_latency_from_intended", 100 * 0.02 / 1.02, "worse"),
    ):  # fmt: skip
        assert found[name].percent == pytest.approx(percent, abs=1e-9) and found[name].verdict == verdict


LIMITS = GoodputLimits((("time_to_first_token", 500.0),))
KEPT, BROKEN, FAILED = answer(0.4), answer(0.4, late_s=0.2), answer(0.1, failure=Failure.TIMEOUT)


def test_shares_within_limits() -> None:
    """Of A 39 of 40, of B 21 of 42; what we gave up counts nowhere."""
    gone = [answer(9, failure=kind) for kind in (Failure.CANCELLED, Failure.INTERRUPTED)]
    a = rounds([KEPT] * 20, [KEPT] * 19 + [BROKEN], [KEPT] * 99)
    b = rounds([KEPT] * 11 + [BROKEN] * 10 + gone, [KEPT] * 10 + [BROKEN] * 6 + [FAILED] * 5)
    found = compare_goodput_rounds(a, b, LIMITS)
    assert found is not None and (found.a, found.b) == (39 / 40, 0.5)
    assert found.points == pytest.approx(-47.5) and found.verdict == "worse" and found.is_worse_by(20)
    assert found.surely[0] < found.interval[0] < -47.5 < found.interval[1] < found.surely[1] < -20
    assert compare_goodput_rounds(rounds(gone), rounds([KEPT]), LIMITS) is None


@pytest.mark.parametrize("a, b", [((56, 70), (48, 80)), ((9, 10), (3, 10)), ((10, 10), (0, 20))])
def test_the_interval_of_two_shares_is_newcombes(a: tuple[int, int], b: tuple[int, int]) -> None:
    """Table II of the paper, its method 10."""
    printed = {(56, 70): (0.0524, 0.3339), (9, 10): (0.1705, 0.8090), (10, 10): (0.6791, 1.0)}[a]
    low, high = newcombe(b, a, Z)
    assert (round(low, 4), round(high, 4)) == printed
    assert newcombe(b, a, Z99)[0] < low


def test_ci_is_seldom_alarmed_by_shares_that_rounds_disturb() -> None:
    """Both keep 90 % in the mean; what a round does to its 40 requests differs by 5 points from round to round."""
    alarms = 0
    for _ in range(ROUNDS):
        shares = np.clip(RNG.normal(0.9, 0.05, (8, 2)), 0, 1)
        kept = RNG.binomial(40, shares)
        found = compare_shares("x", [((int(k_a), 40), (int(k_b), 40)) for k_a, k_b in kept])
        alarms += found is not None and found.is_worse_by(0)
    assert alarms / ROUNDS < 0.012


def test_what_rounds_share_cancels_and_intervals_hold() -> None:
    found = [drawn_pairs(5) for _ in range(ROUNDS)]
    held = sum(d.interval is not None and d.interval[0] <= 5 <= d.interval[1] for d in found)
    assert 0.92 <= held / ROUNDS <= 0.98
    assert np.mean([d.percent for d in found]) == pytest.approx(5, abs=0.3)


def test_no_difference_is_seen_where_there_is_none() -> None:
    found = [drawn_pairs(0).verdict for _ in range(ROUNDS)]
    assert 0.92 <= found.count("no difference seen") / ROUNDS <= 0.98


def test_ci_is_seldom_alarmed_for_nothing() -> None:
    """Of runs without a difference 1 % would fail on one side or the other: half of these are worse."""
    alarms = sum(drawn_pairs(0, n).is_worse_by(0) for n in (3, 8, 20) for _ in range(ROUNDS))
    assert alarms / (3 * ROUNDS) < 0.012


def test_the_visible_effect_is_seen_four_times_out_of_five() -> None:
    visible = float(np.mean([drawn_pairs(0).visible for _ in range(100)]))
    seen = sum(drawn_pairs(visible).verdict == "worse" for _ in range(ROUNDS))
    assert 0.7 <= seen / ROUNDS <= 0.9


def test_samples_of_requests() -> None:
    found = [
        compare_samples("x", False, RNG.gamma(4, 25, 80).tolist(), RNG.gamma(4, 27.5, 50).tolist())
        for _ in range(ROUNDS)
    ]
    held = sum(d.interval is not None and d.interval[0] <= 10 <= d.interval[1] for d in found)
    assert 0.92 <= held / ROUNDS <= 0.98
    assert compare_samples("x", False, [1.0, 1.0], [2.0, 2.0]).verdict == "too few to say"


@pytest.mark.parametrize(
    "more_is_better, interval, verdict, worse_by_5, worse_by_20",
    [
        (False, (10, 15), "worse", True, False), (False, (-15, -10), "better", False, False),
        (True, (-50, -40), "worse", True, True), (True, (10, 15), "better", False, False),
        (False, (-1, 9), "no difference seen", False, False), (False, (1, 9), "worse", False, False),
    ],
)  # fmt: skip
def test_verdicts(
    more_is_better: bool, interval: tuple[float, float], verdict: str, worse_by_5: bool, worse_by_20: bool
) -> None:
    one = Difference("x", more_is_better, 1, 1, 9, 0, interval, 1, surely=interval)
    assert (one.verdict, one.is_worse_by(5), one.is_worse_by(20)) == (verdict, worse_by_5, worse_by_20)


def run_in_turns(null: Null) -> tuple[ComparedRun, ComparedRun]:
    """Run a slow and a fast server in turns, and check that they got the same questions."""
    slow, fast = NullTiming(ttft_ms="20", itl_ms="3"), NullTiming(ttft_ms="20", itl_ms="2")

    def plans(url: str, round_: int) -> BenchPlan:
        load = LoadSettings(concurrency=2, request_count=4, random_seed=round_)
        return make_plan(url, TargetSettings(), load, InputSettings(isl=10, osl=20), SessionSettings())

    a, b = asyncio.run(
        run_interleaved(lambda i: plans(null(slow).url, i), lambda i: plans(null(fast).url, i), 4)
    )  # fmt: skip
    order = sorted([(r.started_s, "A") for r in a.runs] + [(r.started_s, "B") for r in b.runs])
    assert "".join(which for _, which in order) == "ABBAABBA"
    texts = [[sorted(r.turn.text for r in run.records) for run in side.runs] for side in (a, b)]
    assert texts[0] == texts[1] and texts[0][0] != texts[0][1]
    return a, b


def test_rounds_go_in_turns_with_the_same_questions(null: Null) -> None:
    a, b = run_in_turns(null)
    assert "inter_token_latency" in {d.name for d in compare_rounds(a, b)}


@pytest.mark.timing
def test_rounds_in_turns_tell_the_faster_server(null: Null) -> None:
    itl = {d.name: d for d in compare_rounds(*run_in_turns(null))}["inter_token_latency"]
    assert itl.verdict == "better" and itl.percent == pytest.approx(-100 / 3, abs=6)


def written(path: Path, itl_s: float, n: int = 40, failures: tuple[Failure, ...] = ()) -> Path:
    records = []
    for i in range(n):
        chunks = (i + 0.1 + RNG.normal(0, 0.01) + itl_s * np.arange(10)).tolist()
        records.append(
            TurnRecord(Turn("a"), BenchRecord(f"x{i}", i - 0.25, i, chunks, [], chunks[-1], 5, 10, status=200), i, 0)
        )
    records += [TurnRecord(Turn("a"), BenchRecord("y", 1, 1, end_s=2, failure=kind), n, 0) for kind in failures]
    path.mkdir()
    (path / "requests.jsonl").write_text("".join(line_of(r, 1e9) + "\n" for r in records))
    return path


def test_two_results_that_were_written(tmp_path: Path) -> None:
    a, b = written(tmp_path / "a", 0.010), written(tmp_path / "b", 0.012)
    found = {d.name: d for d in compare_answers(read_result(a).answers, read_result(b / "requests.jsonl").answers)}
    assert found["inter_token_latency"].percent == pytest.approx(20, abs=0.1)
    assert found["inter_token_latency"].verdict == "worse"
    assert found["time_to_first_token"].n == 40
    waited = found["time_to_first_token_from_intended"]
    assert waited.a == pytest.approx(found["time_to_first_token"].a + 250, abs=1e-3), "a quarter of a second, written"
    both = compare_goodput_results(
        read_result(a), read_result(b), GoodputLimits((("request_latency", 440.0 + 3 * 10),))
    )
    assert both is not None and both.a > 0.95 and both.b < both.a


@pytest.mark.parametrize("line", ["", "{", "7", "{}", '{"failure": "new"}', '{"failure": null, "sent": "x"}'])
def test_a_file_that_is_no_result(tmp_path: Path, line: str) -> None:
    folder = written(tmp_path / "a", 0.01, n=1)
    with (folder / "requests.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_result(folder)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_result(tmp_path / "absent")


def test_only_failures_are_no_result(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    record = TurnRecord(Turn("a"), BenchRecord("x", 1, 1, end_s=2), 0, 0)
    told = json.loads(line_of(record, 0)) | {"failure": "timeout"}
    path.write_text(json.dumps(told) + "\n")
    with pytest.raises(ConfigError, match="no whole answer"):
        read_result(path)


@pytest.mark.parametrize(
    "field, value",
    [
        ("chunk_ms", "[1.0, NaN]"), ("chunk_ms", "[1e999]"), ("chunk_ms", "[2, 1]"), ("chunk_ms", "[-1]"),
        ("sent", "true"), ("end_ms", "Infinity"), ("n_output_told", "-3"), ("n_output_told", "1e999"),
        ("n_output_told", "2.5"), ("n_output_told", "1" + "0" * 400), ("chunk_tokens", "[0.5]"), ("n_prompt", "NaN"),
        ("intended_ms", "0.001"), ("intended_ms", "-Infinity"),
    ],
)  # fmt: skip
def test_figures_that_no_run_writes(tmp_path: Path, field: str, value: str) -> None:
    """They would become a verdict on a server, or a traceback."""
    folder = written(tmp_path / "a", 0.01, n=1)
    line = json.loads((folder / "requests.jsonl").read_text())
    with (folder / "requests.jsonl").open("a") as file:
        file.write(json.dumps(line | {field: "here"}).replace('"here"', value) + "\n")
    with pytest.raises(ConfigError, match=f'requests.jsonl, line 2: "{field}"'):
        read_result(folder)


def test_failures_and_the_clients_word_are_read(tmp_path: Path) -> None:
    """What we gave up ourselves is no failure of the server."""
    kinds = (Failure.TIMEOUT, Failure.CANCELLED, Failure.STATUS, Failure.INTERRUPTED)
    folder = written(tmp_path / "a", 0.01, n=5, failures=kinds)
    found = read_result(folder)
    assert (len(found.answers), found.n_failed, found.n, found.valid) == (5, 2, 7, None)
    summary = folder / "summary.json"
    for valid in (True, False, None):
        summary.write_text(json.dumps({"valid": valid}))
        assert read_result(folder).valid is read_result(folder / "requests.jsonl").valid is valid
    for text in ("", "[]", "{}", '{"valid": "no"}', "\xff"):
        summary.write_bytes(text.encode("latin-1"))
        with pytest.raises(ConfigError, match=r"summary\.json is no summary"):
            read_result(folder)


@pytest.mark.parametrize(
    "failed, n, more",
    [
        ((0, 0), (40, 40), False), ((0, 1), (40, 40), True), ((1, 1), (40, 40), False), ((2, 1), (40, 40), False),
        ((1, 1), (100, 99), False), ((1, 10), (10, 100), False), ((1, 11), (10, 100), True),
        ((60, 50), (1000, 100), True),
    ],
)  # fmt: skip
def test_failures_are_compared_as_shares(failed: tuple[int, int], n: tuple[int, int], more: bool) -> None:
    """One request more than A's share of them, at least."""
    assert more_failures(failed, n) is more


def test_a_metric_that_one_side_lacks_is_named() -> None:
    streamed, whole = BenchRecord("x", 0, 0, [1.0, 2.0], [], 2, 5, 10), BenchRecord("x", 0, 0, [], [], 2, 5, 10)
    names = ("time_to_first_token", "inter_token_latency", "time_to_first_token_from_intended")
    assert only_one_has([whole], [streamed]) == dict.fromkeys(names, "B")
    assert only_one_has([streamed], [whole, whole]) == dict.fromkeys(names, "A")
    assert only_one_has([whole], [whole]) == only_one_has([streamed], [whole, streamed]) == {}
