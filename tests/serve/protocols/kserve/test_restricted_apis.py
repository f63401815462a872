"""Parts of the protocols that want a header, and headers that models see: Triton's flags, statuses and words."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace.errors import ConfigError
from millrace.model_repository.request.status_code import StatusError
from millrace.serve.protocols.kserve.restricted_apis import GROUPS, RestrictionFlags, api_group_of_call, group_of_path
from tests.support.kserve_grpc import Client, connected, one, refusal, request
from tests.support.repository import ADD_SUB, identity, in_process, write_models
from tests.support.server import Threaded

PAIR = [one("INT32", [1, 16]), one("INT32", [1, 16], "INPUT1")]
RAW = [bytes(64)] * 2
BODY = {"inputs": [{"name": n, "shape": [1, 16], "datatype": "INT32", "data": [1] * 16} for n in ("INPUT0", "INPUT1")]}
SEES = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        said = [np.array([request.parameters().encode()], dtype=np.object_) for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", one)]) for one in said]
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sees = identity("STRING", "1").replace('"identity"', '"python"')
    root = write_models(tmp_path_factory.mktemp("models"), {"simple": ADD_SUB, "sees": sees})
    (root / "sees" / "1" / "model.py").write_text(SEES)
    return root


@pytest.fixture(scope="module")
def guarded(root: Path) -> Iterator[Threaded]:
    rules = ("inference:infer-key=a b", "model-repository,statistics,logging:X-Admin=s3cret")
    guards = RestrictionFlags(
        http_restricted_api=(rules[0].replace(" ", ""), rules[1]), grpc_restricted_protocol=rules[1:]
    )
    with in_process(root, guards=guards, grpc_port=0) as served:
        yield served


def test_over_http(guarded: Threaded) -> None:
    def get(path: str, method: str = "GET", **headers: str) -> tuple[int, Any]:
        reply = httpx.request(method, guarded.url + path, headers=headers)
        return reply.status_code, reply.json().get("error") if reply.content[:1] == b"{" else None

    refused = 403, "This API is restricted, expecting header 'x-admin'"
    for path, method in (("/v2/models/stats", "GET"), ("/v2/models/simple/stats", "GET"),
                         ("/v2/models/simple/versions/1/stats", "GET"), ("/v2/repository/index", "POST"),
                         ("/v2/repository/models/simple/load", "POST"), ("/v2/logging", "GET")):  # fmt: skip
        assert get(path, method) == refused == get(path, method, **{"x-admin": "secret"})
        assert get(path, method, **{"X-Admin": "s3cret"})[0] != 403
    for path in ("/v2", "/v2/health/ready", "/v2/models/simple", "/v2/models/simple/ready", "/v2/models/simple/config"):
        assert get(path)[0] == 200


def test_inferences_on_one_connection(guarded: Threaded) -> None:
    """The same bytes again and again, of which a connection could remember that they were let in once."""
    with httpx.Client() as client:
        for _ in range(4):
            for headers, status in (({"infer-key": "ab"}, 200), ({}, 403), ({"infer-key": "AB"}, 403)):
                reply = client.post(f"{guarded.url}/v2/models/simple/infer", json=BODY, headers=headers)
                assert reply.status_code == status, reply.text
    for route in ("generate", "generate_stream"):
        assert httpx.post(f"{guarded.url}/v2/models/sees/{route}", json={"INPUT0": "a"}).status_code == 403


def test_over_grpc(guarded: Threaded) -> None:
    name = "triton-grpc-protocol-x-admin"
    with connected(guarded.grpc_url) as client:
        for call in ("ModelStatistics", "RepositoryIndex", "RepositoryModelLoad"):
            for metadata in ((), ((name, "S3CRET"),), (("x-admin", "s3cret"),)):
                assert refusal(lambda: client.call(call, metadata)) == (  # noqa: B023
                    "UNAVAILABLE", f"This protocol is restricted, expecting header '{name}'",
                )  # fmt: skip
        assert client.call("RepositoryIndex", ((name, "s3cret"),)).models
        assert client.infer("simple", PAIR, RAW).raw_output_contents == RAW, "inference is open there"


def test_a_restricted_stream(root: Path) -> None:
    guards = RestrictionFlags(grpc_restricted_protocol=("inference:key=v",))
    with in_process(root, guards=guards, grpc_port=0) as served, connected(served.grpc_url) as client:
        metadata = (("triton-grpc-protocol-key", "v"),)
        for _ in range(4):
            assert refusal(lambda: client.infer("simple", PAIR, RAW))[0] == "UNAVAILABLE"
            assert infer(client, metadata).raw_output_contents == RAW
        assert refusal(lambda: list(client.stream(iter([request("simple", PAIR, RAW)]))))[0] == "UNAVAILABLE"
        assert next(client.stream(iter([request("simple", PAIR, RAW)]), metadata)).infer_response.outputs


def infer(client: Client, metadata: Any) -> Any:
    return client.call("ModelInfer", metadata, model_name="simple", inputs=PAIR, raw_input_contents=RAW)


def test_headers_that_models_see(root: Path) -> None:
    guards = RestrictionFlags(http_header_forward_pattern="x-user.*|triton_.*", grpc_header_forward_pattern="x-user")
    with in_process(root, guards=guards, grpc_port=0) as served:
        url, headers = (
            f"{served.url}/v2/models/sees",
            {"X-User": "ada", "x-user-id": "7", "other": "1", "y-x-user": "2"},
        )
        said = httpx.post(f"{url}/generate", json={"INPUT0": "a", "mine": 3}, headers=headers).json()["OUTPUT0"]
        assert said == '{"mine": 3, "x-user": "ada", "x-user-id": "7"}'
        body = {"inputs": [{"name": "INPUT0", "shape": [1], "datatype": "BYTES", "data": ["a"]}]}
        reply = httpx.post(f"{url}/infer", json=body, headers=headers).json()
        assert reply["outputs"][0]["data"] == ['{"x-user": "ada", "x-user-id": "7"}']
        reserved = httpx.post(f"{url}/infer", json=body, headers={"triton_x": "1"})
        assert (reserved.status_code, reserved.json()["error"]) == (
            400, "'triton_x' is reserved for Triton usage and cannot be forwarded.",
        )  # fmt: skip
        asked = request("sees", [one("BYTES", [1])], [b"\1\0\0\0a"])
        with connected(served.grpc_url) as client:
            metadata = (("x-user", "ada"), ("x-users", "no"))
            streamed = next(client.stream(iter([asked]), metadata)).infer_response.raw_output_contents[0]
            told = client.call(
                "ModelInfer", metadata, model_name="sees", inputs=[one("BYTES", [1])],
                raw_input_contents=[b"\1\0\0\0a"],
            ).raw_output_contents[0]  # fmt: skip
            assert streamed[4:] == told[4:] == b'{"x-user": "ada"}'


PATTERNS = [
    ("MY_header.*", ["my_header_1", "my_header"], ["a_my_header"]),
    ("(?i)MY_.*", ["my_a"], ["you"]),
    ("(?-i)MY_.*", [], ["my_a"]),
    ("(?-i)my_.*", ["my_a"], []),
    ("(?-i:M)y_.*", [], ["my_a"]),
    ("m(?-i)y_A|B(?i)c", [], ["my_a", "bc"]),
    ("(m(?-i)y_|X)a", ["my_a"], ["xa"]),
    ("(?s)x.*(?U)y+", ["xy", "xayy"], ["x"]),
    ("(?sU:x.)y", ["xay"], []),
    (r"\Qa.b\E.*", ["a.b", "a.bc"], ["axb"]),
    ("[[:alpha:]]+-[^[:digit:]x]", ["ab-c"], ["ab-1", "ab-x", "1-a"]),
    ("(?P<a>x)|(?<b>y)", ["x", "y"], ["z"]),
    ("[]a]+", ["a"], ["b"]),
]


@pytest.mark.parametrize(("pattern", "taken", "left"), PATTERNS)
def test_patterns_of_headers_are_those_of_re2(pattern: str, taken: list[str], left: list[str]) -> None:
    for guard in (RestrictionFlags(http_header_forward_pattern=pattern).http(),
                  RestrictionFlags(grpc_header_forward_pattern=pattern).grpc()):  # fmt: skip
        assert list(guard.forwarded_headers(dict.fromkeys([*taken, *left], "v"))) == taken


@pytest.mark.parametrize(
    "name",
    ["sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output",
     "triton_final_response", "triton_x"],
)  # fmt: skip
def test_headers_of_reserved_names_are_not_forwarded(root: Path, name: str) -> None:
    guard = RestrictionFlags(http_header_forward_pattern=".*").http()
    with pytest.raises(StatusError, match=f"'{name}' is reserved for Triton usage and cannot be forwarded"):
        guard.forwarded_headers({"other": "1", name: "1"})
    assert RestrictionFlags(http_header_forward_pattern="x.*").http().forwarded_headers({name: "1", "x": "2"}) == {
        "x": "2"
    }


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ({"http_restricted_api": ("inference",)}, "--http-restricted-api is 'inference'"),
        ({"http_restricted_api": ("inferences:a=b",)}, '--http-restricted-api names "inferences"'),
        ({"grpc_restricted_protocol": ("health:a=b", "health,trace:a=c")}, "restricts health twice"),
        ({"grpc_restricted_protocol": ("health:a= ",)}, "--grpc-restricted-protocol is 'health:a= '"),
        ({"http_header_forward_pattern": "(x"}, r"--http-header-forward-pattern is '\(x'"),
        ({"http_header_forward_pattern": "x)"}, "unbalanced parenthesis"),
        ({"http_header_forward_pattern": "x(?=y)"}, "RE2 has no such group"),
        ({"http_header_forward_pattern": r"(x)\1"}, "RE2 has no references back"),
        ({"grpc_header_forward_pattern": "[[:letter:]]"}, "invalid character class"),
        ({"grpc_header_forward_pattern": "x(?z)"}, "RE2 has no such group"),
    ],
)
def test_mistakes_in_flags(flags: dict[str, Any], what: str) -> None:
    guards = RestrictionFlags(**flags)
    with pytest.raises(ConfigError, match=what):
        (guards.http(), guards.grpc())


def test_every_route_and_call_has_a_group() -> None:
    paths = {
        "/v2": "metadata", "/v2/health/live": "health", "/v2/models/m": "metadata", "/v2/models/m/ready": "health",
        "/v2/models/m/versions/3/infer": "inference", "/v2/models/m/generate_stream": "inference",
        "/v2/models/m/config": "model-config", "/v2/models/stats": "statistics", "/v2/trace/setting": "trace",
        "/v2/models/m/trace/setting": "trace", "/v2/systemsharedmemory/region/r/register": "shared-memory",
        "/v2/repository/models/m/load": "model-repository", "/v2/logging": "logging", "/v2/nothing": None,
    }  # fmt: skip
    assert {path: group_of_path(path) for path in paths} == paths
    assert {g for g in paths.values() if g} == set(GROUPS)
    from millrace.serve.protocols.kserve.grpc.server import _STREAM, _UNARY

    assert all(api_group_of_call(name) in GROUPS for name in (*_UNARY, _STREAM, "Check"))
