"""Checks whether a large allocation gets huge pages: allocate, touch, and read the kernel's counters."""

import mmap
from pathlib import Path

HUGE = 2 << 20


def huge_page_share(nbytes: int = 32 << 20) -> float:
    """Return the share of a test allocation on huge pages, 0 to 1, with the same madvise as the engine's."""
    with mmap.mmap(-1, nbytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        before = _anonymous_huge_bytes()
        for at in range(0, nbytes + HUGE, 4096):
            memory[at] = 1
        return min(max(_anonymous_huge_bytes() - before, 0) / nbytes, 1.0)


def _anonymous_huge_bytes() -> int:
    """Return this process's bytes on huge pages; 0 if the kernel does not report them."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages"))
