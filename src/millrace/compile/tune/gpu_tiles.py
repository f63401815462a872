"""Tile tuning on a GPU: times the tiles of quantized matmuls on the GPU that will run them, and caches the result.

A region's matmuls have weights in every layer, so one pass over all layers reads cold weights, as a step does. The
tiles alternate, pass by pass, so that all see the device in the same state. A tile is chosen if it clearly beats the
default rule, as on a CPU (compile/tune/tuner.py); the timing cache is the same, under the GPU's name.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Protocol

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from millrace.compile.cache.timing_cache import TimingCache
from millrace.compile.tune.tuner import PLENTY, SAMPLES, choose, summary
from millrace.engine.artifact.tactics import Choice, Comparison
from millrace.engine.cuda.device_lookup import Gpu
from millrace.engine.cuda.executor import CudaExecutor
from millrace.engine.cuda.host_device_copy import on_device_context
from millrace.kernels.matmul import cuda, cuda_few, gpu_tiles
from millrace.kernels.matmul.coded import Matrix, QuantizedRows
from millrace.kernels.matmul.gpu_tiles import EIGHT, MANY_ROWS, Tile, Tiles, region_of, takes, tiles

KNOB = "tile"  # its value is an index among the tiles for this number of rows; without it the default rule applies
ROWS = 1, EIGHT, 16, 32, MANY_ROWS - 1  # of decode steps; fewer rows use the next larger entry
MORE_ROWS = 2048  # for kernels that take any number of rows
MAX_LAYERS = 32  # layers per pass
LAUNCH_CLOCKS = 80_000  # of a device at 2 GHz: 40 us, the longest launch from a host
Products = Sequence[Callable[[Tile], object]]


class TileClock(Protocol):
    def __call__(self, products: Products, tile: Tile) -> float:
        """Return the microseconds of a matmul, when all are computed once with that tile. raises OutOfResources"""


def on_device(products: Products, tile: Tile) -> float:
    """Time with the device's events.

    The device sleeps first, so that everything is queued when it starts: a launch takes the host longer than a small
    matmul takes the device, and CUDA graphs need no host.
    """
    begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(LAUNCH_CLOCKS * len(products))
    begun.record()
    for product in products:
        product(tile)
    done.record()
    done.synchronize()
    return float(begun.elapsed_time(done)) * 1e3 / len(products)


def machine_key(gpu: Gpu) -> str:
    """Return the key of a timing: the device, the compiler, a digest of the timed kernels and of the list of tiles."""
    sources = b"".join(Path(str(module.__file__)).read_bytes() for module in (cuda, cuda_few, gpu_tiles))
    digest = hashlib.blake2b(sources, digest_size=6).hexdigest()
    major, minor = gpu.capability
    return f"{gpu.name}, sm_{major}{minor}, torch {torch.__version__}, triton {triton.__version__}, kernels {digest}"


@dataclass(frozen=True, slots=True)
class DeviceTuner:
    """seconds: about how long to time; regions that are not reached use the default rule until the next start"""

    gpu: Gpu
    seconds: float
    cache: TimingCache | None
    clock: TileClock = field(default=on_device, repr=False)

    def __call__(self, executor: CudaExecutor) -> Tiles:
        """Choose the tiles. raises MachineError if the timing cache cannot be read"""
        key, works = machine_key(self.gpu), works_of(executor)
        cached = self.cache.read(key) if self.cache else {}
        there_are = {region: {choice.rows for choice in choices} for region, choices in cached.items()}
        missing = [work for work in works if work.rows not in there_are.get(work.region, ())]
        result: dict[str, list[Choice]] = {}
        ends_s = time.perf_counter() + self.seconds
        with torch.inference_mode(), on_device_context(executor.device):
            for work in missing:
                choice = self._timed(work, executor, self.seconds / len(missing), ends_s)
                if choice is None:
                    break
                result.setdefault(work.region, []).append(choice)
        if self.cache and result:
            with suppress(OSError):  # if the cache cannot be written, they are timed again at the next start
                self.cache.merge(key, result)
        return chosen({region: [*cached.get(region, []), *result.get(region, [])] for region in {*cached, *result}})

    def _timed(self, work: "TileWork", executor: CudaExecutor, enough_s: float, ends_s: float) -> Choice | None:
        """Return the choice; None if time was up before all tiles had enough samples."""
        products, us = work.products(executor), dict[int, list[float]]()
        for value, tile in work.tiles.items():
            try:
                self.clock(products, tile)  # to compile it
            except OutOfResources:
                continue  # of shared memory or registers: this device cannot run it
            us[value] = []
        until_s = time.perf_counter() + enough_s
        for passes in range(PLENTY):
            now_s = time.perf_counter()
            if now_s > (until_s if passes >= SAMPLES else ends_s):
                break
            for value, samples in us.items():
                samples.append(self.clock(products, work.tiles[value]))
        if any(len(samples) < SAMPLES for samples in us.values()):
            return None
        if not us:
            return Choice(work.rows, {}, [])
        tried = [summary(value, samples) for value, samples in us.items()]
        value = choose(tried)
        return Choice(work.rows, {} if value == min(work.tiles) else {KNOB: value}, [Comparison(KNOB, tried, value)])


@dataclass(frozen=True, slots=True)
class TileWork:
    """The matmuls of a region with one number of rows. meets: quantizes rows of 16-bit floats for them

    tiles: the candidates, by their index among the tiles for this number of rows; the default rule first
    """

    region: str
    rows: int
    tiles: Mapping[int, Tile]
    weights: Sequence[QuantizedRows]
    meets: Callable[[Tensor], Matrix]

    def products(self, executor: CudaExecutor) -> Products:
        inputs = torch.randn((self.rows, self.weights[0].width), device=executor.device).to(executor.dtype)
        x = self.meets(inputs)

        def build_tiled(w: QuantizedRows) -> Callable[[Tile], object]:
            return lambda tile: cuda.by_kernel(x, w, executor.dtype, tile)

        return [build_tiled(w) for w in self.weights]


def works_of(executor: CudaExecutor) -> list[TileWork]:
    """Return the work of an executor's steps, fewest rows first."""

    def met(w: QuantizedRows, meets: Callable[[Tensor], Matrix], rows: int) -> Matrix:
        return meets(torch.zeros((rows, w.width), dtype=executor.dtype, device=executor.device))

    regions: dict[str, tuple[list[QuantizedRows], Callable[[Tensor], Matrix]]] = {}
    for w, meets in executor.coded():
        regions.setdefault(region_of(met(w, meets, 1), w), ([], meets))[0].append(w)
    result = []
    for rows in (*ROWS, MORE_ROWS):
        for region, (weights, meets) in regions.items():  # whose weights are alike
            w, x = weights[0], met(weights[0], meets, rows)
            if cuda.goes_by_kernel(x, w, executor.dtype):
                which = {value: tile for value, tile in enumerate(tiles(rows)) if takes(tile, x, w)}
                if rows != EIGHT or EIGHT in (tile.rows for tile in which.values()):  # otherwise as for 16
                    result.append(TileWork(region, rows, which, weights[:MAX_LAYERS], meets))
    return result


def check_choice(region: str, choice: Choice) -> None:
    """Check a cached choice. raises ValueError if no GPU kernel has it"""
    for name, value in choice.knobs.items():
        if name != KNOB or value >= len(tiles(choice.rows)):
            raise ValueError(f"{name} of {region} is {value}, not a tile up to {len(tiles(choice.rows)) - 1}")


def chosen(regions: Mapping[str, Sequence[Choice]]) -> Tiles:
    result = {}
    for region, choices in regions.items():
        by_rows = sorted(choices, key=lambda choice: choice.rows)
        result[region] = tuple(
            (c.rows if c.rows < MORE_ROWS else inf, tiles(c.rows)[c.knobs[KNOB]] if c.knobs else None) for c in by_rows
        )
    return Tiles(result)
