"""Whether a request is one for this model, and its inputs as arrays; in Triton's order, and in its words."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from millrace.model_repository.config.enums import DataType
from millrace.model_repository.config.model_config import ModelConfig, ModelInput
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.response_cache import digest_of
from millrace.model_repository.request.status_code import StatusError, invalid
from millrace.model_repository.request.tensors import (
    BYTES,
    DTYPES,
    MOST_DIMENSIONS,
    MOST_STRINGS,
    Array,
    CutOffError,
    objects,
    split_up_to,
)

MOST_BYTES = (1 << 63) - 1
_BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


def wire_name(data_type: DataType) -> str:
    """TYPE_STRING -> BYTES, TYPE_FP32 -> FP32."""
    return BYTES if data_type is DataType.TYPE_STRING else data_type.name.removeprefix("TYPE_")


@dataclass(slots=True)
class RawInput:
    """A tensor as it came. data: its bytes, or an array of `shape` already. datatype: one of DTYPES"""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: "memoryview | Array | Later"


@dataclass(slots=True)
class Later:
    """What is read once it is known that the model takes it. n_bytes: its raw size; None: it becomes an array"""

    read: Callable[[], memoryview | Array]
    n_bytes: int | None = None


class _Input:
    """What one input must be; dims without the batch dimension."""

    __slots__ = ("datatype", "dims", "is_fixed", "name", "optional", "reshape")

    def __init__(self, said: ModelInput) -> None:
        self.name, self.dims, self.optional = said.name, said.dims, said.optional
        self.datatype = wire_name(said.data_type)
        self.is_fixed = -1 not in said.dims
        self.reshape = said.reshape.shape if said.reshape else None


class RequestValidator:
    """Of one model; made once, for its configuration is looked at by every request."""

    def __init__(self, config: ModelConfig, ragged: bool = False, digests: bool = False) -> None:
        """ragged: its backend takes requests of different shapes in one batch, where the configuration allows it

        digests: requests get one of their inputs
        """
        self.digests = digests
        self._model, self._max_batch = config.name, config.max_batch_size
        self._inputs = {said.name: _Input(said) for said in config.input}
        self._outputs = frozenset(said.name for said in config.output)
        self._required = [i.name for i in self._inputs.values() if not i.optional]
        loose = {said.name for said in config.input if ragged and said.allow_ragged_batch}
        self._keyed = [i.name for i in self._inputs.values() if not i.is_fixed and i.name not in loose]
        self.has_strings = any(i.datatype == BYTES for i in self._inputs.values())  # which are read one by one
        self._has_optional = len(self._required) < len(self._inputs)

    def take(self, request: InferRequest, given: Sequence[RawInput]) -> None:
        """Give the request its inputs, its batch size and what it may be batched with. raises StatusError"""
        if not self._outputs.issuperset(request.outputs):
            unknown = next(name for name in request.outputs if name not in self._outputs)
            raise invalid(f"{request.named}unexpected inference output '{unknown}' for model '{self._model}'")
        if len({tensor.name for tensor in given}) < len(given):
            twice = next(name for name, n in Counter(tensor.name for tensor in given).items() if n > 1)
            raise invalid(f"{request.named}input '{twice}' already exists in request")
        if len(given) > len(self._inputs) or len(given) < len(self._required):
            raise self._count(request, given)
        if self._has_optional and not {tensor.name for tensor in given}.issuperset(self._required):
            raise self._count(request, given)  # as many as there may be, and others
        request.batch_size = self._batch_size(request, given) if self._max_batch else 0
        if request.batch_size > self._max_batch:
            most = f"inference request batch-size must be <= {self._max_batch} for '{self._model}'"
            raise invalid(request.named + most)
        for tensor in given:
            said = self._inputs.get(tensor.name)
            if said is None:
                raise invalid(f"{request.named}unexpected inference input '{tensor.name}' for model '{self._model}'")
            self._check(request, said, tensor)
        # Nothing is read before all of it is known to fit. Of several inputs with faults Triton tells the last one's.
        arrays = [self._array(request, self._inputs[tensor.name], tensor) for tensor in reversed(given)]
        for tensor in given:
            request.inputs[tensor.name] = arrays.pop()
        if self._has_optional or self._keyed:
            request.shape_key = self._shape_key(request)
        if self.digests:
            request.digest = digest_of(request.inputs)

    @property
    def reads_all(self) -> bool:
        """Of what comes in binary, too: strings one by one, or for a digest."""
        return self.has_strings or self.digests

    def said(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """The datatype of an input and its dims, the batch's among them; -1: any. None: it has no such input"""
        found = self._inputs.get(name)
        if found is None:
            return None
        return found.datatype, (-1, *found.dims) if self._max_batch else tuple(found.dims)

    def raw(self, request: InferRequest, data: memoryview) -> RawInput:
        """The only input, whose shape is deduced from how many bytes there are. raises StatusError"""
        if len(self._inputs) != 1:
            raise invalid(
                f"{request.named}Raw request must only have 1 input (found 1) to be deduced but got "
                f"{len(self._inputs)} inputs in '{self._model}' model configuration"
            )
        (said,) = self._inputs.values()
        variable = said.dims.count(-1)
        if variable > 1:
            raise invalid(
                f"{request.named}The shape of the raw input '{said.name}' can not be deduced because there are more "
                "than one variable-sized dimension"
            )
        n = prod(d for d in said.dims if d != -1)
        if said.datatype == BYTES:
            if variable or n != 1:
                what = f"For BYTE datatype raw input '{said.name}', the model must have input shape [1]"
                raise invalid(request.named + what)
            shape: tuple[int, ...] = (1,) * len(said.dims)
            shape = (1, *shape) if self._max_batch else shape
            return RawInput(said.name, BYTES, shape, objects([bytes(data)]).reshape(shape))
        deduced = len(data) // n // np.dtype(DTYPES[said.datatype]).itemsize
        shape = tuple(deduced if d == -1 else d for d in said.dims)
        return RawInput(said.name, said.datatype, (1, *shape) if self._max_batch else shape, data)

    def _count(self, request: InferRequest, given: Sequence[RawInput]) -> StatusError:
        there = {g.name for g in given}
        missing = _quoted(name for name in self._required if name not in there)
        n, least = len(self._inputs), len(self._required)
        expected = f"{n}" if least == n else f"number of inputs between {least} and {n}"
        word = " inputs" if least == n else ""
        return invalid(
            f"{request.named}expected {expected}{word} but got {len(given)} inputs for model '{self._model}'. Got "
            f"input(s) {_quoted(sorted(there))}, but missing required input(s) {missing}. Please provide all required "
            "input(s)."
        )

    def _batch_size(self, request: InferRequest, given: Sequence[RawInput]) -> int:
        size: int | None = None
        for tensor in given:
            if not tensor.shape:
                raise invalid(
                    f"{request.named}input '{tensor.name}' has no shape but model requires batch dimension for "
                    f"'{self._model}'"
                )
            if size is None:
                size = tensor.shape[0]
            elif size != tensor.shape[0]:
                raise invalid(
                    f"{request.named}input '{tensor.name}' batch size does not match other inputs for '{self._model}'"
                )
        return size or 0

    def _check(self, request: InferRequest, said: _Input, tensor: RawInput) -> None:
        if tensor.datatype != said.datatype:
            raise invalid(
                f"{request.named}inference input '{said.name}' data-type is '{tensor.datatype}', but model "
                f"'{self._model}' expects '{said.datatype}'"
            )
        dims = tensor.shape[1:] if self._max_batch else tensor.shape
        if dims == said.dims:
            return
        fits = len(dims) == len(said.dims) and all(s in (-1, d) for s, d in zip(said.dims, dims, strict=True))
        if not fits:
            full = (-1, *said.dims) if self._max_batch else said.dims
            note = _BATCH_NOTE if self._max_batch else ""
            raise invalid(
                f"{request.named}unexpected shape for input '{said.name}' for model '{self._model}'. Expected "
                f"{shown(full)}, got {shown(tensor.shape)}. {note}"
            )

    def _array(self, request: InferRequest, said: _Input, tensor: RawInput) -> Array:
        data, shape = tensor.data, tensor.shape
        if said.datatype == BYTES and prod(shape) > MOST_STRINGS:
            what = f"input '{said.name}' has {prod(shape)} strings, at most {MOST_STRINGS} are supported"
            raise invalid(request.named + what)
        if isinstance(data, Later):
            if said.datatype != BYTES and data.n_bytes is not None:
                self._check_size(request, said, shape, data.n_bytes)
            data = data.read()
        if isinstance(data, np.ndarray):
            array: Array = data
        elif said.datatype == BYTES:
            array = objects(self._strings(request, tensor, data)).reshape(shape)
        else:
            self._check_size(request, said, shape, len(data))
            array = np.frombuffer(data, DTYPES[said.datatype]).reshape(shape)
            if said.datatype == "BOOL":  # whatever is not 0 is true; NumPy's own must be 0 or 1
                array = array.view(np.uint8) != 0
        if said.reshape is None:
            return array
        variable = iter([d for s, d in zip(said.dims, shape[1:] if self._max_batch else shape, strict=True) if s == -1])
        dims = [next(variable) if d == -1 else d for d in said.reshape]
        return array.reshape([shape[0], *dims] if self._max_batch else dims)

    def _check_size(self, request: InferRequest, said: _Input, shape: Sequence[int], n_bytes: int) -> None:
        """raises StatusError"""
        expected = prod(shape) * np.dtype(DTYPES[said.datatype]).itemsize
        if n_bytes != expected:
            raise invalid(
                f"{request.named}input byte size mismatch for input '{said.name}' for model '{self._model}'. "
                f"Expected {expected}, got {n_bytes}"
            )

    def _strings(self, request: InferRequest, tensor: RawInput, data: memoryview) -> list[bytes]:
        where = f"for inference input '{tensor.name}' for model '{self._model}'"
        n = prod(tensor.shape)
        try:
            found, n_more = split_up_to(data, n)
        except CutOffError as error:
            part = "incomplete string length indicator" if error.in_length else "incomplete string data"
            expected = "4 bytes" if error.in_length else f"string of length {error.needed}"
            what = f"{part} {where}, expecting {expected} but only {error.n_there} bytes available."
            raise invalid(request.named + what) from None
        if len(found) < n:
            raise invalid(f"{request.named}expected {n} string elements {where}, got {len(found)}")
        if n_more:  # Triton stops at the first that is too many
            raise invalid(f"{request.named}unexpected number of string elements {n + 1} {where}, expecting {n}")
        return found

    def _shape_key(self, request: InferRequest) -> object:
        names = request.inputs if self._has_optional else self._keyed
        skip = 1 if self._max_batch else 0
        return tuple((name, request.inputs[name].shape[skip:]) for name in sorted(names))


def check_shape(name: str, datatype: str, shape: Sequence[int]) -> int:
    """How many elements there are. raises StatusError for a shape that no memory has; negative ones are read no more"""
    if len(shape) > MOST_DIMENSIONS:  # their product, and an array of them, are without bounds
        what = f"{len(shape)} dimensions, at most {MOST_DIMENSIONS} are supported"
        raise invalid(f"invalid shape for input '{name}': {what}")
    n = prod(shape)
    n_beside_0 = n or prod(d for d in shape if d)  # without elements, too, no array has larger dimensions
    if n_beside_0 > MOST_BYTES:
        raise invalid(
            f"invalid shape for input '{name}': shape {shown(shape)} causes total element count to exceed maximum size "
            f"of {MOST_BYTES}"
        )
    size = 8 if datatype == BYTES and not n else 1 if datatype == BYTES else np.dtype(DTYPES[datatype]).itemsize
    if n_beside_0 * size > MOST_BYTES:
        raise invalid(
            f"byte size overflow for input '{name}': element count ({n_beside_0}) * data type size ({size}) exceeds "
            f"maximum allowed size ({MOST_BYTES})"
        )
    return n


def shown(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _quoted(names: Iterable[str]) -> str:
    return "[" + ",".join(f"'{name}'" for name in names) + "]"
