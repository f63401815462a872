"""Inference over gRPC. Requests are serialised once; responses are parsed after their arrival is timestamped."""

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from millrace.bench.client.request_record import BenchRecord, Failure, request_ids
from millrace.bench.infer.model import BenchModel, parse_model
from millrace.bench.infer.target import InferTarget
from millrace.errors import ConfigError, MachineError
from millrace.model_repository.config.enums import InstanceKind
from millrace.model_repository.request.tensors import InferTensor, check_count, check_size, n_items
from millrace.serve.protocols.kserve.grpc.protobuf_messages import CONTENTS, SERVICE, message

ASIDE_S = 30.0  # for what is asked beside the load
EACH = (
    6  # requests that share a connection, as Triton's own client has it: one alone bears no more than one thread does
)
MAX_CONNECTIONS = 64
_OPTIONS = [
    ("grpc.max_receive_message_length", 1 << 30), ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # or all channels would share one connection
]  # fmt: skip
_KINDS = {int(kind): kind.name for kind in InstanceKind}  # a server may say another
_METADATA = re.compile(r"[0-9a-z_.-]+")


def check_headers(headers: Mapping[str, str]) -> None:
    """Refuse headers that gRPC cannot send. raises ConfigError"""
    for name, value in headers.items():
        lower = name.lower()
        if not _METADATA.fullmatch(lower) or lower.startswith("grpc-"):
            raise ConfigError(f'the header "{name}" over gRPC', "letters, digits, - _ . and not grpc-", "correct it")
        if lower.endswith("-bin"):
            raise ConfigError(f'the header "{name}", which is binary over gRPC', "one of text", "leave it out")
        if not (value.isascii() and value.isprintable()):
            raise ConfigError(f'the header "{name}: {value}"', "printable ASCII", "correct it")


class GrpcTransport:
    """A `Transport` over gRPC. at_a_time: expected concurrency"""

    def __init__(self, target: InferTarget, at_a_time: int) -> None:
        scheme, place = _place(target.url)
        self._target, self._n_requests, self._ids = target, 0, request_ids()
        self._headers = [(name.lower(), value) for name, value in target.headers.items()]
        n = min(MAX_CONNECTIONS, -(-at_a_time // EACH))
        self._channels = [
            grpc.aio.secure_channel(place, grpc.ssl_channel_credentials(), _OPTIONS)
            if scheme == "https" else grpc.aio.insecure_channel(place, _OPTIONS)
            for _ in range(n)
        ]  # fmt: skip
        self._infer = [channel.unary_unary(f"{SERVICE}ModelInfer") for channel in self._channels]

    async def __aenter__(self) -> "GrpcTransport":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self._channels:
            await channel.close()

    async def _call(self, name: str) -> Any:
        """Call a method for this model. raises grpc.aio.AioRpcError, DecodeError"""
        call = self._channels[0].unary_unary(f"{SERVICE}{name}")
        request = message(f"{name}Request")(name=self._target.model, version=self._target.version)
        reply = await call(request.SerializeToString(), timeout=ASIDE_S, metadata=self._headers)
        return message(f"{name}Response").FromString(reply)  # grpc itself would give None for what cannot be read

    async def model(self) -> BenchModel:
        try:
            reply = await self._call("ModelMetadata")
        except (grpc.aio.AioRpcError, DecodeError) as error:
            reason = _error_text(error) if isinstance(error, grpc.aio.AioRpcError) else f"no message: {error}"
            message = f'{self._target.url} tells nothing of the model "{self._target.model}": {reason}'
            expected, fix = "KServe's gRPC service, which Triton has on port 8001", "correct --model or the URL"
            raise MachineError(message, expected, fix) from None
        await asyncio.gather(*(channel.channel_ready() for channel in self._channels))  # none connects in the load
        inputs, outputs = (
            [{"name": t.name, "datatype": t.datatype, "shape": list(t.shape)} for t in tensors]
            for tensors in (reply.inputs, reply.outputs)
        )
        metadata = {
            "name": reply.name, "versions": list(reply.versions), "platform": reply.platform, "inputs": inputs,
            "outputs": outputs,
        }  # fmt: skip
        return parse_model(metadata, await self._config())

    async def _config(self) -> Mapping[str, Any] | None:
        try:
            config = (await self._call("ModelConfig")).config
        except (grpc.aio.AioRpcError, DecodeError):  # not every server of the protocol has Triton's extensions
            return None
        groups = [
            {"kind": _KINDS.get(g.kind, "KIND_AUTO"), "count": g.count, "gpus": list(g.gpus)}
            for g in config.instance_group
        ]
        return {"max_batch_size": config.max_batch_size, "backend": config.backend, "instance_group": groups}

    async def statistics(self) -> Mapping[str, Any] | None:
        try:
            stats = (await self._call("ModelStatistics")).model_stats
        except (grpc.aio.AioRpcError, DecodeError):
            return None
        if not stats:
            return None
        one, stages = stats[0], {}
        for field in one.inference_stats.DESCRIPTOR.fields:
            stage = getattr(one.inference_stats, field.name)
            stages[field.name] = {"count": stage.count, "ns": stage.ns}
        return {
            "inference_count": one.inference_count, "execution_count": one.execution_count, "inference_stats": stages,
        }  # fmt: skip

    def body(self, tensors: Sequence[InferTensor]) -> bytes:
        request = message("ModelInferRequest")(
            model_name=self._target.model, model_version=self._target.version,
            inputs=[{"name": t.name, "datatype": t.datatype, "shape": t.values.shape} for t in tensors],
            raw_input_contents=[t.raw() for t in tensors],
        )  # fmt: skip
        body: bytes = request.SerializeToString()
        return body

    async def send(self, body: bytes, answer: BenchRecord) -> None:
        self._n_requests += 1
        answer.id = next(self._ids)
        call = self._infer[self._n_requests % len(self._infer)]
        headers = (*self._headers, ("x-request-id", answer.id))
        answer.sent_s = time.perf_counter()
        answer.intended_s = answer.intended_s or answer.sent_s
        try:
            data = await call(body, timeout=self._target.timeout_s, metadata=headers)
        except grpc.aio.AioRpcError as error:
            answer.end_s = time.perf_counter()
            return answer.fail(_failure(error), _error_text(error))
        answer.end_s = time.perf_counter()
        try:
            _take(answer, message("ModelInferResponse").FromString(data))
        except (DecodeError, ValueError) as error:
            answer.fail(Failure.MALFORMED, str(error))
        return None


def _take(answer: BenchRecord, reply: Any) -> None:
    """Check outputs against their data and count the items. raises ValueError"""
    n_raw = len(reply.raw_output_contents)
    if not reply.outputs or (n_raw and n_raw != len(reply.outputs)):
        raise ValueError(f"{len(reply.outputs)} outputs, {n_raw} of them with data")
    for i, output in enumerate(reply.outputs):
        try:
            if n_raw:
                check_size(output.datatype, output.shape, len(reply.raw_output_contents[i]))
            else:
                listed = CONTENTS.get(output.datatype)
                check_count(output.datatype, output.shape, len(getattr(output.contents, listed)) if listed else 0)
        except ValueError as error:
            raise ValueError(f'output "{output.name:.80}": {error}') from None
    answer.n_reported = n_items([output.shape for output in reply.outputs])


def _place(url: str) -> tuple[str, str]:
    """Split a URL into scheme and HOST:PORT. raises ConfigError"""
    scheme, _, rest = url.rpartition("://")
    place = rest.rstrip("/")
    host, _, port = place.rpartition(":")
    if scheme not in ("", "http", "https", "grpc") or not host or not port.isdigit() or "/" in place:
        raise ConfigError(f'the URL is "{url}"', "HOST:PORT, or https://HOST:PORT", "write it so")
    return scheme, place


def _failure(error: "grpc.aio.AioRpcError") -> Failure:
    code = error.code()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Failure.TIMEOUT
    if code is grpc.StatusCode.UNAVAILABLE:
        details = str(error.details()).lower()
        if "connect" in details:
            return Failure.UNREACHABLE
        if "socket closed" in details or "goaway" in details or "reset" in details:
            return Failure.BROKEN_OFF
    return Failure.STATUS


def _error_text(error: "grpc.aio.AioRpcError") -> str:
    return f"{error.code().name}: {str(error.details())[:500]}"
