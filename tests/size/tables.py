"""The published tables beside the project, as steps and runs."""

from collections.abc import Mapping

import pytest

from benchmarks import published
from millrace.size.fit.device import MeasuredBatch
from millrace.size.fit.overhead import MeasuredRun
from tests.support.shared import NOT_BESIDE, SHARED

SIZING = SHARED / "data" / "sizing"
needs_tables = pytest.mark.skipif(not SIZING.is_dir(), reason=NOT_BESIDE)


def engine_steps() -> Mapping[tuple[str, str], list[MeasuredBatch]]:
    return published.engine_steps(SIZING)


def served_runs() -> list[MeasuredRun]:
    return published.served_runs(SIZING)
