"""Tiles of a GPU's products: timed in turn by a clock of the test's own, on tensors of this CPU."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.compile.cache.timing_cache import TimingCache
from millrace.compile.lower_gpu.lower import lower_for_gpu
from millrace.engine.cuda.device_lookup import Gpu
from millrace.engine.cuda.executor import CudaExecutor
from millrace.errors import MachineError
from millrace.kernels.matmul.coded import E4M3, QuantizedRows, e4m3_rows, int8_rows
from millrace.kernels.matmul.gpu_tiles import (
    EIGHT,
    EIGHT_OF_WORDS,
    MANY_ROWS,
    ONE_OF_E4M3,
    Tile,
    Tiles,
    region_of,
    tiles,
)
from tests.engine.test_cuda import both
from tests.support.checkpoints import random_checkpoint

device_tune = pytest.importorskip("millrace.compile.tune.gpu_tiles", reason="triton is not installed")
from triton.runtime.errors import OutOfResources  # noqa: E402 (Triton's)

H200 = Gpu("cpu", "NVIDIA H200", (9, 0), 1 << 30, 132)
Clock = Callable[[Any, Tile], float]


class Device:
    """A clock: microseconds by tile, what was timed, and tiles that it cannot run."""

    def __init__(self, us: Callable[[Tile], float], lacks: tuple[Tile, ...] = ()) -> None:
        self.us, self.lacks, self.timed = us, lacks, list[tuple[int, Tile]]()

    def __call__(self, products: Any, tile: Tile) -> float:
        if tile in self.lacks:
            raise OutOfResources(1 << 20, 1 << 18, "shared memory")
        self.timed.append((len(products), tile))
        return self.us(tile)


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> CudaExecutor:
    """Rows of bfloat16 and codes of four bits; two layers."""
    folder = random_checkpoint(tmp_path_factory.mktemp("tiles") / "checkpoint", "llama")
    return both(folder, "w4a16")[0]


def tuner(clock: Clock, cache: Path | None = None, seconds: float = 60) -> Any:
    timings = TimingCache(cache, device_tune.check_choice) if cache else None
    return device_tune.DeviceTuner(H200, seconds, timings, clock)


WIDE = Tile(16, 64, 8, 6)


def test_the_clearly_faster_tile_is_chosen(executor: CudaExecutor) -> None:
    device = Device(lambda tile: 5.0 if tile == WIDE else 9.0)
    found = tuner(device)(executor)
    weights, meets = next(iter(executor.coded()))
    assert found.select_tile(meets(torch.zeros((1, weights.width), dtype=torch.bfloat16)), weights) == WIDE
    assert found.select_tile(meets(torch.zeros((16, weights.width), dtype=torch.bfloat16)), weights) == WIDE
    some = found.select_tile(meets(torch.zeros((40, weights.width), dtype=torch.bfloat16)), weights)
    assert some == tiles(40)[0], "where none is faster it is the rule"
    works = device_tune.works_of(executor)
    assert {work.rows for work in works} == {1, EIGHT, 16, 32, MANY_ROWS - 1}, "of many rows others compute"
    regions = {work.region for work in works}
    words = sum(" x 364," not in region for region in regions)  # elsewhere a row of codes is no whole words
    assert len(regions) * 4 + words == len(works) and 0 < words < len(regions)
    assert all(r.endswith(", int4 in 128 by bfloat16") for r in regions)
    assert {n for n, _ in device.timed} == {2}, "of all layers at a time; gate and up are one"


def test_what_is_within_noise_stays_by_the_rule(executor: CudaExecutor) -> None:
    found = tuner(Device(lambda tile: 8.8 if tile == WIDE else 9.0))(executor)
    assert {tile for tiles_ in found.result.values() for _, tile in tiles_} == {None}


def test_what_was_timed_is_not_timed_again(executor: CudaExecutor, tmp_path: Path) -> None:
    path = tmp_path / "timings.json"
    first = Device(lambda tile: float(tile.stages))
    found = tuner(first, path)(executor)
    again = Device(lambda tile: 1 / tile.stages)
    assert tuner(again, path)(executor) == found and not again.timed
    (machine,) = json.loads(path.read_text())
    assert machine.startswith("NVIDIA H200, sm_90, torch ") and "triton" in machine
    other = device_tune.DeviceTuner(
        Gpu("cpu", "NVIDIA L4", (8, 9), 1, 58), 60, TimingCache(path, device_tune.check_choice), again
    )
    assert other(executor) != found and again.timed, "another device is another machine"
    assert len(json.loads(path.read_text())) == 2


def test_no_time_is_the_rule_and_the_next_start_goes_on(executor: CudaExecutor, tmp_path: Path) -> None:
    path, slow = tmp_path / "timings.json", Device(lambda tile: 1.0)
    assert tuner(slow, path, seconds=1e-9)(executor) == Tiles() and not path.exists()
    works = device_tune.works_of(executor)

    class Ends(Device):
        """Time is up when the first work is done."""

        def __call__(self, products: Any, tile: Tile) -> float:
            if len(self.timed) > len(tiles(16)) * (device_tune.PLENTY + 2):
                clock.now = 1e9
            return super().__call__(products, tile)

    clock = Now()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_tune.time, "perf_counter", clock)
        some = tuner(Ends(lambda tile: 1.0), path)(executor)
    assert 0 < sum(map(len, some.result.values())) < len(works)
    rest = Device(lambda tile: 1.0)
    whole = tuner(rest, path)(executor)
    assert sum(map(len, whole.result.values())) == len(works) and rest.timed


class Now:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_tile_that_the_device_cannot_run_is_left_out(executor: CudaExecutor) -> None:
    device = Device(lambda tile: 5.0 if tile == WIDE else 9.0, lacks=(WIDE,))
    found = tuner(device)(executor)
    assert WIDE not in {tile for tiles_ in found.result.values() for _, tile in tiles_}


@pytest.mark.parametrize("knobs", [{"tile": 99}, {"depth": 1}])
def test_a_cache_that_says_what_there_is_not_is_refused(
    executor: CudaExecutor, tmp_path: Path, knobs: dict[str, int]
) -> None:
    path = tmp_path / "timings.json"
    choice = {"rows": 1, "knobs": knobs, "compared": []}
    path.write_text(json.dumps({device_tune.machine_key(H200): {"coded_product 8 x 8, int8 by bfloat16": [choice]}}))
    with pytest.raises(MachineError, match=r"timing cache .* cannot be read"):
        tuner(Device(lambda tile: 1.0), path)(executor)


def test_regions_are_told_apart_by_all_that_time_depends_on() -> None:
    codes, scales = torch.zeros((8, 32), dtype=torch.int8), torch.ones((8, 2), dtype=torch.float16)
    plain = QuantizedRows(codes, scales, 32, 16)
    floats = torch.zeros((3, 32), dtype=torch.bfloat16)
    found = [
        region_of(floats, plain),
        region_of(floats.half(), plain),
        region_of(plain, plain),
        region_of(floats, QuantizedRows(codes, scales, 32, 16, minimums=scales)),
        region_of(floats, QuantizedRows(codes.view(E4M3), scales[:, :1], 32, 32)),
        region_of(floats, QuantizedRows(codes.view(torch.uint8)[:, :16], scales, 32, 16, zero=8)),
        region_of(floats, QuantizedRows(codes[:4], scales[:4], 32, 16)),
    ]
    assert len(set(found)) == len(found)
    assert found[0] == "coded_product 8 x 32, int8 in 16 by bfloat16"
    assert found[4] == "coded_product 8 x 32, float8_e4m3fn by bfloat16"


def test_a_tile_counts_for_at_most_so_many_rows() -> None:
    w = QuantizedRows(torch.zeros((8, 32), dtype=torch.int8), torch.ones((8, 1), dtype=torch.float16), 32, 32)
    x = torch.zeros((20, 32), dtype=torch.bfloat16)
    a, b = Tile(16, 16, 2, 4), Tile(32, 64, 4, 4)
    found = Tiles({region_of(x, w): ((1, a), (8, None), (16, b))})
    assert [found.select_tile(x[:n], w) for n in (1, 2, 9, 16, 17)] == [a, tiles(2)[0], b, b, tiles(17)[0]]


def test_a_kernel_for_one_row_is_the_rule_where_it_takes_the_codes() -> None:
    x, w = (e4m3_rows(torch.ones((n, 32))) for n in (1, 8))
    assert Tiles().select_tile(x, w).rows == 1 and Tiles().select_tile(e4m3_rows(torch.ones((2, 32))), w).rows == 16
    floats, integers = torch.ones((1, 32), dtype=torch.bfloat16), int8_rows(torch.ones((8, 32)), 0)
    assert Tiles().select_tile(floats, w).rows == Tiles().select_tile(integers.some(0, 1), integers).rows == 16
    halves = QuantizedRows(torch.zeros((8, 16), dtype=torch.uint8), torch.ones((8, 1), dtype=torch.float16), 32, 32)
    assert (
        Tiles().select_tile(floats, halves)
        == Tiles().select_tile(floats.half().repeat(8, 1), halves)
        == EIGHT_OF_WORDS[0]
    )
    odd = replace(halves, codes=halves.codes[:, :15], width=30)
    assert Tiles().select_tile(floats[:, :30], odd).rows == Tiles().select_tile(floats.repeat(9, 1), halves).rows == 16
    assert Tiles().select_tile(integers.some(0, 1), halves).rows == Tiles().select_tile(floats[:0], halves).rows == 16


def test_no_rows_at_all_go_by_no_kernel_for_one() -> None:
    """As the head's, in a step that draws nothing; it would write the row that is not there."""
    x, w = (e4m3_rows(torch.ones((n, 32))) for n in (1, 8))
    one = Tile(1, 4, 8, 1)
    found = Tiles({region_of(x, w): ((1, one),)})
    assert found.select_tile(x, w) == one and found.select_tile(x.some(0, 0), w).rows > 1


def test_tiles_of_one_row_are_timed_where_they_take_the_codes(tmp_path: Path) -> None:
    """Beside those of tensor cores, and of the rest only these; the clearly fastest is remembered by its place."""
    folder = random_checkpoint(tmp_path / "checkpoint", "llama")
    fp8 = both(folder, "fp8a16")[0]
    fp8._lowered = lower_for_gpu(fp8._graph, "bf16", {o for node in fp8._loaded.coded for o in node.origin})
    one = ONE_OF_E4M3[1]
    device = Device(lambda tile: 5.0 if tile == one else 9.0)
    found = tuner(device, tmp_path / "timings.json")(fp8)
    weights, meets = next(iter(fp8.coded()))
    rows = torch.zeros((1, weights.width), dtype=torch.bfloat16)
    timed = {tile for _, tile in device.timed}
    assert found.select_tile(meets(rows), weights) == one and timed >= {*ONE_OF_E4M3, *tiles(16), *tiles(40)}
    assert not timed & {*EIGHT_OF_WORDS} and EIGHT not in {work.rows for work in device_tune.works_of(fp8)}
    assert tuner(Device(lambda tile: 1.0), tmp_path / "timings.json")(fp8) == found
    for precision, of_few in (("w4a16", EIGHT_OF_WORDS), ("w8a16", EIGHT_OF_WORDS), ("w8a8", ())):
        again = Device(lambda tile: 9.0)
        tuner(again)(both(folder, precision)[0])
        assert {tile for _, tile in again.timed if tile.rows <= EIGHT} == {*of_few}


class Queue:
    """A device of 2 GHz that does what is queued in turn, beside a host that takes 22 us for each launch."""

    def __init__(self, takes_us: float) -> None:
        self.takes_us, self.host_us, self.free_us = takes_us, 0.0, 0.0

    def product(self, tile: Tile) -> None:
        self.host_us += 22
        self._do(self.takes_us)

    def sleep(self, clocks: int) -> None:
        self._do(clocks / 2e3)

    def _do(self, us: float) -> None:
        self.free_us = max(self.free_us, self.host_us) + us

    def event(self, enable_timing: bool) -> "Event":
        return Event(self)


class Event:
    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    def record(self) -> None:
        self._queue._do(0)
        self.at_us = self._queue.free_us

    def synchronize(self) -> None:
        self._queue.host_us = max(self._queue.host_us, self.at_us)

    def elapsed_time(self, other: "Event") -> float:
        return (other.at_us - self.at_us) / 1e3


@pytest.mark.parametrize("us", [2.0, 9.0, 60.0])
def test_a_product_is_timed_without_its_launch(monkeypatch: pytest.MonkeyPatch, us: float) -> None:
    """Of one user's step the graph launches it, in no time: a host of 22 us would make all tiles alike."""
    queue = Queue(us)
    monkeypatch.setattr(torch.cuda, "Event", queue.event)
    monkeypatch.setattr(torch.cuda, "_sleep", queue.sleep)
    for products in (1, 32, 2):
        assert device_tune.on_device([queue.product] * products, WIDE) == pytest.approx(us)
