"""Short inferences over HTTP, answered in the call that reads them if an instance is idle: no task, parser or JSON.

A client repeats the same HTTP head and JSON; only the numbers of its tensors and the request id differ
(`request_template.py`). Each connection remembers the last request that the normal path read and checked: all bytes
before the tensors, and where each tensor starts. A packet with exactly these bytes and as many after them is the same
request with other numbers. Nothing is parsed here, so nothing can be read differently. Everything else takes the normal
path, as does every request while the model is busy, was reloaded, or the server drains.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
from numpy import ndarray
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from millrace.model_repository.models.model_version import Model
from millrace.model_repository.request.infer_request import InferRequest, InferResponse, Parameter
from millrace.model_repository.request.status_code import StatusError
from millrace.model_repository.request.tensors import Array
from millrace.serve.http.api_keys import ApiKeys
from millrace.serve.http.fast_path import ResponseWriter
from millrace.serve.http.http_request import request_id_of
from millrace.serve.http.server_context import ServerContext
from millrace.serve.protocols.kserve.http.direct import Direct, DirectAnswer, InferHead, header_lines
from millrace.serve.protocols.kserve.http.frontend import error_of, infer_headers
from millrace.serve.protocols.kserve.http.infer_request import HttpOutputOptions, read_infer
from millrace.serve.protocols.kserve.http.infer_response import encode_response
from millrace.serve.protocols.kserve.http.request_template import (
    ID,
    REQUEST_ID,
    FilledTemplate,
    RequestTemplate,
    head_of,
)
from millrace.serve.protocols.kserve.repository_backend import RepositoryBackend

MAX_REQUESTS = 4  # heads that a connection remembers
Header = tuple[bytes, bytes]
TensorSignature = Sequence[tuple[str, Any, tuple[int, ...]]]  # arrays' names, dtypes and shapes


class InputPlace(NamedTuple):
    """Position of an input in a message; over HTTP from the end of the head.

    It is copied, because NumPy takes three times as long for data at an odd address, and the input is short.
    """

    name: str
    dtype: Any
    shape: tuple[int, ...]
    at: int
    end: int


@dataclass(slots=True)
class _CachedReply:
    """A response without its numbers. front, back: its JSON before and after the id of n_id bytes"""

    signature: TensorSignature
    n_id: int
    headers: bytes
    front: bytes
    back: bytes


@dataclass(slots=True)
class _CachedRequest:
    """A remembered request: its head, and everything derived from it."""

    head: RequestTemplate
    filled: FilledTemplate  # as it last was
    n_bytes: int  # of its tensors
    infer_head: InferHead
    model: "ref[Model]"  # weak, so that unloading frees its memory although connections remember it
    tensors: Sequence[InputPlace]
    template: InferRequest  # without its inputs
    output_options: HttpOutputOptions
    last: _CachedReply | None = None  # the last answer


class HttpFastPath:
    """The HTTP fast path of one server."""

    def __init__(self, backend: RepositoryBackend, keys: ApiKeys, serving: ServerContext) -> None:
        self.repository, self.backend, self.serving = backend.repository, backend, serving
        self.direct = Direct(backend, keys, serving)

    def connection(self) -> "ConnectionFastPath":
        return ConnectionFastPath(self)


class ConnectionFastPath:
    """The fast path of one connection, with the requests that it remembers."""

    def __init__(self, server: HttpFastPath) -> None:
        self._server = server
        self._requests: list[_CachedRequest] = []  # the newest first
        self._head: RequestTemplate | None = (
            None  # of the last that came the usual way: what comes twice is to be remembered
        )

    # ------------------------------------------------------------------ what came the usual way

    def remember(self, method: str, path: bytes, headers: Sequence[Header], packet: bytes) -> None:
        """Remember one HTTP/1.1 request, which is all of `packet` and is being answered."""
        if method == "POST" and path.endswith(b"/infer"):
            infer_head = self._server.direct.heads.add(path, headers, packet)
            if infer_head is not None:
                self._remember_inline(infer_head, packet)

    def _remember_inline(self, infer_head: InferHead, packet: bytes) -> None:
        """Remember a request that comes for the second time, if its model can run inline."""
        if infer_head.n_json is None or infer_head.coding != "identity":
            return
        try:
            model = self._server.repository.get(infer_head.name, infer_head.version)
        except StatusError:
            return
        # without JSON, heads of different lengths are equal
        if not model.can_run_inline(infer_head.n_body - infer_head.n_json):
            return
        head = head_of(packet, infer_head.headers)
        if head is not None and head == self._head:
            cached = self._read(infer_head, model, packet, head)
            self._requests = [cached, *self._requests][:MAX_REQUESTS] if cached is not None else self._requests
        self._head = head

    def _read(self, infer_head: InferHead, model: Model, packet: bytes, head: RequestTemplate) -> _CachedRequest | None:
        body, n_json = packet[infer_head.n_bytes :], infer_head.n_json
        assert n_json is not None, "it has that header"
        n_bytes = len(body) - n_json
        if any(k.head == head and k.n_bytes == n_bytes and k.model() is model for k in self._requests):
            return None
        try:
            request, output_options = read_infer(body, n_json, model.name, model.checker)
        except StatusError:
            return None
        tensors = _places(request, body, n_json)
        if tensors is None:
            return None
        request.inputs = {}
        filled = head.fill(packet)
        assert filled is not None, "it is its head"
        return _CachedRequest(head, filled, n_bytes, infer_head, ref(model), tensors, request, output_options)

    # ------------------------------------------------------------------ what comes again

    def knows(self, head: bytes) -> bool:
        """As the connection's `FastPath` has it."""
        return self._server.direct.heads.knows(head)

    def begin(self, packet: bytes, dates: Sequence[Header], connection: ResponseWriter) -> DirectAnswer | bytes | None:
        """As the connection's `FastPath` has it."""
        if self._requests and (response := self.answer(packet, dates)) is not None:
            return response
        head = self._server.direct.heads.lookup(packet)
        if head is None:
            return None
        self._remember_inline(head, packet)
        return self._server.direct.begin(head, packet, dates, connection)

    def answer(self, packet: bytes, dates: Sequence[Header]) -> bytes | None:
        """Return the whole response to `packet`; None if it is not remembered. dates: headers of every response"""
        for cached in self._requests:
            holes = cached.filled.match(packet)
            if holes is None:
                filled = cached.head.fill(packet)
                if filled is None or len(packet) - filled.end != cached.n_bytes:
                    continue
                cached.filled, holes = filled, filled.match(packet)
                assert holes is not None, "it is the same packet"
            model = fast_path_model(
                self._server.backend, cached.infer_head.name, cached.infer_head.version, cached.model, cached.n_bytes
            )
            return self._answer_with_grant(cached, model, packet, holes, dates) if model is not None else None
        return None

    def _answer_with_grant(
        self, cached: _CachedRequest, model: Model, packet: bytes, holes: dict[bytes, bytes], dates: Sequence[Header]
    ) -> bytes | None:
        """Answer a remembered request if its key grants it. holes: their values"""
        grant = self._server.direct.grant(cached.infer_head)
        if grant is None:
            return None
        try:
            return self._answer(cached, model, packet, holes, dates)
        finally:
            grant.end()

    def _answer(
        self, cached: _CachedRequest, model: Model, packet: bytes, holes: dict[bytes, bytes], dates: Sequence[Header]
    ) -> bytes:
        began_ns, front = time.monotonic_ns(), cached.filled.end
        request_id = request_id_of(holes.get(REQUEST_ID) or cached.infer_head.headers.get(REQUEST_ID))
        if (own := holes.get(ID)) is not None:
            cached.template.id = own.decode()
        try:
            inputs = {
                name: ndarray(shape, dtype, packet[front + at : front + end])
                for name, dtype, shape, at, end in cached.tensors
            }
            answered = model.infer_inline(cached.template, inputs, began_ns)
            status, (head, body) = 200, _encode_reply(cached, model, own or b"", *answered)
        except StatusError as error:
            refused = error_of(error)
            status, (head, body) = refused.status, _with_head(refused.headers, refused.body)
        took_ms = (time.monotonic_ns() - began_ns) / 1e6
        self._server.backend.log.add("POST", cached.infer_head.path, request_id, status, took_ms)
        self._server.serving.metrics.count_response(cached.infer_head.route, "POST", status)
        id_header = b"x-request-id: %b\r\n\r\n" % request_id.encode()
        return b"".join((STATUS_LINE[status], header_lines(dates), head, id_header, body))


def fast_path_model(
    backend: RepositoryBackend, name: str, version: int | None, model_ref: "ref[Model]", n_bytes: int
) -> Model | None:
    """Return the model, if the name still refers to it and it can run n_bytes inline; otherwise None."""
    try:
        model = backend.repository.get(name, version)
    except StatusError:
        return None
    return model if model is model_ref() and backend.has_room and model.can_run_inline(n_bytes) else None


def _places(request: InferRequest, body: bytes, n_json: int) -> list[InputPlace] | None:
    """Return the positions of the inputs, from the end of the JSON.

    None if an input is not a plain slice of the body: it was JSON or strings, or had to be converted.
    """
    places, begin = [], _address(np.frombuffer(body, np.uint8))
    for name, array in request.inputs.items():
        here = _address(array) - begin
        if not array.nbytes or not array.flags.c_contiguous or not n_json <= here <= len(body) - array.nbytes:
            return None
        places.append(InputPlace(name, array.dtype, array.shape, here - n_json, here - n_json + array.nbytes))
    return places


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _encode_reply(
    cached: _CachedRequest,
    model: Model,
    request_id: bytes,
    outputs: Mapping[str, Array],
    parameters: Mapping[str, Parameter],
) -> tuple[bytes, bytes]:
    """Return headers and body, with the last framing if names, dtypes and shapes of the outputs are unchanged.

    request_id: the id, if it differs each time
    """
    last_reply = cached.last
    if (
        last_reply is not None
        and not parameters
        and len(request_id) == last_reply.n_id
        and matches_signature(last_reply.signature, outputs)
    ):
        return last_reply.headers, b"".join(
            (last_reply.front, request_id, last_reply.back, *[array.tobytes() for array in outputs.values()])
        )
    body, n_json = encode_response(model, cached.template, InferResponse(outputs, parameters), cached.output_options)
    headers, _ = _with_head(infer_headers(n_json), body)
    is_plain = not (
        parameters or cached.output_options.n_classes or any(a.dtype == np.object_ for a in outputs.values())
    )
    # all of them, and nothing else, in binary: then what is in front of them depends on `template` alone
    if n_json is not None and is_plain and body[n_json:] == b"".join(a.tobytes() for a in outputs.values()):
        front = b'{"id":"' if request_id else b""
        assert body.startswith(front + request_id), body[:80]
        cached.last = _CachedReply(
            tensor_signature(outputs), len(request_id), headers, front, body[len(front) + len(request_id) : n_json]
        )
    return headers, body


def tensor_signature(outputs: Mapping[str, Array]) -> TensorSignature:
    """Return names, dtypes and shapes of outputs."""
    return [(name, array.dtype, array.shape) for name, array in outputs.items()]


def matches_signature(signature: TensorSignature, outputs: Mapping[str, Array]) -> bool:
    """Return whether outputs have the signature `signature`."""
    if len(signature) != len(outputs):
        return False
    for (name, dtype, shape), (output_name, array) in zip(signature, outputs.items(), strict=True):
        if name != output_name or dtype != array.dtype or shape != array.shape:
            return False
    return True


def _with_head(headers: Sequence[Header], body: bytes) -> tuple[bytes, bytes]:
    return header_lines([*headers, (b"content-length", b"%d" % len(body))]), body
