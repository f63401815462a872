"""The executor of a GPU: a graph's operators computed by PyTorch and Triton, with keys and values in pages.

It agrees with the other executors within a tolerance, because libraries choose the order of sums by shapes. With CPU
tensors the same steps run in plain PyTorch, so that everything except the kernels is tested without a GPU.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from millrace.engine.cache_specs import KvFormat
from millrace.engine.cuda.attention_partition import AttentionKind, SmGeometry, pack_arrays, windows_in
from millrace.engine.cuda.capability_check import CODES, check_runs
from millrace.engine.cuda.cuda_graphs import Bucket, Graphs, Tables, captured, select_bucket
from millrace.engine.cuda.device_constants import load
from millrace.engine.cuda.graph_executor import GraphExecutor, Load
from millrace.engine.cuda.host_device_copy import AsyncCopy, on_device, on_device_context
from millrace.engine.cuda.layers import (
    ATTENTION,
    STATE,
    attention_kinds,
    embedding_width,
    head_bytes,
    kind_of,
    n_adapters,
    state_shape,
)  # fmt: skip
from millrace.engine.cuda.lowered import LoweredGraph
from millrace.engine.cuda.sampling import Rows, SamplingMode, draw_tokens, sample, sampling_mode, tokens_alone
from millrace.engine.cuda.step_tables import check_given, rotary_of, step_slots, step_tables
from millrace.engine.dummy_step import dummy_step
from millrace.engine.executor import Executor, ExecutorLimits, IntArray, StepInputs, StepOutputs, WindowPages
from millrace.graph.types import Graph, Node
from millrace.kernels.attention.op import softcap_of, window_of
from millrace.kernels.attention.paged import LayerPages, StepTables
from millrace.kernels.matmul.gpu_tiles import EIGHT, MANY_ROWS
from millrace.kernels.operators import float_attr, int_attr, static_dim
from millrace.kernels.short_conv.slots import SequenceSlots

Slots = Callable[[], SequenceSlots]


class CudaExecutor(GraphExecutor, Executor):
    """lowered, device, load: as in GraphExecutor

    kv: the KV format, INT8 or FP8; None: in dtype
    buckets: sizes, ascending, to which decode steps are padded, to be captured once and then replayed
    raises, before a weight is read: EngineError for an operator or KV format without a kernel here, MachineError
    without a GPU, ConfigError if it lacks a precision
    """

    depth = 2

    def __init__(
        self, lowered: LoweredGraph, limits: ExecutorLimits, *, kv: KvFormat | None = None,
        buckets: Sequence[int] = (), device: str = "cuda", load: Load = load,
    ) -> None:  # fmt: skip
        graph = lowered.graph
        check_runs(graph, kv)
        GraphExecutor.__init__(self, lowered, device=device, kv=kv, load=load)
        self.limits = replace(limits, embedding_width=embedding_width(graph), n_adapters=n_adapters(graph))
        self._kv_format, on_cpu = kv, self.device.type == "cpu"
        self._window_pages = {w.tokens: w.n_pages for w in limits.windows}
        windows = windows_in(attention_kinds(graph))
        assert set(windows) == self._window_pages.keys(), f"pages for windows of {[*self._window_pages]}, not {windows}"
        self._processors = SmGeometry() if on_cpu else _processors(self.device, graph, self.dtype.itemsize)
        with on_device_context(self.device):
            attention = {_layer_of(node): node for node in graph.nodes if node.op in ATTENTION}
            self._pages = {layer: self._page_memory(node) for layer, node in attention.items()}
            self._states = {_layer_of(node): self._state_memory(node) for node in graph.nodes if node.op == STATE}
        assert not self._states or limits.n_slots >= limits.max_sequences, "no slots for states"
        self._windows = {layer: window_of(node) for layer, node in attention.items()}
        self._tables: Tables
        self._slots: Slots
        self._graphs = None if on_cpu else Graphs(self.device)
        self._buckets, self._inputs = tuple(buckets), dict[int, Bucket]()
        self._replays = dict[tuple[int, SamplingMode | None], Callable[[], Tensor]]()
        self._flights: deque[AsyncCopy] = deque()
        self._last_tokens: Tensor | None = None  # of the step launched last

    def warm(self) -> None:
        """Compile kernels, capture buckets and allocate the largest step's memory before the first request.

        Writes into pages that are not owned yet. raises RuntimeError if the device fails, or has too little memory
        """
        limits = self.limits
        longest = min(limits.max_step_tokens, limits.context_tokens)
        each, n_pages = -(-longest // limits.page_tokens), min([limits.n_pages, *self._window_pages.values()])
        n = max(1, min(limits.max_step_tokens // longest, limits.max_sequences, n_pages // each))
        steps = []
        for m in self._buckets[::-1]:  # the largest first, whose memory the others reuse
            if m <= n_pages:
                steps += [dummy_step([1] * m, 0, m, vocab=limits.vocab_size) for _ in SamplingMode]
                steps[-1].sampling["temperature"] = 1
        # Prompts of 9 to 63 tokens have their own tiles, which buckets of few sequences do not use.
        prompts = [[m] for m in (2 * EIGHT, MANY_ROWS - 1) if m < longest]
        # Last, because a capture returns all unused memory that PyTorch holds to the device.
        for lengths in (*prompts, [longest] * n):
            steps.append(dummy_step(lengths, 0, len(lengths) * each, vocab=limits.vocab_size))
        for step in steps:
            self.run(step)
        self.run(replace(steps[-1], pending_tokens=np.zeros((1, 2), np.int32)))  # a token of the previous step

    def launch(self, step: StepInputs) -> None:
        assert len(self._flights) < self.depth, "too many steps at a time"
        check_given(step, self.limits)
        with torch.inference_mode(), on_device_context(self.device):
            size, mode = select_bucket(step, self._buckets), sampling_mode(step)
            if mode is None:
                history = self._history(step)  # before a replay may overwrite the previous step's tokens
                result = sample(self.logits(step), step, self._kernels.draw, history)
            else:
                self._copy_pages(step)
                tokens = self._sample_eager(step, mode) if size is None else self._replay(step, size, mode)
                result = tokens_alone(tokens)
            self._flights.append(AsyncCopy.start(result))
        self._last_tokens = result.tokens

    def wait(self) -> StepOutputs:
        assert self._flights, "nothing was launched"
        with on_device_context(self.device):
            return StepOutputs(*self._flights.popleft().arrived())

    def logits(self, step: StepInputs) -> Tensor:
        """Return the logits (R, V) float32 of the sampled rows; store keys and values. The next step may reuse them."""
        with torch.inference_mode(), on_device_context(self.device):
            self._copy_pages(step)
            size = select_bucket(step, self._buckets)
            result = self._logits(*self._eager(step)) if size is None else self._replay(step, size, None)
            return result.float()

    def _copy_pages(self, step: StepInputs) -> None:
        copies = [(0, step.copies), *((w, pages.copies) for w, pages in self._step_windows(step).items())]
        for window, pairs in copies:
            for source, target in () if pairs is None else pairs.tolist():
                for layer, pages in self._pages.items():
                    if self._windows[layer] == window:
                        pages.copy(source, target)

    def _step_windows(self, step: StepInputs) -> dict[int, WindowPages]:
        """Return the pages of each window, by its tokens."""
        return dict(zip(self._window_pages, step.windows_of(self.limits), strict=True))

    def _eager(self, step: StepInputs) -> tuple[Mapping[str, Tensor], Tables, Slots, Tensor | None]:
        arrays = {
            "tokens": step.tokens, "positions": rotary_of(step), "lengths": np.diff(step.starts),
            "rows": step.sampling["token"], "adapters": step.adapters_of_tokens(),
        }  # fmt: skip
        packed, places = pack_arrays([*arrays.values()])
        merged = on_device(packed, self.device)
        inputs = {name: merged[place] for name, place in zip(arrays, places, strict=True)}
        self._put_last_tokens(inputs["tokens"], step.pending_tokens)
        page_tokens, n, windows = self.limits.page_tokens, self._processors, self._step_windows(step)
        rows = None if step.embeddings is None else on_device(step.embeddings, self.device)

        def tables(kind: AttentionKind) -> StepTables:
            return step_tables(step, page_tokens, self.device, kind, n, windows.get(kind.window))

        def slots() -> SequenceSlots:
            return step_slots(step, step.states_of(self.limits), self.device)

        return inputs, cache(tables), cache(slots), rows

    def _sample_eager(self, step: StepInputs, mode: SamplingMode) -> Tensor:
        rows = Rows.copy_to_device(step.sampling, self.device)
        return self._sample_plain(self._logits(*self._eager(step)), rows, mode)

    def _sample_plain(self, logits: Tensor, rows: Rows, mode: SamplingMode) -> Tensor:
        return draw_tokens(logits, rows, mode, self._kernels.draw, self._kernels.argmax)

    def _put_last_tokens(self, tokens: Tensor, places: IntArray | None) -> None:
        """Insert tokens that the previous step draws. If a draw failed, the token is arbitrary: its row is dropped."""
        if places is not None:
            assert self._last_tokens is not None, "no step was launched before"
            at, rows = on_device(places.T.astype(np.int32), self.device)
            self._kernels.scatter_tokens(tokens, at, self._last_tokens, rows)

    def _history(self, step: StepInputs) -> Tensor:
        """Return the tokens (tokens,) int32 that penalties count, with those that the previous step draws."""
        result = on_device(step.history if step.pending_history is None else step.history.copy(), self.device)
        self._put_last_tokens(result, step.pending_history)
        return result

    def _replay(self, step: StepInputs, size: int, mode: SamplingMode | None) -> Tensor:
        """Replay a bucket: return the tokens of its rows, drawn as `mode`; None: logits. Later steps may reuse both."""
        if size not in self._inputs:
            limits = self.limits
            max_pages = -(-limits.max_context // limits.page_tokens)
            self._inputs[size] = Bucket(
                size, limits.n_pages, max_pages, limits.page_tokens, self.device, self._processors.number,
                attention_kinds(self._graph), self._window_pages, limits.n_slots,
            )  # fmt: skip
        bucket = self._inputs[size]
        bucket.fill(step, list(self._step_windows(step).values()), step.states_of(self.limits))
        self._put_last_tokens(bucket.inputs()["tokens"], step.pending_tokens)
        if (
            size,
            mode,
        ) not in self._replays:  # a capture runs the step once before: its keys go where this step's do
            compute = partial(self._run_bucket, bucket, mode)
            self._replays[size, mode] = captured(compute, self._graphs)
        return self._replays[size, mode]()[: len(step.sampling)]

    def _run_bucket(self, bucket: Bucket, mode: SamplingMode | None) -> Tensor:
        logits = self._logits(bucket.inputs(), bucket.tables, bucket.slots)
        return logits if mode is None else self._sample_plain(logits, bucket.rows, mode)

    def _logits(self, inputs: Mapping[str, Tensor], tables: Tables, slots: Slots, rows: Tensor | None = None) -> Tensor:
        """Return the logits (R, V) in the matmul's type. rows: used instead of token embeddings"""
        self._tables, self._slots, self.embeddings = tables, slots, rows
        return self._computed(inputs)["logits"]

    def close(self) -> None:
        GraphExecutor.close(self)
        self._flights.clear()
        self.embeddings = None
        self._pages, self._states, self._inputs, self._replays = {}, {}, {}, {}

    # --- called by operators (kernels/torch_operators.py)

    def attended(self, node: Node, heads: tuple[Tensor, Tensor, Tensor], table: Tensor | None) -> Tensor:
        step, pages = self._tables(kind_of(node)), self._pages[_layer_of(node)]
        q = self._kernels.keep_rotated(heads, step, table, pages, self.dtype)
        y: Tensor = self._kernels.attention(
            q, step, pages, float_attr(node, "scale"), window_of(node), softcap_of(node)
        )
        return y

    def convolved(self, node: Node, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = self._kernels.short_conv(x.to(self.dtype), w, bias, self._slots(), self._states[_layer_of(node)])
        return y

    def _state_memory(self, node: Node) -> Tensor:
        """Return the states of a layer. The last slot is for padding rows."""
        return torch.zeros((self.limits.n_slots + 1, *state_shape(node)), dtype=self.dtype, device=self.device)

    def _page_memory(self, node: Node) -> LayerPages:
        """Return the pages of a layer. The last page is for padding rows."""
        heads, sizes = static_dim(node.inputs[1], 1), (static_dim(node.inputs[1], 2), static_dim(node.inputs[2], 2))
        window = window_of(node)
        n_pages = self._window_pages[window] if window else self.limits.n_pages
        shape = n_pages + 1, heads, self.limits.page_tokens
        return LayerPages.empty(shape, sizes, CODES[self._kv_format] if self._kv_format else self.dtype, self.device)


def _processors(device: torch.device, graph: Graph, element: int) -> SmGeometry:
    result = torch.cuda.get_device_properties(device)
    capability = result.major, result.minor
    return SmGeometry.from_device(result.multi_processor_count, capability, head_bytes(graph, element), element)


def _layer_of(node: Node) -> int:
    """Return the layer of an attention or state node."""
    return int_attr(node, "layer")
