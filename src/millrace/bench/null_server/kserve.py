"""KServe protocol of the null server: models that echo their inputs, as JSON or in binary.

`null` takes 16 FP32 and 16 INT32 in batches; `null_single` 16 FP32 without batching; `null_FP64`, `null_BYTES`, ... any
number of one datatype; `any` takes everything. Implemented with `struct`, independently of the client's parser.
"""

import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

from millrace.bench.null_server.ledger import Sent
from millrace.bench.null_server.replies import plain

FORMATS = {
    "BOOL": "?", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q", "INT8": "b", "INT16": "h", "INT32": "i",
    "INT64": "q", "FP16": "e", "FP32": "f", "FP64": "d", "BF16": "H",
}  # fmt: skip
CONFIG_TYPES = {**{name: f"TYPE_{name}" for name in FORMATS}, "BYTES": "TYPE_STRING"}
MAX_BATCH, VERSION = 128, "1"
EXTENSIONS = ("binary_tensor_data", "model_configuration", "statistics")
HEADER = "Inference-Header-Content-Length"
_ONLY_BINARY = ("FP16", "BF16")
_ROUTE = re.compile(r"/v2/models/([^/]+)(?:/versions/([0-9]+))?(?:/(\w+))?")
_STAGES = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")


class RefusedError(Exception):
    """An error with Triton's message and HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class NullTensor:
    """data: raw, as in the binary extension"""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class NullModel:
    """A model. tensors: (datatype, dims) of INPUT0, INPUT1, ..., and of its outputs; max_batch 0: no batching"""

    name: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    max_batch: int = MAX_BATCH

    def tensor_metadata(self, prefix: str) -> list[dict[str, Any]]:
        batch = [-1] if self.max_batch else []
        return [
            {"name": f"{prefix}{i}", "datatype": datatype, "shape": [*batch, *dims]}
            for i, (datatype, dims) in enumerate(self.tensors)
        ]

    def metadata(self) -> dict[str, Any]:
        return {
            "name": self.name, "versions": [VERSION], "platform": "null", "inputs": self.tensor_metadata("INPUT"),
            "outputs": self.tensor_metadata("OUTPUT"),
        }  # fmt: skip

    def config(self, instances: int) -> dict[str, Any]:
        def tensors(prefix: str) -> list[dict[str, Any]]:
            return [
                {"name": f"{prefix}{i}", "data_type": CONFIG_TYPES[datatype], "dims": list(dims)}
                for i, (datatype, dims) in enumerate(self.tensors)
            ]

        group = {"name": self.name, "kind": "KIND_CPU", "count": max(1, instances), "gpus": []}
        return {
            "name": self.name, "platform": "", "backend": "null", "max_batch_size": self.max_batch,
            "input": tensors("INPUT"), "output": tensors("OUTPUT"), "instance_group": [group],
        }  # fmt: skip

    def echo(self, inputs: Sequence[NullTensor]) -> tuple[list[NullTensor], int]:
        """Return the outputs and the batch size. raises RefusedError with Triton's wording"""
        if self.name == "any":
            return [NullTensor("OUTPUT", t.datatype, t.shape, t.data) for t in inputs[:1]], inputs[0].shape[0]
        expected = {t["name"]: t for t in self.tensor_metadata("INPUT")}
        if {t.name for t in inputs} != expected.keys() or len(inputs) != len(expected):
            n = len(expected)
            raise RefusedError(f"expected number of inputs between {n} and {n} but got {len(inputs)}")
        for t in inputs:
            shape = expected[t.name]["shape"]
            fits = len(shape) == len(t.shape) and all(a in (-1, b) for a, b in zip(shape, t.shape, strict=True))
            if t.datatype != expected[t.name]["datatype"]:
                raise RefusedError(f"inference input '{t.name}' data-type is '{t.datatype}'")
            if not fits:
                raise RefusedError(
                    f"unexpected shape for input '{t.name}' for model '{self.name}'. Expected {shape}, got {t.shape}"
                )
        n = inputs[0].shape[0] if self.max_batch else 1
        if self.max_batch and not 1 <= n <= self.max_batch:
            raise RefusedError(f"inference request batch-size must be <= {self.max_batch} for '{self.name}'")
        return [NullTensor(t.name.replace("INPUT", "OUTPUT"), t.datatype, t.shape, t.data) for t in inputs], n


def model_of(name: str, version: str = "") -> NullModel:
    """Find a model. raises RefusedError if there is none"""
    kind = name.removeprefix("null_")
    if version in ("", VERSION):
        if name == "null":
            return NullModel(name, (("FP32", (16,)), ("INT32", (16,))))
        if name == "null_single":
            return NullModel(name, (("FP32", (16,)),), 0)
        if kind != name and kind in CONFIG_TYPES:
            return NullModel(name, ((kind, (-1,)),))
        if name == "any":
            return NullModel(name, ())
    detail = f"'{name}' version {version} is not found" if version else f"'{name}' is not found"
    raise RefusedError(f"Request for unknown model: {detail}", 404)


def has_model(name: str, version: str) -> bool:
    try:
        model_of(name, version)
    except RefusedError:
        return False
    return True


def metadata_reply(method: str, path: str, sent: Iterable[Sent], instances: int) -> bytes:
    """Answer all requests except inference: health, metadata, config, statistics."""
    if method != "GET":
        return plain(405, {"error": "Method Not Allowed"})
    if path in ("/v2", "/v2/"):
        return plain(200, {"name": "null", "version": VERSION, "extensions": EXTENSIONS})
    if path in ("/v2/health/live", "/v2/health/ready"):
        return b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
    match = _ROUTE.fullmatch(path)
    if match is None:
        return plain(404, {"error": "Not Found"})
    if match[3] == "ready" and not has_model(match[1], match[2] or ""):
        return plain(400, {"error": "Model version not ready"})
    try:
        model = model_of(match[1], match[2] or "")
    except RefusedError as error:
        return plain(error.status, {"error": str(error)})
    match match[3]:
        case None:
            return plain(200, model.metadata())
        case "ready":
            return b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
        case "config":
            return plain(200, model.config(instances))
        case "stats":
            return plain(200, {"model_stats": [statistics(model.name, sent)]})
    return plain(404, {"error": "Not Found"})


def statistics(name: str, sent: Iterable[Sent]) -> dict[str, Any]:
    """Return Triton's statistics of the answered requests: counts and nanoseconds."""
    done = [s for s in sent if s.kind == "infer" and s.model == name and s.sent_s]
    queue_ns = sum(round(1e9 * s.queue_s) for s in done)
    all_ns = sum(round(1e9 * (s.sent_s[0] - s.arrived_s)) for s in done)
    stages = {stage: {"count": 0, "ns": 0} for stage in _STAGES}
    stages |= {stage: {"count": len(done), "ns": 0} for stage in ("compute_input", "compute_output")}
    stages["success"] = {"count": len(done), "ns": all_ns}
    stages["queue"] = {"count": len(done), "ns": queue_ns}
    stages["compute_infer"] = {"count": len(done), "ns": all_ns - queue_ns}
    return {
        "name": name, "version": VERSION, "last_inference": 0, "inference_count": sum(sum(s.n_tokens) for s in done),
        "execution_count": len(done), "inference_stats": stages,
    }  # fmt: skip


def read_request(body: bytes, n_json: int | None) -> tuple[dict[str, Any], list[NullTensor]]:
    """Parse the JSON and the inputs of a request. raises RefusedError"""
    n = len(body) if n_json is None else n_json
    if not 0 < n <= len(body):
        raise RefusedError(f"inference header size should be in range (0, {len(body)}), got: {n}")
    try:
        request: dict[str, Any] = json.loads(body[:n])
        inputs, at = [], n
        for tensor in request["inputs"]:
            size = (tensor.get("parameters") or {}).get("binary_data_size")
            shape, datatype = tuple(map(int, tensor["shape"])), tensor["datatype"]
            data = from_json(tensor["data"], datatype) if size is None else body[at : at + size]
            at += size or 0
            check(tensor["name"], datatype, shape, data)
            inputs.append(NullTensor(tensor["name"], datatype, shape, data))
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise RefusedError(f"Unable to parse 'inputs': {type(error).__name__}: {error}") from None
    if at != len(body):
        raise RefusedError(f"unexpected additional input data for model: {len(body) - at} bytes")
    return request, inputs


def check(name: str, datatype: str, shape: Sequence[int], data: bytes) -> None:
    n = len(split_bytes(data)) if datatype == "BYTES" else len(data) / struct.calcsize("<" + FORMATS[datatype])
    if n != prod(shape):
        raise RefusedError(f"input '{name}' got unexpected element count {n:g}, expected {prod(shape)}")


def split_bytes(data: bytes) -> list[bytes]:
    """Split length-prefixed strings. raises struct.error, ValueError"""
    values, at = [], 0
    while at < len(data):
        (n,) = struct.unpack_from("<I", data, at)
        values.append(data[at + 4 : at + 4 + n])
        at += 4 + n
    if at != len(data):
        raise ValueError("a string that ends too early")
    return values


def join_bytes(values: Iterable[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(v)) + v for v in values)


def from_json(data: Any, datatype: str) -> bytes:
    """Pack nested or flat JSON values. raises RefusedError, ValueError, struct.error"""
    flat = list(_flat(data))
    if datatype in _ONLY_BINARY:
        raise RefusedError(f"receiving {datatype} data via JSON is not supported. Please use the binary data format")
    if datatype == "BYTES":
        return join_bytes(str(v).encode() for v in flat)
    return struct.pack(f"<{len(flat)}{FORMATS[datatype]}", *flat)


def _flat(data: Any) -> Iterable[Any]:
    return chain.from_iterable(map(_flat, data)) if isinstance(data, list) else [data]


def infer_reply(model: str, request: Mapping[str, Any], outputs: Sequence[NullTensor]) -> bytes:
    """Return the HTTP response of an inference; outputs are binary if they, or the whole request, ask for it."""
    output_parameters = {o["name"]: o.get("parameters") or {} for o in request.get("outputs") or ()}
    binary_by_default = bool((request.get("parameters") or {}).get("binary_data_output"))
    entries, raw = [], []
    for t in outputs:
        if output_parameters and t.name not in output_parameters:
            continue
        tensor: dict[str, Any] = {"name": t.name, "datatype": t.datatype, "shape": t.shape}
        if output_parameters.get(t.name, {}).get("binary_data", binary_by_default):
            tensor["parameters"] = {"binary_data_size": len(t.data)}
            raw.append(t.data)
        elif t.datatype == "BYTES":
            tensor["data"] = [v.decode(errors="replace") for v in split_bytes(t.data)]
        elif t.datatype in _ONLY_BINARY:
            return plain(400, {"error": f"sending {t.datatype} data via JSON is not supported."})
        else:
            tensor["data"] = list(struct.unpack(f"<{prod(t.shape)}{FORMATS[t.datatype]}", t.data))
        entries.append(tensor)
    more = {"id": request["id"]} if "id" in request else {}
    head = json.dumps({**more, "model_name": model, "model_version": VERSION, "outputs": entries}).encode()
    kind = b"application/octet-stream" if raw else b"application/json"
    lines = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n" % kind
    if raw:
        lines += b"%b: %d\r\n" % (HEADER.encode(), len(head))
    body = b"".join((head, *raw))
    return b"%bcontent-length: %d\r\n\r\n%b" % (lines, len(body), body)
