"""KServe's gRPC server: API keys, message bounds, gRPC status codes.

It runs in HTTP's event loop and shares models, limits and keys with it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import grpc

from millrace.errors import ConfigError, MillraceError
from millrace.model_repository.execution.tracebacks import without_frames
from millrace.model_repository.request.infer_request import TokenUsage
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.serve.backend import Models
from millrace.serve.http.api_keys import LIMITED, ApiKeys, Grant
from millrace.serve.http.connection_limits import number_of_connections
from millrace.serve.http.errors import BUG, HttpError, problem_of
from millrace.serve.http.http_request import (
    RequestLog,
    combine_duplicate_headers,
    log_request,
    request_id_of,
)
from millrace.serve.http.request_bodies import UNCOUNTED_BODY_BYTES
from millrace.serve.protocols.kserve.grpc.calls import (
    ADJUSTED,
    ADMITTED,
    PUBLIC_CALLS,
    SHARED,
    GrpcCallContext,
    GrpcFrontend,
)
from millrace.serve.protocols.kserve.grpc.protobuf_messages import SERVICE
from millrace.serve.protocols.kserve.grpc.send_budget import SendBudget, SendBudgetLease
from millrace.serve.protocols.kserve.grpc.stream import Stream
from millrace.serve.protocols.kserve.repository_backend import RepositoryBackend
from millrace.serve.protocols.kserve.restricted_apis import GRPC_PREFIX, api_group_of_call

STATUS = {
    Code.UNKNOWN: grpc.StatusCode.UNKNOWN, Code.INTERNAL: grpc.StatusCode.INTERNAL,
    Code.NOT_FOUND: grpc.StatusCode.NOT_FOUND, Code.INVALID_ARG: grpc.StatusCode.INVALID_ARGUMENT,
    Code.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE, Code.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    Code.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS, Code.CANCELLED: grpc.StatusCode.CANCELLED,
}  # fmt: skip
_STREAM = "ModelStreamInfer"
_UNARY = (
    "ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics",
    "ModelInfer", "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload", *SHARED, *ADJUSTED,
)  # fmt: skip
_INFER = "ModelInfer"
_HEALTH = "/grpc.health.v1.Health/"
_MAX_MESSAGE_BYTES = 2**31 - 1  # gRPC's own, of a size in its options
_PING_TIMEOUT_S = 20
T = TypeVar("T")
Metadata = Iterable[tuple[str, str | bytes]]
UnaryHandler = Callable[[str, str, Metadata, bytes, Any], Awaitable[bytes]]  # service, method
log = logging.getLogger(__name__)


class GrpcServer:
    """The gRPC listener, for the event loop in which it is opened. url: HOST:PORT"""

    name = "grpc_url"

    def __init__(self, models: Models, backend: RepositoryBackend, keys: ApiKeys) -> None:
        self._serving, self._keys, self._heartbeat = models.serving, keys, models.heartbeat
        repository, settings = backend.repository, models.serving.settings
        assert repository.flags.grpc_port is not None
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self._host, self.url = host, f"{host}:{repository.flags.grpc_port}"
        self._max_bytes = min(repository.flags.http_max_input_size, _MAX_MESSAGE_BYTES)
        self._backend, self._guard = backend, backend.grpc_guard
        is_ready = partial(backend.is_ready, models.heartbeat)
        self._front = GrpcFrontend(repository, is_ready, backend.run_off_loop, backend.shared)
        self._send_budget = SendBudget(settings.max_unread_bytes)
        self._streams: set[Stream] = set()
        self._server: Any = None

    async def open(self) -> None:
        """Listen. raises ConfigError"""
        settings = self._serving.settings
        max_connections = number_of_connections(settings.max_connections)
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", self._max_bytes), ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", int(settings.reuse_port)),  # by default a port that is taken would be shared
                ("grpc.max_allowed_incoming_connections", max_connections),
                ("grpc.keepalive_time_ms", int(settings.keep_alive_s * 1e3)),  # clients that do not answer are gone
                ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_S * 1000),
            ],
            maximum_concurrent_rpcs=max_connections,
        )  # fmt: skip
        stream = {_STREAM: grpc.stream_stream_rpc_method_handler(self._stream)}
        server.add_generic_rpc_handlers(
            (_UnaryMethods(self._unary), grpc.method_handlers_generic_handler(SERVICE.strip("/"), stream))
        )
        try:
            port = self._add_port(server)
        except RuntimeError:
            port = 0  # as older ones say it
        if not port:
            raise ConfigError(
                f"cannot listen for gRPC on {self.url}", "a free port at an address of this machine",
                "choose another --host or --grpc-port, or stop what listens there",
            )  # fmt: skip
        await server.start()
        self._server, self.url = server, f"{self._host}:{port}"

    def _add_port(self, server: Any) -> int:
        """Bind the port, with HTTP's certificate. raises RuntimeError if the port is in use"""
        settings = self._serving.settings
        if settings.ssl_certfile is None:
            return int(server.add_insecure_port(self.url))
        chain = Path(settings.ssl_certfile).read_bytes()
        key = Path(settings.ssl_keyfile).read_bytes() if settings.ssl_keyfile is not None else chain
        return int(server.add_secure_port(self.url, grpc.ssl_server_credentials([(key, chain)])))

    async def close(self, within_s: float) -> None:
        """Accept no more calls, end streams that wait for their clients, and wait for responses to be read."""
        for stream in list(self._streams):
            stream.stop()
        server, self._server = self._server, None
        if server is not None:
            await server.stop(within_s)

    # ------------------------------------------------------------------ calls

    async def _unary(self, service: str, name: str, metadata: Metadata, data: bytes, context: Any) -> bytes:
        outcome = await self._call(service, name, metadata, partial(self._answer, name, data, context))
        del data  # gRPC's context keeps what it raises to abort the call, and with it this frame
        return await _finish_call(context, outcome)

    async def _answer(self, name: str, data: bytes, context: Any, call: "_OpenCall") -> bytes:
        """raises StatusError, MillraceError"""
        caller = self._caller(call)
        if name not in ADMITTED:
            return await self._front.answer(name, data, caller)
        lease = self._send_budget.lease(context.peer)
        with _Admission(self._backend, lease, len(data), is_control=name.startswith("Repository")):
            answer = await self._front.answer(name, data, caller)
            lease.add(len(answer))
            lease.until(context)
            return answer

    async def _stream(self, _: Any, context: Any) -> None:
        metadata = context.invocation_metadata() or ()
        await _finish_call(context, await self._call(SERVICE, _STREAM, metadata, partial(self._run_stream, context)))

    async def _run_stream(self, context: Any, call: "_OpenCall") -> None:
        """raises StatusError, MillraceError"""

        async def read() -> bytes | None:
            data = await context.read()
            return None if data is grpc.aio.EOF else data

        ends_with_error = call.metadata.get("triton_grpc_error") == "true"
        caller, write_s = self._caller(call), self._serving.settings.write_timeout_s
        lease = partial(self._send_budget.lease, context.peer)
        admit = partial(_Admission, self._backend, lease())
        stream = Stream(self._front, admit, lease, write_s, ends_with_error, caller, call.grant)
        self._streams.add(stream)
        try:
            # Before the responses: gRPC does not report a call's end while its head waits for the first of them.
            await stream.run(partial(context.send_initial_metadata, ()), read, context.write)
        except StatusError:
            lease().keep(context, stream.n_writing)
            raise
        finally:
            self._streams.discard(stream)
        if stream.stopped:
            raise StatusError(Code.UNAVAILABLE, "Server is stopping")

    def _caller(self, call: "_OpenCall") -> GrpcCallContext:
        """raises StatusError"""
        metadata = call.metadata
        tenant, owner = (call.grant.tenant, call.grant.owner) if call.grant is not None else ("", "")
        return GrpcCallContext(
            self._guard.forwarded_headers(metadata), self._front.parent(metadata), call.token_usage, tenant, owner
        )

    async def _call(
        self, service: str, name: str, raw_metadata: Metadata, work: Callable[["_OpenCall"], Awaitable[T]]
    ) -> "T | _Refusal":
        """Run the work of one call, turn errors into a status, and log the call."""
        began_s, metadata = time.perf_counter(), _texts(raw_metadata)
        request_id = request_id_of(_header(metadata, "x-request-id"))
        code, details = grpc.StatusCode.CANCELLED, ""  # unless it comes to another end
        call = _OpenCall(metadata)
        self._serving.load.n += 1
        try:
            if name not in PUBLIC_CALLS:
                call.grant = self._keys.grant(_header(metadata, "authorization"), _header(metadata, "x-api-key"))
            if (header := self._guard.missing_header(api_group_of_call(name), metadata, GRPC_PREFIX)) is not None:
                what = f"This protocol is restricted, expecting header '{header}'"
                raise StatusError(Code.UNAVAILABLE, what)
            answer = await work(call)
            code = grpc.StatusCode.OK
            return answer
        except StatusError as error:
            code, details = STATUS[error.code], without_frames(error).message
        except MillraceError as error:
            code, details = self._refusal(without_frames(error))
        except grpc.aio.InternalError:  # of a write: its client is gone, and gRPC is about to cancel it
            raise asyncio.CancelledError from None
        except Exception as error:  # a bug of ours must cost one call and not the server; the log has it all
            log.exception("call %s: a bug in the server", request_id)
            without_frames(error)
            code, details = grpc.StatusCode.INTERNAL, BUG.message
        finally:
            self._serving.load.n -= 1
            total_ms, usage = (time.perf_counter() - began_s) * 1e3, call.token_usage
            prompt, generated = usage.prompt, usage.generated
            if call.grant is not None:
                call.grant.end(call.token_usage.take())
            if name == _INFER and not (prompt or generated):
                self._backend.log.add("GRPC", service + name, request_id, code.value[0], total_ms, details)
            else:
                entry = RequestLog("GRPC", service + name, request_id, code.value[0], total_ms)
                entry.prompt_tokens, entry.generated_tokens, entry.error = (
                    prompt or None,
                    generated or None,
                    details or None,
                )
                log_request(entry)
        return _Refusal(code, details)

    def _refusal(self, error: MillraceError) -> tuple[grpc.StatusCode, str]:
        problem = problem_of(error, accepting=self._heartbeat.accepting)
        if isinstance(error, HttpError) and error.status == 401:
            return grpc.StatusCode.UNAUTHENTICATED, problem.message
        if isinstance(error, HttpError) and error.code == LIMITED:
            return grpc.StatusCode.RESOURCE_EXHAUSTED, problem.message
        busy = problem.status in (429, 503)
        return grpc.StatusCode.UNAVAILABLE if busy else grpc.StatusCode.INTERNAL, problem.message


class _UnaryMethods(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpcio has no types
    """The unary methods. grpcio passes it the metadata of each call, which its context would copy once more."""

    def __init__(self, handle: UnaryHandler) -> None:
        self._methods = {SERVICE + name: partial(handle, SERVICE, name) for name in _UNARY}
        self._methods |= {f"{_HEALTH}Check": partial(handle, _HEALTH, "Check")}

    def service(self, handler_call_details: Any) -> Any:
        method = self._methods.get(handler_call_details.method)
        if method is None:
            return None
        metadata = handler_call_details.invocation_metadata or ()
        return grpc.unary_unary_rpc_method_handler(partial(method, metadata))


class _Admission:
    """Context in which a message of n_bytes is answered.

    is_control: always admit it, so that a model that hangs can be unloaded
    Entering raises BusyError, StatusError, HttpError.
    """

    __slots__ = ("_backend", "_body", "_is_control", "_lease", "_n_bytes")

    def __init__(
        self, backend: RepositoryBackend, lease: SendBudgetLease, n_bytes: int, is_control: bool = False
    ) -> None:
        self._backend, self._lease, self._n_bytes, self._is_control = backend, lease, n_bytes, is_control
        self._body: ExitStack | None = None  # the count of a large message

    def __enter__(self) -> None:
        if not self._is_control:
            self._lease.check()
        if self._n_bytes <= UNCOUNTED_BODY_BYTES:
            self._backend.enter(self._is_control)
            return
        with ExitStack() as body:
            self._backend.bodies.count_decompressed(
                body.enter_context(self._backend.bodies.receiving("")), self._n_bytes
            )
            self._backend.enter(self._is_control)
            self._body = body.pop_all()

    def __exit__(self, *_: object) -> None:
        self._backend.leave()
        if self._body is not None:
            self._body.close()


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The status of a call that ends without a response."""

    code: grpc.StatusCode
    details: str


@dataclass(slots=True)
class _OpenCall:
    """A call in progress. grant: None if it needs no key"""

    metadata: dict[str, str]
    grant: Grant | None = None
    token_usage: TokenUsage = field(default_factory=TokenUsage)


async def _finish_call(context: Any, outcome: T | _Refusal) -> T:
    """Return the response of a call, or abort it if it was refused."""
    if isinstance(outcome, _Refusal):
        await _abort(context, outcome.code, outcome.details)
    return outcome


async def _abort(context: Any, code: grpc.StatusCode, details: str) -> NoReturn:
    """End a call with its status; if the client is gone, cancel it."""
    try:
        await context.abort(code, details)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None
    raise AssertionError("it raises")


def _texts(metadata: Metadata) -> dict[str, str]:
    """Return metadata by name as text; values of names that end in -bin are bytes."""
    return combine_duplicate_headers(
        ((key, one if isinstance(one, str) else one.decode("latin-1")) for key, one in metadata), ","
    )


def _header(metadata: dict[str, str], name: str) -> bytes | None:
    value = metadata.get(name)
    return value.encode() if value is not None else None
