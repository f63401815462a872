"""The roofline's arithmetic, with probes that return what the test says."""

import json
from collections.abc import Sequence

import pytest

from millrace.machine.cpu import Cache
from millrace.machine.roofline import DRAM_HIGH, DRAM_LOW, Roofline, measure_roofline, working_sets

MIB = 1 << 20
CACHES = (Cache(1, 48 << 10, 1), Cache(2, 1 * MIB, 1), Cache(3, 32 * MIB, 8))
PRECISIONS = {"fp32": "fp32", "bf16": "bf16", "w8a8": "int8"}


@pytest.fixture
def roofline() -> Roofline:
    speeds = {24 << 10: 400e9, 512 << 10: 200e9, 16 * MIB: 60e9, 8 * MIB: 50e9, 4 * 32 * MIB: 30e9, 2 * 32 * MIB: 20e9}

    def read(threads: int, nbytes: int) -> Sequence[float]:
        return [speeds[nbytes] * threads * share for share in (0.5, 1.0, 0.9, 1.0)]

    def kernels(precision: str, threads: int) -> Sequence[float]:
        return [1e11 * threads]

    def peaks(instruction: str, threads: int) -> Sequence[float]:
        return [{"fp32": 2e11, "bf16": 0.0, "int8": 8e11}[instruction]]

    return measure_roofline(CACHES, 2, 8 << 30, read, kernels, peaks, PRECISIONS)


def test_working_sets_stay_inside_their_level() -> None:
    for threads in (1, 2, 8, 16):
        sets = working_sets(CACHES, threads, 64 << 30)
        assert [name for name, *_ in sets] == ["L1", "L2", "L3", "DRAM"] if threads <= 8 else True
        for (_, capacity, one, each), cache in zip(sets, CACHES, strict=False):
            assert one <= cache.nbytes // 2 and each * min(threads, cache.shared_by) <= cache.nbytes // 2
            assert capacity is None or capacity == cache.nbytes * -(-threads // cache.shared_by)
            assert one % 1024 == 0 and each % 1024 == 0
        assert sets[-1][1] is None and DRAM_LOW <= sets[-1][2] <= DRAM_HIGH


def test_a_last_level_too_small_for_all_threads_is_left_out() -> None:
    crowded = (*CACHES[:2], Cache(3, 8 * MIB, 64))
    assert [name for name, *_ in working_sets(crowded, 64, 64 << 30)] == ["L1", "L2", "DRAM"]


def test_without_known_caches_and_with_little_memory() -> None:
    ((name, capacity, one, each),) = working_sets((), 2, 100 * MIB)
    assert (name, capacity, one, each) == ("DRAM", None, 25 * MIB, 25 * MIB // 2 // 1024 * 1024)


def test_the_upper_quartile_is_what_counts(roofline: Roofline) -> None:
    l1 = roofline.levels[0].one_thread
    assert (l1.usual, l1.best, l1.median) == (400e9, 400e9, 400e9)
    assert roofline.levels[0].all_threads.usual == 800e9


@pytest.mark.parametrize(
    "nbytes, level", [(90 << 10, "L1"), (97 << 10, "L2"), (2 * MIB, "L2"), (3 * MIB, "L3"), (33 * MIB, "DRAM")]
)
def test_the_level_that_holds_the_working_set(roofline: Roofline, nbytes: int, level: str) -> None:
    assert roofline.level_of(nbytes).name == level


def test_what_bounds_is_the_slower_of_reading_and_arithmetic(roofline: Roofline) -> None:
    reading = roofline.bound(200 * MIB, {"w8a8": 1e9})
    assert reading.by == "reading from DRAM" and reading.seconds == pytest.approx(200 * MIB / 40e9)
    computing = roofline.bound(20 * MIB, {"w8a8": 8e9, "fp32": 2e9})
    assert computing.by == "fp32/w8a8 arithmetic" and computing.seconds == pytest.approx(0.01 + 0.01)


def test_without_an_instruction_the_kernels_rate_counts(roofline: Roofline) -> None:
    assert next(c for c in roofline.compute if c.precision == "bf16").peak is None
    assert roofline.bound(0, {"bf16": 2e11}).seconds == pytest.approx(1.0)


def test_a_peak_that_our_kernels_beat_is_none() -> None:
    """Else a share of it is above 1."""

    def measured(peak: float) -> Roofline:
        return measure_roofline(
            CACHES, 2, 8 << 30, lambda *_: [1e9], lambda *_: [3e11], lambda *_: [peak], {"fp32": "fp32"}
        )

    assert measured(2.99e11).compute[0].peak is None
    assert measured(2.99e11).bound(0, {"fp32": 3e11}).seconds == pytest.approx(1.0)
    kept = measured(3e11).compute[0].peak
    assert kept is not None and kept.usual == 3e11


def test_json(roofline: Roofline) -> None:
    told = json.loads(json.dumps(roofline.as_dict()))
    assert told["threads"] == 2 and told["compute_gop_per_s"]["bf16"]["instruction_peak"] is None
    assert told["read_gb_per_s"]["L3"]["all_threads"]["usual"] == 100.0
