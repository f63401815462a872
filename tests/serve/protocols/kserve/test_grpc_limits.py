"""KServe over gRPC: who may ask, how large and how many; ports, models that come and go, and who has no grpcio."""

import importlib.util
import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.errors import ConfigError
from millrace.serve.protocols.kserve.grpc.grpc_dependency import check_grpc
from millrace.serve.settings import ServerSettings
from tests.serve.protocols.kserve.conftest import LIMIT
from tests.serve.support import until
from tests.support.kserve_grpc import Client, connected, one, refusal, request
from tests.support.repository import ADD_SUB, identity, in_process, serving, write_models

PAIR = [one("INT32", [1, 16]), one("INT32", [1, 16], "INPUT1")]
HEALTH = "/grpc.health.v1.Health/"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    slow = 'max_batch_size: 1 parameters { key: "execute_delay_ms" value { string_value: "200" } }'
    models = {"simple": ADD_SUB, "large": identity("UINT8"), "slow": identity("UINT8", more=slow)}
    return write_models(tmp_path_factory.mktemp("models"), models)


@pytest.fixture(scope="module")
def guarded(root: Path) -> Iterator[Client]:
    settings = ServerSettings(port=0, api_keys=("one", "two"))
    with in_process(root, settings, grpc_port=0) as served, connected(served.grpc_url) as client:
        yield client


def test_keys(guarded: Client) -> None:
    assert guarded.call("ServerLive").live and guarded.call("ServerReady").ready
    assert guarded.call("Check", service=HEALTH).status == 1
    for call in ("ServerMetadata", "ModelReady", "ModelInfer", "RepositoryIndex", "RepositoryModelLoad"):
        code, says = refusal(lambda: guarded.call(call))  # noqa: B023
        assert code == "UNAUTHENTICATED" and says.startswith("the API key is missing; expected: "), call
    wrong = refusal(lambda: guarded.call("ServerMetadata", [("authorization", "Bearer three")]))
    assert wrong[0] == "UNAUTHENTICATED" and wrong[1].startswith("the API key is wrong")
    for metadata in ([("authorization", "Bearer one")], [("authorization", "bearer two")], [("x-api-key", "two")]):
        assert guarded.call("ServerMetadata", metadata).name == "triton"
    assert refusal(lambda: list(guarded.stream(iter([]))))[0] == "UNAUTHENTICATED"
    assert list(guarded.stream(iter([]), [("x-api-key", "one")])) == []


def test_messages_up_to_the_limit(client: Client) -> None:
    n = LIMIT - 100
    assert client.infer("same_INT8", [one("INT8", [1, n])], [bytes(n)]).raw_output_contents == [bytes(n)]
    code, says = refusal(lambda: client.infer("same_INT8", [one("INT8", [1, LIMIT])], [bytes(LIMIT)]))
    assert code == "RESOURCE_EXHAUSTED" and f"vs. {LIMIT}" in says
    asked = iter([request("same_INT8", [one("INT8", [1, LIMIT])], [bytes(LIMIT)])])
    assert refusal(lambda: list(client.stream(asked)))[0] == "RESOURCE_EXHAUSTED"


def test_large_tensors_go_through(root: Path) -> None:
    """Read and written off the event loop."""
    n = 5_000_000
    with in_process(root, grpc_port=0) as served, connected(served.grpc_url) as client:
        raw = bytes(range(250)) * (n // 250)
        assert client.infer("large", [one("UINT8", [n])], [raw]).raw_output_contents == [raw]
        typed = one("UINT8", [n], contents={"uint_contents": raw})
        assert client.infer("large", [typed]).raw_output_contents == [raw]
        (told,) = client.stream(iter([request("large", [one("UINT8", [n])], [raw])]))
        assert told.infer_response.raw_output_contents == [raw]


def test_no_more_requests_at_a_time_than_connections_bear(root: Path) -> None:
    settings = ServerSettings(port=0, max_connections=4)  # three of them for tensor models
    with in_process(root, settings, grpc_port=0) as served, connected(served.grpc_url) as client:
        calls = [client.future("ModelInfer", request("slow", [one("UINT8", [1, 1])], [b"x"])) for _ in range(3)]
        until(lambda: client.call("ModelStatistics", name="slow").model_stats[0].inference_stats.success.count)
        calls += [client.future("ModelInfer", request("slow", [one("UINT8", [1, 1])], [b"x"])) for _ in range(4)]
        found = [call.code().name for call in calls]
        assert found.count("OK") >= 3 and set(found) <= {"OK", "UNAVAILABLE", "RESOURCE_EXHAUSTED"}
        assert len(set(found)) > 1, "some were too many"


def test_models_come_and_go(root: Path) -> None:
    raw = [struct.pack("<16i", *range(16))] * 2
    with (
        in_process(root, grpc_port=0, model_control_mode="explicit", load_model=("simple",)) as served,
        connected(served.grpc_url) as client,
    ):
        states = {m.name: m.state for m in client.call("RepositoryIndex").models}
        assert states == {"simple": "READY", "large": "", "slow": ""}
        assert [m.name for m in client.call("RepositoryIndex", ready=True).models] == ["simple"]
        assert refusal(lambda: client.infer("large", [one("UINT8", [1])], [b"x"]))[0] == "NOT_FOUND"
        nameless = refusal(lambda: client.call("RepositoryModelLoad"))
        assert nameless == ("INVALID_ARGUMENT", "Model name cannot be empty. Specify a model name.")
        client.call("RepositoryModelLoad", model_name="large")
        assert client.infer("large", [one("UINT8", [1])], [b"x"]).raw_output_contents == [b"x"]
        client.call("RepositoryModelUnload", model_name="large", parameters={"unload_dependents": {"bool_param": True}})
        gone = "Request for unknown model: 'large' has no available versions"
        assert refusal(lambda: client.infer("large", [one("UINT8", [1])], [b"x"])) == ("NOT_FOUND", gone)
        config = json.dumps(
            {
                "backend": "add_sub", "max_batch_size": 2,
                "input": [{"name": f"INPUT{i}", "data_type": "TYPE_INT32", "dims": [16]} for i in range(2)],
                "output": [{"name": f"OUTPUT{i}", "data_type": "TYPE_INT32", "dims": [16]} for i in range(2)],
            }
        )  # fmt: skip
        client.call("RepositoryModelLoad", model_name="simple", parameters={"config": {"string_param": config}})
        assert client.call("ModelConfig", name="simple").config.max_batch_size == 2
        assert struct.unpack("<16i", client.infer("simple", PAIR, raw).raw_output_contents[0])[15] == 30
        code, says = refusal(lambda: client.call("RepositoryModelLoad", model_name="gone"))
        assert (code, says) == ("INTERNAL", "failed to load 'gone', failed to poll from model repository")


def test_a_port_that_is_taken(root: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = pytest.raises(AssertionError, match=f"cannot listen for gRPC on 127.0.0.1:{port}")
        with refused, serving(root, grpc_port=port):
            pass


@pytest.mark.parametrize("missing", ["grpc", "google", "google.protobuf"])
def test_grpcio_is_an_extra(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    asked: list[str] = []

    def find_spec(name: str) -> object:
        asked.append(name)
        return None if name == missing else object()

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(ConfigError) as error:
        check_grpc("--grpc-port", "leave --grpc-port out")
    assert (error.value.what, error.value.expected) == ("--grpc-port without grpcio", 'pip install "millrace[grpc]"')
    assert asked[-1] == missing, "what is in a package that is not there is not looked for"
