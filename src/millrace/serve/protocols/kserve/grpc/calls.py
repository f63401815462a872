"""KServe's unary gRPC calls, from request bytes to response bytes, independent of the gRPC server.

Error codes and texts are Triton's. `server.py` connects the calls to gRPC; `stream.py` implements the stream.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError

from millrace.model_repository.lifecycle.lifecycle import ModelRepository
from millrace.model_repository.models.model_version import Model
from millrace.model_repository.request.infer_request import InferRequest, TokenUsage
from millrace.model_repository.request.status_code import Code, StatusError, invalid
from millrace.model_repository.request.tensors import memory_bytes
from millrace.model_repository.tracing.trace_context import PARENT, STATE, Parent
from millrace.model_repository.tracing.tracer import TracedExchange
from millrace.serve.protocols.kserve import metadata, request_fields, settings_endpoints
from millrace.serve.protocols.kserve.grpc import message_scan
from millrace.serve.protocols.kserve.grpc.infer import parameter_values
from millrace.serve.protocols.kserve.grpc.infer_message_cache import InferMessage, InferMessageCache
from millrace.serve.protocols.kserve.grpc.message_scan import SplitInferRequest
from millrace.serve.protocols.kserve.grpc.protobuf_messages import build_message, config_message, message
from millrace.serve.protocols.kserve.http.generate_extension import RunOffLoop
from millrace.serve.protocols.kserve.shared_memory import SharedMemoryRegions, regions_of_tenant, require_shared_memory

PUBLIC_CALLS = ("ServerLive", "ServerReady", "Check")  # without a key, as over HTTP
ADMITTED = ("ModelInfer", "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload")  # waited for at the end
SHARED = tuple(
    f"{kind}SharedMemory{action}" for kind in ("System", "Cuda") for action in ("Status", "Register", "Unregister")
)
ADJUSTED = ("LogSettings", "TraceSetting")
_EXPECTED = {"string": "string_param", "boolean": "bool_param", "file": "bytes_param"}
_SERVING, _NOT_SERVING = 1, 2  # of grpc.health.v1
_HEALTHY = ("", "inference.GRPCInferenceService")  # what its services are called there


@dataclass(frozen=True, slots=True)
class GrpcCallContext:
    """The caller of a gRPC call. shown: metadata that models see; parent: the client's trace

    tenant: name of its API key, "" if there are not several; owner: the tenant whose models it may change, "" for all
    """

    shown: Mapping[str, str] = field(default_factory=dict)
    parent: Parent | None = None
    token_usage: TokenUsage = field(default_factory=TokenUsage)
    tenant: str = ""
    owner: str = ""


class GrpcFrontend:
    """The calls of one repository."""

    def __init__(
        self,
        repository: ModelRepository,
        is_ready: Callable[[], bool],
        run_off_loop: RunOffLoop,
        shared: SharedMemoryRegions | None = None,
    ) -> None:
        """is_ready: whether the server is ready; run_off_loop: runs work off the event loop, given its size in bytes

        shared: None if clients' shared memory is not read
        """
        self._shared, self._messages = shared, InferMessageCache()
        self._repository, self._is_ready, self._run_off_loop = repository, is_ready, run_off_loop
        self._calls: dict[str, Callable[[Any], Any]] = {
            "ServerLive": lambda _: {"live": True}, "ServerReady": lambda _: {"ready": is_ready()},
            "Check": self._health, "ServerMetadata": lambda _: metadata.server(shared is not None),
            "ModelReady": self._model_ready, "ModelMetadata": self._metadata, "ModelConfig": self._config,
            "ModelStatistics": self._statistics,
        }  # fmt: skip

    def parent(self, metadata: Mapping[str, str]) -> Parent | None:
        """Return the span of the client's trace, or None."""
        tracer = self._repository.common.tracer
        return tracer.parent(metadata.get(PARENT), metadata.get(STATE))

    async def answer(self, name: str, data: bytes, caller: GrpcCallContext) -> bytes:
        """Answer one call. raises StatusError, BusyError"""
        match name:
            case "ModelInfer":
                return await self._infer(data, caller)
            case "RepositoryIndex" | "RepositoryModelLoad" | "RepositoryModelUnload":
                reply = await self._repository_call(name, parse_message(f"{name}Request", data), caller.owner)
                return encode_response(name, reply)
        if name in SHARED:
            return encode_response(name, self._shared_memory(name, data, caller.tenant))
        if name in ADJUSTED:
            return encode_response(name, self._settings(name, parse_message(f"{name}Request", data), caller.owner))
        request = parse_message("HealthCheckRequest" if name == "Check" else f"{name}Request", data)
        return encode_response("HealthCheck" if name == "Check" else name, self._calls[name](request))

    # ------------------------------------------------------------------ inferences

    def model(self, request: Any) -> Model:
        """Return the model of a ModelInferRequest. raises StatusError"""
        return self._repository.get(request.model_name, _version(request.model_version))

    async def decode_infer(self, data: bytes) -> tuple[Any, SplitInferRequest | None]:
        """Decode a ModelInferRequest; the data of a large one is split off. raises StatusError, BusyError"""
        decoded: tuple[Any, SplitInferRequest | None] = await self._run_off_loop(lambda: _read_infer(data), len(data))
        return decoded

    async def check_infer(
        self, data: bytes, request: Any, cut: SplitInferRequest | None, model: Model, caller: GrpcCallContext
    ) -> tuple[InferRequest, InferMessage]:
        """Check an inference. request, cut: `data`, decoded by `decode_infer`. raises StatusError, BusyError"""
        began_ns, n_bytes = time.monotonic_ns(), len(data)
        if self._shared is not None:
            n_bytes = max(n_bytes, self._shared.slow_bytes)
        read = lambda: self._messages.read(data, request, model, regions_of_tenant(self._shared, caller.tenant), cut)  # noqa: E731
        checked: tuple[InferRequest, InferMessage] = await self._run_off_loop(read, n_bytes)
        _set_caller(checked[0], caller)
        self._repository.common.tracer.trace_stream(checked[0], "GRPC", began_ns, caller.parent)
        return checked

    async def encode_off_loop(self, n_bytes: int, write: Callable[[], bytes]) -> bytes:
        """Run `write`, which encodes n_bytes, off the event loop if they are many. raises StatusError, BusyError"""
        data: bytes = await self._run_off_loop(write, n_bytes)
        return data

    async def _infer(self, data: bytes, caller: GrpcCallContext) -> bytes:
        arrived_ns = time.monotonic_ns()
        model, inference, infer_message = self._read_cached(data, caller) or await self._read(data, caller)
        with TracedExchange(self._repository.common.tracer, inference, "GRPC", arrived_ns, caller.parent) as call:
            response = await model.infer(inference)
            call.on_response()
            return await self.encode_off_loop(
                memory_bytes(response.outputs.values()),
                lambda: infer_message.encode(model, inference, response),
            )

    def _read_cached(self, data: bytes, caller: GrpcCallContext) -> tuple[Model, InferRequest, InferMessage] | None:
        """Read a message that differs from an earlier one only in its id and its data, or return None.

        raises StatusError
        """
        if (layout := self._messages.find(data)) is None:
            return None
        model = self._repository.get(layout.model_name, _version(layout.model_version))
        if model.checker is not layout.validator or model.is_decoupled:
            return None
        inference = layout.fill(data)
        _set_caller(inference, caller)
        return model, inference, layout.message

    async def _read(self, data: bytes, caller: GrpcCallContext) -> tuple[Model, InferRequest, InferMessage]:
        """raises StatusError, BusyError"""
        request, cut = await self.decode_infer(data)
        model = self.model(request)
        if model.is_decoupled:
            what = "ModelInfer RPC doesn't support models with decoupled transaction policy"
            raise StatusError(Code.UNSUPPORTED, what)
        return model, *await self.check_infer(data, request, cut, model, caller)

    # ------------------------------------------------------------------ metadata

    def _health(self, request: Any) -> Any:
        if request.service not in _HEALTHY:
            raise StatusError(Code.NOT_FOUND, f"unknown service '{request.service}'")
        return {"status": _SERVING if self._is_ready() else _NOT_SERVING}

    def _model_ready(self, request: Any) -> Any:
        version = _version(request.version)
        try:
            return {"ready": self._repository.get(request.name, version).is_ready}
        except StatusError:
            return {"ready": False}

    def _metadata(self, request: Any) -> Any:
        model = self._repository.get(request.name, _version(request.version))
        return metadata.metadata(model, self._repository.versions(request.name))

    def _config(self, request: Any) -> Any:
        return {"config": config_message(self._repository.get(request.name, _version(request.version)).config)}

    def _statistics(self, request: Any) -> Any:
        models = metadata.statistics(self._repository, request.name, _version(request.version))
        for one in models:
            del one["batch_closed"]  # ours, for which the protocol has no field
        return {"model_stats": models}

    # ------------------------------------------------------------------ settings

    def _settings(self, name: str, request: Any, owner: str) -> Any:
        """Return log or trace settings, after changing those in the request. raises StatusError"""
        if name == "LogSettings":
            change = dict(parameter_values(request.settings))
            kinds = {bool: "bool_param", int: "uint32_param", str: "string_param"}
            logged = settings_endpoints.log(self._repository.common.log, change, owner)
            return {"settings": {key: {kinds[type(value)]: value} for key, value in logged.items()}}
        settings = {key: _setting_value(key, list(one.value)) for key, one in request.settings.items()}
        traced = settings_endpoints.trace(self._repository, request.model_name, settings, owner)
        return {"settings": {k: {"value": v if isinstance(v, list) else [v]} for k, v in traced.items()}}

    # ------------------------------------------------------------------ shared memory

    def _shared_memory(self, name: str, data: bytes, tenant: str) -> Any:
        regions = require_shared_memory(regions_of_tenant(self._shared, tenant))
        request = parse_message(f"{name}Request", data)
        if name.startswith("Cuda"):
            request_fields.cuda_regions(name.removeprefix("CudaSharedMemory").lower(), request.name)
            return {}
        if name.endswith("Status"):
            return {"regions": {one["name"]: one for one in regions.status(request.name)}}
        if name.endswith("Unregister"):
            regions.unregister(request.name)
        else:
            regions.register(request.name, request.key, request.offset, request.byte_size)
        return {}

    # ------------------------------------------------------------------ repository

    async def _repository_call(self, name: str, request: Any, owner: str) -> Any:
        if request.repository_name:
            raise StatusError(Code.UNSUPPORTED, request_fields.NO_REPOSITORY_NAME)
        if name == "RepositoryIndex":
            return {"models": await self._repository.index(request.ready)}
        parameters = dict(parameter_values(request.parameters))
        if name == "RepositoryModelLoad":
            load = request_fields.load_of(request.model_name, parameters, _wrong, bytes)
            if load.dry_run:
                raise StatusError(Code.UNSUPPORTED, "a dry run has no answer over gRPC: ask over HTTP")
            await self._repository.load(request.model_name, load.config, load.files, owner=owner)
        else:
            with_members = request_fields.unloads_members(parameters, _wrong)
            await self._repository.unload(request.model_name, with_members=with_members, owner=owner)
        return {}


def _set_caller(inference: InferRequest, caller: GrpcCallContext) -> None:
    if caller.shown:
        inference.parameters.update(caller.shown)
    inference.token_usage, inference.tenant = caller.token_usage, caller.tenant


def _read_infer(data: bytes) -> tuple[Any, SplitInferRequest | None]:
    """raises StatusError"""
    cut = message_scan.split_infer_request(data)
    return _parse("ModelInferRequest", data if cut is None else cut.rest), cut


def parse_message(name: str, data: bytes) -> Any:
    """raises StatusError"""
    message_scan.check_message(name, data)
    return _parse(name, data)


def _parse(name: str, data: bytes) -> Any:
    """raises StatusError"""
    try:
        return message(name).FromString(data)
    except DecodeError as error:
        raise StatusError(Code.INTERNAL, f"failed to parse the message {name}: {error}") from None


def encode_response(name: str, fields: Any) -> bytes:
    data: bytes = build_message(f"{name}Response", fields).SerializeToString()
    return data


def _version(text: str) -> int | None:
    return request_fields.version_of(text) if text else None


def _setting_value(key: str, values: list[str]) -> list[str] | str | None:
    """Return a trace setting as it is in JSON; None: cleared. raises StatusError"""
    if key == "trace_level" or not values:
        return values or None
    if len(values) > 1:
        raise invalid(f"expect only 1 value for '{key:.80}'")
    return values[0]


def _wrong(key: str, expected: str) -> StatusError:
    if key == "config" or expected == "file":
        return invalid(f"invalid value type for load parameter '{key}', expected {_EXPECTED[expected]}.")
    return invalid(f"invalid value type for '{key}' parameter, expected {_EXPECTED[expected]}.")
