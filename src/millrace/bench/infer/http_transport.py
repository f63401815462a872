"""Inference over HTTP with the client of the LLM benchmarks, as JSON or with binary tensors."""

import json
import re
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Annotated, Any
from urllib.parse import quote

import msgspec

from millrace.bench.client.client import BenchTarget, Client
from millrace.bench.client.endpoints import BenchEndpoint
from millrace.bench.client.request_record import BenchRecord, Failure
from millrace.bench.infer.model import BenchModel, parse_model
from millrace.bench.infer.target import InferTarget
from millrace.errors import MachineError
from millrace.model_repository.request.tensors import BYTES, InferTensor, check_count, check_size, n_elements, n_items

ASIDE_S = 30.0  # for what is asked beside the load
_EMPTY = re.compile(rb"[\[\], \t\r\n]*")  # lists that hold nothing
_HEADER = b"inference-header-content-length: %d\r\n"


class _Binary(msgspec.Struct):
    binary_data_size: Annotated[int, msgspec.Meta(ge=0)] | None = None


class _Output(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    data: msgspec.Raw = msgspec.Raw()  # left as it is: reading a million numbers would take the client's time
    parameters: _Binary | None = None


class _InferResponse(msgspec.Struct):
    outputs: list[_Output]


_answer = msgspec.json.Decoder(_InferResponse)


def _take(answer: BenchRecord, data: bytes) -> None:
    """Check outputs against their data and count the items. raises msgspec.DecodeError"""
    n = len(data) if answer.n_json is None else answer.n_json
    reply = _answer.decode(data[:n])
    if not reply.outputs:
        raise msgspec.DecodeError("an answer without outputs")
    n_raw = 0
    for output in reply.outputs:
        size = output.parameters.binary_data_size if output.parameters else None
        try:
            if size is None:
                _check_listed(output)
            else:
                check_size(output.datatype, output.shape, size)
        except ValueError as error:
            raise msgspec.DecodeError(f'output "{output.name:.80}": {error}') from None
        n_raw += size or 0
    if n + n_raw != len(data):
        raise msgspec.DecodeError(f"{len(data) - n} bytes of tensors, where binary_data_size says {n_raw}")
    answer.n_reported = n_items([o.shape for o in reply.outputs])


def _check_listed(output: _Output) -> None:
    """Check JSON data, flat or nested, by counting commas outside of strings. raises ValueError"""
    data = bytes(output.data)
    if not data.startswith(b"["):
        raise ValueError("no list of data")
    n = 0 if _EMPTY.fullmatch(data) else data.count(b",") + 1
    if output.datatype != BYTES or not 0 < n_elements(BYTES, output.shape) <= n:
        check_count(output.datatype, output.shape, n)


class HttpTransport:
    """A `Transport` over HTTP."""

    def __init__(self, target: InferTarget) -> None:
        self._target = target
        self._path = f"/v2/models/{quote(target.model, safe='')}" + (
            f"/versions/{quote(target.version, safe='')}" if target.version else ""
        )
        path = f"{self._path}/infer".replace("{", "{{").replace("}", "}}")
        kind = "application/octet-stream" if target.binary else "application/json"
        headers = {"content-type": kind, **target.headers}
        infer = BenchEndpoint("infer", path, lambda q: {}, _take, _take, streams=False)
        self._client = Client(BenchTarget(target.url, infer, target.model, False, False, headers, target.timeout_s))

    async def __aenter__(self) -> "HttpTransport":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.__aexit__(kind, error, trace)

    async def model(self) -> BenchModel:
        answer = await self._client.get(self._path, ASIDE_S)
        if answer.failure is Failure.UNREACHABLE:
            raise MachineError(f"{self._target.url}: {answer.detail}", "a server that listens there", "start it")
        metadata = _object(answer)
        if metadata is None:
            message = (
                f'{self._target.url} tells nothing of the model "{self._target.model}": {answer.detail or "no JSON"}'
            )
            raise MachineError(message, f"KServe's metadata at {self._path}", "correct --model or the URL")
        return parse_model(metadata, _object(await self._client.get(f"{self._path}/config", ASIDE_S)))

    async def statistics(self) -> Mapping[str, Any] | None:
        page = _object(await self._client.get(f"{self._path}/stats", ASIDE_S))
        stats = (page or {}).get("model_stats")
        return stats[0] if isinstance(stats, list) and stats and isinstance(stats[0], dict) else None

    def body(self, tensors: Sequence[InferTensor]) -> tuple[bytes, bytes]:
        """Encode a request and its extra headers."""
        inputs: list[dict[str, Any]] = []
        raw = [t.raw() for t in tensors] if self._target.binary else []
        for i, t in enumerate(tensors):
            data = {"parameters": {"binary_data_size": len(raw[i])}} if raw else {"data": t.to_json_values()}
            inputs.append({"name": t.name, "shape": t.values.shape, "datatype": t.datatype, **data})
        options = {"parameters": {"binary_data_output": True}} if self._target.binary else {}
        head = msgspec.json.encode({**options, "inputs": inputs})
        return b"".join((head, *raw)), _HEADER % len(head) if raw else b""

    async def send(self, body: tuple[bytes, bytes], answer: BenchRecord) -> None:
        await self._client.send(answer, *body)


def _object(answer: BenchRecord) -> dict[str, Any] | None:
    if answer.failure is not None:
        return None
    try:
        document = json.loads(answer.text)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None
