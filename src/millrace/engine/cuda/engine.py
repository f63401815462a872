"""An engine for a GPU: made at every start, from a checkpoint or an engine folder."""

import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

from millrace.engine.artifact.engine import Engine
from millrace.engine.cache_specs import SLOTS_PER_SEQUENCE, KvFormat
from millrace.engine.cuda.device_lookup import CPU, Gpu, first_line
from millrace.engine.cuda.lowered import LoweredGraph
from millrace.engine.cuda.memory_plan import DevicePlan, MemoryNeeds, check_fits, plan_device
from millrace.engine.executor import Executor, ExecutorLimits, WindowLimits
from millrace.errors import MachineError, mib

if TYPE_CHECKING:  # PyTorch is imported only when a GPU is used
    from millrace.engine.cuda.encoder_executor import CudaEncoderExecutor
    from millrace.engine.cuda.executor import CudaExecutor
    from millrace.engine.cuda.graph_executor import Load
    from millrace.kernels.matmul.gpu_tiles import Tiles


class EngineFiles:
    """A temporary folder for the files of an open engine, removed by `remove` or with this object."""

    def __init__(self) -> None:
        self.folder = Path(mkdtemp(prefix="millrace-"))
        self.remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """The arguments of CudaExecutor or CudaEncoderExecutor: a lowered graph whose constants are not read yet.

    limits: without the number of pages; kv, buckets: of a language model; random: weights are drawn on the device
    """

    lowered: LoweredGraph
    limits: ExecutorLimits
    kv: KvFormat | None
    buckets: tuple[int, ...]
    random: bool

    @property
    def load(self) -> "Load":
        from millrace.engine.cuda.device_constants import load
        from millrace.engine.cuda.random_weights import random_loaded

        return random_loaded if self.random else load


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEngine(Engine):
    """An engine on a GPU. Its folder has the tokenizer's files, until `close`; its manifest is valid for this start
    only.

    files: the temporary folder of a start from a checkpoint
    smaller: alternatives to suggest if this does not fit, and their memory needs
    tuner: times kernels on the device, before they are captured
    """

    model: GpuModel
    gpu: Gpu
    needs: MemoryNeeds
    smaller: Callable[[], Iterable[tuple[str, MemoryNeeds]]]
    files: EngineFiles | None = field(default=None, compare=False, repr=False)
    tuner: "Callable[[CudaExecutor], Tiles] | None" = field(default=None, compare=False, repr=False)

    @property
    def windows(self) -> tuple[int, ...]:
        return tuple(w.tokens for w in self.needs.windows)

    def window_page_bytes(self, window: int) -> int:
        return {0: self.needs.page_bytes, **{w.tokens: w.page_bytes for w in self.needs.windows}}[window]

    @property
    def page_bytes(self) -> int:
        return sum(map(self.window_page_bytes, (0, *self.windows)))

    @property
    def n_slots(self) -> int:
        """State slots; 0: the model has no states."""
        return SLOTS_PER_SEQUENCE * self.model.limits.max_sequences if self.needs.states_bytes else 0

    @property
    def states_bytes(self) -> int:
        return self.needs.states_bytes

    def plan(self, kv_memory: int | None) -> DevicePlan:
        """Plan the device's memory. raises MachineError if it does not fit, naming what would"""
        most = self.pages_per_sequence * self.manifest.max_sequences
        return plan_device(self.needs, self.gpu.free_bytes, most, kv_memory=kv_memory, smaller=self.smaller())

    def on_gpu(self, n_pages: int, window_pages: Sequence[int] | None = None) -> Executor:
        """Load the weights, each once, and warm up. raises CheckpointError, ConfigError, MachineError

        window_pages: pages of the caches of each window; None: as many as of full attention
        """
        from millrace.engine.cuda.executor import CudaExecutor  # imports PyTorch

        self.check_language_model()
        model, own = self.model, [n_pages] * len(self.windows) if window_pages is None else window_pages
        limits = replace(
            model.limits, n_pages=n_pages, windows=tuple(map(WindowLimits, self.windows, own)), n_slots=self.n_slots
        )
        with self._failing(self.needs.total_bytes(n_pages, own), "lower --kv-memory"):
            executor = CudaExecutor(
                model.lowered, limits, kv=model.kv, buckets=model.buckets, device=self.gpu.device, load=model.load
            )
            if self.gpu.device != CPU:
                if self.tuner:
                    executor.tiles = self.tuner(executor)
                executor.warm()
        return executor

    def encoder_on_gpu(self) -> "CudaEncoderExecutor":
        """Load an encoder. raises as `on_gpu`, and MachineError if it does not fit, naming what would"""
        from millrace.engine.cuda.encoder_executor import CudaEncoderExecutor  # imports PyTorch

        check_fits(self.needs, self.gpu.free_bytes, self.smaller())
        model = self.model
        most = {"T": model.limits.max_step_tokens, "S": model.limits.max_sequences}
        with self._failing(self.needs.fixed_bytes, "lower --max-batch"):
            network = CudaEncoderExecutor(model.lowered, most, device=self.gpu.device, load=model.load)
            if self.gpu.device != CPU:
                network.warm(model.limits.max_context)
        return network

    @contextmanager
    def _failing(self, needed_bytes: int, fix: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # PyTorch's error for a device, out of memory included
            raise MachineError(
                f"{self.gpu.name} failed while the model was loaded: {first_line(error)}",
                f"a GPU that works, and {mib(needed_bytes)} of its memory, which were free",
                f"see in nvidia-smi who else uses it, or {fix}",
            ) from error  # fmt: skip

    def close(self) -> None:
        Engine.close(self)
        if self.files:
            self.files.remove()
