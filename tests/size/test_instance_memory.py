"""Where an instance's memory goes, beside sums by hand."""

from dataclasses import replace

import pytest

from millrace.machine.devices import find_device
from millrace.size.answer.sizing import instance_of
from millrace.size.performance.closed_form import memory
from millrace.size.performance.models import PRESETS
from millrace.size.performance.operating_point import FigureSource, OperatingPoint, Waits

EIGHT = instance_of(PRESETS["llama-3-8b"], find_device("H100"), "fp8", 1)
POINT = OperatingPoint(
    model="m", device="H100 SXM", precision="fp8", tp=1, input_tokens=2000, output_tokens=200, concurrency=25,
    rate=8.8375, mean=Waits(0.489, 0.0117, 2.825), p95=None, source=FigureSource.MEASURED,
)  # fmt: skip


def test_the_memory_of_an_instance() -> None:
    """80 GB: 8 of them not used, 3 for software, 8.03 and the head's and table's second bytes of weights; the rest."""
    found = memory(EIGHT, POINT)
    assert found.total == 80e9 and found.kept_back == pytest.approx(11e9)
    assert found.weights == EIGHT.model.parameters + 2 * EIGHT.model.head_parameters * 2
    assert found.kv_in_use == pytest.approx(25 * 2100 * 65536)
    assert found.kept_back + found.weights + found.kv_in_use + found.free == pytest.approx(found.total)
    full = memory(EIGHT, replace(POINT, concurrency=1e6))
    assert full.free == 0 and full.kv_in_use == pytest.approx(found.kv_in_use + found.free)
