"""KServe over HTTP: routes, tensors of every datatype both ways, and each error's status and words.

Bytes are packed by `struct` here; the words are those of Triton's source and of its own tests.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from millrace.serve.inference.check import Checker, Given
from millrace.serve.inference.request import InferRequest
from millrace.serve.inference.status import StatusError
from millrace.serve.kserve.infer_body import read_infer
from millrace.serve.repository.config import ModelConfig
from millrace.serve.repository.declare import empty
from tests.serve.repository.test_folders import write
from tests.support.repository import ADD_SUB, REPEAT, identity, serving, write_models

KINDS: dict[str, tuple[str, list[Any]]] = {
    "BOOL": ("?", [True, False]),
    "UINT8": ("B", [0, 255]),
    "UINT16": ("H", [0, 65535]),
    "UINT32": ("I", [0, 2**32 - 1]),
    "UINT64": ("Q", [0, 2**64 - 1]),
    "INT8": ("b", [-128, 127]),
    "INT16": ("h", [-32768, 32767]),
    "INT32": ("i", [-(2**31), 2**31 - 1]),
    "INT64": ("q", [-(2**63), 2**63 - 1]),
    "FP16": ("e", [0.5, -65504.0]),
    "FP32": ("f", [0.5, -1.5]),
    "FP64": ("d", [0.1, -1e300]),
    "BF16": ("H", [0x3F80, 0xBFC0]),
}
HEADER = "Inference-Header-Content-Length"
LIMIT = 20_000


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("models")
    same = {f"same_{kind}": identity(kind, more="max_batch_size: 4") for kind in KINDS}
    models = {
        **same,
        "simple": ADD_SUB,
        "repeat_int32": REPEAT,
        "strings": identity("STRING", "-1, -1"),
        "one": identity("STRING", "1"),
        "label": identity("FP32", "4", "max_batch_size: 2").replace(
            'name: "OUTPUT0"', 'name: "OUTPUT0" label_filename: "labels.txt"'
        ),
        "optional": ADD_SUB.replace('"add_sub"', '"identity"').replace(
            "dims: [ 16 ] },", "dims: [ 16 ] optional: true },", 1
        ),
        "many": identity("FP16", "-1, -1"),
        "reshaped": identity("FP32", "1", "max_batch_size: 2", "reshape { shape: [ ] }"),
        "loose": identity("FP32", "-1", "max_batch_size: 0"),
    }
    write(write_models(root, models), {"label/labels.txt": "a\nb\n\nd\n"})
    with serving(root, http_max_input_size=LIMIT) as found:
        yield found


def infer(
    url: str, model: str, body: Any, headers: dict[str, str] | None = None, path: str = "infer"
) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{url}/v2/models/{model}/{path}", content=content, headers=headers)


def one(datatype: str, shape: list[int], data: Any = None, **more: Any) -> dict[str, Any]:
    return {"name": "INPUT0", "shape": shape, "datatype": datatype, **({} if data is None else {"data": data}), **more}


def binary(inputs: list[dict[str, Any]], raw: bytes, **more: Any) -> tuple[bytes, dict[str, str]]:
    head = json.dumps({"inputs": inputs, **more}).encode()
    return head + raw, {HEADER: str(len(head))}


def parts(response: httpx.Response) -> tuple[dict[str, Any], bytes]:
    assert response.status_code == 200, response.text
    n = int(response.headers.get(HEADER, len(response.content)))
    return json.loads(response.content[:n]), response.content[n:]


@pytest.mark.parametrize("kind", KINDS)
def test_every_datatype_in_binary_and_as_json(url: str, kind: str) -> None:
    code, values = KINDS[kind]
    raw = struct.pack(f"<2{code}", *values)
    wanted = {"parameters": {"binary_data_output": True}}
    body, headers = binary([one(kind, [1, 2], parameters={"binary_data_size": len(raw)})], raw, id="7", **wanted)
    response = infer(url, f"same_{kind}", body, headers)
    told, back = parts(response)
    assert back == raw and response.headers["content-type"] == "application/octet-stream"
    assert told == {
        "id": "7",
        "model_name": f"same_{kind}",
        "model_version": "1",
        "outputs": [
            {"name": "OUTPUT0", "datatype": kind, "shape": [1, 2], "parameters": {"binary_data_size": len(raw)}}
        ],
    }
    response = infer(url, f"same_{kind}", {"inputs": [one(kind, [1, 2], [values])]})
    if kind in ("FP16", "BF16"):
        what = f"receiving {kind} data via JSON is not supported. Please use the binary data format for input INPUT0"
        assert (response.status_code, response.json()) == (400, {"error": what})
        response = infer(url, f"same_{kind}", *binary([one(kind, [1, 2], parameters={"binary_data_size": 4})], raw))
        what = f"sending {kind} data via JSON is not supported. Please use the binary data format for output"
        assert (response.status_code, response.json()) == (400, {"error": what})
        return
    told, back = parts(response)
    assert told["outputs"] == [{"name": "OUTPUT0", "datatype": kind, "shape": [1, 2], "data": values}] and back == b""
    assert response.headers["content-type"] == "application/json" and HEADER not in response.headers


def test_sums_of_inputs_in_both_forms_and_outputs_by_their_own_flags(url: str) -> None:
    left, right = list(range(16)), [1] * 16
    inputs = [
        one("INT32", [1, 16], left),
        {**one("INT32", [1, 16], parameters={"binary_data_size": 64}), "name": "INPUT1"},
    ]
    outputs = [
        {"name": "OUTPUT1", "parameters": {"binary_data": True}},
        {"name": "OUTPUT0", "parameters": {"binary_data": False}},
    ]
    body, headers = binary(
        inputs, struct.pack("<16i", *right), outputs=outputs, parameters={"binary_data_output": True}
    )
    told, back = parts(infer(url, "simple/versions/1", body, headers))
    assert [o["name"] for o in told["outputs"]] == ["OUTPUT1", "OUTPUT0"], "in the order in which they are asked for"
    assert told["outputs"][1]["data"] == [a + 1 for a in left]
    assert struct.unpack("<16i", back) == tuple(a - 1 for a in left)


def test_strings_may_hold_anything(url: str) -> None:
    values = [b"", b"\0\xff", "ü".encode() * 200, b"4"]
    raw = b"".join(struct.pack("<I", len(v)) + v for v in values)
    body, headers = binary(
        [one("BYTES", [2, 2], parameters={"binary_data_size": len(raw)})], raw, parameters={"binary_data_output": True}
    )
    assert parts(infer(url, "strings", body, headers))[1] == raw
    told, _ = parts(infer(url, "strings", {"inputs": [one("BYTES", [2, 1], ["ü", ""])]}))
    assert told["outputs"][0]["data"] == ["ü", ""]
    body, headers = binary([one("BYTES", [2, 2], parameters={"binary_data_size": len(raw)})], raw)
    assert infer(url, "strings", body, headers).json()["error"].startswith("output 'OUTPUT0' is no UTF-8")


def test_data_nested_in_any_way_and_what_is_no_number(url: str) -> None:
    for data in ([1, 2, 3, 4], [[1, 2], [3, 4]], [[[1], [2]], [[3], [4]]], [[1, 2, 3], 4]):
        told, _ = parts(infer(url, "same_FP32", {"inputs": [one("FP32", [2, 2], data)]}))
        assert told["outputs"][0]["data"] == [1, 2, 3, 4]
    raw = struct.pack("<2f", float("nan"), float("inf"))
    body, headers = binary([one("FP32", [1, 2], parameters={"binary_data_size": 8})], raw)
    assert parts(infer(url, "same_FP32", body, headers))[0]["outputs"][0]["data"] == [None, None]


def test_raw_bytes_alone(url: str) -> None:
    raw = struct.pack("<3f", 1, 2, 3)
    told, back = parts(infer(url, "loose", raw, {HEADER: "0"}))
    assert told["outputs"][0]["shape"] == [3] and back == raw
    told, back = parts(infer(url, "same_FP32", raw, {HEADER: "0"}))
    assert told["outputs"][0]["shape"] == [1, 3] and back == raw
    told, back = parts(infer(url, "one", b"427", {HEADER: "0"}))
    assert told["outputs"][0]["shape"] == [1] and back[4:] == b"427"


def test_classes(url: str) -> None:
    data = [0.5, 2.0, -1.0, 1.0, 3.0, 3.0, 0.0, 4.0]
    asked = {
        "inputs": [one("FP32", [2, 4], data)],
        "outputs": [{"name": "OUTPUT0", "parameters": {"classification": 2}}],
    }
    (output,) = parts(infer(url, "label", asked))[0]["outputs"]
    assert (output["datatype"], output["shape"]) == ("BYTES", [2, 2])
    assert output["data"] == ["2.000000:1:b", "1.000000:3:d", "4.000000:3:d", "3.000000:0:a"]
    asked["outputs"][0]["parameters"]["classification"] = 9
    assert parts(infer(url, "label", asked))[0]["outputs"][0]["shape"] == [2, 4]
    (output,) = parts(infer(url, "same_INT8", {**asked, "inputs": [one("INT8", [1, 2], [-1, 5])]}))[0]["outputs"]
    assert output["data"] == ["5:1", "-1:0"]


def test_compression_both_ways(url: str) -> None:
    plain = json.dumps({"inputs": [one("FP32", [1, 2], [1, 2])]}).encode()
    gzip = zlib.compressobj(9, zlib.DEFLATED, 31)
    bodies = {"deflate": zlib.compress(plain), "gzip": gzip.compress(plain) + gzip.flush(), "identity": plain}
    for coding, body in bodies.items():
        response = infer(
            url, "same_FP32", body, {"content-encoding": coding, "accept-encoding": f"br;q=1,{coding};q=0.5"}
        )
        assert parts(response)[0]["outputs"][0]["data"] == [1, 2]
        assert response.headers.get("content-encoding", "identity") == coding
    refused = infer(url, "same_FP32", plain, {"content-encoding": "br"})
    assert (refused.status_code, refused.json()) == (501, {"error": "Unsupported compression type"})
    assert refused.headers["accept-encoding"] == "gzip, deflate"
    bomb = zlib.compress(b" " * 10_000_000)
    refused = infer(url, "same_FP32", bomb, {"content-encoding": "deflate"})
    assert refused.status_code == 400 and "exceeds the maximum allowed input size of 20000 bytes" in refused.text
    cut = infer(url, "same_FP32", bodies["gzip"][:-9], {"content-encoding": "gzip"})
    assert cut.status_code == 400 and "ends too early" in cut.text


def test_server_and_models_are_told(url: str) -> None:
    told = httpx.get(f"{url}/v2").json()
    assert told["name"] == "triton" and "binary_tensor_data" in told["extensions"]
    for path in ("health/live", "health/ready", "models/simple/ready", "models/simple/versions/1/ready"):
        response = httpx.get(f"{url}/v2/{path}")
        assert (response.status_code, response.content) == (200, b"")
    assert httpx.get(f"{url}/v2/models/strings").json() == {
        "name": "strings",
        "versions": ["1"],
        "platform": "identity",
        "inputs": [{"name": "INPUT0", "datatype": "BYTES", "shape": [-1, -1]}],
        "outputs": [{"name": "OUTPUT0", "datatype": "BYTES", "shape": [-1, -1]}],
    }
    assert httpx.get(f"{url}/v2/models/simple/versions/1").json()["inputs"][0]["shape"] == [-1, 16]
    assert httpx.get(f"{url}/v2/models/simple/config").json()["max_batch_size"] == 8
    index = httpx.post(f"{url}/v2/repository/index").json()
    assert {"name": "simple", "version": "1", "state": "READY"} in index and len(index) == 22
    assert httpx.get(f"{url}/v1/models").json()["data"] == []


ADD = [one("INT32", [1, 16], [0] * 16), {**one("INT32", [1, 16], [0] * 16), "name": "INPUT1"}]
ID = "[request id: <id_unknown>] "
BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)
JSON_ERRORS: list[tuple[str, Any, int, str]] = [
    ("gone", {}, 404, "Request for unknown model: 'gone' is not found"),
    ("simple/versions/2", {}, 404, "Request for unknown model: 'simple' version 2 is not found"),
    (
        "simple/versions/0",
        {},
        400,
        "failed to get model version from specified version string '0', version should be an integral value > 0",
    ),
    (
        f"simple/versions/{2**70}",
        {},
        400,
        f"failed to get model version from specified version string '{2**70}' (details:"
        " stol), version should be an integral value > 0",
    ),
    ("repeat_int32", {}, 501, "HTTP end point doesn't support models with decoupled transaction policy"),
    (
        "simple",
        {"inputs": ADD[:1]},
        400,
        ID + "expected 2 inputs but got 1 inputs for model 'simple'. Got input(s) "
        "['INPUT0'], but missing required input(s) ['INPUT1']. Please provide all required input(s).",
    ),
    (
        "simple",
        {"id": "me", "inputs": []},
        400,
        "[request id: me] expected 2 inputs but got 0 inputs for model 'simple'. "
        "Got input(s) [], but missing required input(s) ['INPUT0','INPUT1']. Please provide all required input(s).",
    ),
    (
        "optional",
        {"inputs": []},
        400,
        ID + "expected number of inputs between 1 and 2 but got 0 inputs for model "
        "'optional'. Got input(s) [], but missing required input(s) ['INPUT1']. Please provide all required input(s).",
    ),
    ("simple", {"inputs": [ADD[0], ADD[0]]}, 400, ID + "input 'INPUT0' already exists in request"),
    (
        "simple",
        {"inputs": ADD, "outputs": [{"name": "OUTPUT0"}, {"name": "OUTPUT0"}]},
        400,
        "output 'OUTPUT0' already exists in request",
    ),
    (
        "simple",
        {"inputs": ADD, "outputs": [{"name": "DUMMY"}]},
        400,
        ID + "unexpected inference output 'DUMMY' for model 'simple'",
    ),
    (
        "same_FP32",
        {"inputs": [{**one("FP32", [1, 1], [0]), "name": "X"}]},
        400,
        ID + "unexpected inference input 'X' for model 'same_FP32'",
    ),
    (
        "same_FP32",
        {"inputs": [one("INT32", [1, 1], [0])]},
        400,
        ID + "inference input 'INPUT0' data-type is 'INT32', but model 'same_FP32' expects 'FP32'",
    ),
    (
        "simple",
        {"inputs": [one("INT32", [16], [0] * 16), {**one("INT32", [16], [0] * 16), "name": "INPUT1"}]},
        400,
        ID + "inference request batch-size must be <= 8 for 'simple'",
    ),
    (
        "simple",
        {"inputs": [one("INT32", [1, 15], [0] * 15), ADD[1]]},
        400,
        ID + "unexpected shape for input 'INPUT0' for model 'simple'. Expected [-1,16], got [1,15]. " + BATCH_NOTE,
    ),
    (
        "strings",
        {"inputs": [one("BYTES", [1], ["a"])]},
        400,
        ID + "unexpected shape for input 'INPUT0' for model 'strings'. Expected [-1,-1], got [1]. ",
    ),
    (
        "simple",
        {"inputs": [one("INT32", [], [0]), ADD[1]]},
        400,
        ID + "input 'INPUT0' has no shape but model requires batch dimension for 'simple'",
    ),
    (
        "simple",
        {"inputs": [one("INT32", [2, 16], [0] * 32), ADD[1]]},
        400,
        ID + "input 'INPUT1' batch size does not match other inputs for 'simple'",
    ),
    (
        "same_FP32",
        {"inputs": [one("FP32", [2**4, 2**60 + 2], [1])]},
        400,
        "invalid shape for input 'INPUT0': shape "
        f"[16,{2**60 + 2}] causes total element count to exceed maximum size of 9223372036854775807",
    ),
    (
        "same_FP32",
        {"inputs": [one("FP32", [2**2, 2**60 + 2], [1])]},
        400,
        "byte size overflow for input 'INPUT0': element "
        f"count ({2**62 + 8}) * data type size (4) exceeds maximum allowed size (9223372036854775807)",
    ),
    (
        "same_FP32",
        {"inputs": [one("FP32", [2, -5], [1])]},
        500,
        "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer",
    ),
    (
        "same_FP32",
        {"inputs": [one("FP32", [1, 2], [1])]},
        500,
        "Unable to parse 'data': Shape does not match true shape of 'data' field",
    ),
    (
        "same_FP32",
        {"inputs": [one("FP32", [1, 1], ["a"])]},
        500,
        "Unable to parse 'data': attempt to access JSON non-number as double",
    ),
    (
        "same_BOOL",
        {"inputs": [one("BOOL", [1, 1], [1])]},
        500,
        "Unable to parse 'data': attempt to access JSON non-boolean as boolean",
    ),
    (
        "same_UINT8",
        {"inputs": [one("UINT8", [1, 1], [-1])]},
        500,
        "Unable to parse 'data': attempt to access JSON non-unsigned-integer as unsigned-integer",
    ),
    (
        "same_INT8",
        {"inputs": [one("INT8", [1, 1], [1.5])]},
        500,
        "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer",
    ),
    (
        "strings",
        {"inputs": [one("BYTES", [1, 1], [1])]},
        500,
        "Unable to parse 'data': attempt to access JSON non-string as string",
    ),
    ("same_FP32", {"inputs": [one("FP33", [1, 1], [1])]}, 400, "invalid datatype for input INPUT0"),
    (
        "same_FP32",
        {"inputs": [one("FP32", [1, 1])]},
        400,
        "Input must set only one of the following fields: 'data', "
        "'binary_data_size' in 'parameters', 'shared_memory_region' in 'parameters'. But no field is set",
    ),
    (
        "same_FP32",
        {"inputs": [one("FP32", [1, 1], [1], parameters={"binary_data_size": 4})]},
        400,
        "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
        "'shared_memory_region' in 'parameters'. But set 'data' 'binary_data_size'",
    ),
    (
        "same_FP32",
        {"inputs": [one("FP32", [1, 1], parameters={"binary_data_size": 4})]},
        400,
        "unexpected size for input 'INPUT0', expecting 4 additional bytes for model 'same_FP32'",
    ),
    (
        "same_FP32",
        {"inputs": [one("FP32", [1, 1], parameters={"shared_memory_region": "r"})]},
        501,
        "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable.",
    ),
    (
        "same_FP32",
        {"inputs": [one("FP32", [1, 1], parameters={"binary_data_size": "4"})]},
        500,
        "Unable to parse 'binary_data_size': attempt to access JSON non-unsigned-integer as unsigned-integer",
    ),
    ("simple", {"id": 3, "inputs": ADD}, 500, "Unable to parse 'id': attempt to access JSON non-string as string"),
    ("simple", {}, 500, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
    ("simple", {"inputs": 3}, 500, "Unable to parse 'inputs': attempt to access JSON non-array as array"),
    (
        "simple",
        {"inputs": [{"shape": [], "datatype": ""}]},
        500,
        "Unable to parse 'name': attempt to access non-existing object member 'name'",
    ),
    (
        "simple",
        {"inputs": ADD, "outputs": [{"name": "OUTPUT0", "parameters": {"binary_data": 1}}]},
        500,
        "Unable to parse 'binary_data': attempt to access JSON non-boolean as boolean",
    ),
    (
        "simple",
        {"inputs": ADD, "outputs": [{"name": "OUTPUT0", "parameters": {"classification": -1}}]},
        500,
        "Unable to parse 'classification': attempt to access JSON non-unsigned-integer as unsigned-integer",
    ),
    (
        "simple",
        {"inputs": ADD, "parameters": {"priority": -1}},
        500,
        "Unable to parse 'priority': attempt to access JSON non-unsigned-integer as unsigned-integer",
    ),
    (
        "simple",
        {"inputs": ADD, "parameters": {"sequence_start": 1}},
        500,
        "Unable to parse 'sequence_start': attempt to access JSON non-boolean as boolean",
    ),
    (
        "simple",
        {"inputs": ADD, "parameters": {"triton_x": 1}},
        400,
        "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
    ),
    ("simple", {"inputs": ADD, "parameters": {"headers": 1}}, 400, "headers is reserved for Triton usage"),
    (
        "simple",
        {"inputs": ADD, "parameters": {"mine": [1]}},
        400,
        "parameter 'mine' has invalid type. It should be either 'int', 'bool', 'double', or 'string'.",
    ),
]


@pytest.mark.parametrize(("model", "body", "status", "says"), JSON_ERRORS)
def test_what_is_refused_in_tritons_words(url: str, model: str, body: Any, status: int, says: str) -> None:
    response = infer(url, model, body)
    assert (response.status_code, response.json()) == (status, {"error": says})
    assert response.headers["content-type"] == "application/json"


def nested(depth: int) -> list[Any]:
    return [1] if depth == 1 else [nested(depth - 1)]


def test_depth_of_json(url: str) -> None:
    assert infer(url, "same_INT64", {"inputs": [one("INT64", [1, 1], nested(50))]}).status_code == 200
    limit = {"error": "JSON nesting depth exceeds maximum allowed limit (100)"}
    for depth in (120, 5000):
        data = b"[" * depth + b"1" + b"]" * depth
        body = json.dumps({"inputs": [one("INT64", [1, 1], 0)]}).encode().replace(b'"data": 0', b'"data": ' + data)
        response = infer(url, "same_INT64", body)
        assert (response.status_code, response.json()) == (400, limit)


def test_binary_parts_that_do_not_fit(url: str) -> None:
    def says(model: str, inputs: list[dict[str, Any]], raw: bytes, n: str | None = None) -> str:
        body, headers = binary(inputs, raw)
        response = infer(url, model, body, {HEADER: n} if n is not None else headers)
        assert response.status_code == 400
        return str(response.json()["error"])

    four = {"binary_data_size": 4}
    mismatch = ID + "input byte size mismatch for input 'INPUT0' for model 'same_FP32'. Expected 8, got 4"
    assert says("same_FP32", [one("FP32", [1, 2], parameters=four)], bytes(4)) == mismatch
    more = "unexpected additional input data for model 'same_FP32'"
    assert says("same_FP32", [one("FP32", [1, 1], parameters=four)], bytes(5)) == more
    where = "for inference input 'INPUT0' for model 'strings', expecting"
    size = {"binary_data_size": 6}
    two = b"\2\0\0\0ab"
    assert says("strings", [one("BYTES", [1, 2], parameters=size)], two) == (
        f"{ID}unexpected number of string elements 1 {where} 2"
    )
    assert says("strings", [one("BYTES", [1, 1], parameters=size)], b"\3\0\0\0ab") == (
        f"{ID}incomplete string data {where} string of length 3 but only 2 bytes available."
    )
    assert says("strings", [one("BYTES", [1, 1], parameters=size)], b"\0\0\0\0\0\0") == (
        f"{ID}incomplete string length indicator {where} 4 bytes but only 2 bytes available."
    )
    for n in ("-1", "999999"):
        assert says("same_FP32", [], b"", n) == f"inference header size should be in range (0, 14), got: {n}"
    assert says("same_FP32", [], b"", "x") == f"Unable to parse {HEADER}, got: x"


def test_raw_bytes_whose_shape_is_not_to_be_known(url: str) -> None:
    says = {
        "simple": "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in 'simple' model "
        "configuration",
        "many": "The shape of the raw input 'INPUT0' can not be deduced because there are more than one variable-sized "
        "dimension",
        "same_FP32": "input byte size mismatch for input 'INPUT0' for model 'same_FP32'. Expected 4, got 7",
    }
    for model, what in says.items():
        response = infer(url, model, bytes(7), {HEADER: "0"})
        assert (response.status_code, response.json()) == (400, {"error": ID + what})
    response = infer(url, "strings", b"427", {HEADER: "0"})
    assert "can not be deduced" in response.text


def test_what_is_too_large(url: str) -> None:
    response = infer(url, "simple", bytes(LIMIT + 1))
    assert (response.status_code, response.json()["error"]) == (
        400,
        "request JSON size of 20001 bytes exceeds the maximum allowed input size of 20000 bytes. Use "
        "--http-max-input-size to increase the limit.",
    )
    chunked = httpx.post(f"{url}/v2/models/simple/infer", content=iter([bytes(LIMIT), bytes(9)]))
    assert chunked.status_code == 400 and "exceeds the maximum allowed input size of 20000 bytes" in chunked.text


@pytest.mark.parametrize("body", [b"", b"{", b"[1", b"\xff\xfe", b'{"inputs": [}'])
def test_what_is_no_json(url: str, body: bytes) -> None:
    response = infer(url, "simple", body, {HEADER: str(len(body))} if body else None)
    assert response.status_code == 400 and response.json()["error"].startswith(
        "failed to parse the request JSON buffer: "
    )


def test_paths_and_methods_that_are_none(url: str) -> None:
    for path in (
        "/v2/",
        "/v2/model",
        "/v2/models",
        "/v2/models/",
        "/v2/models/simple/nothing",
        "/v2/models/simple/versions/x",
        "/v2/health",
        "/v2/models/simple/versions/1/infer/x",
        "/v2/repository",
        "/v2/repository/models/simple",
    ):
        response = httpx.get(url + path)
        assert (response.status_code, response.json()) == (404, {"error": "Not Found"}), path
    for method, path in (
        ("GET", "/v2/models/simple/infer"),
        ("POST", "/v2/models/simple/config"),
        ("POST", "/v2"),
        ("DELETE", "/v2/models/simple"),
        ("GET", "/v2/repository/index"),
    ):
        response = httpx.request(method, url + path)
        assert (response.status_code, response.json()) == (405, {"error": "Method Not Allowed"}), path
    not_ready = httpx.get(f"{url}/v2/models/gone/ready")
    assert (not_ready.status_code, not_ready.json()) == (400, {"error": "Model version not ready"})
    refused = httpx.post(f"{url}/v2/repository/models/simple/load")
    what = "explicit model load / unload is not allowed if polling is enabled"
    assert (refused.status_code, refused.json()) == (503, {"error": what})
    named = httpx.post(f"{url}/v2/repository/here/models/simple/load")
    assert (named.status_code, named.json()) == (501, {"error": "'repository_name' specification is not supported"})


def test_statistics_count_items_and_executions(url: str) -> None:
    def told() -> dict[str, Any]:
        (found,) = httpx.get(f"{url}/v2/models/reshaped/stats").json()["model_stats"]
        return dict(found)

    before = told()
    assert parts(infer(url, "reshaped", {"inputs": [one("FP32", [2, 1], [1, 2])]}))[0]["outputs"][0]["shape"] == [2]
    infer(url, "reshaped", {"inputs": [one("FP32", [1, 1], [1])]})
    after = told()
    assert [after[k] - before[k] for k in ("inference_count", "execution_count")] == [3, 2]
    assert [b["batch_size"] for b in after["batch_stats"]] == [1, 2]
    stages = after["inference_stats"]
    assert {name: d["count"] for name, d in stages.items()} == {
        "success": 2,
        "fail": 0,
        "queue": 2,
        "compute_input": 2,
        "compute_infer": 2,
        "compute_output": 2,
        "cache_hit": 0,
        "cache_miss": 0,
    }
    parts_ns = sum(stages[name]["ns"] for name in ("queue", "compute_input", "compute_infer", "compute_output"))
    assert 0 < parts_ns <= stages["success"]["ns"], "what is in it is not longer than it"
    text = httpx.get(f"{url}/metrics").text
    assert 'nv_inference_count{model="reshaped",version="1"} 3\n' in text
    assert "# TYPE nv_inference_count counter\n" in text
    assert 'nv_inference_request_failure{model="reshaped",version="1",reason="BACKEND"} 0\n' in text
    assert len(httpx.get(f"{url}/v2/models/stats").json()["model_stats"]) == 22


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ([1] * 100, "invalid shape for input 'INPUT0': 100 dimensions, at most 32 are supported"),
        ([2**63 - 1] * 900, "invalid shape for input 'INPUT0': 900 dimensions, at most 32 are supported"),
        ([0, 2**40, 2**40], f"exceed maximum size of {2**63 - 1}"),
        ([2**62, 0], "byte size overflow for input 'INPUT0'"),
    ],
)
def test_shapes_that_no_array_has(url: str, shape: list[int], says: str) -> None:
    response = infer(url, "same_FP32", {"inputs": [one("FP32", shape, [7] if 0 not in shape else [])]})
    assert response.status_code == 400 and says in response.json()["error"]


def test_many_names_cost_no_more_than_their_bytes() -> None:
    """As many inputs and outputs as a large body has: each is compared with no list of the others."""
    n = 100_000
    outputs = [{"name": f"{i}"} for i in range(n)] + [{"name": "0"}]
    checker = Checker(empty(ModelConfig))
    with pytest.raises(StatusError, match="output '0' already exists"):
        read_infer(json.dumps({"inputs": [], "outputs": outputs}).encode(), None, "m", checker)
    given = [Given(f"{i}", "FP32", (0,), memoryview(b"")) for i in range(n)]
    with pytest.raises(StatusError, match="input '99999' already exists"):
        checker.take(InferRequest({}), [*given, given[-1]])
