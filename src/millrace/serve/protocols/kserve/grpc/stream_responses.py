"""Encoding of a stream's ModelStreamInferResponses, most of which are like the one before.

A language model's responses differ only in their texts, one token each. So the message without its tensors is cached
and reused for the next response with outputs of the same names, types and shapes; the bytes are those that protobuf
would write.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from millrace.model_repository.models.model_version import Model
from millrace.model_repository.request.concatenation import LARGE, concatenate
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.status_code import StatusError
from millrace.model_repository.request.tensors import BYTES, Array, InferTensor
from millrace.protobuf import varint
from millrace.serve.protocols.kserve.grpc.infer import (
    FINAL,
    RAW_OUTPUT,
    GrpcOutputOptions,
    fill_response,
    set_parameter,
)
from millrace.serve.protocols.kserve.grpc.protobuf_messages import message

_INFER_RESPONSE = bytes((2 << 3 | 2,))  # of ModelStreamInferResponse
_Kind = tuple[str, Any, tuple[int, ...]]  # an output's name, dtype and shape


def error_answer(proto: Any, error: StatusError) -> bytes:
    """Encode the error of a request that was not started. proto: its message, if it could be decoded"""
    reply = message("ModelStreamInferResponse")(error_message=error.message)
    if proto is not None:
        reply.infer_response.id = proto.id  # so that the client knows which request it is
    data: bytes = reply.SerializeToString()
    return data


class StreamResponses:
    """Encoder of the responses to one request. proto: its message"""

    def __init__(self, proto: Any, model: Model, inference: InferRequest, output_options: GrpcOutputOptions) -> None:
        self._proto, self._model, self._inference, self._output_options = proto, model, inference, output_options
        self._kinds: Sequence[_Kind] = ()  # of the last response's outputs
        self._front = b""  # of its message: all but its tensors

    def error(self, error: StatusError, final: bool) -> bytes:
        reply = message("ModelStreamInferResponse")(error_message=error.message)
        reply.infer_response.id = self._proto.id
        return self._encode_with_model(reply, final)

    def end(self) -> bytes:
        """Encode the end of a request without a response."""
        reply = message("ModelStreamInferResponse")()
        reply.infer_response.id = self._proto.id
        return self._encode_with_model(reply, True)

    def response(self, response: InferResponse, final: bool) -> bytes:
        """Encode a response. raises StatusError"""
        alike = not final and self._kinds and not response.parameters
        if alike and (data := self._reuse_last_message(response.outputs)) is not None:
            return data
        proto = message("ModelInferResponse")()
        raws = fill_response(proto, self._model, self._inference, response, self._output_options)
        set_parameter(proto, FINAL, final)
        front = proto.SerializeToString()
        if not (
            final
            or self._inference.outputs
            or response.parameters
            or self._output_options.n_classes
            or self._output_options.shared
        ):
            self._front = front
            self._kinds = [(name, array.dtype, array.shape) for name, array in response.outputs.items()]
        return _frame([front, *raws])

    def _reuse_last_message(self, outputs: Any) -> bytes | None:
        """Encode outputs with the last message's framing; None if names, types or shapes differ."""
        if len(outputs) != len(self._kinds):
            return None
        parts: list[bytes | memoryview] = [self._front]
        for (name, dtype, shape), (output_name, array) in zip(self._kinds, outputs.items(), strict=True):
            if name != output_name or dtype != array.dtype or shape != array.shape:
                return None
            raw = _raw(name, array)
            parts += (RAW_OUTPUT + varint(len(raw)), raw)
        return _frame(parts)

    def _encode_with_model(self, reply: Any, final: bool) -> bytes:
        reply.infer_response.model_name = self._proto.model_name
        reply.infer_response.model_version = self._proto.model_version
        set_parameter(reply.infer_response, FINAL, final)
        data: bytes = reply.SerializeToString()
        return data


def _frame(parts: Sequence[bytes | memoryview]) -> bytes:
    """Encode a ModelStreamInferResponse. parts: of its ModelInferResponse"""
    return concatenate([_INFER_RESPONSE + varint(sum(map(len, parts))), *parts])


def _raw(name: str, array: Array) -> bytes:
    if not array.dtype.hasobject:
        return array.tobytes() if array.nbytes < LARGE else InferTensor(name, "", array).raw()
    if array.size == 1 and type(value := array.item()) is bytes:
        return len(value).to_bytes(4, "little") + value
    return InferTensor(name, BYTES, array).raw()


class Deadline:
    """Cancels the task that it is entered in, where one of its writes takes too long; one timer for all of them."""

    def __init__(self, within_s: float) -> None:
        self._within_s, self._until_s, self._is_over = within_s, float("inf"), False
        self._loop = asyncio.get_running_loop()

    def begin(self) -> None:
        """A write."""
        self._until_s = self._loop.time() + self._within_s

    def end(self) -> None:
        self._until_s = float("inf")

    def __enter__(self) -> "Deadline":
        task = asyncio.current_task()
        assert task is not None, "in a task"
        self._task = task
        self._timer = self._loop.call_later(self._within_s, self._look)
        return self

    def _look(self) -> None:
        now_s = self._loop.time()
        if self._until_s <= now_s:
            self._is_over = True
            self._task.cancel()
        else:  # a write that begins by then has its own time
            self._timer = self._loop.call_at(min(self._until_s, now_s + self._within_s), self._look)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """raises TimeoutError"""
        self._timer.cancel()
        if self._is_over and self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise TimeoutError
