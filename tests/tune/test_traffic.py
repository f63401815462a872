"""What a recording asks of an engine, beside plain counting: one request at a time, one moment at a time."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.errors import ConfigError
from millrace.tune.day_night import day_and_night, distance
from millrace.tune.kv_occupancy import page_spans, pages, sequences, uncached_tokens
from millrace.tune.traffic import FEWEST, TrafficSummary, check_enough, percentile, propose
from tests.tune.traffic_files import line, recording

PAGE, BLOCK, HOUR = 64, 512, 3600.0
ASKED = TrafficSummary(model_context=8192, usual_batch=16, step_tokens=512)
Lines = list[dict[str, Any]]


def drawn(n: int, seed: int, lasting_s: float = 30.0, **more: Any) -> Lines:
    """Requests of one hour, half of which go on from one of five beginnings of up to three blocks."""
    rng = np.random.default_rng(seed)
    lines = []
    for i in range(n):
        n_input, n_output = int(rng.integers(1, 2500)), int(rng.integers(1, 300))
        n_shared = min(int(rng.integers(0, 4)), n_input // BLOCK) if rng.random() < 0.5 else 0
        beginning = 10 * int(rng.integers(5))
        ids = [beginning + k if k < n_shared else 1000 * i + 100 + k for k in range(-(-n_input // BLOCK))]
        told = {
            "hash_ids": ids,
            "duration": round(1e3 * rng.exponential(lasting_s)),
            "choices": int(rng.integers(1, 3)),
        }
        lines.append(line(round(HOUR * rng.random(), 1), n_input, n_output, **told, **more))
    return sorted(lines, key=lambda told: told["timestamp"])


def least(values: list[int], q: float) -> int:
    """By sorting: the least that at least q percent do not exceed."""
    ranked = sorted(values)
    return next(v for i, v in enumerate(ranked, 1) if 100 * i >= q * len(ranked) - 1e-9)


def running(lines: Lines, at_ms: float) -> Lines:
    return [r for r in lines if r["timestamp"] <= at_ms and (
        at_ms < r["timestamp"] + r["duration"] - r.get("waited", 0) or at_ms == r["timestamp"])]  # fmt: skip


def pages_by_hand(request: dict[str, Any]) -> int:
    """Page by page: full pages of the prompt once, everything else for each choice."""
    n_input, choices = int(request["input_length"]), int(request.get("choices", 1))
    answer, full = math.ceil(request["output_length"] / choices), n_input // PAGE
    return int(full + choices * (math.ceil((n_input + answer) / PAGE) - full))


def held_by_hand(lines: Lines, at_ms: float, kept: bool) -> int:
    """A set of pages by name: those of blocks have their block's, so that what is shared is there once."""
    found: dict[int, int] = {}
    total = 0
    uses: dict[int, list[dict[str, Any]]] = {}
    for r in lines:
        for b in r["hash_ids"]:
            uses.setdefault(b, []).append(r)
    there = running(lines, at_ms)
    for r in there:
        shared = 0
        for k, b in enumerate(r["hash_ids"]):
            n = min(BLOCK, r["input_length"] - k * BLOCK) // PAGE
            if len(uses[b]) > 1:
                found[b], shared = n, shared + n
        total += pages_by_hand(r) - shared
    if kept:
        for b, users in uses.items():
            ends = max(r["timestamp"] + r["duration"] for r in users)
            if len(users) > 1 and min(r["timestamp"] for r in users) <= at_ms < ends:
                first = users[0]
                found[b] = min(BLOCK, first["input_length"] - first["hash_ids"].index(b) * BLOCK) // PAGE
    return total + sum(found.values())


@pytest.mark.parametrize("seed", range(4))
def test_what_is_there_agrees_with_counting(tmp_path: Path, seed: int) -> None:
    lines = drawn(120, seed, lasting_s=(3.0, 60.0, 600.0, 60.0)[seed])
    found = recording(tmp_path / "r", lines)
    times = [r["timestamp"] for r in lines]
    there = sequences(found).at(found.at_s).tolist()
    assert there == [sum(r["choices"] for r in running(lines, t)) for t in times]
    assert pages(found).tolist() == [pages_by_hand(r) for r in lines]
    for kept in (False, True):
        assert page_spans(found, retained=kept).at(found.at_s).tolist() == [held_by_hand(lines, t, kept) for t in times]
    alone = [sum(pages_by_hand(r) for r in running(lines, t)) for t in times]
    shared, kept_pages = (page_spans(found, retained=kept).at(found.at_s).tolist() for kept in (False, True))
    assert sum(shared) < sum(alone) or seed == 0, "some beginning is there twice"
    assert sum(kept_pages) > sum(shared), "some come again later"
    seen: set[int] = set()
    for r, fresh in zip(lines, uncached_tokens(found), strict=True):
        known = sum(PAGE * (min(BLOCK, r["input_length"] - k * BLOCK) // PAGE)
                    for k, b in enumerate(r["hash_ids"]) if b in seen)  # fmt: skip
        assert fresh == max(r["input_length"] - known, 1)
        seen |= set(r["hash_ids"])


@pytest.mark.parametrize("seed", range(4))
def test_a_proposal_agrees_with_sorting(tmp_path: Path, seed: int) -> None:
    covers = (100.0, 99.0, 90.0, 50.0)[seed]
    lines = drawn(200, seed, max_tokens=400 if seed % 2 else 0)
    found = recording(tmp_path / "r", lines)
    p = propose(found, TrafficSummary(model_context=8192, usual_batch=16, step_tokens=512, covers=covers))
    needed = [r["input_length"] + max(math.ceil(r["output_length"] / r["choices"]), r["max_tokens"]) for r in lines]
    assert p.context % PAGE == 0 and p.context - PAGE < least(needed, covers) <= p.context
    assert p.n_unfit == sum(n > p.context for n in needed) <= (100 - covers) / 100 * len(lines)
    assert p.longest == max(needed) and p.lengths["needed"] == {
        "p50": least(needed, 50), "p90": least(needed, 90), "p99": least(needed, 99), "longest": max(needed)
    }  # fmt: skip
    there = [sum(r["choices"] for r in running(lines, told["timestamp"])) for told in lines]
    assert p.batch == least(there, 99) and p.peak == max(there) and p.n_late == sum(n > p.batch for n in there)
    assert p.sure == pytest.approx(100 * math.exp(math.log(0.05) / 200))
    in_a_row = [sum(pages_by_hand(r) for r in lines[max(0, i - p.batch + 1) : i + 1]) for i in range(200)]
    runs = [held_by_hand(lines, r["timestamp"], False) for r in lines]
    keeps = [held_by_hand(lines, r["timestamp"], True) for r in lines]
    assert p.pages_running == min(least(runs, 99), least(in_a_row, 99))
    bound = least(in_a_row, 99)
    assert p.pages_kept == least([min(run, bound) + keep - run for run, keep in zip(runs, keeps, strict=True)], 99)


def test_rows_that_are_timed_are_those_of_most_of_the_time(tmp_path: Path) -> None:
    """60 s with one answer, 30 s with two, 9 s with three, 1 s with five; and a pause of which nothing is timed."""
    lines = [line(0, 100, 10, duration=60_000)]
    lines += [line(100, 100, 10, duration=30_000)] * 2
    lines += [line(200, 3000, 10, duration=9_000)] * 3
    lines += [line(300, 100, 10, duration=1_000)] * 5
    p = propose(recording(tmp_path / "r", lines), ASKED)
    assert p.rows.decode == (1, 2, 3), "50, 90 and 99 % of 100 s"
    assert p.rows.prefill == (128, 512), "of 11 prompts the 6th and the 10th, up to a step's tokens"
    narrow = TrafficSummary(model_context=8192, usual_batch=16, step_tokens=512, max_batch=2, max_context=200)
    assert propose(recording(tmp_path / "r", lines), narrow).rows.prefill == (128, 200)
    assert propose(recording(tmp_path / "r", lines), narrow).rows.decode == (1, 2)


def test_a_burst_is_there_all_at_once(tmp_path: Path) -> None:
    lines = [line(10 * (i // 100), 64, 64, duration=500) for i in range(300)]
    p = propose(recording(tmp_path / "r", lines), ASKED)
    assert (p.batch, p.peak, p.n_late, p.pages_running) == (100, 100, 0, 200)
    spread = [line(i, 64, 64, duration=500) for i in range(300)]
    assert propose(recording(tmp_path / "r", spread), ASKED).batch == 1
    nothing = [line(i // 3, 64, 0, duration=0) for i in range(300)]
    assert propose(recording(tmp_path / "r", nothing), ASKED).batch == 3, "what comes and goes at once was there"
    crowd = [line(0, 1, 1, duration=10)] * 2000
    assert propose(recording(tmp_path / "r", crowd), ASKED).batch == 1024


def test_who_waited_did_not_run(tmp_path: Path) -> None:
    """A server of one place served them one after the other: with room for all, ten would have run at a time."""
    lines = [line(0, 64, 64, duration=1000 * (i + 1), waited=1000 * i) for i in range(10)]
    p = propose(recording(tmp_path / "r", lines * 6), ASKED)
    assert p.batch == 60 and p.waited == pytest.approx(0.9)
    for waited, share in ((99, 0.0), (100, 1.0)):
        lines = [line(i, 64, 64, duration=1000, waited=waited) for i in range(60)]
        assert propose(recording(tmp_path / "r", lines), ASKED).waited == share, "less than a tenth is the step before"


def test_equal_requests_need_equal_things(tmp_path: Path) -> None:
    p = propose(recording(tmp_path / "r", [line(i, 100, 28, duration=10) for i in range(60)]), ASKED)
    assert (p.context, p.batch, p.pages_running, p.pages_kept, p.n_unfit, p.again) == (128, 1, 2, 2, 0, 0.0)
    assert p.rows.decode == (1,) and p.rows.prefill == (128,) and set(p.lengths["needed"].values()) == {128}


def test_what_is_longer_than_the_model_takes_is_counted(tmp_path: Path) -> None:
    lines = [line(i, 100 if i % 4 else 9000, 28) for i in range(100)]
    p = propose(recording(tmp_path / "r", lines), ASKED)
    assert (p.context, p.n_unfit, p.longest) == (8192, 25, 9028)
    odd = TrafficSummary(model_context=100, usual_batch=16, step_tokens=512)
    assert propose(recording(tmp_path / "r", lines), odd).context == 100, "no whole page fits"
    told = TrafficSummary(model_context=8192, usual_batch=16, step_tokens=512, max_context=127)
    assert propose(recording(tmp_path / "r", lines), told).n_unfit == 100


def test_without_stays_nothing_is_guessed(tmp_path: Path) -> None:
    lines = [line(i, 64 * (1 + i % 2), 0) for i in range(100)]
    p = propose(recording(tmp_path / "r", lines), ASKED)
    assert p.batch is None and p.rows.decode == (1, 4, 16) and p.pages_running == p.pages_kept == 24, "16 in a row"
    narrow = TrafficSummary(model_context=8192, usual_batch=16, step_tokens=512, max_batch=4)
    p = propose(recording(tmp_path / "r", lines), narrow)
    assert p.rows.decode == (1, 4) and p.pages_running == 6


@pytest.mark.parametrize("n", [1, 2, FEWEST - 1])
def test_too_few_requests_say_nothing(tmp_path: Path, n: int) -> None:
    with pytest.raises(ConfigError, match=rf"holds {n} request"):
        check_enough(recording(tmp_path / "r", [line(0, 1, 1)] * n), "r")
    check_enough(recording(tmp_path / "r", [line(0, 1, 1)] * FEWEST), "r")
    assert 0.95**FEWEST < 0.05 < 0.95 ** (FEWEST - 1), "the longest of so many is beyond 95 %, 19 times of 20"


def test_how_sure_it_is_was_drawn(tmp_path: Path) -> None:
    """Of 400 recordings of 100 requests, about 19 of 20 have a longest that `sure` percent do not exceed."""
    rng = np.random.default_rng(5)
    sure = propose(recording(tmp_path / "r", [line(i, 1, 1) for i in range(100)]), ASKED).sure / 100
    held_true = np.mean(rng.random((400, 100)).max(axis=1) >= sure)
    assert 0.92 < held_true < 0.98


def test_percentiles_are_values_that_were_there() -> None:
    values = np.array([5, 1, 9, 7])
    assert [percentile(values, q) for q in (0, 25, 26, 50, 75, 76, 100)] == [1, 1, 5, 5, 7, 9, 9]


def days(n_days: int, of_hour: Callable[[int], tuple[int, int, int]], duration: float = 2000) -> Lines:
    """of_hour: requests, prompt and answer tokens of each hour of the clock"""
    return [
        line(HOUR * (24 * day + hour + i / n), n_input, n_output, duration=duration)
        for day in range(n_days)
        for hour in range(24)
        for n, n_input, n_output in [of_hour(hour)]
        for i in range(n)
    ]


def test_day_and_night_are_found_where_they_are(tmp_path: Path) -> None:
    office = days(2, lambda hour: (40, 200, 50) if 8 <= hour < 20 else (4, 3000, 400))
    found = distance(recording(tmp_path / "r", office), ASKED)
    (day, by_day), (night, by_night) = found
    assert (day.name, day.first, day.end, day.hours) == ("day", 8, 20, 12)
    assert (night.name, night.first, night.end, night.hours) == ("night", 20, 8, 12)
    assert by_day.n == 2 * 12 * 40 and by_night.n == 2 * 12 * 4
    assert (by_day.context, by_night.context) == (256, 3456)


def test_lengths_alone_make_a_night_too(tmp_path: Path) -> None:
    found = distance(recording(tmp_path / "r", days(2, lambda h: (10, 2000 if 1 <= h < 6 else 200, 50))), ASKED)
    assert {(part.first, part.end, p.context) for part, p in found} == {(1, 6, 2112), (6, 1, 256)}


def test_hours_that_are_alike_are_not_parted(tmp_path: Path) -> None:
    alike = recording(tmp_path / "r", days(2, lambda hour: (10, 200, 50)))
    assert distance(alike, ASKED) == []
    busier = recording(tmp_path / "r", days(2, lambda hour: (40 if hour < 12 else 5, 200, 50)))
    assert day_and_night(busier) is not None and distance(busier, ASKED) == [], "more of the same needs no other engine"


def test_less_than_a_day_has_no_night(tmp_path: Path) -> None:
    lines = [told for told in days(1, lambda hour: (40 if hour < 12 else 5, 200, 50))]
    assert day_and_night(recording(tmp_path / "r", lines)) is None
    few = days(2, lambda hour: (10, 200, 50) if hour < 18 else (0, 1, 1))
    assert day_and_night(recording(tmp_path / "r", few)) is None, "nobody came at night"
