"""Several API keys: none sees, or changes, what belongs to another."""

from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from millrace.model_repository.request.infer_request import END, START, InferRequest
from millrace.serve.settings import ServerSettings
from tests.serve.support import Fake, running
from tests.serve.test_api_keys import written
from tests.support.kserve_grpc import connected, one, refusal
from tests.support.python_models import HEAD, write
from tests.support.repository import identity, in_process, write_models
from tests.support.server import Threaded

KEYS = ("first", "second")
SUMS = (
    HEAD
    + """
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        answers = []
        for request in requests:
            said = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            slot, value = int(said["ID"].reshape(-1)[0]), said["IN"]
            if said["START"].reshape(-1)[0]:
                self.sum = 0
            self.sum += int(value.reshape(-1)[0])
            found = np.full(value.shape, self.sum, np.int32)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", found)]))
        return answers
"""
)
SEQUENCES = """backend: "python" instance_group { count: 2 kind: KIND_CPU }
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
sequence_batching { max_sequence_idle_microseconds: 60000000 control_input [
  { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
  { name: "ID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] } ] }
"""


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Threaded]:
    write(tmp_path, "sums", SUMS, SEQUENCES)
    write_models(tmp_path, {"m": identity("FP32", "-1"), "start": identity("FP32", "-1")})
    settings = ServerSettings(port=0, api_keys=KEYS)
    flags: dict[str, Any] = {"model_control_mode": "explicit", "load_model": ("sums", "start"), "grpc_port": 0}
    with in_process(tmp_path, settings, **flags) as found:
        yield found


def step(served: Threaded, key: str, value: int, flags: int = 0) -> Any:
    parameters = {"sequence_id": 7, "sequence_start": bool(flags & START), "sequence_end": bool(flags & END)}
    body = {"inputs": [{"name": "IN", "shape": [1], "datatype": "INT32", "data": [value]}], "parameters": parameters}
    reply = httpx.post(f"{served.url}/v2/models/sums/infer", json=body, headers=bearer(key)).json()
    return reply["outputs"][0]["data"][0] if "outputs" in reply else reply["error"]


def over_grpc(served: Threaded, key: str, value: int, flags: int = 0) -> int:
    parameters = {
        "sequence_id": {"int64_param": 7}, "sequence_start": {"bool_param": bool(flags & START)},
        "sequence_end": {"bool_param": bool(flags & END)},
    }  # fmt: skip
    with connected(served.grpc_url) as client:
        told = client.call(
            "ModelInfer", metadata=[("authorization", f"Bearer {key}")], model_name="sums", parameters=parameters,
            inputs=[one("INT32", [1], "IN")], raw_input_contents=[np.int32(value).tobytes()],
        )  # fmt: skip
    return int(np.frombuffer(told.raw_output_contents[0], np.int32)[0])


def test_a_sequence_belongs_to_its_key(served: Threaded) -> None:
    assert step(served, "first", 1, START) == 1
    assert "must specify the START flag on the first request of the sequence" in step(served, "second", 100)
    assert step(served, "second", 100, START) == 100
    assert step(served, "first", 1) == 2
    assert over_grpc(served, "second", 100) == 200
    assert over_grpc(served, "first", 1, END) == 3
    assert step(served, "second", 100, END) == 300


def control(served: Threaded, key: str, action: str, name: str = "m") -> tuple[int, str]:
    reply = httpx.post(f"{served.url}/v2/repository/models/{name}/{action}", json={}, headers=bearer(key))
    return reply.status_code, reply.text


def test_a_model_is_changed_by_the_key_that_loaded_it(served: Threaded) -> None:
    assert control(served, "first", "load")[0] == 200
    for action in ("unload", "load"):
        status, words = control(served, "second", action)
        assert status == 400 and "model 'm' was loaded with another API key" in words
        status, words = control(served, "second", action, "start")
        assert status == 400 and "model 'start' was loaded by the server's operator" in words
    with connected(served.grpc_url) as client:
        for call in ("RepositoryModelLoad", "RepositoryModelUnload"):
            metadata = [("authorization", "Bearer second")]
            told = refusal(lambda: client.call(call, metadata, model_name="m"))  # noqa: B023
            assert told[0] == "INVALID_ARGUMENT" and "another API key" in told[1]
    assert httpx.get(f"{served.url}/v2/models/m/ready", headers=bearer("second")).status_code == 200
    assert control(served, "first", "load")[0] == 200
    assert control(served, "first", "unload")[0] == 200
    assert control(served, "second", "load")[0] == 200, "what is gone belongs to nobody"
    assert control(served, "first", "unload")[0] == 400


def test_an_admin_key_changes_every_model(tmp_path: Path) -> None:
    """Those of the server's start, too; a model that another key loaded stays that key's."""
    write_models(tmp_path / "models", {name: identity("FP32", "-1") for name in ("start", "m", "own")})
    keys = written(tmp_path / "keys", "first name=a\nsecond name=b\noperator name=c role=admin\n")
    flags: dict[str, Any] = {"model_control_mode": "explicit", "load_model": ("start",), "grpc_port": 0}
    with in_process(tmp_path / "models", ServerSettings(port=0, key_file=keys), **flags) as served:
        status, words = control(served, "first", "unload", "start")
        assert status == 400 and "by the server's operator" in words and "a key with role=admin can" in words
        assert control(served, "operator", "load", "start")[0] == 200
        assert control(served, "first", "load", "start")[0] == 400, "it is still the operator's"
        assert control(served, "operator", "unload", "start")[0] == 200
        assert control(served, "first", "load")[0] == 200 == control(served, "operator", "load")[0]
        assert control(served, "second", "unload")[0] == 400 and control(served, "first", "load")[0] == 200
        with connected(served.grpc_url) as client:
            metadata = [("authorization", "Bearer operator")]
            client.call("RepositoryModelUnload", metadata, model_name="m")
            client.call("RepositoryModelLoad", metadata, model_name="own")
        assert httpx.get(f"{served.url}/v2/models/m/ready", headers=bearer("second")).status_code == 400
        assert control(served, "second", "unload", "own")[0] == 400


SETTINGS = [("logging", {"log_error": False}), ("trace/setting", {"log_frequency": "1"}),
            ("models/m/trace/setting", {"log_frequency": "1"})]  # fmt: skip


def test_settings_of_the_server_are_an_admins(tmp_path: Path) -> None:
    """A key could silence the log, or trace what others send."""
    write_models(tmp_path / "models", {"m": identity("FP32", "-1")})
    keys = written(tmp_path / "keys", "first name=a\nsecond name=b\noperator name=c role=admin\n")
    with in_process(tmp_path / "models", ServerSettings(port=0, key_file=keys), grpc_port=0) as served:
        for path, change in SETTINGS:
            for key, status in (("first", 400), ("operator", 200)):
                reply = httpx.post(f"{served.url}/v2/{path}", json=change, headers=bearer(key))
                assert reply.status_code == status and ("role=admin" in reply.text) is (status == 400)
                assert httpx.get(f"{served.url}/v2/{path}", headers=bearer(key)).status_code == 200
        with connected(served.grpc_url) as client:
            metadata = [("authorization", "Bearer first")]
            told = refusal(lambda: client.call("LogSettings", metadata, settings={"log_info": {"bool_param": False}}))
            assert told[0] == "INVALID_ARGUMENT" and "role=admin" in told[1]
            told = refusal(lambda: client.call("TraceSetting", metadata, settings={"log_frequency": {"value": ["1"]}}))
            assert told[0] == "INVALID_ARGUMENT" and "role=admin" in told[1]


def test_shared_memory_belongs_to_the_key_that_registered_it(tmp_path: Path) -> None:
    write_models(tmp_path / "models", {"m": identity("FP32", "-1")})
    memory = SharedMemory(create=True, size=64)
    settings = ServerSettings(port=0, api_keys=KEYS)
    try:
        with in_process(tmp_path / "models", settings, allow_client_shm=True, grpc_port=0) as served:
            regions = f"{served.url}/v2/systemsharedmemory"
            register = {"key": memory.name, "offset": 0, "byte_size": 64}

            def infer(key: str) -> int:
                parameters = {"shared_memory_region": "r", "shared_memory_byte_size": 8}
                tensor = {"name": "INPUT0", "shape": [2], "datatype": "FP32", "parameters": parameters}
                url = f"{served.url}/v2/models/m/infer"
                return httpx.post(url, json={"inputs": [tensor]}, headers=bearer(key)).status_code

            def names(key: str) -> list[str]:
                with connected(served.grpc_url) as client:
                    metadata = [("authorization", f"Bearer {key}")]
                    over_grpc = sorted(client.call("SystemSharedMemoryStatus", metadata).regions)
                assert over_grpc == [one["name"] for one in httpx.get(f"{regions}/status", headers=bearer(key)).json()]
                return over_grpc

            first, second = bearer("first"), bearer("second")
            assert httpx.post(f"{regions}/region/r/register", json=register, headers=first).status_code == 200
            assert (infer("first"), infer("second")) == (200, 404) and (names("first"), names("second")) == (["r"], [])
            assert httpx.get(f"{regions}/region/r/status", headers=second).status_code == 404
            assert httpx.post(f"{regions}/unregister", headers=second).status_code == 200
            assert httpx.post(f"{regions}/region/r/unregister", headers=second).status_code == 200
            assert infer("first") == 200
            assert httpx.post(f"{regions}/region/r/register", json=register, headers=second).status_code == 200
            assert httpx.post(f"{regions}/unregister", headers=first).status_code == 200
            assert (infer("first"), infer("second")) == (404, 200) and (names("first"), names("second")) == ([], ["r"])
    finally:
        memory.close()
        memory.unlink()


def test_one_key_changes_whatever_there_is(tmp_path: Path) -> None:
    write_models(tmp_path, {"m": identity("FP32", "-1")})
    flags: dict[str, Any] = {"model_control_mode": "explicit", "load_model": ("m",)}
    with in_process(tmp_path, ServerSettings(port=0, api_keys=("only",)), **flags) as served:
        assert control(served, "only", "load")[0] == 200 == control(served, "only", "unload")[0]


def test_the_timeline_shows_the_requests_of_its_key() -> None:
    with running(Fake(), ServerSettings(port=0, api_keys=KEYS)) as server:
        for key in KEYS:
            body = {"model": "fake", "prompt": f"{key} words of a prompt", "max_tokens": 3}
            headers = bearer(key) | {"x-request-id": f"of-{key}"}
            assert httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).status_code == 200
        server.wait_until_idle()
        n_of = {}
        for key, other in (KEYS, KEYS[::-1]):
            page = httpx.get(f"{server.url}/timeline", headers=bearer(key)).text
            assert f"of-{key}" in page and f"of-{other}" not in page
            (told,) = httpx.get(f"{server.url}/timeline.json", headers=bearer(key)).json()["data"]
            n_of[key] = sum(len(step["prompts"]) for step in told["steps"])
        assert n_of == {"first": 1, "second": 1}


def test_what_a_model_asks_belongs_to_the_key_too() -> None:
    outer, inner = InferRequest({}), InferRequest({})
    outer.tenant = "first"
    inner.inherit_from(outer)
    assert inner.tenant == "first"
