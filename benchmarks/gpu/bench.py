"""What the rows of a run have in common: one device, its rates, and the model that the row before has left."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch

from benchmarks.gpu.model import LLAMA_8B, TINY, RandomExecutor, random_executor
from benchmarks.gpu.roofline import Rates, wait_for
from millrace.checkpoint.config import ModelConfig
from millrace.compile.device_tune import DeviceTuner, check_choice, machine_key
from millrace.compile.timings import TimingCache
from millrace.engine.cuda.found import CPU, find_gpu
from millrace.engine.cuda.memory import needs_of

CONTEXT = 4160  # of the longest row, and a page
MOST_SEQUENCES = 512
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


@dataclass(slots=True)
class Bench:
    device: str
    rates: Rates
    models: tuple[Path, ...] = ()
    dry_run: bool = False
    _held: tuple[str, RandomExecutor] | None = field(init=False, default=None)
    made: dict[str, Any] = field(init=False, default_factory=dict)

    @property
    def config(self) -> ModelConfig:
        return replace(TINY, max_context=128) if self.dry_run else replace(LLAMA_8B, max_context=CONTEXT)

    def seconds_of(self, row: Row) -> float:
        """What it takes from here on, at most."""
        there = not row.precision or (self._held is not None and self._held[0] == row.precision)
        return row.about_s + (0 if there or self.dry_run else MODEL_S)

    def executor(self, precision: str) -> RandomExecutor:
        """Warm; the one that the row before had, where it has the same. `made` says what it took."""
        if self._held is None or self._held[0] != precision:
            self.release()
            self._held = precision, self._made(precision)
        return self._held[1]

    def _made(self, precision: str) -> RandomExecutor:
        begun = time.perf_counter()

        def passed() -> float:
            nonlocal begun
            wait_for(torch.device(self.device))
            before, begun = begun, time.perf_counter()
            return begun - before

        sequences = 4 if self.dry_run else MOST_SEQUENCES
        made = random_executor(self.config, precision, sequences, self.rates, self.device)
        self.made = {"weights_s": passed()}
        if self.device != CPU:
            made.tiles, self.made["tiles"] = _tuned(made, self.device)
            self.made["tuned_s"] = passed()
        made.warm()
        self.made |= {"warm_s": passed(), "captures": len(made._replays), "memory": _memory(made)}
        return made

    def release(self) -> None:
        """The model, and the memory that it has on the device."""
        if self._held is not None:
            self._held[1].close()
            self._held = None
            if self.device != CPU:
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
    limits, gpu = executor.limits, executor.device.type == "cuda"
    needs = needs_of(
        executor._graph, limits, dtype="bf16", kv=executor._kept, buckets=executor._buckets,
        multiprocessors=find_gpu(str(executor.device)).multiprocessors if gpu else 1,
    )  # fmt: skip
    taken = torch.cuda.max_memory_allocated() if gpu else 0
    reserved = torch.cuda.memory_reserved() if gpu else 0
    return {
        **asdict(needs), "n_pages": limits.n_pages, "planned": needs.total_bytes(limits.n_pages), "allocated": taken,
        "reserved": reserved,
    }  # fmt: skip
