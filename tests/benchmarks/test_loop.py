"""The benchmark of the loop: all answers come, and every kind has its samples."""

from benchmarks.loop import Idle, measured
from millrace.engine.executor import Executor


def test_every_kind_is_measured() -> None:
    found = measured(rounds=2, answers=(1, 3), tokens=96)
    assert {n: len(s) for n, s in found["samples"].items()} == {"1": 2, "3": 2}
    assert all(0 < s < 1 for s in found["token_s"].values())


def test_it_overlaps_as_a_gpu_does() -> None:
    assert Idle(2, 256).depth > Executor.depth
