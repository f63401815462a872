"""Fast path for short inferences of fast models over gRPC, as `http/fast_path.py` for HTTP.

protobuf writers put a request's tensors at its end, one field after the other. So the bytes before them are remembered,
with the position of each tensor; a message of the same length with the same bytes around its tensors is the same
request with other numbers. Responses work alike. The id follows the model's name and version: its bytes may differ,
too, and the response has them at the same place. An id of another length makes another request.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import numpy as np
from google.protobuf.message import DecodeError
from numpy import ndarray

from millrace.checkpoint.protobuf import BYTES, key, varint
from millrace.model_repository.models.model_version import Model
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.status_code import StatusError
from millrace.model_repository.request.tensors import Array
from millrace.serve.http.request_bodies import FREE_BYTES
from millrace.serve.protocols.kserve.grpc.infer import GrpcOutputOptions, fill_response, read_infer
from millrace.serve.protocols.kserve.grpc.protobuf_messages import message
from millrace.serve.protocols.kserve.http.fast_path import InputPlace, fast_path_model
from millrace.serve.protocols.kserve.http.request_template import MAX_HEAD_BYTES
from millrace.serve.protocols.kserve.repository_backend import RepositoryBackend
from millrace.serve.protocols.kserve.request_fields import version_of

MAX_LENGTHS, MAX_PER_LENGTH = 64, 4  # remembered lengths of messages, and messages of one length
_ID, _RAW_INPUT, _RAW_OUTPUT = 3, 7, 6  # fields of the messages


_OutputSignature = tuple[str, Any, tuple[int, ...], bytes]  # name, dtype and shape of an output, and the bytes before


@dataclass(slots=True)
class _CachedRequest:
    """A remembered message. fixed: the bytes around its tensors and its id, and where they begin

    id_span: position of the id; None: it has none, or `fixed` has it; front: the last response's bytes before the id
    """

    fixed: Sequence[tuple[int, bytes]]
    id_span: slice | None
    name: str
    version: int | None  # that was asked for
    model: "ref[Model]"
    n_bytes: int  # of its tensors
    places: Sequence[InputPlace]
    template: InferRequest  # without its inputs
    output_options: GrpcOutputOptions
    last_outputs: Sequence[_OutputSignature] | None = None  # of the last answer
    front: bytes = b""


class GrpcFastPath:
    """The gRPC fast path of one server."""

    def __init__(self, backend: RepositoryBackend) -> None:
        self._backend = backend
        self._requests: dict[int, list[_CachedRequest]] = {}  # by the length of their messages
        # The bytes before the tensors, without the id: a request that comes twice is remembered.
        self._last: dict[int, tuple[bytes, bytes]] = {}

    # ------------------------------------------------------------------ what came the usual way

    def remember(self, data: bytes, proto: Any, model: Model) -> None:
        """proto: the ModelInferRequest that `data` is, which is on its way to be answered"""
        raw = list(proto.raw_input_contents)
        if len(data) > FREE_BYTES or not model.can_run_inline(sum(map(len, raw))):
            return
        front, fixed = _split_tensors(data, _RAW_INPUT, raw)
        if len(raw) != len(proto.inputs) or not _is_whole(front) or len(front) > MAX_HEAD_BYTES:
            return
        own = _place_of_id(front, proto)
        if own is not None and message("ModelInferRequest").FromString(front[own.stop :]).id:
            own = None  # it is there twice, and the last one counts
        around = (front, b"") if own is None else (front[: own.start], front[own.stop :])
        if self._last.get(len(data)) == around:
            self._remember(len(data), self._read(proto, raw, fixed, own, model))
        elif len(self._last) >= MAX_LENGTHS:
            self._last.clear()
        self._last[len(data)] = around

    def _remember(self, n_bytes: int, cached: _CachedRequest | None) -> None:
        if cached is None:
            return
        if len(self._requests) >= MAX_LENGTHS:
            self._requests.clear()
        older = [k for k in self._requests.get(n_bytes, ()) if k.fixed != cached.fixed]
        self._requests[n_bytes] = [cached, *older][:MAX_PER_LENGTH]

    def _read(
        self, proto: Any, raw: Sequence[bytes], fixed: Sequence[tuple[int, bytes]], id_span: slice | None, model: Model
    ) -> _CachedRequest | None:
        try:
            version = version_of(proto.model_version) if proto.model_version else None
            request, output_options = read_infer(proto, model)
        except StatusError:
            return None
        places = []
        for array, data, (at, before) in zip(request.inputs.values(), raw, fixed, strict=True):
            if (
                array.dtype.kind in "OSUb" or array.tobytes() != data
            ):  # what has to be converted is no place in a message
                return None
            name = next(name for name, one in request.inputs.items() if one is array)
            begin = at + len(before)
            places.append(InputPlace(name, array.dtype, array.shape, begin, begin + len(data)))
        request.inputs = {}
        if id_span is not None:
            (_, front), *rest = fixed
            fixed = [(0, front[: id_span.start]), (id_span.stop, front[id_span.stop :]), *rest]
        return _CachedRequest(
            fixed, id_span, proto.model_name, version, ref(model), sum(map(len, raw)), places, request, output_options
        )

    # ------------------------------------------------------------------ what comes again

    def answer(self, data: bytes, arrived_ns: int) -> bytes | None:
        """Return the whole response; None: the normal path must answer. arrived_ns: time.monotonic_ns()

        raises StatusError
        """
        for cached in self._requests.get(len(data), ()):
            for at, part in cached.fixed:
                if not data.startswith(part, at):
                    break
            else:
                own = b""
                if cached.id_span is not None:
                    own = data[cached.id_span]
                    if not own.isascii():  # which may be no UTF-8
                        continue
                    cached.template.id = own.decode()
                model = fast_path_model(self._backend, cached.name, cached.version, cached.model, cached.n_bytes)
                if model is None:
                    return None
                inputs = {name: ndarray(shape, dtype, data[at:end]) for name, dtype, shape, at, end in cached.places}
                outputs, parameters = model.infer_inline(cached.template, inputs, arrived_ns)
                if cached.last_outputs is not None and not parameters:
                    response = _reuse_response(cached.last_outputs, outputs, cached.front + own)
                    if response is not None:
                        return response
                return _encode_response(cached, model, InferResponse(outputs, parameters))
        return None


def _split_tensors(data: bytes, field: int, raw: Sequence[bytes]) -> tuple[bytes, list[tuple[int, bytes]]]:
    """Return the bytes before a message's tensors, and all bytes that are not tensor data, by where they begin.

    Both are empty if the tensors are not at the end, or there are none.
    """
    heads = [key(field, BYTES) + varint(len(one)) for one in raw]
    tail = b"".join(part for pair in zip(heads, raw, strict=True) for part in pair)
    if not raw or not data.endswith(tail):
        return b"", []
    at = len(data) - len(tail)
    front, fixed = data[:at], list[tuple[int, bytes]]()
    for i, (head, one) in enumerate(zip(heads, raw, strict=True)):
        fixed.append((at, head) if i else (0, front + head))
        at += len(head) + len(one)
    return front, fixed


def _place_of_id(front: bytes, proto: Any) -> slice | None:
    """Return the position of an ASCII id in a message with this front; None if it has none, or not in its usual place.

    protobuf writers put it after the model's name and version. Ids beyond ASCII are compared as part of the front.
    proto: the message, a ModelInferRequest or a ModelInferResponse
    """
    before = type(proto)(model_name=proto.model_name, model_version=proto.model_version).SerializeToString()
    before += key(_ID, BYTES) + varint(len(proto.id))
    is_here = proto.id and proto.id.isascii() and front.startswith(before + proto.id.encode())
    return slice(len(before), len(before) + len(proto.id)) if is_here else None


def _is_whole(front: bytes) -> bool:
    """Return whether `front` is a message without tensors, so that the tensors after it are all there are."""
    try:
        return bool(front) and not message("ModelInferRequest").FromString(front).raw_input_contents
    except DecodeError:
        return False


def _reuse_response(signatures: Sequence[_OutputSignature], outputs: Mapping[str, Array], data: bytes) -> bytes | None:
    """Return the response with the last framing if names, dtypes and shapes of the outputs are unchanged, or None.

    data: the beginning of the response, which ends with the id
    """
    if len(signatures) != len(outputs):
        return None
    for (name, dtype, shape, before), (output_name, array) in zip(signatures, outputs.items(), strict=True):
        if name != output_name or dtype != array.dtype or shape != array.shape:
            return None
        data += before + array.tobytes()
    return data


def _encode_response(cached: _CachedRequest, model: Model, response: InferResponse) -> bytes:
    """Encode a response, and remember its framing for the next one."""
    proto = message("ModelInferResponse")()
    raws = fill_response(proto, model, cached.template, response, cached.output_options)
    data = b"".join((proto.SerializeToString(), *raws))
    plain = not (response.parameters or cached.output_options.n_classes)
    arrays = list(response.outputs.values())
    if plain and not any(array.dtype == np.object_ for array in arrays):
        _, fixed = _split_tensors(data, _RAW_OUTPUT, [array.tobytes() for array in arrays])
        befores = [part for _, part in fixed]
        if cached.id_span is not None and befores:
            own = _place_of_id(befores[0], proto)
            assert own is not None, "it is written by protobuf"
            cached.front, befores[0] = befores[0][: own.start], befores[0][own.stop :]
        signatures = zip(response.outputs, arrays, befores, strict=True) if fixed else ()
        cached.last_outputs = [(name, array.dtype, array.shape, before) for name, array, before in signatures] or None
    return data
