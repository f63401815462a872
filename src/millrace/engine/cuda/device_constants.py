"""The constants of a graph on a device, each read once."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace.checkpoint.weights.quantized_matrix import QuantisedMatrix
from millrace.engine.cuda.host_device_copy import kept_on_device, rows_on_device
from millrace.engine.cuda.lowered import LoweredGraph
from millrace.errors import CheckpointError
from millrace.graph.types import DType, Graph, Node, Value
from millrace.kernels.matmul.coded import Matrix, QuantizedRows, weights
from millrace.kernels.matmul.op import (
    PRODUCTS,
    codes_of,
    group_of,
    matrices_of,
    matrix_size,
    precision_of,
    transform_of,
)
from millrace.kernels.operand_places import constant_of
from millrace.machine.cpu import usable_cores

AHEAD = 2, 8  # matrices read ahead into host memory, by cores: minimum, maximum
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Loaded:
    """tensors: matmul tables, biases and weights in the engine's type, others in float32

    coded: codes and scales of matmuls by node; matrices that are coded alike are merged
    joined: matmuls with several matrices in the engine's type, merged; `tensors` has views of their parts
    """

    tensors: dict[Value, Tensor]
    coded: dict[Node, tuple[QuantizedRows, ...]]
    joined: dict[Node, Tensor] = field(default_factory=dict)

    def matrices(self, node: Node) -> tuple[Matrix, ...]:
        """Return the weight matrices of a matmul; matrices stored contiguously are returned as one."""
        if node in self.joined:
            return (self.joined[node],)
        return self.coded.get(node) or tuple(self.tensors[w] for w in matrices_of(node))


def load(lowered: LoweredGraph, dtype: torch.dtype, device: torch.device, preloaded: Loaded | None = None) -> Loaded:
    """Load the constants. preloaded: what is on the device already, and is not read

    raises CheckpointError for weights that are not finite, or too large for the engine's type
    """
    placement, constants = lowered.placement, preloaded or Loaded({}, {})
    coded = {node: constants.coded[node] for node in placement.coded if node in constants.coded}
    matrices = [(n, w, rows) for n, rows in placement.coded.items() if n not in coded for w in matrices_of(n)]
    read = _prefetched([partial(_codes, *matrix) for matrix in matrices])
    parts: list[QuantizedRows] = []
    for (node, _, _), matrix in zip(matrices, read, strict=True):
        parts.append(weights(matrix))
        if len(parts) == len(matrices_of(node)):
            coded[node] = tuple(_placed(alike, device) for alike in _group_alike(parts))
            parts.clear()
    kinds = {v: dtype for v in placement.narrow} | {v: torch.float32 for v in placement.wide}
    tensors = {value: constants.tensors[value] for value in kinds if value in constants.tensors}
    new = [value for value in kinds if value not in tensors]
    joined = {**constants.joined, **load_merged(lowered.graph, tensors, placement.coded, dtype, device)}
    for value, array in zip(new, _prefetched([partial(_read, value) for value in new]), strict=True):
        kind = torch.int32 if value.dtype == DType.I32 else kinds[value]
        if value not in tensors:
            tensors[value] = torch.empty(array.shape, dtype=kind, device=device)
        kept_on_device(array, tensors[value])
    _check_finite({value: tensors[value] for value in new if tensors[value].is_floating_point()})
    return Loaded(tensors, coded, joined)


def load_merged(
    graph: Graph, tensors: dict[Value, Tensor], coded: Collection[Node], dtype: torch.dtype, device: torch.device
) -> dict[Node, Tensor]:
    """Allocate one tensor for each matmul with several float matrices, and put views of it into `tensors`.

    coded: matmuls that have codes
    """
    result = {}
    for node in graph.nodes:
        matrices = matrices_of(node) if node.op in PRODUCTS and node not in coded else ()
        if len(set(matrices)) > 1 and not any(w in tensors for w in matrices):
            sizes = [matrix_size(w) for w in matrices]
            result[node] = torch.empty((sum(n for n, _ in sizes), sizes[0][1]), dtype=dtype, device=device)
            tensors.update(zip(matrices, result[node].split([n for n, _ in sizes]), strict=True))
    return result


def _group_alike(parts: Sequence[QuantizedRows]) -> list[list[QuantizedRows]]:
    """Group neighbors that differ in nothing but their codes and scales."""
    result: list[list[QuantizedRows]] = []
    for part in parts:
        if result and _format(result[-1][0]) == _format(part):
            result[-1].append(part)
        else:
            result.append([part])
    return result


def _format(rows: QuantizedRows) -> tuple[object, ...]:
    minimums = None if rows.minimums is None else rows.minimums.dtype
    return rows.codes.dtype, rows.scales.dtype, minimums, rows.width, rows.group, rows.zero


def _placed(parts: Sequence[QuantizedRows], device: torch.device) -> QuantizedRows:
    """Copy parts into one allocation, one after the other."""
    minimums = [part.minimums for part in parts if part.minimums is not None]
    return replace(
        parts[0], codes=rows_on_device([part.codes for part in parts], device),
        scales=rows_on_device([part.scales for part in parts], device),
        minimums=rows_on_device(minimums, device) if minimums else None,
    )  # fmt: skip


def _prefetched(works: Sequence[Callable[[], _T]]) -> Iterator[_T]:
    """Yield the results in order: the next files are read and quantized while the previous ones are copied."""
    flights, ahead = deque[Future[_T]](), min(max(usable_cores() // 2, AHEAD[0]), AHEAD[1])
    with ThreadPoolExecutor(ahead) as pool:
        for work in works:
            flights.append(pool.submit(work))
            if len(flights) > ahead:
                yield flights.popleft().result()
        while flights:
            yield flights.popleft().result()


def _codes(node: Node, w: Value, rows: Node | None) -> QuantisedMatrix:
    """Return the codes of weights. rows: the node that makes the rows that they are multiplied with"""
    constant = constant_of(w)
    return codes_of(constant, constant.load, precision_of(node).bits, group_of(node), transform_of(rows))


def _read(value: Value) -> NDArray[Any]:
    """Read a constant; float64 is rounded to float32 first, as on a CPU."""
    array = constant_of(value).load()
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _check_finite(tensors: Mapping[Value, Tensor]) -> None:
    """Check weights on the device with one synchronization: minimum and maximum are NaN if any element is."""
    if not tensors:
        return
    ends = torch.stack([torch.stack([x.min(), x.max()]).float() for x in tensors.values()])
    for value, finite in zip(tensors, ends.isfinite().all(1).tolist(), strict=True):
        if not finite:
            kind = str(tensors[value].dtype).removeprefix("torch.")
            raise CheckpointError(
                f"{'+'.join(constant_of(value).origin)} has weights that are not finite, or too large for {kind}",
                "numbers", "correct them, download the checkpoint again, or choose another",
            )  # fmt: skip
