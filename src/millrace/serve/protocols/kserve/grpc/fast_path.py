"""Short inferences of quick models over gRPC: `fast_path.py`'s idea, on messages.

protobuf's writers put a request's tensors at its end, one field after the other. So what is in front of them is
remembered, with where each tensor lies; a message of the same length, with the same bytes around its tensors, is the
same request with other numbers. The messages of answers are alike. An id lies behind the model's name and version:
its bytes may be others, too, and an answer has them at the same place. With an id of another length it is another one.
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
from millrace.serve.protocols.kserve.http.request_template import MOST_BYTES
from millrace.serve.protocols.kserve.repository_backend import RepositoryBackend
from millrace.serve.protocols.kserve.request_fields import version_of

MOST_LENGTHS, MOST_OF_LENGTH = 64, 4  # that are remembered
_ID, _RAW_INPUT, _RAW_OUTPUT = 3, 7, 6  # fields of the messages


_Told = tuple[str, Any, tuple[int, ...], bytes]  # an output's name, dtype and shape, and what is in front of it


@dataclass(slots=True)
class _CachedRequest:
    """A message that came before. fixed: the bytes around its tensors and its id, and where they begin

    own: where its id is; None: it has none, or that is in `fixed`. front: of the last answer, in front of the id
    """

    fixed: Sequence[tuple[int, bytes]]
    own: slice | None
    name: str
    version: int | None  # that was asked for
    model: "ref[Model]"
    n_bytes: int  # of its tensors
    places: Sequence[InputPlace]
    like: InferRequest  # but for its inputs
    wanted: GrpcOutputOptions
    told: Sequence[_Told] | None = None  # of the last answer
    front: bytes = b""


class GrpcFastPath:
    """Of one server."""

    def __init__(self, backend: RepositoryBackend) -> None:
        self._backend = backend
        self._known: dict[int, list[_CachedRequest]] = {}  # by the length of their messages
        # What is in front of the tensors, but for the id: what comes twice is worth to be remembered.
        self._last: dict[int, tuple[bytes, bytes]] = {}

    # ------------------------------------------------------------------ what came the usual way

    def remember(self, data: bytes, told: Any, model: Model) -> None:
        """told: the ModelInferRequest that `data` is, which is on its way to be answered"""
        raw = list(told.raw_input_contents)
        if len(data) > FREE_BYTES or not model.can_run_inline(sum(map(len, raw))):
            return
        front, fixed = _around(data, _RAW_INPUT, raw)
        if len(raw) != len(told.inputs) or not _is_whole(front) or len(front) > MOST_BYTES:
            return
        own = _place_of_id(front, told)
        if own is not None and message("ModelInferRequest").FromString(front[own.stop :]).id:
            own = None  # it is there twice, and the last one counts
        around = (front, b"") if own is None else (front[: own.start], front[own.stop :])
        if self._last.get(len(data)) == around:
            self._remember(len(data), self._read(told, raw, fixed, own, model))
        elif len(self._last) >= MOST_LENGTHS:
            self._last.clear()
        self._last[len(data)] = around

    def _remember(self, n_bytes: int, found: _CachedRequest | None) -> None:
        if found is None:
            return
        if len(self._known) >= MOST_LENGTHS:
            self._known.clear()
        others = [k for k in self._known.get(n_bytes, ()) if k.fixed != found.fixed]
        self._known[n_bytes] = [found, *others][:MOST_OF_LENGTH]

    def _read(
        self, told: Any, raw: Sequence[bytes], fixed: Sequence[tuple[int, bytes]], own: slice | None, model: Model
    ) -> _CachedRequest | None:
        try:
            version = version_of(told.model_version) if told.model_version else None
            request, wanted = read_infer(told, model)
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
        if own is not None:
            (_, front), *others = fixed
            fixed = [(0, front[: own.start]), (own.stop, front[own.stop :]), *others]
        return _CachedRequest(
            fixed, own, told.model_name, version, ref(model), sum(map(len, raw)), places, request, wanted
        )

    # ------------------------------------------------------------------ what comes again

    def answer(self, data: bytes, came_ns: int) -> bytes | None:
        """The whole response; None: it must go the usual way. came_ns: time.monotonic_ns(). raises StatusError"""
        for known in self._known.get(len(data), ()):
            for at, part in known.fixed:
                if not data.startswith(part, at):
                    break
            else:
                own = b""
                if known.own is not None:
                    own = data[known.own]
                    if not own.isascii():  # which may be no UTF-8
                        continue
                    known.like.id = own.decode()
                model = fast_path_model(self._backend, known.name, known.version, known.model, known.n_bytes)
                if model is None:
                    return None
                inputs = {name: ndarray(shape, dtype, data[at:end]) for name, dtype, shape, at, end in known.places}
                outputs, parameters = model.infer_inline(known.like, inputs, came_ns)
                if known.told is not None and not parameters:
                    found = _as_before(known.told, outputs, known.front + own)
                    if found is not None:
                        return found
                return _written(known, model, InferResponse(outputs, parameters))
        return None


def _around(data: bytes, field: int, raw: Sequence[bytes]) -> tuple[bytes, list[tuple[int, bytes]]]:
    """What is in front of a message's tensors, and all bytes that are not theirs, by where they begin.

    Empty where the tensors are not at the end, or there are none.
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


def _place_of_id(front: bytes, told: Any) -> slice | None:
    """Where the bytes of an id are in a message of which this is the front; None where it has none of ASCII (others are
    known by their bytes, as all else is), or not where protobuf's writers put it: behind the model's name and version.

    told: the message, a ModelInferRequest or a ModelInferResponse
    """
    before = type(told)(model_name=told.model_name, model_version=told.model_version).SerializeToString()
    before += key(_ID, BYTES) + varint(len(told.id))
    is_here = told.id and told.id.isascii() and front.startswith(before + told.id.encode())
    return slice(len(before), len(before) + len(told.id)) if is_here else None


def _is_whole(front: bytes) -> bool:
    """Whether it is a message by itself, without tensors: then those behind it are all there are."""
    try:
        return bool(front) and not message("ModelInferRequest").FromString(front).raw_input_contents
    except DecodeError:
        return False


def _as_before(told: Sequence[_Told], outputs: Mapping[str, Array], data: bytes) -> bytes | None:
    """Where the outputs are as the last ones were but for their numbers, nothing is told anew.

    data: what the answer begins with, an id's bytes being its last
    """
    if len(told) != len(outputs):
        return None
    for (name, dtype, shape, before), (found, array) in zip(told, outputs.items(), strict=True):
        if name != found or dtype != array.dtype or shape != array.shape:
            return None
        data += before + array.tobytes()
    return data


def _written(known: _CachedRequest, model: Model, response: InferResponse) -> bytes:
    """And what is to be known of it for the next one."""
    found = message("ModelInferResponse")()
    raws = fill_response(found, model, known.like, response, known.wanted)
    data = b"".join((found.SerializeToString(), *raws))
    plain = not (response.parameters or known.wanted.n_classes)
    arrays = list(response.outputs.values())
    if plain and not any(array.dtype == np.object_ for array in arrays):
        _, fixed = _around(data, _RAW_OUTPUT, [array.tobytes() for array in arrays])
        befores = [part for _, part in fixed]
        if known.own is not None and befores:
            own = _place_of_id(befores[0], found)
            assert own is not None, "it is written by protobuf"
            known.front, befores[0] = befores[0][: own.start], befores[0][own.stop :]
        told = zip(response.outputs, arrays, befores, strict=True) if fixed else ()
        known.told = [(name, array.dtype, array.shape, before) for name, array, before in told] or None
    return data
