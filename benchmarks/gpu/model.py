"""What is measured: Llama-3.1-8B's shape with random weights made on the device, and the least time its steps take."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.gpu.roofline import Rates
from benchmarks.shapes import SHAPES
from millrace.checkpoint.config import ModelConfig, RopeConfig
from millrace.compile.pipeline import gpu, run_passes
from millrace.compile.precision import precision_map
from millrace.compile.random_source import source_of
from millrace.engine.cuda.buckets import usual_buckets
from millrace.engine.cuda.executor import CudaExecutor
from millrace.engine.cuda.placement import PRODUCTS, coded_products
from millrace.engine.cuda.random_weights import random_loaded
from millrace.engine.dummy import dummy_step
from millrace.engine.executor import ExecutorLimits, StepInputs
from millrace.engine.kv import PAGE_TOKENS, KvFormat
from millrace.graph.types import Graph
from millrace.kernels.catalogue import operators
from millrace.kernels.matmul.op import matrices_of, precision_of
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
STEP_TOKENS, RESERVE = 8192, 8 << 30  # of a step at most; bytes for what a step computes
_FLOATS = {"bf16": "bf16", "fp8": "fp8a16", "w4a16": "w4a16", "w8a16": "w8a16", "w8a8": "w8a8"}
PRECISIONS = tuple(_FLOATS)  # fp8: weights, activations, keys and values of E4M3, as TensorRT-LLM's table has them


def graph_of(config: ModelConfig, precision: str) -> Graph:
    """Nothing is read. The head is of bfloat16, but for w4a16 (INT8)."""
    source = source_of(config)
    wanted = precision_map(_FLOATS[precision], head=None if precision == "w4a16" else "bf16")
    return run_passes(trace_model(source.module, source.weights, operators()), gpu(wanted))


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

    def __init__(self, graph: Graph, limits: ExecutorLimits, precision: str, rates: Rates, device: str) -> None:
        names = {o for n in coded_products(graph) for o in n.origin} if precision == "fp8" else ()
        kv = KvFormat.FP8 if precision == "fp8" else None
        super().__init__(
            graph, limits, dtype="bf16", kv=kv, fp8_rows=names, buckets=usual_buckets(limits.max_sequences),
            device=device, load=random_loaded,
        )  # fmt: skip
        self.bound_s, self._rates, self._weight = 0.0, rates, weight_of(graph)
        self._rate = rates.fp8 if precision == "fp8" else rates.bf16
        pages = next(iter(self._pages.values()))
        self._kv_bytes = sum(x[0].nbytes for p in self._pages.values() for x in (p.keys, p.values)) / pages.tokens

    def launch(self, step: StepInputs) -> None:
        super().launch(step)
        w, bandwidth = self._weight, self._rates.read
        read = float((step.positions[step.starts[1:] - 1] + 1).sum()) * self._kv_bytes
        self.bound_s += max(w.bytes / bandwidth, w.operations * len(step.tokens) / self._rate)
        self.bound_s += max(w.head_bytes / bandwidth, w.head_operations * len(step.sampling) / self._rates.bf16)
        self.bound_s += read / bandwidth

    def warm(self) -> None:
        """And a mixed step, before anything is measured."""
        super().warm()
        self.run(dummy_step([3, 5], 0, 2, vocab=self.limits.vocab_size))
        self.bound_s = 0.0


def random_executor(
    config: ModelConfig, precision: str, sequences: int, rates: Rates, device: str
) -> RandomExecutor:  # fmt: skip
    """With room for as many pages as the device has left, or in a dry run for all."""
    graph, context = graph_of(config, precision), config.max_context
    limits = ExecutorLimits(
        max_step_tokens=max(sequences, min(STEP_TOKENS, 2 * context)), max_sequences=sequences, max_rows=sequences + 8,
        max_context=context, page_tokens=PAGE_TOKENS, n_pages=_pages(config, graph, precision, sequences, device),
        vocab_size=config.vocab_size,
    )  # fmt: skip
    return RandomExecutor(graph, limits, precision, rates, device)


def _pages(config: ModelConfig, graph: Graph, precision: str, sequences: int, device: str) -> int:
    most = sequences * -(-config.max_context // PAGE_TOKENS)
    if device == "cpu":
        return most
    weight = weight_of(graph)
    element = 1 if precision == "fp8" else 2
    page = 2 * config.n_layers * config.n_kv_heads * PAGE_TOKENS * (config.head_dim * element + 4)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    table = 2 * config.vocab_size * config.hidden_size
    return min(most, int((free - 1.05 * weight.bytes - weight.head_bytes - table - RESERVE) // page))


def prompts_of(config: ModelConfig, n: int, length: int, seed: int = 1) -> Sequence[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, config.vocab_size, length).tolist() for _ in range(n)]
