"""What steps cost by their work: times by hand, a profile's file and its refusals, turns of a loop."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from millrace.errors import ConfigError
from millrace.runtime.scheduling.step_cost_model import (
    SchedulerSettings,
    StepCost,
    StepProfile,
    predicted_vs_measured,
    read_profile,
    write_profile,
)
from millrace.runtime.scheduling.step_features import StepWork, step_intervals_s
from millrace.runtime.step_history import PART, StepRecord
from tests.support.drawn import SEEDS

COST = StepCost(((1, 4e-3), (3, 5e-3), (11, 13e-3)), token=2e-3, pair=1e-6, read=1e-5, host=5e-4, host_sequence=1e-4)
SCHEDULE = SchedulerSettings(512, 16, 48, 2048, 64, 512, 0.1, 1.9, 4)
PROFILE = StepProfile("m", "abc", "a machine", "2026-11-23", 100, 0.05, 1e-3, (0.9, 1.0, 1.4), COST, SCHEDULE)


def step(number: int, began_s: float, took_s: float, parts: list[tuple[int, int, int, int]]) -> StepRecord:
    """parts: request, choice, start, n"""
    rows = [(request, choice, start, n, n if n > 1 else 0, True) for request, choice, start, n in parts]
    return StepRecord(number, began_s, took_s, 0, np.array(rows, PART), ("r",) * len(rows))


@pytest.mark.parametrize(
    "prompts, starts, rows, context, expected",
    [
        ([], [], 1, 100, 4e-3 + 1e-5 * 100),
        ([], [], 2, 10, 4.5e-3 + 1e-5 * 20),  # half way from 1 to 3 tokens
        ([6], [0], 1, 50, 9e-3 + 1e-6 * 6 * 3 + 1e-5 * 50),
        ([11], [0], 0, 0, 13e-3 + 1e-6 * 11 * 5.5),
        ([20, 4], [0, 100], 0, 0, 13e-3 + 13 * 2e-3 + 1e-6 * (20 * 10 + 4 * 102)),  # beyond the last
    ],
)
def test_a_step_takes_its_tokens_and_its_attention(
    prompts: list[float], starts: list[float], rows: int, context: float, expected: float
) -> None:
    assert COST.seconds(prompts, starts, rows, context) == pytest.approx(expected, rel=1e-12)
    assert COST.scaled(1.5).seconds(prompts, starts, rows, context) == pytest.approx(1.5 * expected, rel=1e-12)
    assert COST.between(3) == pytest.approx(8e-4) and COST.scaled(2).between(3) == pytest.approx(16e-4)


@given(seed=SEEDS)
def test_times_are_those_of_numpy_bit_for_bit(seed: int) -> None:
    """Between the knots, at them, before and beyond: by `np.interp`, and the sum in its order."""
    rng = np.random.default_rng(seed)
    tokens = np.unique(rng.integers(1, 300, int(rng.integers(1, 24))))
    times = np.sort(rng.uniform(1e-4, 0.3, len(tokens)))
    token, pair, read = rng.uniform(0, 1e-3, 3).tolist()
    cost = StepCost(tuple(zip(tokens.tolist(), times.tolist(), strict=True)), token, pair, read)
    for _ in range(20):
        prompts = rng.integers(1, 200, int(rng.integers(0, 3))).tolist()
        starts, rows = rng.integers(0, 500, len(prompts)).tolist(), int(rng.integers(0, 40))
        rows, context = rows or int(not prompts), float(rng.uniform(0, 500))
        n = rows + sum(prompts)
        pairs = sum(p * (start + p / 2) for p, start in zip(prompts, starts, strict=True))
        without = float(np.interp(n, tokens, times)) + max(0.0, n - int(tokens[-1])) * token
        assert cost.seconds(prompts, starts, rows, context) == without + pair * pairs + read * rows * context


def test_work_is_that_of_its_parts() -> None:
    seen = step(1, 0.0, 1.0, [(1, 0, 40, 1), (2, 0, 128, 16), (3, 0, 7, 1), (4, 1, 0, 2)])
    work = StepWork.from_parts(seen.parts)
    assert tuple(work) == ((16, 2), (128, 0), 2, 41 + 8)
    expected = COST.seconds([16, 2], [128, 0], 2, 24.5)
    assert COST.work_s(work) == pytest.approx(expected, rel=1e-12)


def test_a_turn_lasts_until_the_next_step_of_somebody_in_it() -> None:
    steps = [
        step(1, 0.0, 0.3, [(1, 0, 0, 8)]),
        step(2, 0.5, 0.1, [(1, 0, 8, 1), (2, 0, 0, 4)]),
        step(3, 0.7, 0.1, [(2, 0, 4, 1)]),
        step(4, 9.0, 0.1, [(2, 1, 0, 4)]),  # another choice: nobody that was there
        step(6, 9.2, 0.1, [(2, 1, 4, 1)]),  # one between them is forgotten
    ]
    assert step_intervals_s(steps) == [0.5, pytest.approx(0.2), None, None, None]
    assert step_intervals_s([]) == []


def test_the_last_steps_stand_beside_their_prediction() -> None:
    old = [step(n, n, 99.0, [(1, 0, n, 1)]) for n in range(1, 20)]
    last = [step(n, n, 6e-3 if n % 2 else 8e-3, [(1, 0, 99, 1)]) for n in range(20, 276)]
    measured_s, predicted_s = predicted_vs_measured(PROFILE, [*old, *last]) or (0, 0)
    assert measured_s == pytest.approx(7e-3)
    assert predicted_s == pytest.approx(1.1 * 5e-3), "the mean of the spread, of what is usual"
    assert predicted_vs_measured(PROFILE, []) is None


def test_a_profile_is_what_was_written(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    write_profile(file, PROFILE)
    assert read_profile(file) == PROFILE
    PROFILE.check("abc", "a machine")
    for engine, machine in (("abd", "a machine"), ("abc", "another")):
        with pytest.raises(ConfigError, match="the profile is of the"):
            PROFILE.check(engine, machine)


@pytest.mark.parametrize(
    "change, why",
    [
        ({"schema": 1}, "profile of schema 1"),
        ({"schema": None}, "profile of schema None"),
        ({"engine": 5}, "engine"),
        ({"spread": []}, "spread"),
        ({"spread": [1.0, float("nan")]}, "spread"),
        ({"spread": [0.0]}, "spread"),
        ({"front": -1.0}, "numbers from 0|-1"),
        ({"error": float("inf")}, "error"),
        ({"more": 1}, "more"),
        ({"cost": {"at": []}}, "cost"),
        ({"at": [[1, 2e-3], [2, 1e-3]]}, "rise"),  # it falls
        ({"at": [[2, 1e-3], [1, 2e-3]]}, "rising"),
        ({"at": [[0, 1e-3]]}, "rising"),
        ({"at": [[n, 1e-3] for n in range(1, 66)]}, "64"),
        ({"token": float("nan")}, "negative, endless"),
        ({"pair": -1e-9}, "negative, endless"),
        ({"schedule": None}, "schedule"),
        ({"max_sequences": 513}, "513 sequences in steps of 512 tokens"),
        ({"max_rows": 15}, "and 15 rows"),
        ({"pages": 1 << 25}, "pages"),
        ({"page_tokens": 0}, "page_tokens"),
        ({"gap_limit_s": float("nan")}, "gap"),
        ({"stretch": float("inf")}, "stretch of inf"),
        ({"stretch": 1.0}, "stretch"),
    ],
)  # fmt: skip
def test_a_damaged_profile_is_refused(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    file = tmp_path / "p.json"
    write_profile(file, PROFILE)
    told = json.loads(file.read_text())
    for name, value in change.items():
        within = next((told[part] for part in ("cost", "schedule") if name in told[part]), told)
        within[name] = value
    file.write_text(json.dumps(told))
    with pytest.raises(ConfigError, match=why):
        read_profile(file)


def test_what_is_no_profile_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_profile(file)
    for text in ("", "[" * 100_000, "[]", '{"schema": 1', "null"):
        file.write_text(text)
        with pytest.raises(ConfigError):
            read_profile(file)
    file.write_text(" " * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match="no profile"):
        read_profile(file)
