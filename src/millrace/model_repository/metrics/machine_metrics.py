"""Triton's machine metrics: CPU utilization and memory."""

from collections.abc import Iterator
from pathlib import Path

from millrace.prometheus import MetricFamily

_STAT, _MEMORY = Path("/proc/stat"), Path("/proc/meminfo")


class MachineMetrics:
    """Machine metrics. Utilization covers the time since the previous call, at first since boot."""

    def __init__(self) -> None:
        self._busy = self._all = 0

    def collect(self) -> Iterator[MetricFamily]:
        total, free = _memory_bytes()
        gauges = (
            ("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", self._utilization()),
            ("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", total),
            ("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", total - free),
        )
        for name, help_text, value in gauges:
            yield MetricFamily(name, "gauge", help_text, [("", "", value)])

    def _utilization(self) -> float:
        # user nice system idle iowait irq softirq steal; user includes guests
        ticks = [int(n) for n in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
        n_all, n_busy = sum(ticks), sum(ticks) - ticks[3] - ticks[4]
        since = n_all - self._all
        busy_share = (n_busy - self._busy) / since if since > 0 else 0.0
        self._all, self._busy = n_all, n_busy
        return min(1.0, max(0.0, busy_share))


def _memory_bytes() -> tuple[int, int]:
    """Return total and available memory."""
    lines = (line.split() for line in _MEMORY.read_text().splitlines())
    kib = {words[0]: int(words[1]) for words in lines if len(words) > 1}
    return kib["MemTotal:"] * 1024, kib["MemAvailable:"] * 1024
