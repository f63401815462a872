"""Measurements in process: prefill, decode at several batch sizes, load time and memory of one engine."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from millrace.engine.artifact.engine import Engine
from millrace.engine.cache_specs import PAGE_TOKENS
from millrace.engine.dummy_step import dummy_step
from millrace.engine.native.executor import NativeExecutor
from millrace.engine.roofline_probe import read_rates
from millrace.kernels.library import usable_isas

TUNE_S = 2.0  # of timing kernels in a build, as `millrace build` does it
TILES = "amx" in usable_isas()  # how a build sums bfloat16 where nobody says
LOOKED_UP = ("embed", "rope")  # kernels that take a row of their table for each token


@dataclass(frozen=True)
class Timing:
    """Seconds of repeated runs of the same work."""

    samples_s: list[float]

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_s)


def repeat(work: Callable[[], object], n: int) -> Timing:
    work()  # warm: page faults, clocks
    samples = []
    for _ in range(n):
        started = time.perf_counter()
        work()
        samples.append(time.perf_counter() - started)
    return Timing(samples)


def prefill(executor: NativeExecutor, n_tokens: int, runs: int) -> Timing:
    """One prompt of n tokens, in steps as large as the engine takes."""
    size = executor.limits.max_step_tokens
    parts = [dummy_step([min(size, n_tokens - at)], at, executor.limits.n_pages) for at in range(0, n_tokens, size)]
    return repeat(lambda: [executor.run(p) for p in parts], runs)


def decode(
    executor: NativeExecutor, n_sequences: int, context: int, n_tokens: int, threads: int, runs: int
) -> tuple[Timing, list[float]]:
    """n new tokens for each of several sequences that already hold `context` tokens.

    Also the read bandwidth in bytes a second, before the first run and after each: they take turns in this process,
    because shared machines change it from minute to minute.
    """
    steps = [dummy_step([1] * n_sequences, context + i, executor.limits.n_pages, seed=i) for i in range(n_tokens)]
    repeat(lambda: [executor.run(s) for s in steps], 0)  # warms up
    samples, rates = [], [bandwidth(executor.isa, threads)]
    for _ in range(runs):
        started = time.perf_counter()
        for step in steps:
            executor.run(step)
        samples.append(time.perf_counter() - started)
        rates.append(bandwidth(executor.isa, threads))
    return Timing(samples), rates


def share_of_bandwidth(samples_s: Sequence[float], rates: Sequence[float], bytes_per_sample: float) -> float:
    """The median over runs, each beside the two probes next to it; `counted` says whether it is one."""
    beside = [(a + b) / 2 for a, b in pairwise(rates)]
    return statistics.median(bytes_per_sample / s / r for s, r in zip(samples_s, beside, strict=True))


def counted(shares: Sequence[float | None]) -> list[float | None]:
    """The shares of one run if none is above 1, else None for each: where one is impossible, the machine changed
    between samples and probes, and the others rest on the same probes."""
    return [None] * len(shares) if any(share is not None and share > 1 for share in shares) else list(shares)


def bandwidth(isa: str, threads: int) -> float:
    """Bytes a second from DRAM now, all threads."""
    return statistics.median(read_rates(isa, threads, 256 << 20))


def read_per_step(engine: Engine) -> int:
    """Bytes of weights that a decode step of one sequence reads: products whole, of tables next to nothing."""
    total = 0
    for s in json.loads((engine.folder / "program.json").read_text())["calls"]:
        size = sum(o.get("bytes", 0) for o in s["operands"].values())
        if s["kernel"] == "rescore":  # the likeliest rows only
            total += size * s["params"]["count"] // s["params"]["n"]
        elif s["kernel"] not in LOOKED_UP:
            total += size
    return total


def load_seconds(engine: Engine, n_pages: int, threads: int) -> tuple[NativeExecutor, float]:
    started = time.perf_counter()
    executor = engine.executor(n_pages=n_pages, threads=threads)
    executor.run(dummy_step([1], 0, n_pages))
    return executor, time.perf_counter() - started


def resident_bytes() -> int:
    """Of this process, without the page cache of files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


def pages_for(n_sequences: int, tokens: int) -> int:
    return n_sequences * -(-tokens // PAGE_TOKENS)
