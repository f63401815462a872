"""This machine's processor and memory, as far as this process may use them, by affinity and control groups."""

import mmap
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from millrace.machine.cgroup import cpu_quotas, memory_limits

HUGE_PAGE_BYTES = 2 << 20
_CPUS = Path("/sys/devices/system/cpu")


def cpu_model() -> str:
    """Return the kernel's name of the processor, or its architecture if there is none."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def cpu_flags() -> frozenset[str]:
    """Return the processor's flags ("avx512f", "avx512_vnni", ...); empty if the kernel does not list them."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()


def affinity_cores() -> int:
    """Return how many cores this process may be scheduled on."""
    return len(os.sched_getaffinity(0))


def quota_cores() -> float | None:
    """Return the CPU quota of the control groups in cores; None: no limit."""
    return min(cpu_quotas(), default=None)


def usable_cores() -> int:
    """Return the number of cores by affinity, or less by a control group's quota."""
    quota = quota_cores()
    return affinity_cores() if quota is None else min(affinity_cores(), max(1, int(quota)))


def machine_name() -> str:
    """Return a short name of the machine for which timings of whole programs are valid."""
    return f"{cpu_model()}, {usable_cores()} cores"


@dataclass(frozen=True, slots=True)
class Cache:
    """One level of the caches, as seen by one core, without instruction caches."""

    level: int
    nbytes: int
    shared_by: int  # number of cores, including those that this process may not use


def caches() -> tuple[Cache, ...]:
    """Return the caches of the first usable core, smallest level first; empty if the kernel does not list them."""
    result = []
    for folder in sorted((_CPUS / f"cpu{min(os.sched_getaffinity(0))}" / "cache").glob("index*")):
        try:
            level, kind, size, shared = (
                (folder / name).read_text().strip() for name in ("level", "type", "size", "shared_cpu_list")
            )
        except OSError:
            continue
        if kind != "Instruction":
            result.append(Cache(int(level), _kib(size), _cpus_in(shared)))
    return tuple(sorted(result, key=lambda c: c.level))


def _kib(text: str) -> int:
    """Convert "48K" or "32M" to bytes."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


def _cpus_in(text: str) -> int:
    """Count the CPUs in "0-3,8"."""
    ends = [[int(n) for n in part.split("-")] for part in text.split(",")]
    return sum(e[-1] - e[0] + 1 for e in ends)


def load() -> float:
    """Return the load average of the last minute, on the whole machine."""
    return os.getloadavg()[0]


@dataclass(frozen=True, slots=True)
class Memory:
    total_bytes: int
    available_bytes: int  # that a process can allocate without swapping, within its control groups


def memory() -> Memory:
    fields = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value = line.split(":", 1)
        fields[name] = int(value.split()[0]) * 1024
    total, available = fields["MemTotal"], fields["MemAvailable"]
    limits = memory_limits()
    return Memory(
        min([total, *(limit.limit_bytes for limit in limits)]),
        min([available, *(limit.left_bytes for limit in limits)]),
    )


def huge_pages() -> str:
    """Return the system's setting for transparent huge pages: "always", "madvise", "never" or "unknown"."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    return text[text.index("[") + 1 : text.index("]")] if "[" in text else "unknown"


def fingerprint(isa: str) -> dict[str, str | int]:
    """Return what an engine's choices depend on: stored in it, compared when it is opened. isa: the best one here"""
    return {"cpu": cpu_model(), "isa": isa, "cores": usable_cores()}


def huge_page_share(nbytes: int = 32 << 20) -> float:
    """Return the share of a test allocation on huge pages, 0 to 1, with the same madvise as the engine's."""
    with mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        before = _anonymous_huge_bytes()
        for at in range(0, nbytes + HUGE_PAGE_BYTES, 4096):
            memory[at] = 1
        return min(max(_anonymous_huge_bytes() - before, 0) / nbytes, 1.0)


def _anonymous_huge_bytes() -> int:
    """Return this process's bytes on huge pages; 0 if the kernel does not report them."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages"))
