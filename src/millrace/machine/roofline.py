"""The measured roofline of this machine: bytes per second from each memory level, operations per second.

The probes are native code of a later room (`engine/roofline_probe.py`), and so are arguments here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.machine.cpu import Cache

ReadProbe = Callable[[int, int], Sequence[float]]  # threads, bytes per thread -> bytes/s of all, one figure per round
RateProbe = Callable[[str, int], Sequence[float]]  # precision, threads -> operations/s of all, one figure per round

DRAM_LOW, DRAM_HIGH = 128 << 20, 1 << 30  # bounds of the buffer for DRAM: much larger than caches, but fast to fill
KIB = 1024


@dataclass(frozen=True, slots=True)
class Rate:
    """One measured rate per second: `usual` is the upper quartile of the rounds.

    Other processes only slow a round down, so the fastest rounds are nearest to the machine's rate; the single fastest
    one may be a clock error on a virtual machine.
    """

    usual: float
    best: float
    median: float


@dataclass(frozen=True, slots=True)
class MemoryLevel:
    """The read rate of one memory level."""

    name: str  # "L1", "L2", "L3", "DRAM"
    capacity_bytes: int | None  # of all caches of this level that our threads use; None: DRAM
    one_thread: Rate
    all_threads: Rate


@dataclass(frozen=True, slots=True)
class Compute:
    """The rate of one precision; a multiply and an add count as two operations."""

    precision: str  # "fp32", "bf16", "w8a8", "w4a8"
    one_thread: Rate
    all_threads: Rate
    peak: Rate | None  # of the instructions alone, all threads; None: this CPU lacks them, or our kernels are faster


@dataclass(frozen=True, slots=True)
class Bound:
    """The least time of some work here, and what limits it."""

    seconds: float
    by: str  # "reading from L3", "bf16 arithmetic"


@dataclass(frozen=True, slots=True)
class Roofline:
    threads: int
    levels: tuple[MemoryLevel, ...]
    compute: tuple[Compute, ...]

    def level_of(self, working_set: int) -> MemoryLevel:
        """Return the fastest level whose caches hold `working_set` bytes."""
        for level in self.levels:
            if level.capacity_bytes is None or working_set <= level.capacity_bytes:
                return level
        return self.levels[-1]

    def bound(self, nbytes: int, operations: Mapping[str, float]) -> Bound:
        """Return the bound of work on all threads that reads `nbytes` once and computes operations by precision.

        Peaks of instructions count if measured, because our own kernels do not limit the machine. A precision that was
        not measured does not limit anything.
        """
        level = self.level_of(nbytes)
        reading_s = nbytes / level.all_threads.usual
        rates = {c.precision: (c.peak or c.all_threads).usual for c in self.compute}
        compute_s = sum(n / rates[precision] for precision, n in operations.items() if precision in rates)
        if reading_s >= compute_s:
            return Bound(reading_s, f"reading from {level.name}")
        return Bound(compute_s, f"{'/'.join(sorted(operations))} arithmetic")

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-able dict; rates in GB/s (10^9 bytes) and Gop/s."""

        def plain(rate: Rate | None) -> dict[str, float] | None:
            return {k: round(getattr(rate, k) / 1e9, 2) for k in ("usual", "best", "median")} if rate else None

        return {
            "threads": self.threads,
            "read_gb_per_s": {
                x.name: {"one_thread": plain(x.one_thread), "all_threads": plain(x.all_threads)} for x in self.levels
            },
            "compute_gop_per_s": {
                x.precision: {
                    "one_thread": plain(x.one_thread),
                    "all_threads": plain(x.all_threads),
                    "instruction_peak": plain(x.peak),
                }
                for x in self.compute
            },
        }


def measure_roofline(
    caches: Sequence[Cache], threads: int, available_bytes: int, read: ReadProbe, kernels: RateProbe, peaks: RateProbe,
    precisions: Mapping[str, str],
) -> Roofline:  # fmt: skip
    """Measure the roofline. precisions: our kernels' precision -> that of its instructions, {"w8a8": "int8", ...}"""
    levels = tuple(
        MemoryLevel(name, capacity, _rate(read(1, one)), _rate(read(threads, each)))
        for name, capacity, one, each in working_sets(caches, threads, available_bytes)
    )
    instructions = {name: _rate(peaks(name, threads)) for name in dict.fromkeys(precisions.values())}
    compute = []
    for name, below in precisions.items():
        peak, ours = instructions[below], _rate(kernels(name, threads))
        holds = peak.best > 0 and peak.usual >= ours.usual  # otherwise it was measured in a slower moment
        compute.append(Compute(name, _rate(kernels(name, 1)), ours, peak if holds else None))
    return Roofline(threads, levels, tuple(compute))


def working_sets(caches: Sequence[Cache], threads: int, available_bytes: int) -> list[tuple[str, int | None, int, int]]:
    """Return (level, capacity, bytes for one thread alone, bytes per thread if all read) of each level.

    Half of a cache each, so that the data stays in it; DRAM: four times the last cache. A level that leaves a thread
    less than the previous one is left out.
    """
    result: list[tuple[str, int | None, int, int]] = []
    last_total = smallest = 0
    for cache in caches:
        sharing = min(threads, cache.shared_by)
        one, each = cache.nbytes // 2 // KIB * KIB, cache.nbytes // 2 // sharing // KIB * KIB
        if each > 2 * smallest:
            last_total = cache.nbytes * -(-threads // cache.shared_by)
            result.append((f"L{cache.level}", last_total, one, each))
            smallest = each
    dram = min(max(4 * last_total, DRAM_LOW), DRAM_HIGH, max(available_bytes // 4, 16 << 20))
    result.append(("DRAM", None, dram // KIB * KIB, dram // threads // KIB * KIB))
    return result


def _rate(rounds: Sequence[float]) -> Rate:
    ordered = sorted(rounds)
    return Rate(usual=ordered[3 * len(ordered) // 4], best=ordered[-1], median=ordered[len(ordered) // 2])
