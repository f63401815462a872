"""Templates of requests that differ only in the data of their inputs, so that the rest is read and checked once."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.request_validation import RequestValidator
from millrace.model_repository.request.tensors import Array

OutputSignature = tuple[tuple[str, Any, tuple[int, ...]], ...]  # name, dtype and shape of each output
_NUMBERS = "iufV"  # kinds of dtypes whose values are the bytes that the client sent; V: bfloat16


class InferTemplate:
    """A validated request whose inputs are raw numbers, without its data.

    sizes: bytes of each input, in the order in which the client sent them
    offsets: where each input begins if they follow each other
    n_bytes: bytes of all inputs
    """

    __slots__ = ("_inputs", "_request", "n_bytes", "offsets", "sizes")

    def __init__(self, request: InferRequest) -> None:
        self._inputs = [(name, array.dtype, array.shape) for name, array in request.inputs.items()]
        self.sizes: Sequence[int] = [array.nbytes for array in request.inputs.values()]
        *self.offsets, self.n_bytes = accumulate(self.sizes, initial=0)
        self._request = request.copy_with({})

    @classmethod
    def from_request(cls, request: InferRequest, validator: RequestValidator, n_bytes: int) -> "InferTemplate | None":
        """Return the template of a request that `validator` accepted.

        None if its inputs are not `n_bytes` of raw numbers, or if they need a digest.
        """
        if validator.digests or not all(array.dtype.kind in _NUMBERS for array in request.inputs.values()):
            return None
        template = cls(request)
        return template if template.n_bytes == n_bytes else None

    def fill(self, data: bytes, offsets: Iterable[int], request_id: str) -> InferRequest:
        """Return a request with the inputs that begin at `offsets` of `data`.

        They are copied: aligned, so that no sum depends on where they lay.
        """
        inputs = {
            name: np.ndarray(shape, dtype, data[at : at + size])
            for (name, dtype, shape), at, size in zip(self._inputs, offsets, self.sizes, strict=True)
        }
        request = self._request.copy_with(inputs)
        request.id = request_id
        return request

    def fill_with(self, parts: Sequence[bytes], request_id: str) -> InferRequest:
        """Return a request with these inputs, which are not copied."""
        inputs = {
            name: np.ndarray(shape, dtype, part) for (name, dtype, shape), part in zip(self._inputs, parts, strict=True)
        }
        request = self._request.copy_with(inputs)
        request.id = request_id
        return request


def output_signature(outputs: Mapping[str, Array]) -> OutputSignature:
    return tuple((name, array.dtype, array.shape) for name, array in outputs.items())
