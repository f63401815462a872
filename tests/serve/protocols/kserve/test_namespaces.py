"""Two repositories with a model of the same name, over HTTP and gRPC: which requests by name are answered."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.model_repository.test_lifecycle import control, index
from tests.support.kserve import infer, one
from tests.support.kserve import parts as answer_of
from tests.support.kserve_grpc import connected, refusal
from tests.support.kserve_grpc import one as tensor
from tests.support.namespaces import AMBIGUOUS, roots_of
from tests.support.repository import in_process
from tests.support.server import Threaded

ONE = {"inputs": [one("INT32", [4], [1, 2, 3, 4])]}


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    return roots_of(tmp_path, (10, 20))


@pytest.fixture
def served(roots: list[Path]) -> Iterator[Threaded]:
    folders: Any = {"model_repository": tuple(map(str, roots)), "model_namespacing": True}
    with in_process(roots[0], grpc_port=0, model_control_mode="explicit", **folders) as found:
        yield found


def test_requests_by_name(served: Threaded, roots: list[Path]) -> None:
    url, what = served.url, AMBIGUOUS % "m"
    with connected(served.grpc_url) as client:
        assert control(url, "pipe_a", "load") == (200, "")
        assert answer_of(infer(url, "m", ONE))[0]["outputs"][0]["data"] == [11, 12, 13, 14], "there is one"
        client.call("RepositoryModelLoad", model_name="m")
        assert control(url, "pipe_b", "load") == (200, "")
        for name, first in (("pipe_a", 11), ("pipe_b", 21)):
            assert answer_of(infer(url, name, ONE))[0]["outputs"][0]["data"][0] == first
            answered = client.infer(name, [tensor("INT32", [4], contents={"int_contents": [1, 2, 3, 4]})])
            assert int.from_bytes(answered.raw_output_contents[0][:4], "little") == first
        refused = infer(url, "m", ONE)
        assert (refused.status_code, refused.json()) == (400, {"error": what})
        for path in ("", "/config", "/stats", "/versions/1"):
            told = httpx.get(f"{url}/v2/models/m{path}")
            assert (told.status_code, told.json()) == (400, {"error": what}), path
        asked = infer(url, "m", {"INPUT0": [1, 2, 3, 4]}, path="generate")
        assert (asked.status_code, asked.json()) == (400, {"error": what})
        for ready in (httpx.get(f"{url}/v2/models/m/ready"), httpx.get(f"{url}/v2/models/m/versions/1/ready")):
            assert (ready.status_code, ready.json()) == (400, {"error": "Model version not ready"})
        assert not client.call("ModelReady", name="m").ready and client.call("ModelReady", name="pipe_b").ready
        for call in (
            lambda: client.infer("m", [tensor("INT32", [4], contents={"int_contents": [1, 2, 3, 4]})]),
            lambda: client.call("ModelMetadata", name="m"),
            lambda: client.call("ModelConfig", name="m"),
            lambda: client.call("ModelStatistics", name="m"),
        ):
            assert refusal(call) == ("INVALID_ARGUMENT", what)
        everybody = httpx.get(f"{url}/v2/models/stats").json()["model_stats"]
        assert [one["name"] for one in everybody] == ["m", "m", "pipe_a", "pipe_b"]
        states = [(one["name"], one["state"]) for one in index(url)]
        assert states == [("m", "READY"), ("m", "READY"), ("pipe_a", "READY"), ("pipe_b", "READY")]
        assert [(one.name, one.state) for one in client.call("RepositoryIndex").models] == states
        metrics = httpx.get(f"{url}/metrics").text
        assert all(f'nv_inference_count{{namespace="{root}",model="m",' in metrics for root in roots)


def test_a_name_is_unloaded_in_every_repository(served: Threaded, roots: list[Path]) -> None:
    url = served.url
    for name in ("pipe_a", "m", "pipe_b"):
        assert control(url, name, "load") == (200, "")
    would = httpx.post(f"{url}/v2/repository/models/m/load", json={"parameters": {"dry_run": True}}).json()
    assert [one["ensembles"] for one in would["models"]] == [[f"{root}::pipe_{root.name}"] for root in roots]
    with connected(served.grpc_url) as client:
        client.call("RepositoryModelUnload", model_name="m")
    assert infer(url, "m", ONE).json() == {"error": "Request for unknown model: 'm' has no available versions"}
    assert {one["state"] for one in index(url)} <= {"UNAVAILABLE", "UNLOADING"}
    assert control(url, "m", "load") == (200, ""), "and the ensembles come back with it"
