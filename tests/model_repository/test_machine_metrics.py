"""Triton's metrics of the machine, beside what it says of itself."""

from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from millrace.model_repository.metrics import triton_metrics
from millrace.model_repository.metrics.triton_metrics import MachineMetrics


def told(metrics: MachineMetrics) -> dict[str, float]:
    return {family.name: family.samples[0][2] for family in metrics.collect()}


def test_cores_are_told_since_somebody_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """user nice system idle iowait irq softirq steal, and guests, who are in user already."""
    stat, metrics = tmp_path / "stat", MachineMetrics()
    monkeypatch.setattr(triton_metrics, "_STAT", stat)
    found = []
    for ticks in (
        (10, 0, 10, 70, 10, 0, 0, 0, 9, 9),
        (30, 5, 15, 80, 30, 5, 5, 10, 9, 9),
        (30, 5, 15, 80, 30, 5, 5, 10),
    ):
        stat.write_text(f"cpu  {' '.join(map(str, ticks))}\ncpu0 1 2 3\n")
        found.append(told(metrics)["nv_cpu_utilization"])
    assert found == [0.2, pytest.approx(50 / 80), 0.0], "of 100, of 80 more, of none"


def test_memory_is_the_machines() -> None:
    found, memory = told(MachineMetrics()), psutil.virtual_memory()
    assert found["nv_cpu_memory_total_bytes"] == memory.total
    assert found["nv_cpu_memory_used_bytes"] == pytest.approx(memory.total - memory.available, abs=1 << 30)
    assert 0 <= found["nv_cpu_utilization"] <= 1
