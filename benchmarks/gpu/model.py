"""What is measured: Llama-3.1-8B's shape with random weights made on the device, and the least time its steps take."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.shapes import SHAPES
from millrace.checkpoint.config.model_config import ModelConfig
from millrace.checkpoint.config.rope_config import RopeConfig
from millrace.compile.lower_gpu.lower import lower_for_gpu, placement_of
from millrace.compile.lower_gpu.memory import needs_of
from millrace.compile.passes.pipeline import gpu, run_passes
from millrace.compile.precision import precision_map
from millrace.compile.random_weights import source_of
from millrace.engine.cache_specs import PAGE_TOKENS, KvFormat
from millrace.engine.cuda.cuda_graphs import default_buckets
from millrace.engine.cuda.device_lookup import CPU, Gpu, find_gpu
from millrace.engine.cuda.device_roofline import DeviceRates
from millrace.engine.cuda.executor import CudaExecutor
from millrace.engine.cuda.lowered import LoweredGraph
from millrace.engine.cuda.memory_plan import MemoryNeeds, plan_device
from millrace.engine.cuda.random_weights import random_loaded
from millrace.engine.dummy_step import dummy_step
from millrace.engine.executor import ExecutorLimits, StepInputs
from millrace.graph.types import Graph
from millrace.kernels.catalogue import operators
from millrace.kernels.matmul.op import PRODUCTS, matrices_of, precision_of
from millrace.model.module import trace_model

LLAMA_8B = replace(
    SHAPES["tinyllama-1.1b"], hidden_size=4096, intermediate_size=14336, n_layers=32, n_heads=32, n_kv_heads=8,
    head_dim=128, vocab_size=128256, rope=RopeConfig(theta=5e5),
)  # fmt: skip
# Of a dry run: sizes that nothing divides, a group that ends early.
TINY = replace(
    SHAPES["tinyllama-1.1b"], hidden_size=80, intermediate_size=208, n_layers=2, n_heads=5, n_kv_heads=1, head_dim=16,
    vocab_size=503,
)  # fmt: skip
STEP_TOKENS = 8192  # at most
_FLOATS = {"bf16": "bf16", "fp8": "fp8a16", "w4a16": "w4a16", "w8a16": "w8a16", "w8a8": "w8a8"}
PRECISIONS = tuple(_FLOATS)  # fp8: weights, activations, keys and values of E4M3, as TensorRT-LLM's table has them
KV = {precision: KvFormat.FP8 if precision == "fp8" else None for precision in PRECISIONS}


def graph_of(config: ModelConfig, precision: str) -> Graph:
    """Nothing is read. The head is of bfloat16, but for w4a16 (INT8)."""
    source = source_of(config)
    wanted = precision_map(_FLOATS[precision], head=None if precision == "w4a16" else "bf16")
    return run_passes(trace_model(source.module, source.weights, operators()), gpu(wanted))


def lowered_graph(graph: Graph, precision: str) -> LoweredGraph:
    names = {o for n in placement_of(graph).coded for o in n.origin} if precision == "fp8" else ()
    return lower_for_gpu(graph, "bf16", names)


@dataclass(frozen=True, slots=True)
class Weight:
    """Of all products of a step, but for the head: that is of the rows that are drawn."""

    bytes: float
    operations: float  # for each token
    head_bytes: float
    head_operations: float  # for each row


def weight_of(graph: Graph) -> Weight:
    layers, head = [0.0, 0.0], [0.0, 0.0]
    for node in graph.nodes:
        if node.op in PRODUCTS:
            n = sum(float(np.prod([d for d in w.shape if isinstance(d, int)])) for w in matrices_of(node))
            part = head if "lm_head" in node.origin else layers
            part[0] += n * (precision_of(node).bits / 8 if precision_of(node).coded else 2)
            part[1] += 2 * n
    return Weight(*layers, *head)


class RandomExecutor(CudaExecutor):
    """Of random weights. bound_s: what its steps would have taken at the rates that this device was seen to have:
    each step's products by their bytes or their operations, whichever takes longer, and then all keys and values."""

    def __init__(
        self, graph: Graph, limits: ExecutorLimits, precision: str, rates: DeviceRates, device: str,
        buckets: Sequence[int],
    ) -> None:  # fmt: skip
        lowered = lowered_graph(graph, precision)
        super().__init__(lowered, limits, kv=KV[precision], buckets=buckets, device=device, load=random_loaded)
        self.bound_s, self._rates, self._weight = 0.0, rates, weight_of(graph)
        self._rate = rates.products["fp8" if precision == "fp8" else "bf16"]
        pages = next(iter(self._pages.values()))
        self._kv_bytes = sum(x[0].nbytes for p in self._pages.values() for x in (p.keys, p.values)) / pages.tokens

    def launch(self, step: StepInputs) -> None:
        super().launch(step)
        w, bandwidth = self._weight, self._rates.read
        read = float((step.positions[step.starts[1:] - 1] + 1).sum()) * self._kv_bytes
        self.bound_s += max(w.bytes / bandwidth, w.operations * len(step.tokens) / self._rate)
        head_s = w.head_operations * len(step.sampling) / self._rates.products["bf16"]
        self.bound_s += max(w.head_bytes / bandwidth, head_s)
        self.bound_s += read / bandwidth

    def warm(self) -> None:
        """And a mixed step, before anything is measured."""
        super().warm()
        self.run(dummy_step([3, 5], 0, 2, vocab=self.limits.vocab_size))
        self.bound_s = 0.0

    def without_graphs(self) -> None:
        """From here on every step goes as prompts do."""
        self._buckets, self._inputs, self._replays = (), {}, {}

    def captures(self) -> int:
        return len(self._replays)

    @contextmanager
    def anew(self) -> Iterator[None]:
        """Nothing is captured yet; what was is back behind it."""
        inputs, replays = self._inputs, self._replays
        self._inputs, self._replays = {}, {}
        try:
            yield
        finally:
            self._inputs, self._replays = inputs, replays

    def needs(self) -> MemoryNeeds:
        """By the plan that an engine of this kind is made by."""
        return planned(self._graph, self.limits, self._kv_format, self._buckets, str(self.device))


def gpu_of(device: str) -> Gpu:
    return Gpu(CPU, "tensors of a CPU", (9, 0), 2 << 30, 1) if device == CPU else find_gpu(device)


def planned(
    graph: Graph, limits: ExecutorLimits, kv: KvFormat | None, buckets: Sequence[int], device: str
) -> MemoryNeeds:  # fmt: skip
    return needs_of(
        lower_for_gpu(graph, "bf16"), limits, kv=kv, buckets=buckets, multiprocessors=gpu_of(device).multiprocessors
    )


def random_executor(
    config: ModelConfig, precision: str, sequences: int, rates: DeviceRates, device: str, *, graphs: bool = True
) -> RandomExecutor:  # fmt: skip
    """With pages for all sequences, or as many as an engine would take of the device. graphs: False: all is eager

    raises MachineError where not one sequence has room
    """
    graph, context = graph_of(config, precision), config.max_context
    buckets = default_buckets(sequences) if graphs else ()
    limits = ExecutorLimits(
        max_step_tokens=max(sequences, min(STEP_TOKENS, 2 * context)), max_sequences=sequences, max_rows=sequences + 8,
        max_context=context, page_tokens=PAGE_TOKENS, n_pages=0, vocab_size=config.vocab_size,
    )  # fmt: skip
    needs = planned(graph, limits, KV[precision], buckets, device)
    plan = plan_device(needs, gpu_of(device).free_bytes, sequences * needs.least_pages)
    limits = replace(limits, n_pages=plan.n_pages)
    return RandomExecutor(graph, limits, precision, rates, device, buckets)


def prompts_of(config: ModelConfig, n: int, length: int, seed: int = 1) -> Sequence[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, config.vocab_size, length).tolist() for _ in range(n)]
