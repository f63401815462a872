"""One way to take time, for all engines, and to find the setting that suits an engine best."""

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

TRIALS = 2  # of each setting; its best counts, for other processes only ever slow one down

Setting = TypeVar("Setting")


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def best_times(settings: Iterable[Setting], run: Callable[[Setting], float]) -> dict[Setting, float]:
    """Seconds of each setting, by `run`, which gives them; the first run of each also warms it up."""
    return {setting: min(run(setting) for _ in range(TRIALS)) for setting in settings}


def fastest(settings: Iterable[Setting], run: Callable[[Setting], float]) -> Setting:
    """By `best_times`."""
    taken_s = best_times(settings, run)
    return min(taken_s, key=taken_s.__getitem__)
