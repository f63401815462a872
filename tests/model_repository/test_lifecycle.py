"""Loading, reloading and unloading: by request, by the folders, and under load."""

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace.serve.settings import ServerSettings
from tests.serve.support import until
from tests.support.loaded import BATCHES
from tests.support.repository import ADD_SUB, serving, write_models

HEALTH = ("/v2/health/ready", "/v1/health/ready")
ONE = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [7]}]}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_models(tmp_path, {"m": BATCHES % ""})


def control(url: str, model: str, action: str, body: Any = None) -> tuple[int, str]:
    content = json.dumps(body) if body is not None else ""
    response = httpx.post(f"{url}/v2/repository/models/{model}/{action}", content=content, timeout=30)
    return response.status_code, response.json()["error"] if response.content else ""


def index(url: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = httpx.post(f"{url}/v2/repository/index").json()
    return found


def infer(url: str, model: str = "m", body: Any = ONE) -> httpx.Response:
    return httpx.post(f"{url}/v2/models/{model}/infer", json=body, timeout=30)


def becomes(what: Callable[[], bool]) -> None:
    """Also where nobody listens yet."""
    until_s, found = time.monotonic() + 10, False
    while not found and time.monotonic() < until_s:
        with contextlib.suppress(httpx.TransportError):
            found = what()
        if not found:
            time.sleep(0.02)
    assert found


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def answers(url: str, *paths: str) -> list[int]:
    return [httpx.get(url + path).status_code for path in paths]


def told_of_trouble(url: str) -> str:
    """What the server says once it has tried all its models: it is warm no later than that."""
    found = [""]

    def is_told() -> bool:
        found[0] = httpx.get(url + HEALTH[1]).json()["message"]
        return found[0].startswith("tensor models could not be loaded: ")

    becomes(is_told)
    return found[0]


def test_models_come_and_go_by_request(root: Path) -> None:
    write_models(root, {"m": BATCHES % "version_policy { all {} }"}, version=3)
    with serving(root, model_control_mode="explicit") as url:
        assert index(url) == [{"name": "m"}]
        assert infer(url).json() == {"error": "Request for unknown model: 'm' is not found"}
        assert control(url, "m", "load") == (200, "")
        assert infer(url).json()["model_version"] == "3", "the highest"
        assert httpx.get(f"{url}/v2/models/m").json()["versions"] == ["1", "3"]
        assert control(url, "m", "unload", {"parameters": {"unload_dependents": False}}) == (200, "")
        gone = infer(url)
        assert (gone.status_code, gone.json()) == (
            404,
            {"error": "Request for unknown model: 'm' has no available versions"},
        )
        of_one = httpx.post(f"{url}/v2/models/m/versions/1/infer", json=ONE)
        what = "Request for unknown model: 'm' version 1 is not at ready state"
        assert (of_one.status_code, of_one.json()) == (503, {"error": what})
        until_s = time.monotonic() + 10
        unloaded = [{"name": "m", "version": v, "state": "UNAVAILABLE", "reason": "unloaded"} for v in "13"]
        while index(url) != unloaded and time.monotonic() < until_s:
            time.sleep(0.01)
        assert index(url) == unloaded
        assert httpx.post(f"{url}/v2/repository/index", json={"ready": True}).json() == []
        assert httpx.get(f"{url}/v2/health/ready").status_code == 200, "what was unloaded is no trouble"
        assert control(url, "m", "load") == (200, "") and infer(url).status_code == 200
        assert control(url, "other", "load") == (500, "failed to load 'other', failed to poll from model repository")
        assert control(url, "..", "load")[0] in (400, 404)
        assert control(url, "%2e%2e", "load") == (400, "model name must not contain path traversal characters")
        assert control(url, "other", "unload") == (200, ""), "as Triton's own lifecycle_test.py has it"
        assert control(url, "m", "unload", {"parameters": {"unload_dependents": 1}}) == (
            500, "Unable to parse 'unload_dependents': attempt to access JSON non-boolean as boolean",
        )  # fmt: skip


def test_a_failed_reload_keeps_what_is_served(root: Path) -> None:
    with serving(root, model_control_mode="explicit", load_model=("*",)) as url:
        config = root / "m" / "config.pbtxt"
        config.write_text((BATCHES % "").replace("max_batch_size", "max_batchsize"))
        status, says = control(url, "m", "load")
        assert status == 500 and says.startswith("failed to load 'm', failed to poll from model repository: ")
        assert ': m/config.pbtxt:1:21: "max_batchsize" is no field of a configuration' in says
        assert infer(url).status_code == 200 and index(url)[0]["state"] == "READY"
        config.write_text(ADD_SUB.replace("TYPE_INT32", "TYPE_STRING"))
        assert control(url, "m", "load") == (
            500, "load failed for model 'm': version 1 is at UNAVAILABLE state: Invalid argument: model 'm' must have "
            "inputs and outputs of one type of numbers;",
        )  # fmt: skip
        assert infer(url).status_code == 200
        config.write_text((BATCHES % "").replace('"identity"', '"idendity"'))
        assert "unable to find backend 'idendity'; did you mean \"identity\"?" in control(url, "m", "load")[1]
        twice = "instance_group { count: 2 kind: KIND_CPU } sequence_batching { iterative_sequence: true }"
        config.write_text(BATCHES % twice)
        assert "iterative_sequence with 2 instances is not supported yet" in control(url, "m", "load")[1]
        config.write_text((BATCHES % "").replace("FP32", "FP64"))
        assert control(url, "m", "load") == (200, "")
        assert "expects 'FP64'" in infer(url).text


def test_a_configuration_may_come_with_the_load(root: Path) -> None:
    with serving(root, model_control_mode="explicit", load_model=("m",)) as url:
        told = httpx.get(f"{url}/v2/models/m/config").json()
        assert control(url, "m", "load", {"parameters": {"config": json.dumps(told)}}) == (200, "")
        assert httpx.get(f"{url}/v2/models/m/config").json() == told, "what is told may be given back"
        told |= {"max_batch_size": 2, "parameters": {"execute_delay_ms": {"string_value": "1"}}}
        assert control(url, "m", "load", {"parameters": {"config": json.dumps(told)}}) == (200, "")
        now = httpx.get(f"{url}/v2/models/m/config").json()
        assert (now["max_batch_size"], now["parameters"]) == (2, {"execute_delay_ms": {"string_value": "1"}})
        before = index(url)
        for config, says in (
            ('{"max_batchsize": 2}', '"max_batchsize" is no field of a configuration'),
            ('{"max_batch_size": "x"}', '"x" for max_batch_size'),
            ('{"a b": 2}', '"unknown_field" is no field of a configuration'),
            ('{"name": "other"}', "unexpected directory name 'm' for model 'other'"),
            ("[]", "attempt to access JSON non-object as object"),
            ("{", "failed to parse the request JSON buffer: "),
        ):
            assert says in control(url, "m", "load", {"parameters": {"config": config}})[1]
        assert control(url, "m", "load", {"parameters": {"config": 1}})[0] == 500
        assert control(url, "m", "load", {"parameters": {"file:1/model.py": ""}})[0] == 400
        assert index(url) == before and infer(url).status_code == 200
        assert control(url, "m", "load") == (200, "")
        assert httpx.get(f"{url}/v2/models/m/config").json()["max_batch_size"] == 8, "the file's again"


def test_a_reload_under_load_drops_no_request(root: Path) -> None:
    slow = BATCHES % 'dynamic_batching { } parameters { key: "execute_delay_ms" value { string_value: "3" } }'
    write_models(root, {"m": slow})
    with serving(root, model_control_mode="explicit", load_model=("m",)) as url:
        done, counts = threading.Event(), []

        def ask() -> None:
            n = 0
            with httpx.Client() as client:
                while not done.is_set():
                    response = client.post(f"{url}/v2/models/m/infer", json=ONE, timeout=30)
                    assert response.status_code == 200, response.text
                    assert response.json()["outputs"][0]["data"] == [7]
                    n += 1
            counts.append(n)

        with ThreadPoolExecutor(8) as pool:
            asking = [pool.submit(ask) for _ in range(8)]
            for _ in range(6):
                assert control(url, "m", "load") == (200, "")
                time.sleep(0.05)
            done.set()
            for one in asking:
                one.result()
        assert min(counts) >= 5


def test_a_client_that_goes_away_cancels_what_it_asked(root: Path) -> None:
    write_models(root, {"m": BATCHES % 'parameters { key: "execute_delay_ms" value { string_value: "1000" } }'})
    with serving(root) as url, httpx.Client() as client:
        host, port = url.removeprefix("http://").split(":")
        body = json.dumps(ONE).encode()
        head = b"POST /v2/models/m/infer HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        sockets = [socket.create_connection((host, int(port))) for _ in range(2)]

        def counts() -> tuple[int, int]:
            (stats,) = client.get(f"{url}/v2/models/m/stats").json()["model_stats"]
            return stats["execution_count"], stats["inference_stats"]["fail"]["count"]

        sockets[0].sendall(head + body)
        for _ in range(2):  # what arrived before the first of these is being computed after the second
            assert counts() == (0, 0)
        sockets[1].sendall(head + body)
        waiting = 'nv_inference_pending_request_count{model="m",version="1"} 1\n'
        until(lambda: waiting in client.get(f"{url}/metrics").text)
        sockets[1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # gone, not only silent
        sockets[1].close()
        assert sockets[0].recv(100).startswith(b"HTTP/1.1 200 OK")
        sockets[0].close()
        until(lambda: counts() == (1, 1))
        text = client.get(f"{url}/metrics").text
        assert 'nv_inference_request_failure{model="m",version="1",reason="CANCELED"} 1\n' in text


def test_folders_are_followed(root: Path) -> None:
    with serving(root, model_control_mode="poll", repository_poll_secs=0.1) as url:
        assert infer(url).status_code == 200
        write_models(root, {"second": BATCHES % ""})
        becomes(lambda: infer(url, "second").status_code == 200)
        (root / "m" / "config.pbtxt").write_text("nonsense: 1")
        write_models(root, {"second": BATCHES % ""}, version=2)
        becomes(lambda: infer(url, "second").json()["model_version"] == "2")
        assert infer(url).status_code == 200, "the broken one is what it was"
        for path in sorted((root / "second").rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        (root / "second").rmdir()
        becomes(lambda: infer(url, "second").status_code == 404)
        refused = "explicit model load / unload is not allowed if polling is enabled"
        assert control(url, "m", "load") == (503, refused)


def test_a_server_with_a_model_that_cannot_be_loaded_is_not_ready(tmp_path: Path) -> None:
    write_models(tmp_path, {"bad": ADD_SUB.replace("TYPE_INT32", "TYPE_STRING"), "good": BATCHES % ""})
    with serving(tmp_path, ServerSettings(port=free_port()), wait=False) as url:
        becomes(lambda: answers(url, "/v2/models/good/ready") == [200])
        assert httpx.get(f"{url}/v2/health/live").status_code == 200
        assert httpx.get(f"{url}/v2/health/ready").status_code == 400
        bad, good = index(url)
        assert (bad["state"], good["state"]) == ("UNAVAILABLE", "READY")
        assert bad["reason"] == "model 'bad' must have inputs and outputs of one type of numbers"


def load(root: Path, url: str) -> None:
    write_models(root, {"bad": BATCHES % ""})
    assert control(url, "bad", "load") == (200, "")


def unload(root: Path, url: str) -> None:
    assert control(url, "bad", "unload") == (200, "")


def fix(root: Path, url: str) -> None:
    write_models(root, {"bad": BATCHES % ""})


def remove(root: Path, url: str) -> None:
    (root / "bad").rename(root / ".bad")


@pytest.mark.parametrize("what", [load, unload, fix, remove])
@pytest.mark.parametrize("config", [ADD_SUB.replace("TYPE_INT32", "TYPE_STRING"), "nonsense: 1"])
def test_what_failed_at_the_start_can_be_fixed(root: Path, config: str, what: Callable[[Path, str], None]) -> None:
    write_models(root, {"bad": config})
    settings = ServerSettings(port=free_port())
    mode: dict[str, Any] = {"model_control_mode": "explicit", "load_model": ("*",)}
    if what in (fix, remove):
        mode = {"model_control_mode": "poll", "repository_poll_secs": 0.1}
    with serving(root, settings, wait=False, **mode) as url:
        becomes(lambda: answers(url, "/v2/models/m/ready") == [200])
        told_of_trouble(url)
        if what in (fix, remove):
            time.sleep(0.3)  # three looks at the folders, which fix nothing
        assert answers(url, *HEALTH) == [400, 503]
        what(root, url)
        becomes(lambda: answers(url, *HEALTH) == [200, 200])


def test_a_model_that_is_not_there_at_the_start_is_missed_until_it_is(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ServerSettings(port=free_port())
    with serving(root, settings, wait=False, model_control_mode="explicit", load_model=("m", "later")) as url:
        becomes(lambda: answers(url, "/v2/models/m/ready") == [200])
        why = "tensor models could not be loaded: failed to load 'later', failed to poll from model repository"
        assert told_of_trouble(url) == why
        assert answers(url, *HEALTH) == [400, 503]
        assert f"this server is not ready: {why}" in caplog.messages
        write_models(root, {"later": BATCHES % ""})
        assert control(url, "later", "load") == (200, "")
        becomes(lambda: answers(url, *HEALTH) == [200, 200])


def test_a_server_that_is_not_ready_says_what_is_wrong_now(root: Path) -> None:
    """Of what failed at the start what is left of it, with its last error, and what else is not as it was to be."""
    of_types = ADD_SUB.replace("TYPE_INT32", "TYPE_STRING")
    write_models(root, {"one": "nonsense: 1", "two": of_types, "three": BATCHES % ""})
    settings = ServerSettings(port=free_port())
    mode: dict[str, Any] = {"model_control_mode": "explicit", "load_model": ("m", "one", "two")}
    begin = "tensor models could not be loaded: "
    failed = "failed to load '%s', failed to poll from model repository: %s/config.pbtxt:1:1: "
    types = "model 'two' must have inputs and outputs of one type of numbers"
    two = f"load failed for model 'two': version 1 is at UNAVAILABLE state: Invalid argument: {types}"
    with serving(root, settings, wait=False, **mode) as url:
        first = told_of_trouble(url)
        assert first.startswith(begin + failed % ("one", "one")) and first.endswith(f"; {two}")
        write_models(root, {"one": BATCHES % "", "two": "other: 1"})
        assert control(url, "one", "load") == (200, "")
        assert told_of_trouble(url) == begin + two, "one is fixed, and two is as it was"
        assert control(url, "two", "load")[0] == 500
        assert told_of_trouble(url).startswith(begin + failed % ("two", "two")), "of its newest error"
        write_models(root, {"three": "nonsense: 1"})
        assert control(url, "three", "load")[0] == 500
        assert f"; model 'three' version 1 is at UNAVAILABLE state: {failed % ('three', 'three')}" in told_of_trouble(
            url
        )
        assert httpx.get(f"{url}/health").text == told_of_trouble(url)
        assert control(url, "two", "unload") == (200, "")
        assert told_of_trouble(url).startswith(f"{begin}model 'three' version 1 is at UNAVAILABLE state: ")
        assert control(url, "three", "unload") == (200, "")
        becomes(lambda: answers(url, *HEALTH) == [200, 200])


def test_a_name_that_no_folder_has_is_refused(root: Path) -> None:
    with serving(root, model_control_mode="explicit") as url:
        assert control(url, "m" * 256, "load") == (400, "model name has more than 255 bytes")
        assert control(url, "m" * 255, "load")[0] == 500, "as any that is not there"
