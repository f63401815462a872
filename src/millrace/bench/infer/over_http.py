"""Inference over HTTP, by the client that asks for tokens, too: as JSON, or with tensors in binary behind it."""

import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any
from urllib.parse import quote

import msgspec

from millrace.bench.answer import Answer, Failure
from millrace.bench.client import Client, Target
from millrace.bench.endpoints import Endpoint
from millrace.bench.infer.model import Model, told_model
from millrace.bench.infer.target import InferTarget
from millrace.bench.infer.tensors import Tensor
from millrace.errors import MachineError

ASIDE_S = 30.0  # for what is asked beside the load
_HEADER = b"inference-header-content-length: %d\r\n"


class _Binary(msgspec.Struct):
    binary_data_size: int | None = None


class _Output(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    data: msgspec.Raw = msgspec.Raw()  # left as it is: reading a million numbers would take the client's time
    parameters: _Binary | None = None


class _Answer(msgspec.Struct):
    outputs: list[_Output]


_answer = msgspec.json.Decoder(_Answer)


def _take(answer: Answer, data: bytes) -> None:
    """raises msgspec.DecodeError for what is no answer"""
    n = len(data) if answer.n_json is None else answer.n_json
    found = _answer.decode(data[:n])
    sizes = [o.parameters.binary_data_size if o.parameters else None for o in found.outputs]
    n_raw = sum(size for size in sizes if size is not None)
    if not found.outputs:
        raise msgspec.DecodeError("an answer without outputs")
    if any(size is None and not memoryview(o.data) for size, o in zip(sizes, found.outputs, strict=True)):
        raise msgspec.DecodeError("an output without data")
    if n + n_raw != len(data):
        raise msgspec.DecodeError(f"{len(data) - n} bytes of tensors, where binary_data_size says {n_raw}")


class OverHttp:
    """What `Transport` says."""

    def __init__(self, target: InferTarget) -> None:
        self._target = target
        self._path = f"/v2/models/{quote(target.model, safe='')}" + (
            f"/versions/{quote(target.version, safe='')}" if target.version else ""
        )
        path = f"{self._path}/infer".replace("{", "{{").replace("}", "}}")
        kind = "application/octet-stream" if target.binary else "application/json"
        headers = {"content-type": kind, **target.headers}
        infer = Endpoint("infer", path, lambda q: {}, _take, _take, streams=False)
        self._client = Client(Target(target.url, infer, target.model, False, False, headers, target.timeout_s))

    async def __aenter__(self) -> "OverHttp":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.__aexit__(kind, error, trace)

    async def model(self) -> Model:
        answer = await self._client.get(self._path, ASIDE_S)
        if answer.failure is Failure.UNREACHABLE:
            raise MachineError(f"{self._target.url}: {answer.detail}", "a server that listens there", "start it")
        metadata = _object(answer)
        if metadata is None:
            what = f'{self._target.url} tells nothing of the model "{self._target.model}": {answer.detail or "no JSON"}'
            raise MachineError(what, f"KServe's metadata at {self._path}", "correct --model or the URL")
        return told_model(metadata, _object(await self._client.get(f"{self._path}/config", ASIDE_S)))

    async def statistics(self) -> Mapping[str, Any] | None:
        found = _object(await self._client.get(f"{self._path}/stats", ASIDE_S))
        told = (found or {}).get("model_stats")
        return told[0] if isinstance(told, list) and told and isinstance(told[0], dict) else None

    def body(self, tensors: Sequence[Tensor]) -> tuple[bytes, bytes]:
        """And the lines of its head."""
        inputs: list[dict[str, Any]] = []
        raw = [t.raw() for t in tensors] if self._target.binary else []
        for i, t in enumerate(tensors):
            data = {"parameters": {"binary_data_size": len(raw[i])}} if raw else {"data": t.listed()}
            inputs.append({"name": t.name, "shape": t.values.shape, "datatype": t.datatype, **data})
        wanted = {"parameters": {"binary_data_output": True}} if self._target.binary else {}
        head = msgspec.json.encode({**wanted, "inputs": inputs})
        return b"".join((head, *raw)), _HEADER % len(head) if raw else b""

    async def send(self, body: tuple[bytes, bytes], answer: Answer) -> None:
        await self._client.send(answer, *body)


def _object(answer: Answer) -> dict[str, Any] | None:
    if answer.failure is not None:
        return None
    try:
        found = json.loads(answer.text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
