"""KServe's routes over HTTP, from a request in plain types to its response, without a web framework.

Statuses, bodies and error texts are Triton's (`status_code.py` has the codes). `asgi_app.py` connects it to the server.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import msgspec

from millrace.model_repository.config.config_json import config_json
from millrace.model_repository.execution.tracebacks import without_frames
from millrace.model_repository.lifecycle.lifecycle import ModelRepository
from millrace.model_repository.models.model_version import Model
from millrace.model_repository.request.infer_request import InferRequest, TokenUsage
from millrace.model_repository.request.status_code import Code, StatusError, invalid
from millrace.model_repository.request.tensors import memory_bytes
from millrace.model_repository.tracing.trace_context import PARENT, STATE, Parent
from millrace.model_repository.tracing.tracer import TracedExchange
from millrace.serve.http.http_request import EVENT_STREAM, UNBUFFERED
from millrace.serve.protocols.kserve import metadata, request_fields, settings_endpoints
from millrace.serve.protocols.kserve.http import compression
from millrace.serve.protocols.kserve.http.generate_extension import Events, RunOffLoop, generate, read_generate
from millrace.serve.protocols.kserve.http.infer_request import HEADER, HttpOutputOptions, read_infer
from millrace.serve.protocols.kserve.http.infer_response import (
    TIMING_HEADER,
    encode_error,
    encode_response,
    server_timing,
)
from millrace.serve.protocols.kserve.restricted_apis import UNRESTRICTED, ApiRestrictions, headers_as_text
from millrace.serve.protocols.kserve.shared_memory import SharedMemoryRegions, regions_of_tenant, require_shared_memory

STATUS = {Code.INTERNAL: 500, Code.NOT_FOUND: 404, Code.UNAVAILABLE: 503, Code.UNSUPPORTED: 501}  # the others: 400
_JSON, _BINARY = b"application/json", b"application/octet-stream"
_HEADER = HEADER.encode()
_LINES = b"application/x-ndjson"
_STREAMS = {b"text/event-stream": EVENT_STREAM, _LINES: _LINES}
_EVENTS = ((b"content-type", EVENT_STREAM), *UNBUFFERED)
_MAX_GROWTH = 1032  # times, of deflate
OF_MODEL = ("infer", "ready", "config", "stats", "generate", "generate_stream", "trace/setting")


@dataclass(slots=True)
class HttpCall:
    """One HTTP request. path: without the query, as it was sent; headers: names in lower case"""

    method: str
    path: str
    headers: Mapping[bytes, bytes]
    body: bytes
    grew: Callable[[int], None] = lambda n_bytes: None  # called with memory held in addition to `body`; may raise
    arrived_ns: int = 0  # time.monotonic_ns(), before its body
    token_usage: TokenUsage = field(default_factory=TokenUsage)
    tenant: str = ""  # name of its API key, if there are several
    owner: str = ""  # the tenant whose models it may change; "" for all of them


@dataclass(slots=True)
class HttpReply:
    status: int
    body: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    events: Events | None = None  # in place of `body`; to be closed


def error_reply(status: int, message: str) -> HttpReply:
    return HttpReply(status, encode_error(message), [(b"content-type", _JSON)])


def error_of(error: StatusError) -> HttpReply:
    reply = error_reply(STATUS.get(error.code, 400), error.message)
    if error.code is Code.UNSUPPORTED and error.message == "Unsupported compression type":
        reply.headers.append((b"accept-encoding", b"gzip, deflate"))
    return reply


def json_reply(answer: object) -> HttpReply:
    return HttpReply(200, msgspec.json.encode(answer), [(b"content-type", _JSON)])


class _NoSuchPath(Exception):  # noqa: N818  - it never leaves this file
    pass


class _WrongMethod(Exception):  # noqa: N818
    pass


class HttpFrontend:
    """The HTTP routes of one repository."""

    def __init__(
        self, repository: ModelRepository, is_ready: Callable[[], bool], run_off_loop: RunOffLoop,
        shared: SharedMemoryRegions | None = None, guard: ApiRestrictions = UNRESTRICTED,
    ) -> None:  # fmt: skip
        """is_ready: whether the server is ready. run_off_loop: reads JSON off the event loop, given its size in bytes

        shared: None if clients' shared memory is not read; guard: which headers models see
        """
        self._guard = guard
        self._repository, self._is_ready, self._run_off_loop, self._shared = repository, is_ready, run_off_loop, shared
        self._max_bytes = repository.flags.http_max_input_size

    async def answer(self, request: HttpCall) -> HttpReply:
        try:
            return await self._dispatch(request)
        except StatusError as error:
            return error_of(without_frames(error))
        except _NoSuchPath:
            return error_reply(404, "Not Found")
        except _WrongMethod:
            return error_reply(405, "Method Not Allowed")

    async def _dispatch(self, request: HttpCall) -> HttpReply:
        parts = request.path.split("/")[2:]  # ["", "v2", ...]
        match parts:
            case ["models", "stats"]:
                _require_method("GET", request)
                return json_reply({"model_stats": metadata.statistics(self._repository)})
            case ["models", name, *_] if name:
                return await self._model_call(request, *parse_model_path(parts[1:]))
            case [] | ["health", "live" | "ready"]:
                return self._server_call(request, parts)
            case ["repository", *rest]:
                return await self._repository_call(request, rest)
            case ["systemsharedmemory" | "cudasharedmemory", *rest] if rest and rest[-1] in _SHARED_ACTIONS:
                return self._shared_memory(request, parts[0], rest)
            case ["logging"]:
                return json_reply(
                    settings_endpoints.log(self._repository.common.log, _settings_update(request), request.owner)
                )
            case ["trace", "setting"]:
                return json_reply(
                    settings_endpoints.trace(self._repository, "", _settings_update(request), request.owner)
                )
        raise _NoSuchPath

    def _server_call(self, request: HttpCall, parts: list[str]) -> HttpReply:
        _require_method("GET", request)
        if not parts:
            return json_reply(metadata.server(self._shared is not None))
        return HttpReply(200 if parts[1] == "live" or self._is_ready() else 400)

    # ------------------------------------------------------------------ models

    async def _model_call(self, request: HttpCall, name: str, version: int | None, action: str) -> HttpReply:
        if action and action not in OF_MODEL:
            raise _NoSuchPath
        if action == "trace/setting":
            if version is not None:
                raise _NoSuchPath
            return json_reply(
                settings_endpoints.trace(self._repository, name, _settings_update(request), request.owner)
            )
        _require_method("POST" if action in ("infer", "generate", "generate_stream") else "GET", request)
        if action == "ready":
            return self._model_ready(name, version)
        if action == "stats":
            return json_reply({"model_stats": metadata.statistics(self._repository, name, version)})
        model = self._repository.get(name, version)
        match action:
            case "infer":
                return await self._infer(request, model)
            case "config":
                return json_reply(config_json(model.config))
            case "":
                return json_reply(metadata.metadata(model, self._repository.versions(name)))
        return await self._generate(request, model, streamed=action == "generate_stream")

    def _model_ready(self, name: str, version: int | None) -> HttpReply:
        try:
            is_ready = self._repository.get(name, version).is_ready
        except StatusError:
            is_ready = False
        return HttpReply(200) if is_ready else error_reply(400, "Model version not ready")

    async def _infer(self, request: HttpCall, model: Model) -> HttpReply:
        headers = request.headers
        accepts = headers.get(b"accept", b"").split(b";")[0].strip()
        if model.is_decoupled and accepts not in _STREAMS:
            what = "HTTP end point doesn't support models with decoupled transaction policy"
            raise StatusError(Code.UNSUPPORTED, what)
        inference, output_options = await self._read(request, model)
        if model.is_decoupled:
            return await self._stream(request, model, inference, output_options, accepts)
        inference.timings = [] if TIMING_HEADER in headers else None
        with TracedExchange(
            self._repository.common.tracer, inference, "HTTP", request.arrived_ns, self._parent(request)
        ) as call:
            response = await model.infer(inference)
            call.on_response()
            n_bytes = memory_bytes(response.outputs.values())
            answer, n_head = await self._run_off_loop(
                lambda: encode_response(model, inference, response, output_options), n_bytes
            )
        reply_headers = [*infer_headers(n_head), *server_timing(inference, request.arrived_ns)]
        accepted = headers.get(b"accept-encoding")
        if accepted and (coding := compression.choose_coding(accepted.decode("latin-1"))) != "identity":
            answer = await self._run_off_loop(lambda: compression.compress(answer, coding), len(answer))
            reply_headers.append((b"content-encoding", coding.encode()))
        return HttpReply(200, answer, reply_headers)

    async def _read(self, request: HttpCall, model: Model) -> tuple[InferRequest, HttpOutputOptions]:
        """raises StatusError"""
        headers = request.headers
        coding = headers.get(b"content-encoding", b"").decode("latin-1")
        body = request.body if coding in ("", "identity") else await self._decompress(request, coding)
        n_json = header_length(headers.get(_HEADER.lower()))

        def read() -> Any:
            return read_infer(body, n_json, model.name, model.checker, regions_of_tenant(self._shared, request.tenant))

        n_slow = len(body) if n_json is None or model.checker.reads_all else n_json
        if self._shared is not None:
            n_slow = max(n_slow, self._shared.slow_bytes)
        inference: InferRequest
        inference, output_options = await self._run_off_loop(read, n_slow)
        self._show_headers(inference, request)
        inference.token_usage, inference.tenant = request.token_usage, request.tenant
        return inference, output_options

    async def _stream(
        self,
        request: HttpCall,
        model: Model,
        inference: InferRequest,
        output_options: HttpOutputOptions,
        accepts: bytes,
    ) -> HttpReply:
        """Stream the responses of a decoupled model, each as `/infer` would answer. raises StatusError"""
        if output_options.binary_default or any(output_options.binary.values()):
            raise invalid("a stream of responses is JSON: leave binary_data and binary_data_output out of its outputs")
        self._repository.common.tracer.trace_stream(inference, "HTTP", request.arrived_ns, self._parent(request))
        write = lambda model, inference, response: encode_response(model, inference, response, output_options)[0]  # noqa: E731
        events = Events(model, inference, self._run_off_loop, write, lines=accepts == _LINES)
        failed = await events.begin()
        headers = [(b"content-type", _STREAMS[accepts]), *UNBUFFERED]
        return HttpReply(STATUS.get(failed, 400) if failed else 200, b"", headers, events)

    async def _generate(self, request: HttpCall, model: Model, *, streamed: bool) -> HttpReply:
        if request.headers.get(b"content-encoding", b"identity") != b"identity":
            raise StatusError(Code.UNSUPPORTED, "generate takes no compressed bodies")
        inference = await self._run_off_loop(lambda: read_generate(request.body, model), len(request.body))
        self._show_headers(inference, request)
        inference.token_usage, inference.tenant = request.token_usage, request.tenant
        self._repository.common.tracer.trace_stream(inference, "HTTP", request.arrived_ns, self._parent(request))
        if not streamed:
            return HttpReply(200, await generate(model, inference, self._run_off_loop), [(b"content-type", _JSON)])
        events = Events(model, inference, self._run_off_loop)
        failed = await events.begin()
        return HttpReply(STATUS.get(failed, 400) if failed else 200, b"", list(_EVENTS), events)

    def _parent(self, request: HttpCall) -> Parent | None:
        """Return the span of the client's trace, or None."""
        headers = request.headers
        return self._repository.common.tracer.parent(headers.get(PARENT.encode()), headers.get(STATE.encode()))

    def _show_headers(self, inference: InferRequest, request: HttpCall) -> None:
        """Pass forwarded headers to the model as parameters. raises StatusError"""
        if self._guard.forward is not None:  # otherwise they are not needed
            inference.parameters.update(self._guard.forwarded_headers(headers_as_text(request.headers.items())))

    async def _decompress(self, request: HttpCall, coding: str) -> bytes:
        """Decompress a body in pieces, each counted before the next: it may become a thousand times larger."""
        reader, pieces = compression.BodyDecompressor(request.body, coding, self._max_bytes), list[bytes]()
        while not reader.is_done:
            pieces.append(
                await self._run_off_loop(reader.piece, min(compression.PIECE, len(request.body) * _MAX_GROWTH))
            )
            request.grew(len(pieces[-1]))
        n_bytes = sum(map(len, pieces))
        return await self._run_off_loop(lambda: b"".join(pieces), n_bytes) if len(pieces) > 1 else pieces[0]

    # ------------------------------------------------------------------ shared memory

    def _shared_memory(self, request: HttpCall, kind: str, rest: list[str]) -> HttpReply:
        """Answer a shared-memory route: [/region/{name}]/{status,register,unregister}."""
        action, region = rest[-1], ""
        if len(rest) == 3 and rest[0] == "region":
            region = _name(rest[1])
        elif len(rest) > 1:
            raise _NoSuchPath
        _require_method("GET" if action == "status" else "POST", request)
        regions = require_shared_memory(regions_of_tenant(self._shared, request.tenant))
        if kind == "cudasharedmemory":
            if action == "register":
                request_fields.json_object(request.body)
            regions_of_cuda = request_fields.cuda_regions(action, region)
            return (
                HttpReply(200, b"", [(b"content-type", _JSON)])
                if regions_of_cuda is None
                else json_reply(regions_of_cuda)
            )
        if action == "status":
            return json_reply(regions.status(region))
        if action == "unregister":
            regions.unregister(region)
        else:
            regions.register(region, *request_fields.region_fields(region, request_fields.json_object(request.body)))
        return HttpReply(200, b"", [(b"content-type", _JSON)])

    # ------------------------------------------------------------------ repository

    async def _repository_call(self, request: HttpCall, rest: list[str]) -> HttpReply:
        of_one = ""
        if len(rest) in (2, 4) and rest[0]:
            of_one, rest = rest[0], rest[1:]
        match rest:
            case ["index"]:
                _require_method("POST", request)
                ready = request_fields.json_object(request.body).get("ready", False)
                if not isinstance(ready, bool):
                    raise StatusError(Code.INTERNAL, "attempt to access JSON non-boolean as boolean")
                return json_reply(await self._repository.index(ready))
            case ["models", name, "load" | "unload" as action] if name:
                _require_method("POST", request)
                if of_one:
                    raise StatusError(Code.UNSUPPORTED, request_fields.NO_REPOSITORY_NAME)
                most = self._max_bytes  # it may bring the model's files
                body = await self._run_off_loop(
                    lambda: request_fields.json_object(request.body, most), len(request.body)
                )
                return await self._control(_name(name), action, body, request.owner)
        raise _NoSuchPath

    async def _control(self, name: str, action: str, body: dict[str, Any], owner: str) -> HttpReply:
        parameters = body.get("parameters", {})
        if not isinstance(parameters, dict):
            raise StatusError(Code.INTERNAL, "attempt to access JSON non-object as object")
        if action == "unload":
            await self._repository.unload(
                name, with_members=request_fields.unloads_members(parameters, _wrong), owner=owner
            )
            return HttpReply(200, b"", [(b"content-type", _JSON)])
        load = request_fields.load_of(name, parameters, _wrong, str)
        if load.dry_run:
            return json_reply(await self._repository.would_load(name, load.config))
        await self._repository.load(name, load.config, load.files, owner=owner)
        return HttpReply(200, b"", [(b"content-type", _JSON)])


_SHARED_ACTIONS = ("status", "register", "unregister")


def _settings_update(request: HttpCall) -> dict[str, Any] | None:
    """Return the settings to change; None if they are only read. raises StatusError"""
    if request.method not in ("GET", "POST"):
        raise _WrongMethod
    return request_fields.json_object(request.body) if request.method == "POST" else None


def _require_method(method: str, request: HttpCall) -> None:
    if request.method != method:
        raise _WrongMethod


def _name(part: str) -> str:
    return unquote(part, errors="replace") if "%" in part else part


def parse_model_path(parts: list[str]) -> tuple[str, int | None, str]:
    """Parse NAME[/versions/V][/ACTION] into name, version and action. raises StatusError"""
    name, *rest = parts
    version: int | None = None
    if rest[:1] == ["versions"] and len(rest) > 1 and rest[1].isascii() and rest[1].isdigit():
        version, rest = request_fields.version_of(rest[1]), rest[2:]
    return _name(name), version, "/".join(rest)


def infer_headers(n_head: int | None) -> list[tuple[bytes, bytes]]:
    """Return the headers of an inference response. n_head: bytes of its JSON, None if all of it is JSON"""
    if n_head is None:
        return [(b"content-type", _JSON)]
    return [(b"content-type", _BINARY), (_HEADER, b"%d" % n_head)]


def header_length(value: bytes | None) -> int | None:
    if value is None:
        return None
    text = value.decode("latin-1")
    if not text.removeprefix("-").isdigit() or not text.isascii() or len(text) > 19:
        raise invalid(f"Unable to parse {HEADER}, got: {text}")
    return int(text)


def _wrong(key: str, expected: str) -> StatusError:
    """Return the error of a load or unload parameter of a wrong type, in the words of Triton's JSON."""
    expected = "string" if expected == "file" else expected
    what = f"attempt to access JSON non-{expected} as {expected}"
    return StatusError(Code.INTERNAL, f"Unable to parse '{key}': {what}" if key == "unload_dependents" else what)
