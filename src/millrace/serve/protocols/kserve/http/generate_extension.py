"""Triton's generate extension (`generate`, `generate_stream`): a flat JSON object in, one or several out.

A key that is an input's name is that input, as a scalar or a list; any other key is a parameter, as are those of the
object `parameters`. A response has outputs by name, as scalars if they have one element.
"""

import json
from collections.abc import Awaitable, Callable
from math import prod
from typing import Any

import msgspec

from millrace.model_repository.models.model_version import Model
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.request_validation import RawInput
from millrace.model_repository.request.response_stream import ResponseStream
from millrace.model_repository.request.status_code import Code, StatusError, invalid
from millrace.model_repository.request.tensors import memory_bytes, output_datatype
from millrace.serve.http.json_scan import count_values
from millrace.serve.protocols.kserve.http.compression import too_large
from millrace.serve.protocols.kserve.http.infer_request import take_parameters
from millrace.serve.protocols.kserve.http.infer_response import encode_error, flat_list
from millrace.serve.protocols.kserve.http.json_values import elements, from_json, no_json, parse_error, too_deep

_MAX_BYTES = 16 << 20  # of a text with its parameters; tensors of numbers go to `infer`
_MAX_VALUES = 1 << 17
_NOT_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)
RunOffLoop = Callable[[Callable[[], Any], int], Awaitable[Any]]


class _Object(tuple[tuple[str, Any], ...]):
    """A JSON object in its original order, with repeated keys."""

    __slots__ = ()


def read_generate(body: bytes, model: Model) -> InferRequest:
    """raises StatusError"""
    members = _decode(body)
    request, inputs = InferRequest({}), list[RawInput]()
    for key, value in members:
        if key == "id" and model.checker.declared_input(key) is None:
            if not isinstance(value, str):
                raise parse_error("id", "attempt to access JSON non-string as string")
            request.id = value
        elif key == "parameters":
            if not isinstance(value, _Object):
                raise invalid("Expected JSON object for keyword: 'parameters'")
            try:
                for inner, inner_value in value:
                    _take(inner, inner_value, request, inputs, model)
            except StatusError as error:
                raise StatusError(error.code, f"Converting keyword: 'parameters': {error}") from None
        else:
            _take(key, value, request, inputs, model)
    model.checker.attach_inputs(request, inputs)
    return request


def _decode(body: bytes) -> _Object:
    if len(body) > _MAX_BYTES:
        raise too_large("generate request JSON size", len(body), _MAX_BYTES)
    if count_values(body).values > _MAX_VALUES:
        raise no_json(f"it has more than {_MAX_VALUES} values: send larger tensors to /infer")
    try:
        members = json.loads(body, object_pairs_hook=_Object, parse_constant=_no_constant)
        msgspec.json.encode(members)  # half of a surrogate pair, of which no answer could speak
    except RecursionError:
        raise too_deep() from None
    except ValueError as error:
        raise no_json(error) from None
    if not isinstance(members, _Object):
        raise StatusError(Code.INTERNAL, "attempt to access JSON non-object as object")
    return members


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _take(key: str, value: Any, request: InferRequest, inputs: list[RawInput], model: Model) -> None:
    declared = model.checker.declared_input(key)
    if declared is None:
        if take_parameters(request, {key: value}):  # `binary_data_output`, which is nothing of this protocol's
            request.parameters[key] = value
        return
    if any(tensor.name == key for tensor in inputs):
        raise invalid(f"{request.error_prefix}input '{key}' already exists in request")
    datatype, dims = declared
    shape = _shape(key, dims, value)
    inputs.append(RawInput(key, datatype, shape, from_json(key, datatype, value, prod(shape)).reshape(shape)))


def _shape(name: str, dims: tuple[int, ...], value: Any) -> tuple[int, ...]:
    """Return the shape of nested lists with as many levels as dims; otherwise the last variable dim takes the rest."""
    nested = _nesting(value, len(dims))
    if nested is not None and all(d in (-1, n) for d, n in zip(dims, nested, strict=True)):
        return nested
    n = len(elements(value))
    left, rest = divmod(n, prod(d for d in dims if d != -1) or 1)
    shape = list(dims)
    for i in reversed(range(len(dims))):
        if dims[i] == -1:
            shape[i], left = left, 1
    if rest or left != 1:
        raise invalid(f"unexpected number of elements for input '{name}': {n}, which do not fit {list(dims)}")
    return tuple(shape)


def _nesting(value: Any, depth: int) -> tuple[int, ...] | None:
    """Return the lengths of nested lists, along their first elements; None if there are fewer levels."""
    lengths: list[int] = []
    while isinstance(value, list) and len(lengths) < depth:
        lengths.append(len(value))
        value = value[0] if value else None
    return tuple(lengths) if len(lengths) == depth else None


def encode_generated(model: Model, request: InferRequest, response: InferResponse) -> bytes:
    """Encode one response as JSON. raises StatusError"""
    answer: dict[str, Any] = dict(response.parameters)
    answer |= {"id": request.id} if request.id else {}
    answer |= {"model_name": model.name, "model_version": str(model.version)}
    for name, array in response.outputs.items():
        values = flat_list(name, output_datatype(name, array), array)
        answer[name] = values[0] if len(values) == 1 else values
    return msgspec.json.encode(answer)


async def generate(model: Model, request: InferRequest, run_off_loop: RunOffLoop) -> bytes:
    """Return the only response, encoded. raises StatusError if there is not exactly one"""
    responses = ResponseStream(model, request)
    try:
        only = await responses.next()
        if only is None or await responses.next() is not None:
            raise StatusError(Code.INTERNAL, _NOT_ONE)
    finally:
        responses.close()
    n_bytes = memory_bytes(only.outputs.values())
    data: bytes = await run_off_loop(lambda: encode_generated(model, request, only), n_bytes)
    return data


Write = Callable[[Model, InferRequest, InferResponse], bytes]


class Events:
    """Server-sent events, one per response. An error is an event, too, because the status was sent before."""

    def __init__(
        self,
        model: Model,
        request: InferRequest,
        run_off_loop: RunOffLoop,
        write: Write = encode_generated,
        *,
        lines: bool = False,
    ) -> None:
        """write: encodes a response as JSON; lines: one response per line instead of events. raises StatusError"""
        self._model, self._request, self._run_off_loop, self._write = model, request, run_off_loop, write
        self._around = (b"", b"\n") if lines else (b"data: ", b"\n\n")
        self._responses = ResponseStream(model, request)
        self._first: bytes | None = None

    async def begin(self) -> Code | None:
        """Wait for the first response; return its error code, which decides the HTTP status, or None."""
        try:
            self._first = await self._next()
        except StatusError as error:
            self._first = self._error_event(error)
            return error.code
        except BaseException:  # the client is gone
            self.close()
            raise
        return None

    def __aiter__(self) -> "Events":
        return self

    async def __anext__(self) -> bytes:
        event, self._first = self._first, None
        if event is None:
            try:
                event = await self._next()
            except StatusError as error:
                event = self._error_event(error)
        if not event:
            raise StopAsyncIteration
        return event

    async def _next(self) -> bytes:
        """Return the next event; b"" at the end. raises StatusError"""
        response = await self._responses.next()
        if response is None:
            return b""
        data: bytes = await self._run_off_loop(
            lambda: self._write(self._model, self._request, response), memory_bytes(response.outputs.values())
        )
        return data.join(self._around)

    def _error_event(self, error: StatusError) -> bytes:
        return encode_error(error.message).join(self._around)

    def close(self) -> None:
        """Nobody reads any more."""
        self._responses.close()
