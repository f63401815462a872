"""Large tensors in pieces: the bytes and the values are those of one piece, and no request stalls others."""

import gc
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from google.protobuf.message import DecodeError

from millrace.bench.run.server_process import ServerProcess
from millrace.model_repository.python_backend.stub import bytes_tensors
from millrace.model_repository.request import concatenation
from millrace.model_repository.request.concatenation import concatenate
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.status_code import StatusError
from millrace.model_repository.request.tensors import BYTES, DTYPES, InferTensor, objects
from millrace.protobuf import varint
from millrace.serve.protocols.kserve.grpc import infer, message_scan, packed_numbers
from millrace.serve.protocols.kserve.grpc.infer import GrpcOutputOptions, response_bytes
from millrace.serve.protocols.kserve.grpc.protobuf_messages import CONTENTS, SERVICE, field_numbers, message
from millrace.serve.protocols.kserve.http import infer_response
from millrace.serve.protocols.kserve.http.infer_request import HttpOutputOptions
from tests.support.repository import identity, write_models

MODEL: Any = SimpleNamespace(name="m", version=1, labels={})
DRAWN: dict[str, Callable[[random.Random], Any]] = {
    "BOOL": lambda draw: draw.random() < 0.5, "INT8": lambda draw: draw.randrange(-128, 128),
    "INT32": lambda draw: draw.randrange(-(2**31), 2**31), "INT64": lambda draw: draw.randrange(-(2**63), 2**63),
    "UINT32": lambda draw: draw.randrange(2 ** draw.randrange(1, 33)), "UINT64": lambda draw: draw.randrange(2**64),
    "FP32": lambda draw: float(draw.randrange(9)), "FP64": lambda draw: draw.uniform(-1, 1),
    "BYTES": lambda draw: draw.randbytes(draw.choice((0, 3, 40))),
}  # fmt: skip


def test_concatenated_as_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(5)
    monkeypatch.setattr(concatenation, "LARGE", 64)
    for _ in range(200):
        texts = [draw.randbytes(draw.choice((0, 1, 63, 64, 200))) for _ in range(draw.randrange(5))]
        parts = [memoryview(b"x" + t)[1:] if draw.random() < 0.5 else t for t in texts]
        assert concatenate(parts) == b"".join(texts)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how large a piece is."""

    def to(n: int) -> None:
        monkeypatch.setattr(message_scan, "LARGE", 8)
        monkeypatch.setattr(message_scan, "_PIECE", n)
        for module in (infer, infer_response, bytes_tensors):
            monkeypatch.setattr(module, "_PIECE", max(1, n // 8))
        monkeypatch.setattr(concatenation, "LARGE", n)

    return to


def typed(datatype: str, values: list[Any], *, is_packed: bool) -> bytes:
    """InferTensorContents; numbers in one field, or each in one of its own."""
    parts = [values] if is_packed else [[v] for v in values]
    made = (message("InferTensorContents")(**{CONTENTS[datatype]: part}).SerializeToString() for part in parts)
    return b"".join(made)


@pytest.mark.parametrize("datatype", DRAWN)
@pytest.mark.parametrize("is_packed", [True, False])
def test_typed_contents_in_pieces(datatype: str, is_packed: bool, small_pieces: Callable[[int], None]) -> None:
    draw = random.Random(7)
    for n in (8, 16, 64, 1000):
        small_pieces(n)
        values = [DRAWN[datatype](draw) for _ in range(draw.randrange(60, 200))]
        asked = message("ModelInferRequest")(model_name="m", id="i")
        for name in "ab":
            asked.inputs.add(name=name, datatype=datatype, shape=[len(values)])
            asked.inputs[-1].contents.MergeFromString(typed(datatype, values, is_packed=is_packed))
        cut = message_scan.split_infer_request(asked.SerializeToString())
        assert cut is not None and set(cut.contents) == ({0, 1} if n < 64 else set(cut.contents))
        told = message("ModelInferRequest").FromString(cut.rest)
        array = objects(values) if datatype == BYTES else np.array(values, DTYPES[datatype])
        given = list(infer._raw_inputs(told, "m", None, cut, []))
        assert [bytes(one.data) for one in given] == [InferTensor("a", datatype, array).raw()] * 2  # type: ignore[arg-type]


@pytest.mark.parametrize("datatype", [name for name in DRAWN if name not in ("BYTES", "INT8")])
def test_packed_numbers_as_protobuf_reads_them(datatype: str) -> None:
    """Also integers that are longer than their field, longer than they need be, or cut off."""
    draw = random.Random(11)
    number, dtype = field_numbers("InferTensorContents")[CONTENTS[datatype]], np.dtype(DTYPES[datatype])
    n_refused = 0
    for _ in range(300):
        pieces = []
        for _ in range(draw.randrange(1, 30)):
            if dtype.kind == "f":
                pieces.append(draw.randbytes(4))
            else:
                n_more = draw.choice((0, 0, 1, 4, 8, 9, 9, 10)) if draw.random() < 0.2 else 0
                more = bytes(draw.randrange(128) | 128 for _ in range(n_more))
                pieces.append(more + bytes((draw.choice((0, 1, 5)),)))
        packed = b"".join(pieces)[: None if draw.random() < 0.8 else -1]
        told = message("InferTensorContents")()
        try:
            told.ParseFromString(field(number, packed))
            expected = np.array(getattr(told, CONTENTS[datatype]), dtype)
        except DecodeError:
            expected, n_refused = None, n_refused + 1
        found = packed_numbers.unpack_numbers(memoryview(packed), dtype)
        assert (found is None) == (expected is None), packed
        if found is not None and expected is not None:
            assert found.dtype == expected.dtype and found.tobytes() == expected.tobytes()
    assert 0 < n_refused < 300


def test_raw_contents_are_read_where_they_lie(small_pieces: Callable[[int], None]) -> None:
    small_pieces(16)
    raws = [bytes(range(n)) for n in (8, 80, 0)]
    asked = message("ModelInferRequest")(model_name="m", raw_input_contents=raws)
    for i, raw in enumerate(raws):
        asked.inputs.add(name=f"n{i}", datatype="INT8", shape=[len(raw)])
    cut = message_scan.split_infer_request(asked.SerializeToString())
    assert cut is not None and len(cut.rest) < len(asked.SerializeToString()) - 88
    told = message("ModelInferRequest").FromString(cut.rest)
    assert [bytes(one.data) for one in infer._raw_inputs(told, "m", None, cut, [])] == raws  # type: ignore[arg-type]
    told.inputs[0].contents.int_contents.append(1)
    with pytest.raises(StatusError, match="contents field must not be specified when using raw_input_contents"):
        list(infer._raw_inputs(told, "m", None, cut, []))


def test_contents_of_two_types_are_refused(small_pieces: Callable[[int], None]) -> None:
    small_pieces(16)
    asked = message("ModelInferRequest")(model_name="m")
    tensor = asked.inputs.add(name="a", datatype="INT32", shape=[50])
    tensor.contents.int_contents.extend([7] * 50)
    tensor.contents.fp32_contents.append(1.0)
    cut = message_scan.split_infer_request(asked.SerializeToString())
    assert cut is not None
    with pytest.raises(StatusError, match=r"binary data was already supplied|of type 'FP32'"):
        list(infer._raw_inputs(message("ModelInferRequest").FromString(cut.rest), "m", None, cut, []))


RESPONSE = InferResponse(
    {
        "numbers": np.arange(200, dtype=np.float32).reshape(2, 100), "strings": objects([b"ab"] * 99),
        "none": np.zeros((0, 3), np.int8), "yes": np.array([True]),
    },
    {"seen": 3},
)  # fmt: skip


@pytest.mark.parametrize("n", [8, 100, 1 << 16])
def test_responses_in_pieces(n: int, small_pieces: Callable[[int], None]) -> None:
    request = InferRequest({}, request_id="r")
    found = message("ModelInferResponse")(model_name="m", model_version="1", id="r")
    found.parameters["seen"].int64_param = 3
    told = list[dict[str, Any]]()
    for name, array in RESPONSE.outputs.items():
        datatype = {"numbers": "FP32", "strings": BYTES, "none": "INT8", "yes": "BOOL"}[name]
        found.outputs.add(name=name, datatype=datatype, shape=array.shape)
        found.raw_output_contents.append(InferTensor(name, datatype, array).raw())
        values = ["ab"] * 99 if datatype == BYTES else array.reshape(-1).tolist()
        told.append({"name": name, "datatype": datatype, "shape": array.shape, "data": values})
    small_pieces(n)
    assert response_bytes(MODEL, request, RESPONSE, GrpcOutputOptions()) == found.SerializeToString()
    whole = {"id": "r", "model_name": "m", "model_version": "1", "parameters": {"seen": 3}, "outputs": told}
    assert infer_response.encode_response(MODEL, request, RESPONSE, HttpOutputOptions()) == (
        msgspec.json.encode(whole),
        None,
    )
    body, n_head = infer_response.encode_response(
        MODEL, request, RESPONSE, HttpOutputOptions(binary={"numbers": True, "strings": True})
    )
    assert n_head is not None and body[n_head:] == b"".join(found.raw_output_contents[:2])
    outputs = json.loads(body[:n_head])["outputs"]
    assert [one.get("parameters", {}).get("binary_data_size") for one in outputs] == [800, 594, None, None]
    assert outputs[2]["data"] == [] and outputs[3]["data"] == [True]


# ---------------------------------------------------------------------- stalls


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A process of its own: the interpreter lock is not the client's."""
    kinds = {"floats": "FP32", "ints": "INT32", "strings": "STRING"}
    root = write_models(tmp_path_factory.mktemp("models"), {name: identity(kind, "-1") for name, kind in kinds.items()})
    flags = ("--model-repository", str(root), "--grpc-port", "0", "--http-max-input-size", str(64 << 20))
    with ServerProcess(None, flags) as found:
        yield found


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def by_grpc(model: str, datatype: str, n: int, raw: bytes, contents: bytes = b"") -> bytes:
    tensor = field(1, b"INPUT0") + field(2, datatype.encode()) + field(3, varint(n))
    tensor += field(5, contents) if contents else b""
    return field(1, model.encode()) + field(5, tensor) + (field(7, raw) if raw else b"")


def by_json(datatype: str, n: int, item: str) -> bytes:
    head = f'{{"inputs":[{{"name":"INPUT0","shape":[{n}],"datatype":"{datatype}","data":['
    return f"{head}{','.join([item] * n)}]}}]}}".encode()


FLOATS = 15 << 20
LARGEST: dict[str, tuple[str, Callable[[], bytes]]] = {
    "http json floats": ("floats", lambda: by_json("FP32", 8_000_000, "0.12345")),
    "http json strings": ("strings", lambda: by_json("BYTES", 2_000_000, '"abcdefgh"')),
    "http raw": ("floats", lambda: bytes(4 * FLOATS)),
    "grpc raw": ("floats", lambda: by_grpc("floats", "FP32", FLOATS, bytes(4 * FLOATS))),
    "grpc raw strings": ("strings", lambda: by_grpc("strings", "BYTES", 2_000_000, b"\3\0\0\0abc" * 2_000_000)),
    "grpc integers": ("ints", lambda: by_grpc("ints", "INT32", 16_000_000, b"", field(2, b"\1" * 16_000_000))),
    "grpc strings": ("strings", lambda: by_grpc("strings", "BYTES", 1_500_000, b"", field(8, b"abcdefgh") * 1_500_000)),
}


CLIENT = """
import http.client, sys
kind, address, path, file = sys.argv[1:]
body = open(file, "rb").read()
if kind.startswith("http"):
    connection = http.client.HTTPConnection(address, timeout=60)
    headers = {"Inference-Header-Content-Length": "0"} if kind == "http raw" else {}
    connection.request("POST", f"/v2/models/{path}/infer", body, headers)
    reply = connection.getresponse()
    assert reply.status == 200
    n = len(reply.read())
else:
    import grpc
    sizes = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    n = len(grpc.insecure_channel(address, options=sizes).unary_unary(path)(body, timeout=60))
assert n > 1 << 20
"""


@pytest.fixture
def frozen() -> Iterator[None]:
    """No collection of the client's garbage, which takes 0.1 s in a process with all tests, within a measurement."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


@pytest.mark.timing
@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("name", LARGEST)
def test_health_answers_within_100_ms_beside_a_large_request(name: str, served: ServerProcess, tmp_path: Path) -> None:
    model, make = LARGEST[name]
    (tmp_path / "body").write_bytes(make())
    is_http = name.startswith("http")
    address = served.url.removeprefix("http://") if is_http else served.grpc_url
    asked = (name, address, model if is_http else f"{SERVICE}ModelInfer", str(tmp_path / "body"))
    worst_s = 0.0
    with httpx.Client(base_url=served.url) as client:
        client.get("/health")
        with subprocess.Popen([sys.executable, "-c", CLIENT, *asked]) as process:
            while process.poll() is None:
                began_s = time.perf_counter()
                assert client.get("/health").status_code == 200
                worst_s = max(worst_s, time.perf_counter() - began_s)
                time.sleep(0.002)
    assert process.returncode == 0
    sys.stdout.write(f"beside {name}: /health within {worst_s * 1e3:.0f} ms\n")
    assert worst_s < 0.1, f"/health answered within {worst_s * 1e3:.0f} ms"
