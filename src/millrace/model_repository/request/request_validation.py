"""Request validation: checks a request against its model's configuration, in Triton's order and with its messages."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from millrace.model_repository.config.enums import DataType
from millrace.model_repository.config.model_config import ModelConfig, ModelInput
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.response_cache import input_digest
from millrace.model_repository.request.status_code import StatusError, invalid
from millrace.model_repository.request.tensors import (
    BYTES,
    DTYPES,
    MAX_DIMENSIONS,
    MAX_STRINGS,
    Array,
    CutOffError,
    objects,
    split_up_to,
)

MAX_BYTES = (1 << 63) - 1
_BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


def wire_name(data_type: DataType) -> str:
    """Return the protocol's name of a data type: TYPE_STRING -> BYTES, TYPE_FP32 -> FP32."""
    return BYTES if data_type is DataType.TYPE_STRING else data_type.name.removeprefix("TYPE_")


@dataclass(slots=True)
class RawInput:
    """An input as received. data: its bytes, or an array of `shape`. datatype: one of DTYPES"""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: "memoryview | Array | DeferredData"


@dataclass(slots=True)
class DeferredData:
    """Data that is read only after the model accepts the input. n_bytes: raw size; None if it is read as an array"""

    read: Callable[[], memoryview | Array]
    n_bytes: int | None = None


class _Input:
    """Requirements of one input; dims exclude the batch dimension."""

    __slots__ = ("datatype", "dims", "is_fixed", "name", "optional", "reshape")

    def __init__(self, config: ModelInput) -> None:
        self.name, self.dims, self.optional = config.name, config.dims, config.optional
        self.datatype = wire_name(config.data_type)
        self.is_fixed = -1 not in config.dims
        self.reshape = config.reshape.shape if config.reshape else None


class RequestValidator:
    """Validator of one model, created once, because every request uses it."""

    def __init__(self, config: ModelConfig, ragged: bool = False, digests: bool = False) -> None:
        """ragged: the backend accepts requests of different shapes in a batch if the configuration allows it

        digests: compute a digest of each request's inputs
        """
        self.digests = digests
        self._model, self._max_batch = config.name, config.max_batch_size
        self._inputs = {tensor.name: _Input(tensor) for tensor in config.input}
        self._outputs = frozenset(tensor.name for tensor in config.output)
        self._required = [i.name for i in self._inputs.values() if not i.optional]
        loose = {tensor.name for tensor in config.input if ragged and tensor.allow_ragged_batch}
        self._variable_inputs = [i.name for i in self._inputs.values() if not i.is_fixed and i.name not in loose]
        self.has_strings = any(i.datatype == BYTES for i in self._inputs.values())  # which are slow to parse
        self._has_optional = len(self._required) < len(self._inputs)

    def attach_inputs(self, request: InferRequest, raw_inputs: Sequence[RawInput]) -> None:
        """Validate inputs and set them, the batch size and the shape key of the request. raises StatusError"""
        if not self._outputs.issuperset(request.outputs):
            unknown = next(name for name in request.outputs if name not in self._outputs)
            raise invalid(f"{request.error_prefix}unexpected inference output '{unknown}' for model '{self._model}'")
        if len({tensor.name for tensor in raw_inputs}) < len(raw_inputs):
            twice = next(name for name, n in Counter(tensor.name for tensor in raw_inputs).items() if n > 1)
            raise invalid(f"{request.error_prefix}input '{twice}' already exists in request")
        if len(raw_inputs) > len(self._inputs) or len(raw_inputs) < len(self._required):
            raise self._count_error(request, raw_inputs)
        if self._has_optional and not {tensor.name for tensor in raw_inputs}.issuperset(self._required):
            raise self._count_error(request, raw_inputs)  # the count fits, but not the names
        request.batch_size = self._batch_size(request, raw_inputs) if self._max_batch else 0
        if request.batch_size > self._max_batch:
            message = f"inference request batch-size must be <= {self._max_batch} for '{self._model}'"
            raise invalid(request.error_prefix + message)
        for tensor in raw_inputs:
            declared = self._inputs.get(tensor.name)
            if declared is None:
                raise invalid(
                    f"{request.error_prefix}unexpected inference input '{tensor.name}' for model '{self._model}'"
                )
            self._check(request, declared, tensor)
        # Read only after all checks pass. If several inputs are faulty, Triton reports the last one.
        arrays = [self._array(request, self._inputs[tensor.name], tensor) for tensor in reversed(raw_inputs)]
        for tensor in raw_inputs:
            request.inputs[tensor.name] = arrays.pop()
        if self._has_optional or self._variable_inputs:
            request.shape_key = self._shape_key(request)
        if self.digests:
            request.digest = input_digest(request.inputs)

    @property
    def reads_all(self) -> bool:
        """Whether all input bytes are read, even binary ones: for strings, or for a digest."""
        return self.has_strings or self.digests

    def declared_input(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """Return datatype and dims (with batch; -1 is any) of an input; None if there is no such input."""
        declared = self._inputs.get(name)
        if declared is None:
            return None
        return declared.datatype, (-1, *declared.dims) if self._max_batch else tuple(declared.dims)

    def raw_input(self, request: InferRequest, data: memoryview) -> RawInput:
        """Return the only input, with its shape deduced from the number of bytes. raises StatusError"""
        if len(self._inputs) != 1:
            raise invalid(
                f"{request.error_prefix}Raw request must only have 1 input (found 1) to be deduced but got "
                f"{len(self._inputs)} inputs in '{self._model}' model configuration"
            )
        (declared,) = self._inputs.values()
        variable = declared.dims.count(-1)
        if variable > 1:
            raise invalid(
                f"{request.error_prefix}The shape of the raw input '{declared.name}' can not be deduced because there "
                "are more than one variable-sized dimension"
            )
        n = prod(d for d in declared.dims if d != -1)
        if declared.datatype == BYTES:
            if variable or n != 1:
                message = f"For BYTE datatype raw input '{declared.name}', the model must have input shape [1]"
                raise invalid(request.error_prefix + message)
            shape: tuple[int, ...] = (1,) * len(declared.dims)
            shape = (1, *shape) if self._max_batch else shape
            return RawInput(declared.name, BYTES, shape, objects([bytes(data)]).reshape(shape))
        deduced = len(data) // n // np.dtype(DTYPES[declared.datatype]).itemsize
        shape = tuple(deduced if d == -1 else d for d in declared.dims)
        return RawInput(declared.name, declared.datatype, (1, *shape) if self._max_batch else shape, data)

    def _count_error(self, request: InferRequest, raw_inputs: Sequence[RawInput]) -> StatusError:
        present = {g.name for g in raw_inputs}
        missing = _quoted(name for name in self._required if name not in present)
        n, least = len(self._inputs), len(self._required)
        expected = f"{n}" if least == n else f"number of inputs between {least} and {n}"
        word = " inputs" if least == n else ""
        return invalid(
            f"{request.error_prefix}expected {expected}{word} but got {len(raw_inputs)} inputs for model "
            f"'{self._model}'. Got input(s) {_quoted(sorted(present))}, but missing required input(s) {missing}. "
            "Please provide all required input(s)."
        )

    def _batch_size(self, request: InferRequest, raw_inputs: Sequence[RawInput]) -> int:
        size: int | None = None
        for tensor in raw_inputs:
            if not tensor.shape:
                raise invalid(
                    f"{request.error_prefix}input '{tensor.name}' has no shape but model requires batch dimension for "
                    f"'{self._model}'"
                )
            if size is None:
                size = tensor.shape[0]
            elif size != tensor.shape[0]:
                raise invalid(
                    f"{request.error_prefix}input '{tensor.name}' batch size does not match other inputs for "
                    f"'{self._model}'"
                )
        return size or 0

    def _check(self, request: InferRequest, declared: _Input, tensor: RawInput) -> None:
        if tensor.datatype != declared.datatype:
            raise invalid(
                f"{request.error_prefix}inference input '{declared.name}' data-type is '{tensor.datatype}', but model "
                f"'{self._model}' expects '{declared.datatype}'"
            )
        dims = tensor.shape[1:] if self._max_batch else tensor.shape
        if dims == declared.dims:
            return
        fits = len(dims) == len(declared.dims) and all(s in (-1, d) for s, d in zip(declared.dims, dims, strict=True))
        if not fits:
            full = (-1, *declared.dims) if self._max_batch else declared.dims
            note = _BATCH_NOTE if self._max_batch else ""
            raise invalid(
                f"{request.error_prefix}unexpected shape for input '{declared.name}' for model '{self._model}'. "
                f"Expected {format_shape(full)}, got {format_shape(tensor.shape)}. {note}"
            )

    def _array(self, request: InferRequest, declared: _Input, tensor: RawInput) -> Array:
        data, shape = tensor.data, tensor.shape
        if declared.datatype == BYTES and prod(shape) > MAX_STRINGS:
            message = f"input '{declared.name}' has {prod(shape)} strings, at most {MAX_STRINGS} are supported"
            raise invalid(request.error_prefix + message)
        if isinstance(data, DeferredData):
            if declared.datatype != BYTES and data.n_bytes is not None:
                self._check_size(request, declared, shape, data.n_bytes)
            data = data.read()
        if isinstance(data, np.ndarray):
            array: Array = data
        elif declared.datatype == BYTES:
            array = objects(self._strings(request, tensor, data)).reshape(shape)
        else:
            self._check_size(request, declared, shape, len(data))
            array = np.frombuffer(data, DTYPES[declared.datatype]).reshape(shape)
            if declared.datatype == "BOOL":  # any non-zero byte is true, but NumPy requires 0 or 1
                array = array.view(np.uint8) != 0
        if declared.reshape is None:
            return array
        variable = iter(
            [d for s, d in zip(declared.dims, shape[1:] if self._max_batch else shape, strict=True) if s == -1]
        )
        dims = [next(variable) if d == -1 else d for d in declared.reshape]
        return array.reshape([shape[0], *dims] if self._max_batch else dims)

    def _check_size(self, request: InferRequest, declared: _Input, shape: Sequence[int], n_bytes: int) -> None:
        """Check the byte size of an input. raises StatusError"""
        expected = prod(shape) * np.dtype(DTYPES[declared.datatype]).itemsize
        if n_bytes != expected:
            raise invalid(
                f"{request.error_prefix}input byte size mismatch for input '{declared.name}' for model "
                f"'{self._model}'. Expected {expected}, got {n_bytes}"
            )

    def _strings(self, request: InferRequest, tensor: RawInput, data: memoryview) -> list[bytes]:
        where = f"for inference input '{tensor.name}' for model '{self._model}'"
        n = prod(tensor.shape)
        try:
            strings, n_more = split_up_to(data, n)
        except CutOffError as error:
            part = "incomplete string length indicator" if error.in_length else "incomplete string data"
            expected = "4 bytes" if error.in_length else f"string of length {error.needed}"
            message = f"{part} {where}, expecting {expected} but only {error.n_there} bytes available."
            raise invalid(request.error_prefix + message) from None
        if len(strings) < n:
            raise invalid(f"{request.error_prefix}expected {n} string elements {where}, got {len(strings)}")
        if n_more:  # Triton stops at the first surplus element
            raise invalid(f"{request.error_prefix}unexpected number of string elements {n + 1} {where}, expecting {n}")
        return strings

    def _shape_key(self, request: InferRequest) -> object:
        names = request.inputs if self._has_optional else self._variable_inputs
        skip = 1 if self._max_batch else 0
        return tuple((name, request.inputs[name].shape[skip:]) for name in sorted(names))


def check_shape(name: str, datatype: str, shape: Sequence[int]) -> int:
    """Return the number of elements of a shape. raises StatusError for an impossible shape"""
    if len(shape) > MAX_DIMENSIONS:  # bounds their product, and an array of that rank
        message = f"{len(shape)} dimensions, at most {MAX_DIMENSIONS} are supported"
        raise invalid(f"invalid shape for input '{name}': {message}")
    n = prod(shape)
    n_nonzero = n or prod(d for d in shape if d)  # empty arrays have the same limit on dimensions
    if n_nonzero > MAX_BYTES:
        raise invalid(
            f"invalid shape for input '{name}': shape {format_shape(shape)} causes total element count to exceed "
            f"maximum size of {MAX_BYTES}"
        )
    size = 8 if datatype == BYTES and not n else 1 if datatype == BYTES else np.dtype(DTYPES[datatype]).itemsize
    if n_nonzero * size > MAX_BYTES:
        raise invalid(
            f"byte size overflow for input '{name}': element count ({n_nonzero}) * data type size ({size}) exceeds "
            f"maximum allowed size ({MAX_BYTES})"
        )
    return n


def format_shape(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _quoted(names: Iterable[str]) -> str:
    return "[" + ",".join(f"'{name}'" for name in names) + "]"
