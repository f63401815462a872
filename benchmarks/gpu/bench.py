"""What the rows of a run have in common: one device, its rates, and the model that the row before has left."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch

from benchmarks.gpu.failures import FAILURES, traced
from benchmarks.gpu.model import LLAMA_8B, TINY, RandomExecutor, random_executor
from millrace.checkpoint.config.model_config import ModelConfig
from millrace.compile.cache.timing_cache import TimingCache
from millrace.compile.tune.gpu_tiles import DeviceTuner, check_choice, machine_key
from millrace.engine.cuda.device_lookup import CPU, find_gpu
from millrace.engine.cuda.device_roofline import DeviceRates, wait_for
from millrace.kernels import gpu_launch

CONTEXT = 4160  # of the longest row, and a page
MAX_SEQUENCES = 512
TUNE_S = 15.0  # of a model's tiles, which no run before has left: a third of it goes into compiling them
MODEL_S = 45  # until a model is there, tuned, compiled and captured, on the device that this is meant for


@dataclass(frozen=True, slots=True)
class Row:
    """about_s: that it takes at most on the device it is meant for, but for its model; it ends itself after that.

    precision: of the model that it wants; "" for none. first: where it does not agree, nothing is measured behind it
    """

    name: str
    about_s: int
    run: "Callable[[Bench, Row], dict[str, Any]]"
    precision: str = ""
    first: bool = False
    with_: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CompressionMethod:
    """How steps are run: whether kernels overlap, and whether graphs are replayed, which a fault may be of."""

    overlap: bool = True
    graphs: bool = True


WAYS = (
    CompressionMethod(),
    CompressionMethod(overlap=False),
    CompressionMethod(overlap=False, graphs=False),
)  # what is given up first comes first


@dataclass(slots=True)
class Bench:
    device: str
    rates: DeviceRates
    models: tuple[Path, ...] = ()
    dry_run: bool = False
    way: CompressionMethod = WAYS[0]
    _held: tuple[str, CompressionMethod, RandomExecutor] | None = field(init=False, default=None)
    made: dict[str, Any] = field(init=False, default_factory=dict)

    @property
    def config(self) -> ModelConfig:
        return replace(TINY, max_context=128) if self.dry_run else replace(LLAMA_8B, max_context=CONTEXT)

    def seconds_of(self, row: Row) -> float:
        """What it takes from here on, at most."""
        there = not row.precision or (self._held is not None and self._held[0] == row.precision)
        return row.about_s + (0 if there or self.dry_run else MODEL_S)

    @contextmanager
    def going(self, way: CompressionMethod) -> Iterator[None]:
        """So, from here to its end."""
        before, overlap = self.way, gpu_launch.OVERLAP
        self.way, gpu_launch.OVERLAP = way, way.overlap
        try:
            yield
        finally:
            self.way, gpu_launch.OVERLAP = before, overlap

    def executor(self, precision: str) -> RandomExecutor:
        """Warm; the one that the row before had, where it has the same. `made` says what it took."""
        if self._held is None or self._held[:2] != (precision, self.way):
            self.release()
            self._held = precision, self.way, self._made(precision)
        return self._held[2]

    def _made(self, precision: str) -> RandomExecutor:
        begun = time.perf_counter()

        def passed() -> float:
            nonlocal begun
            wait_for(torch.device(self.device))
            before, begun = begun, time.perf_counter()
            return begun - before

        sequences = 4 if self.dry_run else MAX_SEQUENCES
        made = random_executor(self.config, precision, sequences, self.rates, self.device, graphs=self.way.graphs)
        self.made = {"weights_s": passed()}
        if self.device != CPU:
            made.tiles, self.made["tiles"] = _tuned(made, self.device)
            self.made["tuned_s"] = passed()
        try:
            made.warm()
        except FAILURES:  # to be measured nevertheless, if prompts' way works
            if not self.way.graphs:
                raise
            self.made["without_graphs"] = traced()
            made.without_graphs()
            made.warm()
        self.made |= {"warm_s": passed(), "captures": made.captures(), "memory": _memory(made)}
        return made

    def release(self) -> None:
        """The model, and the memory that it has on the device."""
        if self._held is not None:
            self._held[2].close()
            self._held = None
        if self.device != CPU:
            gc.collect()  # what a row that failed has left
            torch.cuda.empty_cache()


def _tuned(executor: RandomExecutor, device: str) -> tuple[Any, Any]:
    """Its tiles, and every time that was taken for them."""
    gpu = find_gpu(device)
    with TemporaryDirectory() as folder:
        cache = TimingCache(Path(folder) / "timings.json", check_choice)
        tiles = DeviceTuner(gpu, TUNE_S, cache)(executor)
        return tiles, msgspec.to_builtins(cache.read(machine_key(gpu)))


def _memory(executor: RandomExecutor) -> dict[str, Any]:
    """The plan beside what is taken: bytes."""
    needs, n_pages, gpu = executor.needs(), executor.limits.n_pages, executor.device.type == "cuda"
    taken = torch.cuda.max_memory_allocated() if gpu else 0
    reserved = torch.cuda.memory_reserved() if gpu else 0
    return {
        **asdict(needs), "n_pages": n_pages, "planned": needs.total_bytes(n_pages), "allocated": taken,
        "reserved": reserved,
    }  # fmt: skip
