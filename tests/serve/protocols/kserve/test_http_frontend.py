"""KServe over HTTP: routes, and tensors of every datatype both ways.

Bytes are packed by `struct` here; the words are those of Triton's source and of its own tests.
"""

import json
import struct
import zlib
from typing import Any

import httpx
import pytest

from tests.support.kserve import HEADER, KINDS, binary, infer, one, parts


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
    assert refused.status_code == 400 and "exceeds the maximum allowed value of 20000 bytes" in refused.text
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
    assert {"name": "simple", "version": "1", "state": "READY"} in index and len(index) == 23
    assert httpx.get(f"{url}/v1/models").json()["data"] == []
    for name, code in (({}, "model_cannot"), ({"model": "simple"}, "model_not_found")):
        error = httpx.post(f"{url}/v1/completions", json={"prompt": "a", **name}).json()["error"]
        assert error["code"] == code and "to fix: ask its models at /v2/models/NAME/infer" in error["message"]


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
    assert len(httpx.get(f"{url}/v2/models/stats").json()["model_stats"]) == 23
