"""This machine's processor and memory, as far as this process may use them: affinity and cgroup limits included."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def cpu_model() -> str:
    """The name that the kernel gives the processor; the architecture where it gives none."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def usable_cores() -> int:
    """Cores by affinity, or fewer by the cgroup's quota."""
    cores = len(os.sched_getaffinity(0))
    quota = _cgroup_value("cpu.max")
    if quota and quota.split()[0] != "max":
        allowed, period = (int(part) for part in quota.split())
        cores = min(cores, max(1, allowed // period))
    return cores


@dataclass(frozen=True, slots=True)
class Memory:
    total_bytes: int
    available_bytes: int  # what a process can take now without swapping, or what its cgroup leaves


def memory() -> Memory:
    fields = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value = line.split(":", 1)
        fields[name] = int(value.split()[0]) * 1024
    total, available = fields["MemTotal"], fields["MemAvailable"]
    limit, used = _cgroup_value("memory.max"), _cgroup_value("memory.current")
    if limit and limit != "max" and used:
        total = min(total, int(limit))
        available = min(available, int(limit) - int(used) + _reclaimable())
    return Memory(total, max(available, 0))


def _reclaimable() -> int:
    """Page cache that counts against the cgroup and is given back under pressure."""
    stat = _cgroup_value("memory.stat") or ""
    values = dict(line.split() for line in stat.splitlines() if len(line.split()) == 2)
    return int(values.get("inactive_file", 0))


def _cgroup_value(name: str) -> str | None:
    try:
        return (_CGROUP / name).read_text().strip()
    except OSError:
        return None


def huge_pages() -> str:
    """The system's setting for transparent huge pages: "always", "madvise", "never" or "unknown"."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    return text[text.index("[") + 1 : text.index("]")] if "[" in text else "unknown"


def fingerprint(isa: str) -> dict[str, str | int]:
    """What an engine's choices depend on: written into it, compared when it is opened. `isa`: the best that runs here."""
    return {"cpu": cpu_model(), "isa": isa, "cores": usable_cores()}
