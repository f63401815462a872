"""Batches of requests whose shapes differ: inputs one behind the other, and what tells a network where each begins.

An input with `allow_ragged_batch` is all elements of all requests, in one dimension. `batch_input` are further inputs,
computed of such a batch; `batch_output` says by which input's shapes an output in one dimension is taken apart again.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np

from millrace.model_repository.config.enums import BatchInputKind
from millrace.model_repository.config.message_fields import empty
from millrace.model_repository.config.model_config import BatchInput, ModelConfig, ModelInput
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.request_validation import wire_name
from millrace.model_repository.request.status_code import Code, StatusError, invalid
from millrace.model_repository.request.tensors import DTYPES, Array


class Ragged:
    """Of one model."""

    def __init__(self, config: ModelConfig) -> None:
        self._has_batches = config.max_batch_size > 0
        self.flat = frozenset(said.name for said in config.input if said.allow_ragged_batch)
        self.added = config.batch_input
        dims = {said.name: said.dims for said in config.output}
        self.scattered = {
            name: (said.source_input[0], dims[name]) for said in config.batch_output for name in said.target_name
        }

    @property
    def free(self) -> frozenset[str]:
        """Tensors whose dims are not those of the configuration."""
        return self.flat.union(self.scattered, *(said.target_name for said in self.added))

    def __bool__(self) -> bool:
        """Whether the model has anything of this."""
        return bool(self.flat or self.added or self.scattered)

    def gathered(self, requests: Sequence[InferRequest]) -> dict[str, Array]:
        """All inputs of a batch. raises StatusError"""
        found = {
            name: np.concatenate(
                [r.inputs[name].reshape(-1) if name in self.flat else r.inputs[name] for r in requests]
            )
            for name in requests[0].inputs
        }
        for said in self.added:
            array = self._computed(said, requests)
            found.update(dict.fromkeys(said.target_name, array))
        return found

    def parts(self, name: str, array: Array, requests: Sequence[InferRequest]) -> list[Array]:
        """An output, a part for each request. raises StatusError"""
        if name not in self.scattered:
            return split(name, array, requests) if self._has_batches else [array]
        source, dims = self.scattered[name]
        shapes = [self._shape(dims, self._source(source, r).shape, r) for r in requests]
        sizes = [prod(shape) for shape in shapes]
        if array.size != sum(sizes):
            what = f"output '{name}' has {array.size} elements, expected {sum(sizes)} by the shapes of '{source}'"
            raise StatusError(Code.INTERNAL, what)
        pieces = np.split(array.reshape(-1), np.cumsum(sizes)[:-1])
        return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def _shape(self, dims: tuple[int, ...], of_input: tuple[int, ...], request: InferRequest) -> list[int]:
        """Dims of an output that vary are those of the input at the same place."""
        inner = of_input[1:] if self._has_batches else of_input
        if any(dim == -1 and i >= len(inner) for i, dim in enumerate(dims)):
            raise invalid(f"{request.named}an output of dims {list(dims)} does not follow an input of {list(inner)}")
        known = [inner[i] if dim == -1 else dim for i, dim in enumerate(dims)]
        return [request.batch_size, *known] if self._has_batches else known

    def _source(self, name: str, request: InferRequest) -> Array:
        array = request.inputs.get(name)
        if array is None:
            raise invalid(f"{request.named}input '{name}' is needed, as other inputs of a batch follow from it")
        return array

    def _computed(self, said: BatchInput, requests: Sequence[InferRequest]) -> Array:
        sources = [self._source(said.source_input[0], r) for r in requests]
        dtype, kind, counts = DTYPES[wire_name(said.data_type)], said.kind, [array.size for array in sources]
        if kind is BatchInputKind.BATCH_ELEMENT_COUNT:
            return np.array(counts, dtype)
        if kind is BatchInputKind.BATCH_ACCUMULATED_ELEMENT_COUNT:
            return np.cumsum(counts).astype(dtype)
        if kind is BatchInputKind.BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO:
            return np.cumsum([0, *counts]).astype(dtype)
        if kind is BatchInputKind.BATCH_MAX_ELEMENT_COUNT_AS_SHAPE:
            return np.zeros(max(counts), dtype)
        skip = 1 if self._has_batches else 0
        items = [
            array.shape[skip:] for r, array in zip(requests, sources, strict=True) for _ in range(r.batch_size or 1)
        ]
        shapes = np.array(items, dtype)
        return shapes if kind is BatchInputKind.BATCH_ITEM_SHAPE else shapes.reshape(-1)


def split(name: str, array: Array, requests: Sequence[InferRequest]) -> list[Array]:
    """By the batch sizes of the requests. raises StatusError"""
    n_items = sum(r.batch_size for r in requests)
    if array.shape[:1] != (n_items,):
        what = f"output '{name}' has shape {list(array.shape)} for a batch of {n_items}"
        raise StatusError(Code.INTERNAL, what)
    parts, at = [], 0
    for request in requests:
        parts.append(array[at : at + request.batch_size])
        at += request.batch_size
    return parts


def with_batch_inputs(config: ModelConfig) -> ModelConfig:
    """With what is computed of a batch among its inputs, as its network has them; their dims are no configuration's."""
    added = [
        replace(empty(ModelInput), name=name, data_type=said.data_type, dims=(-1,))
        for said in config.batch_input
        for name in said.target_name
    ]
    return replace(config, input=(*config.input, *added))
