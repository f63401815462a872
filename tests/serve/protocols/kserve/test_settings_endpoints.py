"""Trace and log settings of a running server, over HTTP and gRPC: looked up, changed, refused."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace.model_repository.lifecycle.log_settings import LogSettings
from millrace.serve.settings import ServerSettings
from tests.support.kserve_grpc import Client, connected, one, refusal, request
from tests.support.repository import ADD_SUB, in_process, write_models
from tests.support.server import Threaded

GLOBAL: dict[str, Any] = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": "-1", "log_frequency": "0",
                          "trace_mode": "triton"}  # fmt: skip
NO_FILE = "trace file location can not be updated through network protocol"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces") / "trace.json"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, file: Path) -> Iterator[Threaded]:
    root = write_models(tmp_path_factory.mktemp("models"), {"simple": ADD_SUB, "other": ADD_SUB})
    said = (f"triton,file={file}", "level=TIMESTAMPS", "rate=1")
    with in_process(root, ServerSettings(port=0, trace_config=said), grpc_port=0) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Threaded) -> Iterator[Client]:
    with connected(server.grpc_url) as found:
        yield found


@pytest.fixture(autouse=True)
def as_it_was(server: Threaded) -> Iterator[None]:
    yield
    cleared = dict.fromkeys(("trace_level", "trace_rate", "trace_count", "log_frequency"))
    for path in ("trace/setting", "models/simple/trace/setting"):
        assert httpx.post(f"{server.url}/v2/{path}", json=cleared).status_code == 200


def http(server: Threaded, path: str, change: Any = None) -> tuple[int, Any]:
    url = f"{server.url}/v2/{path}"
    reply = httpx.get(url) if change is None else httpx.post(url, content=json.dumps(change))
    return reply.status_code, reply.json()


def over_grpc(client: Client, change: dict[str, list[str]] | None = None, model: str = "") -> dict[str, Any]:
    said = {key: {"value": values} for key, values in (change or {}).items()}
    told = client.call("TraceSetting", settings=said, model_name=model).settings
    lists = {key: list(one.value) for key, one in told.items()}
    return {key: values if key == "trace_level" else values[0] for key, values in lists.items()}


def test_trace_settings_over_both_protocols(server: Threaded, client: Client, file: Path) -> None:
    start = {**GLOBAL, "trace_file": str(file)}
    assert http(server, "trace/setting") == http(server, "models/simple/trace/setting") == (200, start)
    assert over_grpc(client) == over_grpc(client, model="simple") == start
    both = {"trace_level": ["TIMESTAMPS", "TENSORS"]}
    assert http(server, "models/simple/trace/setting", {"trace_rate": "12", "log_frequency": "34"}) == (
        200, {**start, "trace_rate": "12", "log_frequency": "34"},
    )  # fmt: skip
    assert http(server, "trace/setting", both) == (200, {**start, **both})
    assert over_grpc(client, model="simple") == {**start, **both, "trace_rate": "12", "log_frequency": "34"}
    assert over_grpc(client, {"trace_rate": [], "log_frequency": ["0"]}, "simple") == {**start, **both}
    assert over_grpc(client, {"trace_level": ["OFF"], "trace_count": ["3"]}) == {
        **start, "trace_level": ["OFF"], "trace_count": "3",
    }  # fmt: skip
    assert http(server, "models/other/trace/setting", {}) == (
        200, {**start, "trace_level": ["OFF"], "trace_count": "3"},
    )  # fmt: skip


@pytest.mark.parametrize(
    "change, status, says",
    [
        ({"trace_file": "x"}, 501, NO_FILE),
        ({"trace_file": None}, 501, NO_FILE),
        ({"trace_rate": "0"}, 400, "Unable to parse 'trace_rate', value is out of range [1, 4294967295], got: 0"),
        ({"trace_rate": "a"}, 400, "Unable to parse 'trace_rate', got: a"),
        ({"trace_count": "-2"}, 400, "Unable to parse 'trace_count', value is out of range [-1, 2147483647], got: -2"),
        ({"log_frequency": 5}, 500, "Unable to parse 'log_frequency': attempt to access JSON non-string as string"),
        ({"trace_level": "OFF"}, 500, "Unable to parse 'trace_level': attempt to access JSON non-array as array"),
        ({"trace_level": ["OFF", "TENSORS"]}, 400, "Expect only one trace level 'OFF' is specified"),
        ({"trace_level": ["ALL"]}, 400, "Unsupported trace level: ALL; expected: OFF, TIMESTAMPS, TENSORS"),
        ({"trace_speed": "1"}, 400, "unknown trace setting 'trace_speed'; "),
    ],
)
def test_trace_settings_that_cannot_be(server: Threaded, change: Any, status: int, says: str) -> None:
    before = http(server, "trace/setting")
    found, reply = http(server, "trace/setting", change)
    assert found == status and reply["error"].startswith(says)
    assert http(server, "trace/setting") == before


def test_trace_settings_of_no_model(server: Threaded, client: Client) -> None:
    unknown = "Request for unknown model : gone"
    assert http(server, "models/gone/trace/setting") == (400, {"error": unknown})
    assert http(server, "models/gone/trace/setting", {"trace_rate": "1"}) == (400, {"error": unknown})
    assert refusal(lambda: over_grpc(client, model="gone")) == ("INVALID_ARGUMENT", unknown)
    assert http(server, "models/simple/versions/1/trace/setting") == (404, {"error": "Not Found"})
    assert refusal(lambda: over_grpc(client, {"trace_file": ["x"]})) == ("UNIMPLEMENTED", NO_FILE)
    two = refusal(lambda: over_grpc(client, {"trace_rate": ["1", "2"]}))
    assert two == ("INVALID_ARGUMENT", "expect only 1 value for 'trace_rate'")
    assert httpx.put(f"{server.url}/v2/trace/setting").status_code == 405


def test_what_is_traced_is_in_the_file_once_settings_change(server: Threaded, file: Path) -> None:
    tensors = [{"name": f"INPUT{i}", "shape": [1, 16], "datatype": "INT32", "data": [1] * 16} for i in range(2)]
    for i in range(3):
        body = {"id": f"r{i}", "inputs": tensors}
        assert httpx.post(f"{server.url}/v2/models/simple/infer", json=body).status_code == 200
    assert http(server, "trace/setting", {"trace_level": ["OFF"]})[0] == 200
    ids = [record["request_id"] for record in json.loads(file.read_text()) if "request_id" in record]
    assert ids[-3:] == ["r0", "r1", "r2"]


FRONT = {
    "http": ["HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END"],
    "grpc": ["GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "GRPC_SEND_START", "GRPC_SEND_END"],
}


@pytest.mark.parametrize("protocol", FRONT)
def test_a_trace_has_the_protocols_times(server: Threaded, client: Client, file: Path, protocol: str) -> None:
    if protocol == "http":
        tensors = [{"name": f"INPUT{i}", "shape": [1, 16], "datatype": "INT32", "data": [1] * 16} for i in range(2)]
        assert httpx.post(f"{server.url}/v2/models/simple/infer", json={"inputs": tensors}).status_code == 200
    else:
        inputs = [one("INT32", [1, 16], f"INPUT{i}") for i in range(2)]
        client.infer("simple", inputs, [bytes(64)] * 2)
    assert http(server, "trace/setting", {"trace_level": ["OFF"]})[0] == 200
    times = {t["name"]: t["ns"] for t in json.loads(file.read_text())[-1]["timestamps"]}
    first, read, begun, sent = (times[name] for name in FRONT[protocol])
    assert first <= read <= times["REQUEST_START"] <= times["REQUEST_END"] <= begun <= sent
    assert sent - first < 5e9


def test_what_a_stream_answers_is_traced_too(server: Threaded, client: Client, file: Path) -> None:
    inputs = [one("INT32", [1, 16], f"INPUT{i}") for i in range(2)]
    (answer,) = client.stream(iter([request("simple", inputs, [bytes(64)] * 2, id="streamed")]))
    assert answer.infer_response.id == "streamed"
    assert http(server, "trace/setting", {"trace_level": ["OFF"]})[0] == 200
    *_, head, last = json.loads(file.read_text())
    assert head["request_id"] == "streamed"
    names = [t["name"] for t in last["timestamps"]]
    assert names[0] == "REQUEST_START" and names[-2:] == FRONT["grpc"][:2]


def test_extensions_are_told(server: Threaded) -> None:
    assert {"trace", "logging"} <= set(httpx.get(f"{server.url}/v2").json()["extensions"])


LOG = {"log_file": "", "log_info": True, "log_warning": True, "log_error": True, "log_verbose_level": 0,
       "log_format": "default"}  # fmt: skip


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What a handler of the package's log writes."""
    found: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, handler = logging.getLogger("millrace"), Kept()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_log_settings_over_both_protocols(server: Threaded, client: Client, lines: list[str]) -> None:
    def told() -> dict[str, Any]:
        settings = client.call("LogSettings").settings
        return {key: getattr(one, one.WhichOneof("parameter_choice")) for key, one in settings.items()}

    assert http(server, "logging") == (200, LOG) and told() == LOG
    quiet = {**LOG, "log_info": False, "log_verbose_level": 1, "log_format": "ISO8601"}
    change = {key: quiet[key] for key in ("log_info", "log_verbose_level", "log_format")}
    assert http(server, "logging", change) == (200, quiet) and told() == quiet
    said = {"log_verbose_level": {"uint32_param": 0}, "log_warning": {"bool_param": False}}
    client.call("LogSettings", settings=said)
    assert told() == {**quiet, "log_verbose_level": 0, "log_warning": False}
    lines.clear()
    logger = logging.getLogger("millrace.serve.somewhere")
    for say in (logger.debug, logger.info, logger.warning, logger.error):
        say("%s", say.__name__)
    assert lines == ["error"]
    assert http(server, "logging", {"log_info": True, "log_verbose_level": 2, "log_error": False})[0] == 200
    lines.clear()
    for say in (logger.debug, logger.info, logger.warning, logger.error):
        say("%s", say.__name__)
    assert [line for line in lines if line in ("debug", "info", "warning", "error")] == ["debug", "info"]
    assert http(server, "logging", {key: value for key, value in LOG.items() if key != "log_file"}) == (200, LOG)


@pytest.mark.parametrize(
    "change, status, says",
    [
        ({"log_file": "x"}, 501, "log file location can not be updated through network protocol"),
        ({"log_info": 1}, 500, "Unable to parse 'log_info': attempt to access JSON non-boolean as boolean"),
        ({"log_verbose_level": -1}, 500, "Unable to parse 'log_verbose_level': attempt to access JSON non-unsigned"),
        ({"log_verbose_level": True}, 500, "Unable to parse 'log_verbose_level': attempt to access JSON non-unsigned"),
        ({"log_format": "rfc"}, 400, "invalid argument for log_format, got: rfc; expected: default or ISO8601"),
        ({"log_warnings": True}, 400, "unknown log setting 'log_warnings'; did you mean \"log_warning\"?"),
        ([], 500, "attempt to access JSON non-object as object"),
    ],
)
def test_log_settings_that_cannot_be(server: Threaded, change: Any, status: int, says: str) -> None:
    found, reply = http(server, "logging", change)
    assert found == status and reply["error"].startswith(says), reply


def test_the_log_is_as_it_was_when_a_server_ends(lines: list[str]) -> None:
    switches = LogSettings()
    switches.change({"log_error": False})
    logging.getLogger("millrace").error("unheard")
    switches.close()
    logging.getLogger("millrace").error("heard")
    assert lines == ["heard"]
