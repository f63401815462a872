"""Short inferences of quick models over HTTP, answered in the call that reads them: no task, no parser, no JSON.

A client writes the same head again and again, of HTTP and of the JSON behind it; only the numbers of its tensors
differ. So what came the usual way, which has read and checked it, is remembered by its connection: all bytes in front
of the tensors, and where each tensor lies. A packet that begins with the very same bytes, and is as long, is the same
request with other numbers. Nothing is parsed here, so that nothing can be understood differently; whatever is not the
same goes the usual way, and so does everything while the model is busy, was loaded anew, or the server drains.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
from numpy import ndarray
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from millrace.serve.errors import HttpError
from millrace.serve.inference.model import Model
from millrace.serve.inference.request import InferRequest, InferResponse, Parameter
from millrace.serve.inference.served import RepositoryBackend
from millrace.serve.inference.status import StatusError
from millrace.serve.keys import Keys
from millrace.serve.kserve import encoding
from millrace.serve.kserve.asgi import BELOW, route_of
from millrace.serve.kserve.http import addressed, error_of, header_length, infer_headers
from millrace.serve.kserve.infer_body import HEADER, Wanted, read_infer
from millrace.serve.kserve.infer_reply import written
from millrace.serve.kserve.tensors import Array
from millrace.serve.serving import Serving
from millrace.serve.wire import FREE_BYTES, id_of

MOST_HEAD_BYTES, MOST_KNOWN = 4 << 10, 4  # that a connection remembers
Header = tuple[bytes, bytes]
Likeness = Sequence[tuple[str, Any, tuple[int, ...]]]  # arrays' names, dtypes and shapes
_END = b"\r\n\r\n"
_LENGTH = HEADER.lower().encode()
_MODELS = f"{BELOW}/models/".encode()
# Whoever writes others may mean something by them, now or in a later version.
_HARMLESS = frozenset((b"host", b"user-agent", b"accept", b"accept-encoding", b"content-type", b"content-length",
                       b"connection", b"authorization", b"x-api-key", b"x-request-id", _LENGTH))  # fmt: skip


class Place(NamedTuple):
    """Where an input lies in what came. It is copied from there, as NumPy takes three times as long for what begins at
    an odd address, and it is short."""

    name: str
    dtype: Any
    shape: tuple[int, ...]
    at: int
    end: int


@dataclass(slots=True)
class _Known:
    """A request that came before: `head`, and all that follows from it."""

    head: bytes  # of HTTP and of the JSON
    n_bytes: int  # of the packet
    path: str
    route: str  # as the metrics call it
    name: str
    version: int | None  # that was asked for
    model: "ref[Model]"  # whoever unloads it gets its memory back, whatever connections remember
    tensors: Sequence[Place]
    like: InferRequest  # but for its inputs
    wanted: Wanted
    headers: dict[bytes, bytes]
    told: tuple[Likeness, bytes, bytes] | None = None  # of the last answer: its shapes, its headers, its JSON


class Quick:
    """Of one server."""

    def __init__(self, backend: RepositoryBackend, keys: Keys, serving: Serving) -> None:
        self.repository, self.backend, self.keys, self.serving = backend.repository, backend, keys, serving

    def connection(self) -> "QuickConnection":
        return QuickConnection(self)


class QuickConnection:
    """What one connection remembers."""

    def __init__(self, of: Quick) -> None:
        self._of = of
        self._known: list[_Known] = []  # the newest first
        self._head = b""  # of the last request that came the usual way: what comes twice is worth to be remembered

    # ------------------------------------------------------------------ what came the usual way

    def came(self, method: str, path: bytes, headers: Sequence[Header], packet: bytes) -> None:
        """One request of HTTP/1.1, that is all of `packet`; it is on its way to be answered."""
        if method != "POST" or not path.endswith(b"/infer") or not path.startswith(_MODELS):
            return
        by_name = dict(headers)
        if len(by_name) < len(headers) or not _HARMLESS.issuperset(by_name):
            return
        head, at = _whole_head(by_name, packet)
        if head and head == self._head:
            found = self._read(path.decode("ascii"), by_name, packet, head, at)
            self._known = [found, *self._known][:MOST_KNOWN] if found is not None else self._known
        self._head = head

    def _read(self, path: str, headers: dict[bytes, bytes], packet: bytes, head: bytes, at: int) -> _Known | None:
        """head: all in front of the tensors. at: of the body"""
        if headers.get(b"connection", b"keep-alive").lower() != b"keep-alive":
            return None
        if encoding.chosen(headers.get(b"accept-encoding", b"").decode("latin-1")) != "identity":
            return None
        body = packet[at:]
        try:
            name, version, action = addressed(path.split("/")[3:])
            if action != "infer":
                return None
            model = self._of.repository.get(name, version)
            if not model.answers_at_once(len(packet)) or any(
                k.head == head and k.model() is model for k in self._known
            ):
                return None
            request, wanted = read_infer(body, header_length(headers[_LENGTH]), model.name, model.checker)
        except StatusError:
            return None
        tensors = _places(request, body, at)
        if tensors is None:
            return None
        request.inputs = {}
        route = route_of(path).path
        return _Known(
            head, len(packet), path[:300], route, name, version, ref(model), tensors, request, wanted, headers
        )

    # ------------------------------------------------------------------ what comes again

    def answer(self, packet: bytes, dates: Sequence[Header]) -> bytes | None:
        """The whole response to `packet`; None: it must go the usual way. dates: headers that every response has"""
        for known in self._known:
            if len(packet) == known.n_bytes and packet.startswith(known.head):
                model = ready(self._of.backend, known.name, known.version, known.model, known.n_bytes)
                return self._granted(known, model, packet, dates) if model is not None else None
        return None

    def _granted(self, known: _Known, model: Model, packet: bytes, dates: Sequence[Header]) -> bytes | None:
        try:
            given = known.headers.get(b"authorization"), known.headers.get(b"x-api-key")
            grant = self._of.keys.grant(*given, counts_refusals=False)
        except HttpError:
            return None  # which is refused the usual way
        try:
            return self._answer(known, model, packet, dates)
        finally:
            grant.end()

    def _answer(self, known: _Known, model: Model, packet: bytes, dates: Sequence[Header]) -> bytes:
        began_ns = time.monotonic_ns()
        request_id = id_of(known.headers.get(b"x-request-id"))
        try:
            inputs = {name: ndarray(shape, dtype, packet[at:end]) for name, dtype, shape, at, end in known.tensors}
            answered = model.infer_at_once(known.like, inputs, began_ns)
            status, (head, body) = 200, _written(known, model, *answered)
        except StatusError as error:
            refused = error_of(error)
            status, (head, body) = refused.status, _with_head(refused.headers, refused.body)
        took_ms = (time.monotonic_ns() - began_ns) / 1e6
        self._of.backend.log.add("POST", known.path, request_id, status, took_ms)
        self._of.serving.metrics.answered(known.route, "POST", status)
        own = b"x-request-id: %b\r\n\r\n" % request_id.encode()
        return b"".join((STATUS_LINE[status], _lines(dates), head, own, body))


def ready(
    backend: RepositoryBackend, name: str, version: int | None, known: "ref[Model]", n_bytes: int
) -> Model | None:
    """The model, where that name still means it, and it would answer so many bytes at once."""
    try:
        model = backend.repository.get(name, version)
    except StatusError:
        return None
    return model if model is known() and backend.has_room and model.answers_at_once(n_bytes) else None


def _whole_head(headers: dict[bytes, bytes], packet: bytes) -> tuple[bytes, int]:
    """With that of the JSON, and where that begins; empty where it is not one to be remembered."""
    at = packet.find(_END) + len(_END)
    n_json, n_body = headers.get(_LENGTH, b""), headers.get(b"content-length", b"")
    # more digits than that are refused the usual way
    if not (n_json.isdigit() and n_body.isdigit() and len(n_json) < 10 and len(n_body) < 10):
        return b"", 0
    end = at + int(n_json)
    if len(packet) - at != int(n_body) or int(n_body) > FREE_BYTES or end > min(len(packet), MOST_HEAD_BYTES):
        return b"", 0
    return packet[:end], at


def _places(request: InferRequest, body: bytes, at: int) -> list[Place] | None:
    """None where an input is no plain piece of the body: it was JSON, or strings, or had to be converted."""
    found, begin = [], _address(np.frombuffer(body, np.uint8))
    for name, array in request.inputs.items():
        here = _address(array) - begin
        if not array.nbytes or not array.flags.c_contiguous or not 0 <= here <= len(body) - array.nbytes:
            return None
        found.append(Place(name, array.dtype, array.shape, at + here, at + here + array.nbytes))
    return found


def _address(array: Array) -> int:
    found: int = array.__array_interface__["data"][0]
    return found


def _written(
    known: _Known, model: Model, outputs: Mapping[str, Array], parameters: Mapping[str, Parameter]
) -> tuple[bytes, bytes]:
    """Headers and body. Where the outputs are as the last ones were but for their numbers, nothing is told anew."""
    if known.told is not None and not parameters and is_like(known.told[0], outputs):
        _, headers, told = known.told
        return headers, b"".join((told, *[array.tobytes() for array in outputs.values()]))
    body, n_json = written(model, known.like, InferResponse(outputs, parameters), known.wanted)
    headers, _ = _with_head(infer_headers(n_json), body)
    is_plain = not (parameters or known.wanted.n_classes or any(a.dtype == np.object_ for a in outputs.values()))
    # all of them, and nothing else, in binary: then what is in front of them depends on `like` alone
    if n_json is not None and is_plain and body[n_json:] == b"".join(a.tobytes() for a in outputs.values()):
        known.told = (likeness(outputs), headers, body[:n_json])
    return headers, body


def likeness(outputs: Mapping[str, Array]) -> Likeness:
    """All of them but their numbers."""
    return [(name, array.dtype, array.shape) for name, array in outputs.items()]


def is_like(like: Likeness, outputs: Mapping[str, Array]) -> bool:
    """Whether `like` is their likeness."""
    if len(like) != len(outputs):
        return False
    for (name, dtype, shape), (found, array) in zip(like, outputs.items(), strict=True):
        if name != found or dtype != array.dtype or shape != array.shape:
            return False
    return True


def _with_head(headers: Sequence[Header], body: bytes) -> tuple[bytes, bytes]:
    return _lines([*headers, (b"content-length", b"%d" % len(body))]), body


def _lines(headers: Sequence[Header]) -> bytes:
    return b"".join(b"%b: %b\r\n" % (name.lower(), value) for name, value in headers)  # as uvicorn writes them
