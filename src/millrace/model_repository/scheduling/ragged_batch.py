"""Ragged batching: concatenated inputs of different shapes, plus batch inputs that tell the model where each begins.

An input with `allow_ragged_batch` holds all elements of all requests in one dimension. Each `batch_input` is a further
input computed from the batch. A `batch_output` names the input whose shapes split a one-dimensional output again.
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


class RaggedBatch:
    """Ragged inputs and outputs of one model."""

    def __init__(self, config: ModelConfig) -> None:
        self._has_batches = config.max_batch_size > 0
        self.flat_inputs = frozenset(spec.name for spec in config.input if spec.allow_ragged_batch)
        self.batch_inputs = config.batch_input
        dims = {spec.name: spec.dims for spec in config.output}
        self.scattered_outputs = {
            name: (spec.source_input[0], dims[name]) for spec in config.batch_output for name in spec.target_name
        }

    @property
    def variable_tensors(self) -> frozenset[str]:
        """Names of tensors whose dims differ from the configuration."""
        return self.flat_inputs.union(
            self.scattered_outputs, *(batch_input.target_name for batch_input in self.batch_inputs)
        )

    def __bool__(self) -> bool:
        """Whether the model uses ragged batching at all."""
        return bool(self.flat_inputs or self.batch_inputs or self.scattered_outputs)

    def gather(self, requests: Sequence[InferRequest]) -> dict[str, Array]:
        """Return the concatenated inputs of a batch. raises StatusError"""
        inputs = {
            name: np.concatenate(
                [r.inputs[name].reshape(-1) if name in self.flat_inputs else r.inputs[name] for r in requests]
            )
            for name in requests[0].inputs
        }
        for batch_input in self.batch_inputs:
            array = self._batch_input(batch_input, requests)
            inputs.update(dict.fromkeys(batch_input.target_name, array))
        return inputs

    def scatter(self, name: str, array: Array, requests: Sequence[InferRequest]) -> list[Array]:
        """Split an output into one part per request. raises StatusError"""
        if name not in self.scattered_outputs:
            return split(name, array, requests) if self._has_batches else [array]
        source, dims = self.scattered_outputs[name]
        shapes = [self._shape(dims, self._source(source, r).shape, r) for r in requests]
        sizes = [prod(shape) for shape in shapes]
        if array.size != sum(sizes):
            message = f"output '{name}' has {array.size} elements, expected {sum(sizes)} by the shapes of '{source}'"
            raise StatusError(Code.INTERNAL, message)
        pieces = np.split(array.reshape(-1), np.cumsum(sizes)[:-1])
        return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def _shape(self, dims: tuple[int, ...], of_input: tuple[int, ...], request: InferRequest) -> list[int]:
        """Return an output's shape, whose variable dims come from the input at the same position."""
        inner = of_input[1:] if self._has_batches else of_input
        if any(dim == -1 and i >= len(inner) for i, dim in enumerate(dims)):
            raise invalid(
                f"{request.error_prefix}an output of dims {list(dims)} does not follow an input of {list(inner)}"
            )
        shape = [inner[i] if dim == -1 else dim for i, dim in enumerate(dims)]
        return [request.batch_size, *shape] if self._has_batches else shape

    def _source(self, name: str, request: InferRequest) -> Array:
        array = request.inputs.get(name)
        if array is None:
            raise invalid(f"{request.error_prefix}input '{name}' is needed, as other inputs of a batch follow from it")
        return array

    def _batch_input(self, batch_input: BatchInput, requests: Sequence[InferRequest]) -> Array:
        sources = [self._source(batch_input.source_input[0], r) for r in requests]
        dtype, kind, counts = (
            DTYPES[wire_name(batch_input.data_type)],
            batch_input.kind,
            [array.size for array in sources],
        )
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
    """Split an output by the batch sizes of the requests. raises StatusError"""
    n_items = sum(r.batch_size for r in requests)
    if array.shape[:1] != (n_items,):
        message = f"output '{name}' has shape {list(array.shape)} for a batch of {n_items}"
        raise StatusError(Code.INTERNAL, message)
    parts, at = [], 0
    for request in requests:
        parts.append(array[at : at + request.batch_size])
        at += request.batch_size
    return parts


def with_batch_inputs(config: ModelConfig) -> ModelConfig:
    """Return the configuration with its batch inputs added to the inputs, as the model file declares them."""
    added = [
        replace(empty(ModelInput), name=name, data_type=batch_input.data_type, dims=(-1,))
        for batch_input in config.batch_input
        for name in batch_input.target_name
    ]
    return replace(config, input=(*config.input, *added))
