"""Encoding of inference responses over HTTP: the JSON, binary tensors after it, errors, and the timing header."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from millrace.model_repository.models.model_version import Model
from millrace.model_repository.request.concatenation import concatenate
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.status_code import invalid
from millrace.model_repository.request.tensors import (
    BYTES,
    ONLY_BINARY,
    WIRE_NAMES,
    Array,
    InferTensor,
    objects,
    output_datatype,
)
from millrace.serve.protocols.kserve.http.infer_request import HttpOutputOptions

_PIECE = 1 << 16  # values
TIMING_HEADER = b"x-millrace-timing"  # requests the header `server-timing`


def requested_outputs(
    model: Model, request: InferRequest, response: InferResponse, n_classes: Mapping[str, int]
) -> Iterator[InferTensor]:
    """Yield the requested outputs, some with their classes instead of their values. raises StatusError"""
    for name, array in response.outputs.items():
        if request.outputs and name not in request.outputs:
            continue
        if n := n_classes.get(name):
            array = classify(array, n, model.labels.get(name, ()), has_batch=request.batch_size > 0)
        yield InferTensor(name, output_datatype(name, array), array)


def encode_error(message: str) -> bytes:
    """Encode an error; the same format is used for all routes and streams."""
    return msgspec.json.encode({"error": message})


def encode_response(
    model: Model, request: InferRequest, response: InferResponse, output_options: HttpOutputOptions
) -> tuple[bytes, int | None]:
    """Return the body, and how many bytes of it are JSON, None for all of it. raises StatusError"""
    outputs, raw = list[dict[str, Any]](), list[bytes | memoryview]()
    long: dict[str, Sequence[bytes]] = {}  # JSON of an output's data, in pieces
    for tensor in requested_outputs(model, request, response, output_options.n_classes):
        name, datatype = tensor.name, tensor.datatype
        member: dict[str, Any] = {"name": name, "datatype": datatype, "shape": tensor.values.shape}
        if (place := output_options.shared.get(name)) is not None:
            place.write(
                name, tensor.raw()
            )  # and nothing more is said: Triton's client in C++ takes any parameters for a size
        elif output_options.binary.get(name, output_options.binary_default):
            parts = tensor.raw_parts()
            raw += parts
            member["parameters"] = {"binary_data_size": sum(map(len, parts))}
        elif tensor.values.size <= _PIECE:
            member["data"] = flat_list(name, datatype, tensor.values)
        else:
            long[name] = _listed_pieces(name, datatype, tensor.values)
        outputs.append(member)
    answer: dict[str, Any] = {"id": request.id} if request.id else {}
    answer["model_name"], answer["model_version"] = model.name, str(model.version)
    if response.parameters:
        answer["parameters"] = response.parameters
    if not long:
        answer["outputs"] = outputs
        head: Sequence[bytes] = (msgspec.json.encode(answer),)
    else:
        pieces = list[bytes]()
        for member in outputs:
            pieces += (b",", *_with_member(msgspec.json.encode(member), b"data", long.get(member["name"], ())))
        head = _with_member(msgspec.json.encode(answer), b"outputs", (b"[", *pieces[1:], b"]"))
    if not raw and len(head) == 1:
        return head[0], None
    return concatenate([*head, *raw]), sum(map(len, head)) if raw else None


def _with_member(encoded: bytes, name: bytes, value: Sequence[bytes]) -> Sequence[bytes]:
    """Return a non-empty JSON object with one more member, if it has a value; in pieces."""
    return (encoded[:-1], b',"%b":' % name, *value, b"}") if value else (encoded,)


def _listed_pieces(name: str, datatype: str, array: Array) -> Sequence[bytes]:
    """Return the JSON of `flat_list` in pieces, because encoding holds the interpreter lock. raises StatusError"""
    flat, parts = array.reshape(-1), list[bytes]()
    for i in range(0, len(flat), _PIECE):
        parts += (b",", msgspec.json.encode(flat_list(name, datatype, flat[i : i + _PIECE]))[1:-1])
    return (b"[", *parts[1:], b"]")


def flat_list(name: str, datatype: str, array: Array) -> list[Any]:
    """Return an array as a flat list for JSON; NaN and infinities become null when encoded."""
    if datatype in ONLY_BINARY:
        what = f"sending {datatype} data via JSON is not supported. Please use the binary data format for output"
        raise invalid(what)
    flat = array.reshape(-1)
    if datatype != BYTES:
        return list(flat.tolist())
    try:
        return [value if isinstance(value, str) else bytes(value).decode() for value in flat]
    except UnicodeDecodeError:
        raise invalid(f"output '{name}' is no UTF-8. Please use the binary data format for output") from None


def classify(array: Array, n: int, labels: Sequence[str], *, has_batch: bool) -> Array:
    """Return the n largest of each item as b"value:index:label"; [B, n] or [n] of bytes objects. raises StatusError"""
    if array.dtype.kind not in "iuf" and WIRE_NAMES.get(array.dtype) not in ONLY_BINARY:
        raise invalid(f"class result not available for output due to unsupported type '{WIRE_NAMES.get(array.dtype)}'")
    items = array.reshape(array.shape[0] if has_batch else 1, -1)
    n = min(n, items.shape[1])
    order = np.argsort(-items.astype(np.float64), axis=1, kind="stable")[:, :n]
    texts = [_class_text(items[i, j], int(j), labels) for i in range(len(items)) for j in order[i]]
    return objects(texts).reshape((len(items), n) if has_batch else (n,))


def _class_text(value: Any, index: int, labels: Sequence[str]) -> bytes:
    number = f"{float(value):f}" if np.asarray(value).dtype.kind not in "iu" else str(int(value))
    label = f":{labels[index]}" if index < len(labels) and labels[index] else ""
    return f"{number}:{index}{label}".encode()


def server_timing(request: InferRequest, arrived_ns: int) -> list[tuple[bytes, bytes]]:
    """Return the header `server-timing`, as browsers read it: all models that computed for the request, as they ended.

    Milliseconds: reading the request; of each model its queue, inputs, inference, outputs; the total until writing.
    """
    if request.timings is None:
        return []
    entries = [("read", "", request.received_ns - arrived_ns)]
    for hop in request.timings:
        phases = (("queue", hop.queued_ns, hop.started_ns), ("compute_input", hop.started_ns, hop.computing_ns),
                  ("compute_infer", hop.computing_ns or hop.started_ns, hop.computed_ns or hop.done_ns),
                  ("compute_output", hop.computed_ns, hop.done_ns))  # fmt: skip
        entries += [(name, hop.model, end - begin) for name, begin, end in phases if begin and end]
    entries.append(("total", "", time.monotonic_ns() - arrived_ns))
    texts = [f"{name}{_description(model)};dur={ns / 1e6:.3f}" for name, model, ns in entries]
    return [(b"server-timing", ", ".join(texts).encode())]


def _description(model: str) -> str:
    """Return a model's name as a quoted string of HTTP, without characters that a header cannot hold."""
    plain = "".join(c for c in model if " " <= c <= "~" and c not in '"\\')
    return f';desc="{plain}"' if model else ""
