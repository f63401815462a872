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


def fastest(settings: Iterable[Setting], run: Callable[[Setting], float]) -> Setting:
    """`run` gives the seconds that a setting takes; the first run of each also warms it up."""
    taken_s = {setting: min(run(setting) for _ in range(TRIALS)) for setting in settings}
    return min(taken_s, key=taken_s.__getitem__)
