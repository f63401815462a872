"""Requests whose JSON or message is cached are read and answered as by the readers that cache nothing."""

import json
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from millrace.model_repository.config.pbtxt_binder import read_config
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.infer_template import InferTemplate
from millrace.model_repository.request.request_validation import RequestValidator
from millrace.model_repository.request.status_code import StatusError
from millrace.model_repository.request.tensors import DTYPES, objects
from millrace.serve.protocols.kserve.grpc.infer import read_infer as read_message
from millrace.serve.protocols.kserve.grpc.infer import response_bytes
from millrace.serve.protocols.kserve.grpc.infer_message_cache import InferMessageCache
from millrace.serve.protocols.kserve.grpc.protobuf_messages import message
from millrace.serve.protocols.kserve.http import infer_header_cache
from millrace.serve.protocols.kserve.http.infer_header_cache import InferHeaderCache
from millrace.serve.protocols.kserve.http.infer_request import read_infer
from millrace.serve.protocols.kserve.http.infer_response import encode_response

_CONFIG = """max_batch_size: 4
input [
  { name: "A" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "B" data_type: TYPE_INT64 dims: [ 2 ] reshape { shape: [ 1, 2 ] } },
  { name: "C" data_type: TYPE_%s dims: [ 1 ] optional: true }
]
output [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "Y" data_type: TYPE_STRING dims: [ -1 ] } ]
"""
_IDS = ["", "1", "42", "a b", 'quo"te', "back\\slash", "ünï", "\x7f", "tab\t", "😀", "x" * 300]


def model(third: str, version: int = 1, digests: bool = False) -> Any:
    config = read_config((_CONFIG % third).encode(), Path("config.pbtxt")).config
    checker = RequestValidator(config, digests=digests)
    return SimpleNamespace(name="m", version=version, labels={"X": ("a", "b")}, checker=checker)


def inputs(kind: random.Random, draw: random.Random, third: str) -> list[tuple[str, str, list[int], bytes]]:
    """Name, datatype, shape and data of inputs, some of them not as the model has them."""
    rows, n = kind.choice((1, 2, 3, 4, 5)), kind.choice((0, 1, 3))
    found = [("A", "FP32", [rows, n], draw.randbytes(4 * rows * n))]
    found.append(("B", "INT64", [rows, 2], draw.randbytes(16 * rows)))
    if kind.random() < 0.5:
        size = np.dtype(DTYPES[third]).itemsize if third != "BYTES" else 0
        data = draw.randbytes(size * rows) if size else b"\1\0\0\0z" * rows
        found.insert(kind.randrange(3), ("C", third, [rows, 1], data))
    if kind.random() < 0.2:
        kind.shuffle(found)
    return found[kind.random() < 0.1 :]


def body(draw: random.Random, third: str) -> tuple[bytes, int]:
    """A body of one of 30 kinds, and how many bytes of it are JSON."""
    kind = random.Random(draw.randrange(30))
    tensors, raw = [], b""
    for name, datatype, shape, data in inputs(kind, draw, third):
        tensor: dict[str, Any] = {"name": name, "shape": shape, "datatype": datatype}
        if name == "B" and kind.random() < 0.1:
            tensor["data"] = [[1, 2]] * shape[0]
        else:
            tensor["parameters"] = {"binary_data_size": len(data)}
            raw += data
        tensors.append(tensor)
    members: dict[str, Any] = {"inputs": tensors}
    options, is_first = kind.randrange(6), kind.random() < 0.9
    if options < 4:
        members["parameters"] = {"binary_data_output": options != 3, "priority": 2, "mine": "x"}
    if options == 1:
        members["outputs"] = [{"name": "X"}]
    if options == 2:
        members["outputs"] = [{"name": "X", "parameters": {"classification": 1}}, {"name": "Y"}]
    if request_id := draw.choice([*_IDS[:4] * 4, *_IDS]):
        members = {"id": request_id, **members} if is_first else {**members, "id": request_id}
    text = json.dumps(members, ensure_ascii=kind.random() < 0.5, separators=kind.choice([None, (",", ":")]))
    if kind.random() < 0.1:
        text = text[:-1] + ', "id": "last"}'
    head = text.encode()
    if draw.random() < 0.05:
        raw = raw[:-1]
    return head + raw, len(head)


def proto(draw: random.Random, third: str) -> Any:
    """A message of one of 30 kinds."""
    kind = random.Random(draw.randrange(30))
    found = message("ModelInferRequest")(model_name="m", id=draw.choice([*_IDS[:4] * 4, *_IDS]))
    for name, datatype, shape, data in inputs(kind, draw, third):
        found.inputs.add(name=name, datatype=datatype, shape=shape)
        found.raw_input_contents.append(data)
    options = kind.randrange(5)
    found.parameters["mine"].string_param = "x"
    found.parameters["priority"].int64_param = 2
    if options == 1:
        found.outputs.add(name="X")
    if options == 2:
        found.outputs.add(name="X").parameters["classification"].int64_param = 1
    if draw.random() < 0.05 and found.raw_input_contents:
        found.raw_input_contents[-1] += b"0"
    return found


def responses(draw: random.Random, request: InferRequest) -> InferResponse:
    outputs: dict[str, Any] = {
        "X": np.array([draw.uniform(-9, 9) for _ in range(4)], "<f4").reshape(draw.choice([(2, 2), (4, 1)]))
    }
    if draw.random() < 0.3:
        outputs["X"] = outputs["X"].T
    if draw.random() < 0.3:
        outputs["Y"] = objects([b"text", b""]).reshape(2, 1)
    outputs = {name: outputs[name] for name in request.outputs or outputs if name in outputs}
    return InferResponse(outputs, {"n": 1} if draw.random() < 0.1 else {})


def fields(request: InferRequest, is_cached: bool = False) -> tuple[Any, ...]:
    arrays = [(name, array.dtype, array.shape, array.tolist()) for name, array in request.inputs.items()]
    plain = (
        "id",
        "outputs",
        "parameters",
        "batch_size",
        "priority",
        "timeout_us",
        "correlation_id",
        "flags",
        "shape_key",
    )
    assert all(array.flags.aligned for array in request.inputs.values()) or not is_cached
    return repr(arrays), [getattr(request, name) for name in plain], request.digest


def outcome(read: Callable[[], tuple[InferRequest, bytes]]) -> Any:
    try:
        request, answer = read()
    except StatusError as error:
        return error.code, error.message
    return fields(request), answer


@pytest.mark.parametrize("third", ["FP16", "BF16", "BOOL", "BYTES"])
def test_json_that_is_cached(third: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer_header_cache, "MAX_HEADERS", 60)
    draw, cache, n_filled = random.Random(third), InferHeaderCache(), [0]
    fill = InferTemplate.fill

    def counted(self: InferTemplate, *arguments: Any) -> InferRequest:
        n_filled[0] += 1
        return fill(self, *arguments)

    monkeypatch.setattr(InferTemplate, "fill", counted)
    models = [model(third), model(third, 2)]
    for i in range(1500):
        if i == 700:
            models[0] = model(third, digests=True)
        served, (data, n_json), seed = draw.choice(models), body(draw, third), draw.random()

        def cached() -> tuple[InferRequest, Any]:
            request, header = cache.read(data, n_json, served, None)  # noqa: B023
            return request, header.encode(served, request, responses(random.Random(seed), request))  # noqa: B023

        def plain() -> tuple[InferRequest, Any]:
            request, options = read_infer(data, n_json, "m", served.checker)  # noqa: B023
            response = responses(random.Random(seed), request)  # noqa: B023
            return request, encode_response(served, request, response, options)  # noqa: B023

        assert outcome(cached) == outcome(plain), data
    assert n_filled[0] > 100
    assert len(cache._headers) <= 60


@pytest.mark.parametrize("third", ["FP16", "BYTES"])
def test_messages_that_are_cached(third: str) -> None:
    draw, cache, models = random.Random(third), InferMessageCache(), [model(third), model(third, 2)]
    for _ in range(1500):
        served, sent, seed = draw.choice(models), proto(draw, third), draw.random()

        def cached() -> tuple[InferRequest, Any]:
            data = sent.SerializeToString()  # noqa: B023
            copy = type(sent).FromString(data)  # noqa: B023
            request, known = cache.read(data, copy, served, None, None)  # noqa: B023
            assert copy.id == request.id, "streams name it"
            return request, known.encode(served, request, responses(random.Random(seed), request))  # noqa: B023

        def plain() -> tuple[InferRequest, Any]:
            request, options = read_message(sent, served)  # noqa: B023
            return request, response_bytes(served, request, responses(random.Random(seed), request), options)  # noqa: B023

        assert outcome(cached) == outcome(plain), sent
    assert len(cache._messages) > 10


def test_messages_of_a_known_layout_are_those_that_protobuf_decodes() -> None:
    """Whole messages, and such with other bytes: what has a layout is read as by protobuf."""
    draw, cache, served, n_found = random.Random(0), InferMessageCache(), model("FP16"), [0, 0]
    kind = message("ModelInferRequest")
    for i in range(3000):
        sent = proto(draw, "FP16")
        data = sent.SerializeToString()
        if i % 2:
            at, piece = draw.randrange(len(data)), draw.randbytes(draw.choice((1, 1, 1, 2)))
            data = data[:at] + piece + data[at + (len(piece) if draw.random() < 0.7 else 0) :]
        layout = cache.find(data)
        if layout is not None:
            n_found[i % 2] += 1
            assert layout.validator is served.checker
            found, (plain, _) = layout.fill(data), read_message(kind.FromString(data), served)
            assert fields(found, is_cached=True) == fields(plain), data
        else:
            with suppress(DecodeError, StatusError):
                cache.read(data, kind.FromString(data), served, None, None)
    assert n_found[0] > 200 and n_found[1] > 50, n_found


def test_a_message_in_another_order_has_no_layout() -> None:
    """protobuf allows fields in any order, and twice."""
    cache, served, sent = InferMessageCache(), model("FP16"), message("ModelInferRequest")(model_name="m", id="1")
    for name, datatype, shape, size in (("A", "FP32", [1, 1], 4), ("B", "INT64", [1, 2], 16)):
        sent.inputs.add(name=name, datatype=datatype, shape=shape)
        sent.raw_input_contents.append(bytes(size))
    data = sent.SerializeToString()
    names = type(sent)(model_name="m").SerializeToString()
    others = [data[len(names) :] + names, data + names, data + type(sent)(id="2").SerializeToString()]
    for other in [*others, data]:
        for _ in range(3):
            request, _ = cache.read(other, type(sent).FromString(other), served, None, None)
        assert request.id == type(sent).FromString(other).id
        assert (cache.find(other) is not None) == (other == data)


def test_json_that_is_almost_cached_is_refused() -> None:
    """The rest behind an id is no JSON by itself, and neither is an object behind one."""
    served, draw = model("FP16"), random.Random(1)
    tensors = inputs(random.Random(2), draw, "FP16")
    described = [
        {"name": name, "shape": shape, "datatype": kind, "parameters": {"binary_data_size": len(data)}}
        for name, kind, shape, data in tensors
    ]
    rest = json.dumps({"inputs": described}).encode()[1:]
    raw = b"".join(data for _, _, _, data in tensors)
    for first in (b"{" + rest, b'{"id":"a",' + rest):
        for start in (b'{"id":"x",{', b"", b'{\x0b"id":"x",', b'{\x0c"id":"x",', b'{"id":"x",,'):
            second = start + rest
            cache = InferHeaderCache()
            cache.read(first + raw, len(first), served, None)
            with pytest.raises(StatusError, match="failed to parse the request JSON"):
                cache.read(second + raw, len(second), served, None)
