"""Inference requests that are answered without ASGI: as the normal path answers them, whatever clients do meanwhile.

A header that the server does not know makes a request take the normal path.
"""

import json
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace.serve.http.api_key_file import KeyFile
from millrace.serve.http.connection import HOLD_S
from millrace.serve.protocols.kserve.http import fast_path, infer_header_cache
from millrace.serve.protocols.kserve.http.fast_path import END, HeadCache, HttpFastPath
from millrace.serve.settings import ServerSettings
from tests.serve.support import until
from tests.support.kserve import HEADER, binary, one
from tests.support.python_models import HEAD, write
from tests.support.raw_connection import Connection
from tests.support.repository import in_process
from tests.support.server import Threaded

PATH = "/v2/models/m/infer"
_TENSORS = """backend: "python"
input [ { name: "A" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "WAIT" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "B" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
_MODEL = (
    HEAD
    + """
    def initialize(self, args):
        import time
        self.time = time

    def execute(self, requests):
        responses = []
        for request in requests:
            a = pb_utils.get_input_tensor_by_name(request, "A").as_numpy()
            until = self.time.monotonic() + float(pb_utils.get_input_tensor_by_name(request, "WAIT").as_numpy()[0])
            while self.time.monotonic() < until and not request.is_cancelled():
                self.time.sleep(0.005)
            if a.size and a[0] < 0:
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("negative")))
            elif a.size and a[0] > 1e6:
                raise RuntimeError("too large")
            else:
                b = np.repeat(a + 1, 40_000 if request.request_id() == "many" else 1)
                parameters = {"n": int(a.size)} if request.request_id() == "told" else None
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("B", b)], parameters=parameters))
        return responses
"""
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Threaded]:
    root = tmp_path_factory.mktemp("models")
    write(root, "m", _MODEL, _TENSORS)
    with in_process(root, http_max_input_size=20_000) as found:
        yield found


@pytest.fixture
def url(served: Threaded) -> str:
    return served.url


@pytest.fixture
def n_fast(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each request that was answered without ASGI."""
    found: list[int] = []
    begin = HttpFastPath.begin

    def counted(*given: Any) -> Any:
        answer = begin(*given)
        found.extend([1] if answer is not None else [])
        return answer

    monkeypatch.setattr(HttpFastPath, "begin", counted)
    return found


def body(a: list[float], wait_s: float = 0.0, **more: Any) -> bytes:
    inputs = [{**one("FP32", [len(a)], a), "name": "A"}, {**one("FP32", [1], [wait_s]), "name": "WAIT"}]
    return json.dumps({"inputs": inputs, **more}).encode()


def packet(data: bytes, **headers: str) -> bytes:
    lines = {"host": "x", **{k.replace("_", "-"): v for k, v in headers.items()}, "content-length": str(len(data))}
    return (f"POST {PATH} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items()) + "\r\n").encode() + data


def normal(whole: bytes) -> bytes:
    return whole.replace(b"host: x\r\n", b"host: x\r\nx-unknown: 1\r\n", 1)


def bodies(draw: random.Random) -> Iterator[tuple[bytes, dict[str, str]]]:
    def some() -> list[float]:
        return [draw.uniform(0, 9) for _ in range(draw.randrange(1, 5))]

    yield body(some()), {}
    yield body(some(), id="seven"), {}
    yield body(some(), id="told"), {}
    yield body(some(), outputs=[{"name": "B"}]), {}
    yield body(some(), outputs=[{"name": "B", "parameters": {"binary_data": True}}]), {}
    yield body(some(), outputs=[{"name": "B", "parameters": {"classification": 2}}]), {}
    yield body(some(), parameters={"priority": 1, "timeout": 10**6}), {}
    yield body([draw.random()] * 6, id="many"), {}  # so many bytes are written beside the event loop
    yield body(some()), {"x_request_id": "mine"}
    yield body(some()), {"accept_encoding": "gzip, deflate"}
    yield body([draw.random()] * 6, id="many"), {"accept_encoding": "deflate"}
    yield body([-1.0]), {}
    yield body([2e6]), {}
    yield body(some(), outputs=[{"name": "C"}]), {}
    yield body(some(), parameters={"headers": "x"}), {}
    yield body([]), {}
    yield b"", {}
    yield b"[]", {}
    yield body(some())[:-1], {}
    yield b'{"inputs": [' + b"[" * 200, {}
    raw = struct.pack("<3f", *(draw.uniform(0, 9) for _ in range(2)), 0.0)
    inputs = [
        {**one("FP32", [2], parameters={"binary_data_size": 8}), "name": "A"},
        {**one("FP32", [1], parameters={"binary_data_size": 4}), "name": "WAIT"},
    ]
    yield binary(inputs, raw)
    yield binary(inputs, raw[:-1])
    yield binary(inputs, raw + b"0")
    whole, _ = binary(inputs, raw)
    yield whole, {HEADER: str(len(whole) + 1)}


@pytest.mark.parametrize("seed", range(2))
def test_answers_are_those_of_the_normal_path(url: str, n_fast: list[int], seed: int) -> None:
    for data, headers in bodies(random.Random(seed)):
        whole = packet(data, **headers)
        with Connection(url) as warm, Connection(url) as fresh:
            wanted, before = fresh.send(normal(whole)), len(n_fast)
            found = [warm.send(whole) for _ in range(3)]
            assert found == [wanted] * 3, data[:200]
            assert len(n_fast) >= before + 2


def test_an_id_of_the_client_is_said_again_and_others_are_new(url: str, n_fast: list[int]) -> None:
    with httpx.Client() as client:
        told = [client.post(url + PATH, content=body([1.0]), headers={"x-request-id": "mine"}) for _ in range(3)]
        assert [one.headers["x-request-id"] for one in told] == ["mine"] * 3
        assert len({client.post(url + PATH, content=body([1.0])).headers["x-request-id"] for _ in range(5)}) == 5
    assert len(n_fast) >= 6


@pytest.mark.parametrize("pause_s", [0.0, 0.01, 0.2])
def test_a_body_behind_its_head_is_the_same_request(url: str, n_fast: list[int], pause_s: float) -> None:
    """As most clients send it; after a while the normal path waits for it."""
    whole = packet(body([1.0, 2.0]))
    at = whole.index(END) + len(END)
    with Connection(url) as client:
        (wanted,) = client.send(normal(whole))
        for _ in range(4):
            client.socket.sendall(whole[:at])
            time.sleep(pause_s)
            assert client.send(whole[at:]) == [wanted]
        client.socket.sendall(whole[:at])
        time.sleep(pause_s)
        assert client.send(whole[at:] + whole, n=2) == [wanted] * 2
        client.socket.sendall(whole[:at])
        time.sleep(pause_s)
        assert client.send(whole[at : at + 5], whole[at + 5 :]) == [wanted]
        client.socket.sendall(whole[:at])
        time.sleep(pause_s)
        client.socket.shutdown(socket.SHUT_WR)
        assert client._read.read() == b"", "its body never came"
    assert n_fast or pause_s > HOLD_S


def test_requests_behind_one_that_is_computed_are_answered_in_their_order(url: str, n_fast: list[int]) -> None:
    slow, quick = packet(body([1.0], 0.2, id="slow")), packet(body([2.0], id="told"))
    with Connection(url) as client:
        client.send(slow), client.send(quick)
        for packets in ([slow, quick, quick], [slow, normal(quick)], [slow + quick], [slow, quick[:30], quick[30:]]):
            n = sum(part.count(b"POST") for part in packets)
            answers = client.send(*packets, n=n)
            assert [json.loads(told)["id"] for _, _, told in answers] == ["slow"] + ["told"] * (n - 1)
    assert n_fast


def test_who_sends_no_more_is_answered_and_who_leaves_is_not_waited_for(served: Threaded, n_fast: list[int]) -> None:
    url, slow = served.url, packet(body([1.0], 0.3))
    with Connection(url) as client:
        client.send(slow)
        client.socket.sendall(slow)
        client.socket.shutdown(socket.SHUT_WR)
        (told,) = client.read_response()
        assert told[0].startswith(b"HTTP/1.1 200") and client._read.read() == b""
    forever = packet(body([1.0], 3600.0))
    with Connection(url) as client:
        client.send(packet(body([1.0], 0.0)))
    with Connection(url) as client:  # once the normal way, so that its head is known
        client.socket.sendall(forever)
        time.sleep(0.1)
    with Connection(url) as client:
        client.socket.sendall(forever)
        until(lambda: len(n_fast) > 1)
    with Connection(url) as client:  # the instance is free again
        assert client.send(packet(body([5.0])))[0][0].startswith(b"HTTP/1.1 200")
    metrics = httpx.get(f"{url}/metrics").text
    assert 'path="/v2/models/{model}/infer",status="499"' in metrics
    until(lambda: httpx.get(f"{url}/load").json()["server_load"] == 0)


def test_a_key_is_charged_until_it_is_answered(tmp_path: Path, n_fast: list[int]) -> None:
    write(tmp_path / "models", "m", _MODEL, _TENSORS)
    keys = tmp_path / "keys.json"
    keys.write_text("one name=one concurrent=1")
    keys.chmod(0o600)
    settings = ServerSettings(port=0, key_file=KeyFile.read(keys))
    with in_process(tmp_path / "models", settings) as served:
        whole = packet(body([1.0]), authorization="Bearer one")
        with Connection(served.url) as client, Connection(served.url) as other:
            for _ in range(3):
                assert client.send(whole)[0][0].startswith(b"HTTP/1.1 200")
            assert len(n_fast) == 2
            assert other.send(packet(body([1.0]), authorization="Bearer two"))[0][0].startswith(b"HTTP/1.1 401")
            slow = packet(body([1.0], 1.0), authorization="Bearer one")
            assert client.send(slow)[0][0].startswith(b"HTTP/1.1 200")
            client.socket.sendall(slow)
            until(lambda: len(n_fast) > 2)
            assert other.send(whole)[0][0].startswith(b"HTTP/1.1 429")
            (told,) = client.read_response()
            assert told[0].startswith(b"HTTP/1.1 200")
            assert other.send(whole)[0][0].startswith(b"HTTP/1.1 200")


def test_a_server_that_stops_answers_what_it_has_taken(tmp_path: Path, n_fast: list[int]) -> None:
    write(tmp_path, "m", _MODEL, _TENSORS)
    with in_process(tmp_path) as served, Connection(served.url) as client:
        slow = packet(body([1.0], 0.5))
        client.send(slow)
        client.socket.sendall(slow)
        until(lambda: len(n_fast) == 1)
        threading.Timer(0.1, served.server.stop).start()
        (told,) = client.read_response()
        assert told[0].startswith(b"HTTP/1.1 200") and client._read.read() == b""


def test_a_bug_in_writing_ends_one_request(
    url: str, n_fast: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = packet(body([1.0]))
    with Connection(url) as client:
        client.send(whole)
        with monkeypatch.context() as broken:
            broken.setattr(infer_header_cache, "encode_response", lambda *given: 1 / 0)
            assert client.send(whole)[0][0].startswith(b"HTTP/1.1 500")
        assert client.send(whole)[0][0].startswith(b"HTTP/1.1 200")
    assert "a bug in the server" in caplog.text


def test_a_bug_before_writing_holds_nothing(
    served: Threaded, n_fast: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A backend may send what is no array: each request ends with 500, and its slot is free again."""
    whole, slow = packet(body([1.0])), packet(body([1.0], 0.02))
    with Connection(served.url) as client:
        for name, n in (("memory_bytes", 3), ("regions_of_tenant", 3)):
            client.send(whole), client.send(slow)
            with monkeypatch.context() as broken:
                broken.setattr(fast_path, name, lambda *given: 1 / 0)
                for _ in range(n):
                    assert client.send(whole)[0][0].startswith(b"HTTP/1.1 500"), name
                    assert client.send(slow)[0][0].startswith(b"HTTP/1.1 500"), name
        assert client.send(whole)[0][0].startswith(b"HTTP/1.1 200")
    assert len(n_fast) >= 12 and "a bug in the server" in caplog.text
    until(lambda: httpx.get(f"{served.url}/load").json()["server_load"] == 0)


def test_heads_are_bounded_and_the_least_recently_used_leave() -> None:
    heads = HeadCache(max_bytes=100)
    path, n = PATH.encode(), fast_path.MAX_HEADS

    def added(name: str, n_body: int = 3) -> bytes:
        whole = packet(b"x" * n_body, user_agent=name)
        headers = [tuple(line.split(b": ")) for line in whole.partition(END)[0].split(b"\r\n")[1:]]
        heads.add(path, headers, whole)  # type: ignore[arg-type]
        return whole

    first, second = added("0"), added("1")
    for i in range(2, n):
        added(str(i))
    assert heads.lookup(first) is not None
    added("one more")
    assert heads.lookup(first) is not None and heads.lookup(second) is None
    assert heads.lookup(first[:-1]) is None and heads.lookup(first + b"x") is None
    assert heads.lookup(added("too large", 101)) is None
    assert heads.lookup(added("x" * fast_path.MAX_HEAD_BYTES)) is None


@pytest.mark.parametrize("line", ["x-other: 1", "expect: 100-continue", "content-encoding: gzip", "connection: close"])
def test_heads_that_need_the_normal_path_are_not_kept(line: str) -> None:
    heads, whole = HeadCache(100), packet(b"{}").replace(b"host: x", b"host: x\r\n" + line.encode())
    headers = [tuple(one.split(b": ")) for one in whole.partition(END)[0].split(b"\r\n")[1:]]
    assert heads.add(PATH.encode(), headers, whole) is None and heads.lookup(whole) is None  # type: ignore[arg-type]
