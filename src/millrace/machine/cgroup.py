"""Control groups: the limits of a process's own group, and of every group around it.

version 2    one tree at /sys/fs/cgroup, or at /sys/fs/cgroup/unified beside version 1
version 1    a tree for each controller, at /sys/fs/cgroup/memory and /sys/fs/cgroup/cpu

/proc/self/cgroup names this process's group in each tree, in lines "number:controllers:/path"; version 2 is the line
without controllers. In a container the tree may begin at the container's own group, where the host's path does not
exist: missing groups are skipped.
source: https://docs.kernel.org/admin-guide/cgroup-v2.html, and cgroup-v1/memory.html beside it
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TREES = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 60  # version 1 represents "no limit" by the largest number of whole pages


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The limit of one group, including all groups within it."""

    limit_bytes: int
    left_bytes: int  # below the limit, if inactive page cache is dropped


def memory_limits() -> list[MemoryLimit]:
    """Return the limits of all groups that have one."""
    result = []
    for group in _groups(None):
        limits = [_number(group / "memory.max"), _number(group / "memory.high")]  # beyond "high" a process is throttled
        result.append(_limit(group, limits, "memory.current", "inactive_file"))
    for group in _groups("memory"):
        limits = [_number(group / "memory.limit_in_bytes")]
        result.append(_limit(group, limits, "memory.usage_in_bytes", "total_inactive_file"))
    return [limit for limit in result if limit is not None]


def _limit(group: Path, limits: list[int | None], used_file: str, cache_name: str) -> MemoryLimit | None:
    limit = min((n for n in limits if n is not None and n < _NO_LIMIT), default=None)
    if limit is None:
        return None
    lines = [line.split() for line in _text(group / "memory.stat").splitlines()]
    cache = next((int(line[1]) for line in lines if line[:1] == [cache_name]), 0)
    return MemoryLimit(limit, max(limit - max((_number(group / used_file) or 0) - cache, 0), 0))


def cpu_quotas() -> list[float]:
    """Return the CPU quotas in cores, of every group that has one."""
    pairs = [_text(group / "cpu.max").split() for group in _groups(None)]
    for group in _groups("cpu"):
        pairs.append([_text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")])
    return [int(pair[0]) / int(pair[1]) for pair in pairs if len(pair) == 2 and all(n.isdigit() for n in pair)]


def _groups(controller: str | None) -> Iterator[Path]:
    """Yield the folders of this process's groups, outermost first; None: of version 2."""
    trees = [_TREES, _TREES / "unified"] if controller is None else [_TREES / controller]
    lines = [line.split(":", 2) for line in _text(_MEMBERSHIP).splitlines()]
    path = next((line[2] for line in lines if (controller or "") in line[1].split(",")), "/")
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for tree in trees:
        yield from (tree.joinpath(*parts[:n]) for n in range(len(parts) + 1))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None
