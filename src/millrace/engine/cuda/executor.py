"""The executor of a GPU: a graph's operators as PyTorch and Triton compute them, keys and values in pages.

It agrees with the others within a tolerance: libraries choose how sums are cut by shapes. On tensors of a CPU the
same steps go through plain PyTorch, so that everything but the kernels is tested without a device.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from millrace.engine.cuda import plain
from millrace.engine.cuda.buckets import Bucket, Tables, bucket_of, captured
from millrace.engine.cuda.glue import coding_of, glue_of, is_silu_mul
from millrace.engine.cuda.gpu import CODES, check_gpu, check_runs, precisions_used
from millrace.engine.cuda.loaded import Loaded, load
from millrace.engine.cuda.memory import ATTENTION, head_bytes, kinds_of, read_last
from millrace.engine.cuda.operators import OPERATORS, evaluate, layer_of
from millrace.engine.cuda.sampling import Rows, Way, drawn_plainly, sample, tokens_alone, way_of
from millrace.engine.cuda.step import step_tables
from millrace.engine.cuda.transfer import OnItsWay, on_device, there
from millrace.engine.cuda.work import Processors, joined
from millrace.engine.dummy import dummy_step
from millrace.engine.executor import Executor, ExecutorLimits, StepInputs, StepOutputs
from millrace.engine.kv import KvFormat
from millrace.graph.trees import as_tree
from millrace.graph.types import Graph, Node, Value
from millrace.kernels.attention.paged import LayerPages
from millrace.kernels.matmul.coded import AS_E4M3, CodedRows, Coding, Matrix
from millrace.kernels.matmul.gpu_tiles import RULES
from millrace.kernels.matmul.op import precision_of
from millrace.kernels.operators import number, size
from millrace.kernels.storage import storage_of

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class CudaExecutor(Executor):
    """graph: after the passes of `pipeline.gpu`, which say how each product's weights are coded.

    dtype: of DTYPES: of activations and of weights that are not coded
    kv: how keys and values are kept, INT8 or FP8; None: in dtype
    fp8_rows: linear layers by name whose rows, where 16-bit floats meet codes, become E4M3, each by its own scale
    buckets: sizes, ascending, to which steps of one token a sequence are padded, to be captured once and then replayed
    raises, before a weight is read: EngineError for an operator, or keys and values, that have no kernel here,
    MachineError without a GPU, ConfigError for one that lacks a precision
    """

    depth = 2

    def __init__(
        self, graph: Graph, limits: ExecutorLimits, *, dtype: str, kv: KvFormat | None = None,
        fp8_rows: Collection[str] = (), buckets: Sequence[int] = (), device: str = "cuda",
    ) -> None:  # fmt: skip
        check_runs(graph, kv)
        self.limits, self.dtype, self.device = limits, DTYPES[dtype], torch.device(device)
        self._kept, self._fp8_rows = kv, frozenset(fp8_rows)
        on_cpu = self.device.type == "cpu"
        if not on_cpu:
            check_gpu(self.device, precisions_used(graph, dtype, fp8_rows, kv))
        self._kernels: ModuleType = plain if on_cpu else _kernels()
        self._processors = Processors() if on_cpu else _processors(self.device, head_bytes(graph, self.dtype.itemsize))
        self._pages = {layer_of(node): self._page_memory(node) for node in graph.nodes if node.op in ATTENTION}
        self._graph, self._loaded, self._read_last = graph, self._load(graph), read_last(graph)
        self._glue, self.tiles = glue_of(graph, self._takes_e4m3), RULES
        self._values: dict[Value, Matrix] = {}
        self._tables: Tables
        self._graph_memory = None if on_cpu else torch.cuda.graph_pool_handle()
        self._buckets, self._inputs = tuple(buckets), dict[int, Bucket]()
        self._replays = dict[tuple[int, Way | None], Callable[[], Tensor]]()
        self._flights: deque[OnItsWay] = deque()
        self._drawn: Tensor | None = None  # by the last step that was launched

    def warm(self) -> None:
        """Kernels are compiled, buckets captured and the largest step's memory is taken, before anybody waits for it.

        Writes into pages that nobody has yet. raises RuntimeError where the device fails, or has too little memory
        """
        limits = self.limits
        longest = min(limits.max_step_tokens, limits.context_tokens)
        each = -(-longest // limits.page_tokens)
        n = max(1, min(limits.max_step_tokens // longest, limits.max_sequences, limits.n_pages // each))
        steps = [dummy_step([longest] * n, 0, n * each, vocab=limits.vocab_size)]
        for m in self._buckets[::-1]:  # the largest has room for what others compute
            if m <= limits.n_pages:
                steps += [dummy_step([1] * m, 0, m, vocab=limits.vocab_size) for _ in Way]
                steps[-1].sampling["temperature"] = 1
        for step in steps:
            self.run(step)

    def _load(self, graph: Graph) -> Loaded:
        return load(graph, self.dtype, self.device)

    def launch(self, step: StepInputs) -> None:
        assert len(self._flights) < self.depth, "too many steps at a time"
        with torch.inference_mode(), there(self.device):
            size, way = bucket_of(step, self._buckets), way_of(step)
            if way is None:
                found = sample(self.logits(step), step, self._kernels.draw)
            else:
                self._copy_pages(step)
                tokens = self._drawn_at_once(step, way) if size is None else self._replayed(step, size, way)
                found = tokens_alone(tokens)
            self._flights.append(OnItsWay.of(found))
        self._drawn = found.tokens

    def wait(self) -> StepOutputs:
        assert self._flights, "nothing was launched"
        with there(self.device):
            return StepOutputs(*self._flights.popleft().arrived())

    def logits(self, step: StepInputs) -> Tensor:
        """(R, V) float32 for the sampled rows, after keys and values were stored. The next step may write over it."""
        with torch.inference_mode(), there(self.device):
            self._copy_pages(step)
            size = bucket_of(step, self._buckets)
            found = self._computed(*self._eager(step)) if size is None else self._replayed(step, size, None)
            return found.float()

    def _copy_pages(self, step: StepInputs) -> None:
        for source, target in () if step.copies is None else step.copies.tolist():
            for pages in self._pages.values():
                pages.copy(source, target)

    def _eager(self, step: StepInputs) -> tuple[Mapping[str, Tensor], Tables]:
        given = {
            "tokens": step.tokens, "positions": step.positions, "lengths": np.diff(step.starts),
            "rows": step.sampling["token"],
        }  # fmt: skip
        whole, places = joined([*given.values()])
        held = on_device(whole, self.device)
        inputs = {name: held[place] for name, place in zip(given, places, strict=True)}
        self._put_drawn(inputs["tokens"], step)
        page_tokens, n = self.limits.page_tokens, self._processors
        return inputs, cache(lambda *kind: step_tables(step, page_tokens, self.device, kind, n))

    def _drawn_at_once(self, step: StepInputs, way: Way) -> Tensor:
        rows = Rows.of(step.sampling, self.device)
        return self._plainly(self._computed(*self._eager(step)), rows, way)

    def _plainly(self, logits: Tensor, rows: Rows, way: Way) -> Tensor:
        return drawn_plainly(logits, rows, way, self._kernels.draw, self._kernels.best)

    def _put_drawn(self, tokens: Tensor, step: StepInputs) -> None:
        """Those that the step before draws; what it could not draw is any token: nobody waits for what follows."""
        if step.drawn is not None:
            assert self._drawn is not None, "no step was launched before"
            at, rows = on_device(step.drawn.T.astype(np.int32), self.device)
            self._kernels.put(tokens, at, self._drawn, rows)

    def _replayed(self, step: StepInputs, size: int, way: Way | None) -> Tensor:
        """The tokens of its rows, drawn that way; None: their logits. The next step may write over them."""
        if size not in self._inputs:
            limits = self.limits
            most_pages = -(-limits.max_context // limits.page_tokens)
            self._inputs[size] = Bucket(
                size, limits.n_pages, most_pages, limits.page_tokens, self.device, self._processors.number,
                kinds_of(self._graph),
            )  # fmt: skip
        bucket = self._inputs[size]
        bucket.fill(step)
        self._put_drawn(bucket.inputs()["tokens"], step)
        if (size, way) not in self._replays:  # what is captured runs once before: its keys go where this step's do
            compute = partial(self._of_bucket, bucket, way)
            self._replays[size, way] = captured(compute, self.device, self._graph_memory)
        return self._replays[size, way]()[: len(step.sampling)]

    def _of_bucket(self, bucket: Bucket, way: Way | None) -> Tensor:
        logits = self._computed(bucket.inputs(), bucket.tables)
        return logits if way is None else self._plainly(logits, bucket.rows, way)

    def _computed(self, inputs: Mapping[str, Tensor], tables: Tables) -> Tensor:
        """logits (R, V), as their product gives them"""
        self._values, self._tables = {p.value: inputs[p.name] for p in self._graph.inputs}, tables
        for node, gone in zip(self._graph.nodes, self._read_last, strict=True):
            if node.outputs[0] not in self._values:  # a norm may have come with the sum before it
                found = OPERATORS[node.op](node, self)
                self._values.update(zip(node.outputs, found if isinstance(found, tuple) else (found,), strict=True))
            for value in gone:
                self._values.pop(value, None)
        (output,) = (p.value for p in self._graph.outputs if p.name == "logits")
        return self.tensor(output)

    def coded(self) -> Iterator[tuple[CodedRows, Callable[[Tensor], Matrix]]]:
        """Weights of products, and what makes of rows of 16-bit floats (M, K) what they meet."""
        producers = self._graph.producers()
        for node, matrices in self._loaded.coded.items():
            coding = AS_E4M3 if self._takes_e4m3(node) else None
            if precision_of(node).takes_bytes:
                coding = coding_of(storage_of(producers[node.inputs[0]]))
            meets: Callable[[Tensor], Matrix] = coding.rows if coding else Tensor.contiguous
            for matrix in matrices:
                yield matrix, meets

    def close(self) -> None:
        self._flights.clear()
        self._loaded, self._pages, self._values = Loaded({}, {}), {}, {}
        self._inputs, self._replays = {}, {}

    # --- what operators ask for (engine/cuda/operators.py)

    def tensor(self, value: Value) -> Tensor:
        held = self._loaded.tensors[value] if value.constant else self._values[value]
        assert isinstance(held, Tensor), f"{value} is coded"
        return held

    def products(self, node: Node, bias: Tensor | None = None) -> list[Tensor]:
        x = self._values[node.inputs[0]]
        if isinstance(x, Tensor) and self._takes_e4m3(node):
            x = self.coded_rows(x, AS_E4M3)
        found = [self._kernels.product(x, w, self.dtype, bias, self.tiles) for w in self._loaded.matrices(node)]
        return [part for y in found for part in y.split(node.output.width, 1)]

    def _takes_e4m3(self, node: Node) -> bool:
        """Of products; rows that are INT8 by now stay so."""
        return node in self._loaded.coded and not self._fp8_rows.isdisjoint(node.origin)

    def matrix(self, value: Value) -> Matrix:
        return self._values[value]

    def coded_rows(self, x: Tensor, coding: Coding) -> CodedRows:
        y: CodedRows = self._kernels.coded_rows(x, coding)
        return y

    def added(self, node: Node, y: Tensor) -> Tensor:
        residual, norm = self.tensor(node.inputs[-1]).float(), self._glue.norms.get(node)
        if norm is None:
            return residual + y
        w, coding = self.tensor(norm.inputs[1]), self._glue.coded.get(norm.output)
        total: Tensor
        total, self._values[norm.output] = self._kernels.add_norm(
            y, residual, w, number(norm, "eps"), self.dtype, coding
        )
        return total

    def gated(self, node: Node, halves: Sequence[Tensor]) -> Matrix:
        if is_silu_mul(node):
            y: Matrix = self._kernels.silu_mul(*halves, self.dtype, self._glue.coded.get(node.output))
            return y
        return evaluate(as_tree(node.attrs["tree"]), [x.float() for x in halves]).to(self.dtype)

    def normalised(self, x: Tensor, w: Tensor, eps: float) -> Tensor:
        y: Tensor = self._kernels.rms_norm(x, w, eps, self.dtype)
        return y

    def attended(self, node: Node, heads: tuple[Tensor, Tensor, Tensor], table: Tensor | None) -> Tensor:
        kv_heads = heads[1].shape[1]
        step, pages = self._tables(heads[0].shape[1] // kv_heads, kv_heads), self._pages[layer_of(node)]
        q = self._kernels.keep_rotated(heads, step, table, pages, self.dtype)
        y: Tensor = self._kernels.attention(q, step, pages, number(node, "scale"))
        return y

    def _page_memory(self, node: Node) -> LayerPages:
        """The last page is for rows that fill a bucket."""
        heads, sizes = size(node.inputs[1], 1), (size(node.inputs[1], 2), size(node.inputs[2], 2))
        shape = self.limits.n_pages + 1, heads, self.limits.page_tokens
        return LayerPages.empty(shape, sizes, CODES[self._kept] if self._kept else self.dtype, self.device)


def _processors(device: torch.device, head_bytes: int) -> Processors:
    found = torch.cuda.get_device_properties(device)
    return Processors.of(found.multi_processor_count, (found.major, found.minor), head_bytes)


def _kernels() -> ModuleType:
    """Imported for a device alone: Triton decides at its import how it runs."""
    from millrace.engine.cuda import triton_kernels

    return triton_kernels
