"""KServe over HTTP: what is too deep, too large, too short, or no request at all."""

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from millrace.model_repository.config.enums import DataType
from millrace.model_repository.config.message_fields import empty
from millrace.model_repository.config.model_config import ModelConfig, ModelInput
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.request_validation import RawInput, RequestValidator
from millrace.model_repository.request.status_code import StatusError
from millrace.serve.protocols.kserve.http.infer_request import read_infer
from tests.serve.protocols.kserve.conftest import LIMIT
from tests.support.kserve import HEADER, ID, binary, infer, one


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
        f"{ID}expected 2 string elements {where.removesuffix(', expecting')}, got 1"
    )
    many = {"binary_data_size": 18}
    assert says("strings", [one("BYTES", [1, 1], parameters=many)], two * 3) == (
        f"{ID}unexpected number of string elements 2 {where} 1"
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
        "three": "For BYTE datatype raw input 'INPUT0', the model must have input shape [1]",
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
        "request JSON size of 20001 bytes exceeds the maximum allowed value of 20000 bytes. Use "
        "--http-max-input-size to increase the limit.",
    )
    raw = infer(url, "same_FP32", bytes(LIMIT + 1), {HEADER: "0"})
    assert (raw.status_code, raw.json()["error"]) == (
        400,
        "Raw input has a byte_size (20001 bytes) that exceeds the maximum allowed value of 20000 bytes. Use "
        "--http-max-input-size to increase the limit.",
    )
    load = httpx.post(f"{url}/v2/repository/models/simple/load", content=bytes(LIMIT + 1))
    assert (load.status_code, load.json()["error"]) == (
        400,
        "request JSON size of 20001 bytes exceeds the maximum allowed input size. It is 20000 bytes: use "
        "--http-max-input-size to increase the limit.",
    )
    chunked = httpx.post(f"{url}/v2/models/simple/infer", content=iter([bytes(LIMIT), bytes(9)]))
    assert chunked.status_code == 400 and "exceeds the maximum allowed value of 20000 bytes" in chunked.text


@pytest.mark.parametrize("body", [
    b"", b"{", b"[1", b"\xff\xfe", b'{"inputs": [}', b'{"inputs": [], "id": "\xff"}', b'{"id": 1, "\xbd": 2}',
])  # fmt: skip
def test_what_is_no_json(url: str, body: bytes) -> None:
    response = infer(url, "simple", body, {HEADER: str(len(body))} if body else None)
    assert response.status_code == 400 and response.json()["error"].startswith(
        "failed to parse the request JSON buffer: "
    )


@pytest.mark.parametrize("path", ["logging", "trace/setting", "repository/index", "repository/models/simple/load"])
def test_what_is_no_json_of_the_server(url: str, path: str) -> None:
    for body in (b"{", b'{"a": "\xff"}', b"[" * 100_000):
        response = httpx.post(f"{url}/v2/{path}", content=body[:LIMIT])
        assert (response.status_code, response.json()["error"][:40]) == (
            400,
            "failed to parse the request JSON buffer:",
        )


def test_statistics_of_what_is_not_there(url: str) -> None:
    for model, status, says in (
        ("simple/versions/7", 400, "requested model version is not available for model 'simple'"),
        ("gone", 404, "Request for unknown model: 'gone' is not found"),
        ("gone/versions/1", 404, "Request for unknown model: 'gone' is not found"),
    ):
        found = httpx.get(f"{url}/v2/models/{model}/stats")
        assert (found.status_code, found.json()["error"]) == (status, says)
    assert httpx.get(f"{url}/v2/models/simple/versions/1/stats").json()["model_stats"][0]["name"] == "simple"


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
    checker = RequestValidator(empty(ModelConfig))
    with pytest.raises(StatusError, match="Duplicate output name '0' is not allowed"):
        read_infer(json.dumps({"inputs": [], "outputs": outputs}).encode(), None, "m", checker)
    given = [RawInput(f"{i}", "FP32", (0,), memoryview(b"")) for i in range(n)]
    with pytest.raises(StatusError, match="input '99999' already exists"):
        checker.attach_inputs(InferRequest({}), [*given, given[-1]])


def test_of_several_inputs_with_faults_the_last_is_told() -> None:
    def said(name: str) -> ModelInput:
        return replace(empty(ModelInput), name=name, data_type=DataType.TYPE_STRING, dims=(2,))

    checker = RequestValidator(replace(empty(ModelConfig), name="m", input=(said("A"), said("B"))))
    one = memoryview(b"\1\0\0\0a")
    with pytest.raises(StatusError, match="expected 2 string elements for inference input 'B' for model 'm', got 1"):
        checker.attach_inputs(InferRequest({}), [RawInput("A", "BYTES", (2,), one), RawInput("B", "BYTES", (2,), one)])
    request = InferRequest({})
    both = memoryview(bytes(one) * 2)
    checker.attach_inputs(request, [RawInput("B", "BYTES", (2,), both), RawInput("A", "BYTES", (2,), both)])
    assert list(request.inputs) == ["B", "A"], "in the request's order"
