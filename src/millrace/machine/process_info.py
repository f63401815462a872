"""Age and memory of this process, and of others."""

import ctypes
import os
import time
from pathlib import Path


def age_s() -> float:
    """Return the seconds since this process was started (to 10 ms), interpreter and imports included."""
    # field 22 of /proc/self/stat; the name in field 2 may contain spaces and brackets, so count from its end
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started_s, 0.0)


def resident_bytes(process: int | str = "self") -> int:
    """Return the resident memory of a process. process: its id, or "self". raises OSError if it has ended"""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def release_free_memory() -> None:
    """Return freed memory that the C library holds to the system. Other threads run meanwhile.

    glibc by itself returns only memory at the end of its heap. Other C libraries have no `malloc_trim`, and hold less.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
