"""Executes a graph on a device, node by node: the common part of language models and encoders."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor

from millrace.engine.cache_specs import KvFormat
from millrace.engine.cuda.capability_check import check_gpu, precisions_used
from millrace.engine.cuda.device_constants import Loaded, load
from millrace.engine.cuda.host_device_copy import on_device_context
from millrace.engine.cuda.lowered import LoweredGraph
from millrace.graph.expressions import as_tree
from millrace.graph.types import Node, Value
from millrace.kernels import torch_reference
from millrace.kernels.elementwise.torch_ref import evaluate
from millrace.kernels.matmul.coded import AS_E4M3, Matrix, QuantizedRows, RowQuantization, coding_of
from millrace.kernels.matmul.gpu_tiles import RULES
from millrace.kernels.matmul.op import is_silu_mul, precision_of
from millrace.kernels.operators import float_attr
from millrace.kernels.row_storage import storage_of
from millrace.kernels.torch_operators import torch_operators

DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
}  # fmt: skip
Load = Callable[[LoweredGraph, torch.dtype, torch.device], Loaded]
_PRODUCTS = threading.Lock()  # PyTorch's setting for float32 matmuls is global to all threads


class GraphExecutor:
    """lowered: of a type in DTYPES; kv: as in CudaExecutor; load: loads its constants onto the device

    raises, before a weight is read: MachineError without a GPU, ConfigError if it lacks a precision
    """

    def __init__(self, lowered: LoweredGraph, *, device: str, kv: KvFormat | None = None, load: Load = load) -> None:
        self._lowered, self._graph = lowered, lowered.graph
        self.dtype, self.device = DTYPES[lowered.dtype], torch.device(device)
        self._tf32, self.tiles = lowered.dtype == "tf32", RULES
        on_cpu = self.device.type == "cpu"
        if not on_cpu:
            check_gpu(self.device, precisions_used(lowered, kv))
        self._kernels: ModuleType = torch_reference if on_cpu else _kernels()
        with on_device_context(self.device):  # pinned memory uses some of the current device, which may be another
            self._loaded = load(lowered, self.dtype, self.device)
        self._last_reads = lowered.graph.last_reads()
        self._values: dict[Value, Matrix] = {}
        self.embeddings: Tensor | None = None

    def _computed(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the graph's outputs by name, for inputs by name."""
        with self._multiplying():
            return self._walked(inputs)

    @contextmanager
    def _multiplying(self) -> Iterator[None]:
        """Set the precision of float32 matmuls to this engine's: exact, or TF32."""
        if self.dtype != torch.float32:
            yield
            return
        with _PRODUCTS:
            torch.backends.cuda.matmul.allow_tf32 = self._tf32
            yield

    def _walked(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self._values = {p.value: inputs[p.name] for p in self._graph.inputs}
        operators = torch_operators()
        for node, gone in zip(self._graph.nodes, self._last_reads, strict=True):
            if node.outputs[0] not in self._values:  # a norm may have been computed with the preceding sum
                result = operators[node.op](node, self)
                self._values.update(zip(node.outputs, result if isinstance(result, tuple) else (result,), strict=True))
            for value in gone:
                self._values.pop(value, None)
        return {p.name: self.tensor(p.value) for p in self._graph.outputs}

    def coded(self) -> Iterator[tuple[QuantizedRows, Callable[[Tensor], Matrix]]]:
        """Yield quantized matmul weights, each with the function that quantizes rows (M, K) of 16-bit floats for it."""
        producers = self._graph.producers()
        for node, matrices in self._loaded.coded.items():
            coding = AS_E4M3 if self._takes_e4m3(node) else None
            if precision_of(node).takes_bytes:
                coding = coding_of(storage_of(producers[node.inputs[0]]))
            meets: Callable[[Tensor], Matrix] = coding.rows if coding else Tensor.contiguous
            for matrix in matrices:
                yield matrix, meets

    def close(self) -> None:
        self._loaded, self._values = Loaded({}, {}), {}

    # --- called by operators (kernels/torch_operators.py)

    def tensor(self, value: Value) -> Tensor:
        tensor = self._loaded.tensors[value] if value.constant else self._values[value]
        assert isinstance(tensor, Tensor), f"{value} is coded"
        return tensor

    def products(self, node: Node, bias: Tensor | None = None) -> list[Tensor]:
        x = self._values[node.inputs[0]]
        if isinstance(x, Tensor) and self._takes_e4m3(node):
            x = self.coded_rows(x, AS_E4M3)
        result = [self._kernels.product(x, w, self.dtype, bias, self.tiles) for w in self._loaded.matrices(node)]
        width = node.output.width
        return [part for y in result for part in ([y] if y.shape[1] == width else y.split(width, 1))]

    def _takes_e4m3(self, node: Node) -> bool:
        """Return whether a matmul rounds its rows to E4M3; rows that are INT8 already stay so."""
        return node in self._lowered.e4m3

    def matrix(self, value: Value) -> Matrix:
        return self._values[value]

    def coded_rows(self, x: Tensor, coding: RowQuantization) -> QuantizedRows:
        y: QuantizedRows = self._kernels.coded_rows(x, coding)
        return y

    def added(self, node: Node, y: Tensor) -> Tensor:
        residual, norm = self.tensor(node.inputs[-1]).float(), self._lowered.fusions.norms.get(node)
        if norm is None:
            return residual + y
        w, coding = self.tensor(norm.inputs[1]), self._lowered.fusions.codings.get(norm.output)
        total: Tensor
        total, self._values[norm.output] = self._kernels.add_norm(
            y, residual, w, float_attr(norm, "eps"), self.dtype, coding
        )
        return total

    def gated(self, node: Node, halves: Sequence[Tensor]) -> Matrix:
        if is_silu_mul(node):
            y: Matrix = self._kernels.silu_mul(*halves, self.dtype, self._lowered.fusions.codings.get(node.output))
            return y
        return evaluate(as_tree(node.attrs["tree"]), [x.float() for x in halves]).to(self.dtype)

    def normalised(self, x: Tensor, w: Tensor, eps: float) -> Tensor:
        y: Tensor = self._kernels.rms_norm(x, w, eps, self.dtype)
        return y

    def attended(self, node: Node, heads: tuple[Tensor, Tensor, Tensor], table: Tensor | None) -> Tensor:
        raise NotImplementedError("of what keeps no keys and values")

    def convolved(self, node: Node, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError("of what keeps no states")

    def attended_whole(self, node: Node, heads: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        raise NotImplementedError("of what does not read whole texts")


def _kernels() -> ModuleType:
    """Import them for a device only: Triton chooses its backend on import."""
    from millrace.kernels import triton_kernels

    return triton_kernels
