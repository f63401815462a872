"""`generate` and `generate_stream`: what goes in and out, and everything that Triton's own test of them asks for.

`llm` is a model like that test's: it says PROMPT so many times, or answers once with its end.
"""

import asyncio
import json
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace.bench.client.client import BenchTarget, Client
from millrace.bench.client.endpoints import ENDPOINTS
from millrace.bench.client.request_record import BenchMessage, BenchRecord, BenchRequest
from tests.support.kserve import ID
from tests.support.python_models import HEAD, SAY, write
from tests.support.repository import ADD_SUB, REPEAT, identity, serving, write_models

LLM = (
    HEAD
    + """
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request, request.get_response_sender())).start()

    def answer(self, request, sender):
        import time
        from pathlib import Path
        given = {t.name(): t.as_numpy().reshape(-1)[0] for t in request.inputs()}
        out = pb_utils.Tensor("TEXT", np.array([given["PROMPT"]], dtype=object))
        response = pb_utils.InferenceResponse([out], parameters={"seen": json.loads(request.parameters()).get("p", "")})
        if not given["STREAM"]:
            sender.send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return
        for _ in range(given.get("REPETITION", 1)):
            if request.is_cancelled():
                Path(self.mark).write_text(request.request_id())
                break
            sender.send(response)
            time.sleep(given.get("DELAY", 0) / 1e3)
        if given.get("FAIL_LAST"):
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("An Error Occurred")))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    mark = MARK
"""
)
LLM_CONFIG = """backend: "python" model_transaction_policy { decoupled: true }
input [ { name: "PROMPT" data_type: TYPE_STRING dims: [ 1 ] }, { name: "STREAM" data_type: TYPE_BOOL dims: [ 1 ] },
        { name: "REPETITION" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
        { name: "DELAY" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
        { name: "FAIL_LAST" data_type: TYPE_BOOL dims: [ 1 ] optional: true } ]
output { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
"""
WORDS = HEAD + """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            n = int(pb_utils.get_input_tensor_by_name(request, "max_tokens").as_numpy()[0])
            for i in range(n):
                sender.send(said(f"{i} "))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
""" + SAY.replace("OUT", "text_output")  # fmt: skip
WORDS_CONFIG = """backend: "python" model_transaction_policy { decoupled: true }
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
        { name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] } ]
output { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }
"""
NOT_ONE = "generate expects model to produce exactly 1 response, use generate stream for model that generates various"
SAID = {"model_name": "llm", "model_version": "1", "TEXT": "hello world", "seen": ""}


@pytest.fixture(scope="module")
def mark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("marks") / "cancelled"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, mark: Path) -> Iterator[str]:
    root = tmp_path_factory.mktemp("models")
    write(root, "llm", LLM.replace("MARK", repr(str(mark))), LLM_CONFIG)
    write(root, "words", WORDS, WORDS_CONFIG)
    models = {
        "simple": ADD_SUB, "repeat": REPEAT, "texts": identity("STRING", "1", "max_batch_size: 4"),
        "matrix": identity("FP32", "-1, 2"), "batches": identity("FP32", "2", "max_batch_size: 4"),
        "half": identity("FP16", "-1"), "loose": identity("INT64", "-1, -1"), "raw": identity("UINT8", "-1"),
    }  # fmt: skip
    with serving(write_models(root, models)) as found:
        yield found


def post(url: str, model: str, body: Any, route: str = "generate", **headers: str) -> httpx.Response:
    content = body if isinstance(body, str | bytes) else json.dumps(body)
    return httpx.post(f"{url}/v2/models/{model}/{route}", content=content, headers=headers, timeout=30)


def streamed(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = response.text.split("\n\n")
    assert events.pop() == "" and all(e.startswith("data: ") for e in events)
    return [json.loads(e.removeprefix("data: ")) for e in events]


def test_one_response(url: str) -> None:
    for prompt in ("hello world", ["hello world"]):
        for stream in (True, False):
            response = post(url, "llm", {"PROMPT": prompt, "STREAM": stream})
            assert (response.status_code, response.json()) == (200, SAID)
            assert response.headers["content-type"] == "application/json"
            assert streamed(post(url, "llm", {"PROMPT": prompt, "STREAM": stream}, "generate_stream")) == [SAID]
    told = post(url, "llm", {"id": "7", "PROMPT": "ü", "STREAM": False, "p": 3}, "versions/1/generate").json()
    assert told == {**SAID, "id": "7", "TEXT": "ü", "seen": 3}


def test_several_responses_and_none(url: str) -> None:
    asked = {"PROMPT": "hello world", "STREAM": True, "parameters": {"REPETITION": 3, "p": "x"}}
    assert streamed(post(url, "llm", asked, "generate_stream")) == [{**SAID, "seen": "x"}] * 3
    for n in (0, 2, 3):
        response = post(url, "llm", {**asked, "parameters": {"REPETITION": n}})
        assert response.status_code == 500 and response.json()["error"].startswith(NOT_ONE)
    empty = post(url, "llm", {**asked, "parameters": {"REPETITION": 0}}, "generate_stream")
    assert empty.status_code == 200 and streamed(empty) == []


def test_errors_are_events_and_the_first_decides_on_the_status(url: str) -> None:
    asked = {"PROMPT": "hello world", "STREAM": True, "FAIL_LAST": True}
    first = post(url, "llm", {**asked, "REPETITION": 0}, "generate_stream")
    assert first.status_code == 500 and streamed(first) == [{"error": "An Error Occurred"}]
    later = post(url, "llm", asked, "generate_stream")
    assert later.status_code == 200 and streamed(later) == [SAID, {"error": "An Error Occurred"}]
    alone = post(url, "llm", {**asked, "REPETITION": 0})
    assert (alone.status_code, alone.json()) == (500, {"error": "An Error Occurred"})


REFUSED: list[tuple[Any, int, str]] = [
    ({}, 400, "expected number of inputs between 2 and 5 but got 0 inputs"),
    ({"abc": 123}, 400, "between 2 and 5 but got 0 inputs"),
    ({"PROMPT": "hello"}, 400, "between 2 and 5 but got 1 inputs"),
    ({"PROMPT": 123, "STREAM": False}, 500, "attempt to access JSON non-string as string"),
    ({"PROMPT": "hello", "STREAM": "false"}, 500, "attempt to access JSON non-boolean as boolean"),
    ({"PROMPT": True, "STREAM": 123}, 500, "attempt to access JSON non-string as string"),
    ({"STREAM": 123, "PROMPT": True}, 500, "attempt to access JSON non-boolean as boolean"),
    ('{"PROMPT": "a", "STREAM": false, "STREAM": true, "PROMPT": "b"}', 400, "input 'STREAM' already exists in"),
    ('{"PROMPT": "a", "STREAM": false, "parameters": {"PROMPT": "b"}}', 400,
     f"Converting keyword: 'parameters': {ID}input 'PROMPT' already exists in request"),
    ({"PROMPT": "a", "STREAM": True, "PARAMS": {"a": 0}}, 400, "parameter 'PARAMS' has invalid type"),
    ({"PROMPT": {"USER": "a"}, "STREAM": True}, 500, "attempt to access JSON non-string as string"),
    ({"PROMPT": "a", "STREAM": True, "parameters": 1}, 400, "Expected JSON object for keyword: 'parameters'"),
    ({"PROMPT": "a", "STREAM": True, "parameters": {"nested": {"twice": 1}}}, 400,
     "Converting keyword: 'parameters': parameter 'nested' has invalid type."),
    ({"PROMPT": ["a", "b"], "STREAM": True}, 400, "unexpected number of elements for input 'PROMPT': 2"),
    ({"id": 3}, 500, "Unable to parse 'id': attempt to access JSON non-string as string"),
    ({"triton_x": 3}, 400, "parameter keys starting with 'triton_' are reserved"),
    ([1], 500, "attempt to access JSON non-object as object"),
    ("", 400, "failed to parse the request JSON buffer: "),
    ("{", 400, "failed to parse the request JSON buffer: "),
    (b"\xff{}", 400, "failed to parse the request JSON buffer: "),
    ('{"a": NaN}', 400, "failed to parse the request JSON buffer: NaN is no JSON"),
    ('{"a": 1' + "0" * 30 + "}", 400, "parameter 'a' has invalid type"),
    ('{"a": 1' + "0" * 5000 + "}", 400, "failed to parse the request JSON buffer: "),
    ('{"id": "\\ud800"}', 400, "failed to parse the request JSON buffer: "),
    ('{"PROMPT": ' + "[" * 120 + "]" * 120 + "}", 400, "JSON nesting depth exceeds maximum allowed limit (100)"),
    ("[" * 100_000, 400, "JSON nesting depth exceeds maximum allowed limit (100)"),
    (" " * ((16 << 20) + 1), 400, "exceeds the maximum allowed value of 16777216 bytes"),
]  # fmt: skip


@pytest.mark.parametrize("route", ["generate", "generate_stream"])
@pytest.mark.parametrize(("body", "status", "says"), REFUSED, ids=lambda x: str(x)[:30])
def test_what_is_refused(url: str, route: str, body: Any, status: int, says: str) -> None:
    response = post(url, "llm", body, route)
    assert response.status_code == status and says in response.json()["error"]
    assert response.headers["content-type"] == "application/json"


def test_models_that_there_are_not_and_compressed_bodies(url: str) -> None:
    gone = post(url, "gone", {}, "generate_stream")
    assert (gone.status_code, gone.json()) == (404, {"error": "Request for unknown model: 'gone' is not found"})
    packed = post(url, "llm", {}, **{"content-encoding": "gzip"})
    assert (packed.status_code, packed.json()) == (501, {"error": "generate takes no compressed bodies"})
    assert httpx.get(f"{url}/v2/models/llm/generate").status_code == 405
    half = post(url, "half", {"INPUT0": [1.5]})
    assert half.status_code == 400 and half.json()["error"].startswith("receiving FP16 data via JSON is not supported")


@pytest.mark.parametrize(
    ("model", "value", "out"),
    [
        ("texts", "a", "a"),
        ("texts", ["a", "b"], ["a", "b"]),
        ("matrix", [1, 2, 3, 4], [1, 2, 3, 4]),
        ("matrix", [[1, 2], [3, 4]], [1, 2, 3, 4]),
        ("batches", [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]),
        ("batches", [[1, 2]], [1, 2]),
        ("loose", [1, 2, 3], [1, 2, 3]),
        ("loose", [[1], [2], [3]], [1, 2, 3]),
        ("loose", -(2**63), -(2**63)),
        ("raw", [], []),
    ],
)
def test_lists_become_tensors(url: str, model: str, value: Any, out: Any) -> None:
    assert post(url, model, {"INPUT0": value}).json()["OUTPUT0"] == out


@pytest.mark.parametrize(
    ("model", "value", "says"),
    [
        ("batches", [1, 2, 3], "unexpected number of elements for input 'INPUT0': 3, which do not fit [-1, 2]"),
        ("matrix", [1, 2, 3], "unexpected number of elements for input 'INPUT0': 3, which do not fit [-1, 2]"),
        ("loose", [[1, 2], [3]], "Shape does not match true shape of 'data' field"),
        ("batches", list(range(10)), "inference request batch-size must be <= 4 for 'batches'"),
    ],
)
def test_lists_that_fit_no_shape(url: str, model: str, value: Any, says: str) -> None:
    assert says in post(url, model, {"INPUT0": value}).json()["error"]


def test_tensors_by_name_of_models_in_general(url: str) -> None:
    told = post(url, "simple", {"INPUT0": list(range(16)), "INPUT1": [1] * 16}).json()
    assert told["OUTPUT0"] == [i + 1 for i in range(16)] and told["OUTPUT1"] == [i - 1 for i in range(16)]
    events = streamed(post(url, "repeat", {"IN": [4, 2], "DELAY": [0, 0], "WAIT": 0}, "generate_stream"))
    assert [(e["OUT"], e["IDX"]) for e in events] == [(4, 0), (2, 1)]


def test_events_come_as_they_are_made_and_who_goes_away_cancels(url: str, mark: Path) -> None:
    asked = {"id": "gone", "PROMPT": "x", "STREAM": True, "REPETITION": 100_000, "DELAY": 5}
    body = json.dumps(asked).encode()
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        head = f"POST /v2/models/llm/generate_stream HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        assert b"data: " in client.recv(1000) + client.recv(1000), "the model is far from its end"
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until_s = time.monotonic() + 10
    while not (mark.exists() and mark.read_text()) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert mark.read_text() == "gone"


@pytest.mark.parametrize(("streamed", "n"), [(True, 7), (False, 1)])
def test_the_load_generator_drives_it(url: str, streamed: bool, n: int) -> None:
    async def ask() -> BenchRecord:
        async with Client(BenchTarget(url, ENDPOINTS["generate"], "words", streamed, keep_text=True)) as client:
            return await client.ask(BenchRequest([BenchMessage("user", "one two three")], n))

    answer = asyncio.run(ask())
    assert (answer.failure, answer.detail, answer.status) == (None, "", 200)
    assert answer.text == "".join(f"{i} " for i in range(n)) and len(answer.chunk_s) == (n if streamed else 0)
