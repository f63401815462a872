"""The simulator beside all published serving runs, and each part of them by what was fitted to the others."""

import json
import sys
from collections import defaultdict
from dataclasses import asdict

import pytest

from benchmarks.sizing import PARTS
from millrace.size.fit.overhead import LeaveOneOutResult, MeasuredRun, leave_one_out, replay, summarize_errors
from millrace.size.performance.fitted_devices import profile
from tests.size.tables import needs_tables, served_runs

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800), needs_tables]


def by_profile() -> dict[tuple[str, str], list[MeasuredRun]]:
    found = defaultdict(list)
    for run in served_runs():
        found[run.instance.device.name, run.instance.precision].append(run)
    return found


def show(where: str, held: LeaveOneOutResult) -> None:
    sys.stdout.write(json.dumps({"of": where, **asdict(held)}) + "\n")


def test_all_runs_by_the_shipped_stacks() -> None:
    found = []
    for (device, precision), runs in by_profile().items():
        of_these = [replay(run, profile(run.instance.device, precision).stack) for run in runs]
        show(f"{device} {precision}", summarize_errors("by its own stack", of_these))
        found += of_these
    held = summarize_errors("all", found)
    show("all", held)
    assert held.rate.n == 349 and held.rate.median <= 0.14 and held.rate.mape <= 0.10
    assert held.ttft.median <= 0.20 and held.itl.median <= 0.10


def test_what_is_left_out() -> None:
    """No part of a profile's runs is further than 25 % from what the others say, and most are within 10."""
    errors = []
    for (device, precision), runs in by_profile().items():
        start = profile(runs[0].instance.device, precision).stack
        for part, group in PARTS.items():
            for held in leave_one_out(runs[::2], start, group):
                show(f"{device} {precision}, {part}", held)
                errors.append(held.rate.mape)
    assert max(errors) <= 0.25 and sorted(errors)[len(errors) // 2] <= 0.10
