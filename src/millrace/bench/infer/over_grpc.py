"""Inference over gRPC. A request is made into bytes once; what arrives is read when its time has been taken."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from millrace.bench.answer import Answer, Failure
from millrace.bench.infer.messages import KINDS, SERVICE, message
from millrace.bench.infer.model import Model, told_model
from millrace.bench.infer.target import InferTarget
from millrace.bench.infer.tensors import Tensor
from millrace.errors import ConfigError, MachineError

ASIDE_S = 30.0  # for what is asked beside the load
EACH = (
    6  # requests that share a connection, as Triton's own client has it: one alone bears no more than one thread does
)
MOST_CONNECTIONS = 64
_OPTIONS = [
    ("grpc.max_receive_message_length", 1 << 30), ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # or all channels would share one connection
]  # fmt: skip


class OverGrpc:
    """What `Transport` says. at_a_time: requests that will be under way at once"""

    def __init__(self, target: InferTarget, at_a_time: int) -> None:
        scheme, place = _place(target.url)
        self._target, self._n_asked = target, 0
        self._headers = [(name.lower(), value) for name, value in target.headers.items()]
        n = min(MOST_CONNECTIONS, -(-at_a_time // EACH))
        self._channels = [
            grpc.aio.secure_channel(place, grpc.ssl_channel_credentials(), _OPTIONS)
            if scheme == "https" else grpc.aio.insecure_channel(place, _OPTIONS)
            for _ in range(n)
        ]  # fmt: skip
        self._infer = [channel.unary_unary(f"{SERVICE}ModelInfer") for channel in self._channels]

    async def __aenter__(self) -> "OverGrpc":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self._channels:
            await channel.close()

    async def _called(self, name: str) -> Any:
        """Of this model. raises grpc.aio.AioRpcError"""
        call = self._channels[0].unary_unary(
            f"{SERVICE}{name}", message(f"{name}Request").SerializeToString, message(f"{name}Response").FromString
        )
        asked = message(f"{name}Request")(name=self._target.model, version=self._target.version)
        return await call(asked, timeout=ASIDE_S, metadata=self._headers)

    async def model(self) -> Model:
        try:
            told = await self._called("ModelMetadata")
        except grpc.aio.AioRpcError as error:
            what = f'{self._target.url} tells nothing of the model "{self._target.model}": {_said(error)}'
            expected, mend = "KServe's gRPC service, which Triton has on port 8001", "correct --model or the URL"
            raise MachineError(what, expected, mend) from None
        await asyncio.gather(*(channel.channel_ready() for channel in self._channels))  # none connects in the load
        inputs, outputs = (
            [{"name": t.name, "datatype": t.datatype, "shape": list(t.shape)} for t in tensors]
            for tensors in (told.inputs, told.outputs)
        )
        metadata = {
            "name": told.name, "versions": list(told.versions), "platform": told.platform, "inputs": inputs,
            "outputs": outputs,
        }  # fmt: skip
        return told_model(metadata, await self._config())

    async def _config(self) -> Mapping[str, Any] | None:
        try:
            told = (await self._called("ModelConfig")).config
        except grpc.aio.AioRpcError:  # not every server of the protocol has Triton's extensions
            return None
        groups = [
            {"kind": KINDS[g.kind] if 0 <= g.kind < len(KINDS) else "KIND_AUTO", "count": g.count, "gpus": list(g.gpus)}
            for g in told.instance_group
        ]
        return {"max_batch_size": told.max_batch_size, "backend": told.backend, "instance_group": groups}

    async def statistics(self) -> Mapping[str, Any] | None:
        try:
            told = (await self._called("ModelStatistics")).model_stats
        except grpc.aio.AioRpcError:
            return None
        if not told:
            return None
        one, stages = told[0], {}
        for field in one.inference_stats.DESCRIPTOR.fields:
            stage = getattr(one.inference_stats, field.name)
            stages[field.name] = {"count": stage.count, "ns": stage.ns}
        return {
            "inference_count": one.inference_count, "execution_count": one.execution_count, "inference_stats": stages,
        }  # fmt: skip

    def body(self, tensors: Sequence[Tensor]) -> bytes:
        request = message("ModelInferRequest")(
            model_name=self._target.model, model_version=self._target.version,
            inputs=[{"name": t.name, "datatype": t.datatype, "shape": t.values.shape} for t in tensors],
            raw_input_contents=[t.raw() for t in tensors],
        )  # fmt: skip
        body: bytes = request.SerializeToString()
        return body

    async def send(self, body: bytes, answer: Answer) -> None:
        self._n_asked += 1
        answer.id = f"millrace-bench-{self._n_asked}"
        call = self._infer[self._n_asked % len(self._infer)]
        headers = (*self._headers, ("x-request-id", answer.id))
        answer.sent_s = time.perf_counter()
        answer.intended_s = answer.intended_s or answer.sent_s
        try:
            data = await call(body, timeout=self._target.timeout_s, metadata=headers)
        except grpc.aio.AioRpcError as error:
            answer.end_s = time.perf_counter()
            return answer.fail(_failure(error), _said(error))
        answer.end_s = time.perf_counter()
        try:
            found = message("ModelInferResponse").FromString(data)
        except DecodeError as error:
            return answer.fail(Failure.MALFORMED, str(error))
        n_raw = len(found.raw_output_contents)
        if not found.outputs or (n_raw and n_raw != len(found.outputs)):
            answer.fail(Failure.MALFORMED, f"{len(found.outputs)} outputs, {n_raw} of them with data")
        return None


def _place(url: str) -> tuple[str, str]:
    """Scheme and HOST:PORT. raises ConfigError"""
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
        said = str(error.details()).lower()
        if "connect" in said:
            return Failure.UNREACHABLE
        if "socket closed" in said or "goaway" in said or "reset" in said:
            return Failure.BROKEN_OFF
    return Failure.STATUS


def _said(error: "grpc.aio.AioRpcError") -> str:
    return f"{error.code().name}: {str(error.details())[:500]}"
