"""How fast engines are that are loaded in one process, in turns: a prompt of 512, one user and sixteen.

A row of speeds beside the price in answers, a few seconds for each engine. `benchmarks.peers` gives each a process of
its own, and is what comparisons with others rest on.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from benchmarks.peers.workloads import Phase, Workload

PACES = (
    Workload(Phase.PREFILL, users=1, prompt=512, new=0), Workload(Phase.DECODE, users=1, prompt=128, new=32),
    Workload(Phase.DECODE, users=16, prompt=128, new=32),
)  # fmt: skip
CONTEXT = max(w.prompt + w.new for w in PACES)
ROUNDS = 5
_SETTLE_S = 0.05  # until the threads of whoever ran before have stopped spinning
Say = Callable[[str], None]
Speeds = dict[str, dict[str, Any]]  # by workload


class Timed(Protocol):
    """An engine as `benchmarks.peers` has it."""

    def warm_up(self, workload: Workload) -> None: ...

    def run(self, workload: Workload) -> float:
        """Seconds."""
        ...


def in_turns(
    engines: Mapping[str, Timed], probe: Callable[[], float], rounds: int = ROUNDS, say: Say = lambda _: None
) -> dict[str, Speeds]:
    """By engine and workload: the median in tokens a second, all samples, and the read bandwidth right before each.

    probe: gives that bandwidth, bytes a second. Who begins changes from round to round.
    """
    names = list(engines)
    samples: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for workload in PACES:
        for name in names:
            say(f"warm-up, {workload.name}, {name}")
            engines[name].warm_up(workload)
        for at in range(rounds):
            first = at % len(names)
            for name in names[first:] + names[:first]:
                say(f"round {at + 1} of {rounds}, {workload.name}, {name}")
                time.sleep(_SETTLE_S)
                read = probe()
                samples.setdefault((name, workload.name), []).append((engines[name].run(workload), read))
    return {name: {w.name: _speed(w, samples[name, w.name]) for w in PACES} for name in names}


def _speed(workload: Workload, samples: list[tuple[float, float]]) -> dict[str, Any]:
    seconds, read = zip(*samples, strict=True)
    rate = round(workload.tokens / statistics.median(seconds), 1)
    return {"tokens_per_s": rate, "samples_s": [*seconds], "read_bytes_per_s": [*read]}
