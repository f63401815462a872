"""KServe's gRPC service of the null server: the same models, timing and record as over HTTP."""

import asyncio
import struct
import time
from collections.abc import Callable
from math import prod
from typing import Any

import grpc

from millrace.bench.null_server import kserve as kserve
from millrace.bench.null_server.ledger import Ledger
from millrace.serve.protocols.kserve.grpc.protobuf_messages import CONTENTS, SERVICE, message

_CODES = {400: grpc.StatusCode.INVALID_ARGUMENT, 404: grpc.StatusCode.NOT_FOUND}
_UNBOUNDED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


async def started(ledger: Ledger, host: str) -> int:
    """Its port."""
    server = grpc.aio.server(options=_UNBOUNDED)
    service = _Service(ledger)
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            call, message(f"{name}Request").FromString, message(f"{name}Response").SerializeToString
        )
        for name, call in service.calls().items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.strip("/"), handlers),))
    port: int = server.add_insecure_port(f"{host}:0")
    await server.start()
    service.server = server  # which ends with the last reference to it
    return port


class _Service:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self.server = ledger, None

    def calls(self) -> dict[str, Callable[[Any, Any], Any]]:
        return {
            "ServerLive": self._live, "ServerReady": self._ready, "ServerMetadata": self._metadata,
            "ModelReady": self._model_ready, "ModelMetadata": self._model_metadata, "ModelConfig": self._config,
            "ModelStatistics": self._statistics, "ModelInfer": self._infer,
        }  # fmt: skip

    async def _live(self, request: Any, context: Any) -> Any:
        return message("ServerLiveResponse")(live=True)

    async def _ready(self, request: Any, context: Any) -> Any:
        return message("ServerReadyResponse")(ready=True)

    async def _metadata(self, request: Any, context: Any) -> Any:
        return message("ServerMetadataResponse")(name="null", version=kserve.VERSION, extensions=kserve.EXTENSIONS)

    async def _model(self, request: Any, context: Any) -> kserve.NullModel:
        try:
            return kserve.model_of(request.name, request.version)
        except kserve.RefusedError as error:
            return await context.abort(_CODES[error.status], str(error))  # type: ignore[no-any-return]  # it raises

    async def _model_ready(self, request: Any, context: Any) -> Any:
        return message("ModelReadyResponse")(ready=kserve.has_model(request.name, request.version))

    async def _model_metadata(self, request: Any, context: Any) -> Any:
        metadata = (await self._model(request, context)).metadata()
        return message("ModelMetadataResponse")(**metadata)

    async def _config(self, request: Any, context: Any) -> Any:
        config = (await self._model(request, context)).config(self._ledger.timing.instances)
        return message("ModelConfigResponse")(config=config)

    async def _statistics(self, request: Any, context: Any) -> Any:
        model = await self._model(request, context)
        return message("ModelStatisticsResponse")(model_stats=[kserve.statistics(model.name, self._ledger.truth)])

    async def _infer(self, request: Any, context: Any) -> Any:
        name = dict(context.invocation_metadata() or ()).get("x-request-id", "")
        try:
            model = kserve.model_of(request.model_name, request.model_version)
            outputs, n = model.echo(_inputs(request))
        except kserve.RefusedError as error:
            await context.abort(_CODES[error.status], str(error))
        sent, fault = (
            self._ledger.record_inference(name, model.name, n),
            self._ledger.fault_of(len(self._ledger.truth) - 1),
        )
        reply = message("ModelInferResponse")(
            model_name=model.name,
            model_version=kserve.VERSION,
            id=request.id,
            outputs=[{"name": t.name, "datatype": t.datatype, "shape": t.shape} for t in outputs],
            raw_output_contents=[t.data for t in outputs],
        )
        await asyncio.sleep(sent.arrived_s + sent.due_s[0] - time.perf_counter())
        match fault:
            case "stall":
                await asyncio.Event().wait()
            case "malformed":
                return message("ModelInferResponse")(model_name=model.name)
            case str():
                await context.abort(grpc.StatusCode.INTERNAL, "as it was told to")
        sent.sent_s.append(time.perf_counter())
        sent.n_tokens.append(n)
        return reply


def _inputs(request: Any) -> list[kserve.NullTensor]:
    """Parse the inputs of a request. raises RefusedError with Triton's wording"""
    tensors, raw = [], list(request.raw_input_contents)
    if raw and len(raw) != len(request.inputs):
        raise kserve.RefusedError(f"expected {len(request.inputs)} raw inputs, got {len(raw)}")
    for i, tensor in enumerate(request.inputs):
        if raw and tensor.HasField("contents"):
            raise kserve.RefusedError(
                f"contents field must not be specified when using raw_input_contents for '{tensor.name}'"
            )
        data = raw[i] if raw else _pack(tensor)
        try:
            kserve.check(tensor.name, tensor.datatype, tensor.shape, data)
        except (struct.error, ValueError, KeyError) as error:
            raise kserve.RefusedError(f"input '{tensor.name}': {error}") from None
        tensors.append(kserve.NullTensor(tensor.name, tensor.datatype, tuple(tensor.shape), data))
    return tensors


def _pack(contents: Any) -> bytes:
    if contents.datatype not in CONTENTS:
        raise kserve.RefusedError(f"{contents.datatype} data has to be raw")
    values = getattr(contents.contents, CONTENTS[contents.datatype])
    if contents.datatype == "BYTES":
        return kserve.join_bytes(values)
    return struct.pack(f"<{prod(contents.shape)}{kserve.FORMATS[contents.datatype]}", *values)
