"""Triton's metrics of the machine: how busy its cores are, and how full its memory."""

from pathlib import Path

_STAT, _MEMORY = Path("/proc/stat"), Path("/proc/meminfo")


class MachineMetrics:
    """Cores are told since the last time that somebody asked, the first time since the machine was started."""

    def __init__(self) -> None:
        self._busy = self._all = 0

    def text(self) -> str:
        """In Prometheus' text format."""
        total, free = _memory_bytes()
        told = (
            ("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", self._utilization()),
            ("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", total),
            ("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", total - free),
        )
        return "".join(f"# HELP {name} {what}\n# TYPE {name} gauge\n{name} {value}\n" for name, what, value in told)

    def _utilization(self) -> float:
        # user nice system idle iowait irq softirq steal; guests are in user already
        ticks = [int(n) for n in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
        n_all, n_busy = sum(ticks), sum(ticks) - ticks[3] - ticks[4]
        since = n_all - self._all
        found = (n_busy - self._busy) / since if since > 0 else 0.0
        self._all, self._busy = n_all, n_busy
        return min(1.0, max(0.0, found))


def _memory_bytes() -> tuple[int, int]:
    """All there is, and what could be had."""
    lines = (line.split() for line in _MEMORY.read_text().splitlines())
    kib = {words[0]: int(words[1]) for words in lines if len(words) > 1}
    return kib["MemTotal:"] * 1024, kib["MemAvailable:"] * 1024
