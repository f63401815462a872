"""Short requests that are answered by what came before: always as they are answered the usual way.

Each request is sent on a connection that knows one like it, and on one that knows nothing.
"""

import gc
import logging
import random
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from millrace.model_repository.models.resizable_model import ResizableModel
from millrace.serve.http.http_request import (
    ACCESS,
    LOG_ATTRIBUTE,
    BatchedRequestLogs,
    BufferedRequestLog,
    Line,
    RequestLog,
)
from millrace.serve.ops.logs import JsonFormatter, TextFormatter
from millrace.serve.protocols.kserve.grpc.fast_path import GrpcFastPath
from millrace.serve.protocols.kserve.grpc.protobuf_messages import message
from millrace.serve.protocols.kserve.http.fast_path import MAX_REQUESTS, ConnectionFastPath
from tests.serve.protocols.kserve.conftest import LIMIT
from tests.serve.support import until
from tests.support.kserve import HEADER, binary, one
from tests.support.kserve_grpc import Client
from tests.support.kserve_grpc import one as grpc_one
from tests.support.kserve_grpc import request as grpc_request
from tests.support.repository import ADD_SUB, in_process, write_models
from tests.support.server import Threaded

Answer = tuple[bytes, dict[bytes, bytes], bytes]
_INPUTS = [
    {**one("INT32", [1, 16], parameters={"binary_data_size": 64}), "name": f"INPUT{i}"} for i in range(2)
]  # fmt: skip


@pytest.fixture
def n_quick(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each request that was answered at once."""
    found: list[int] = []
    http, grpc = ConnectionFastPath.answer, GrpcFastPath.answer

    def counted(usual: Callable[..., bytes | None]) -> Callable[..., bytes | None]:
        def answer(*given: Any) -> bytes | None:
            answered = usual(*given)
            found.extend([1] if answered is not None else [])
            return answered

        return answer

    monkeypatch.setattr(ConnectionFastPath, "answer", counted(http))
    monkeypatch.setattr(GrpcFastPath, "answer", counted(grpc))
    return found


class Connection:
    def __init__(self, url: str) -> None:
        self._raw = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=10)
        self._raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._read = self._raw.makefile("rb")

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self._read.close()
        self._raw.close()

    def ask(self, *packets: bytes, n: int = 1) -> list[Answer]:
        """All `n` answers, or those before the end; without what differs each time."""
        for packet in packets:
            self._raw.sendall(packet)
        return [answer for _ in range(n) for answer in self._answer()]

    def _answer(self) -> Iterator[Answer]:
        status = self._read.readline()
        while status.startswith(b"HTTP/1.1 100"):
            assert self._read.readline() == b"\r\n"
            status = self._read.readline()
        headers: dict[bytes, bytes] = {}
        while (line := self._read.readline().rstrip(b"\r\n")) != b"":
            name, _, value = line.partition(b": ")
            headers[name] = value
        body = self._read.read(int(headers.get(b"content-length", b"0")))
        assert b"date" in headers or not headers.pop(b"x-request-id", None) or status[9:12] != b"200"
        for changing in (b"date", b"x-request-id"):
            headers.pop(changing, None)
        if status:
            yield status, headers, body


def packet(body: bytes, headers: dict[str, str], model: str = "simple", line: str = "") -> bytes:
    told = {"host": "x", **headers, "content-length": str(len(body))}
    lines = "".join(f"{name}: {value}\r\n" for name, value in told.items())
    return f"{line or f'POST /v2/models/{model}/infer HTTP/1.1'}\r\n{lines}\r\n".encode() + body


def sums(draw: random.Random, **more: Any) -> tuple[bytes, dict[str, str]]:
    raw = struct.pack("<32i", *(draw.randrange(-1000, 1000) for _ in range(32)))
    return binary(_INPUTS, raw, parameters={"binary_data_output": True}, **more)


def others(draw: random.Random) -> Iterator[tuple[list[bytes], int]]:
    """Packets that are almost what came before, and how many answers they have."""
    body, headers = sums(draw)
    whole = packet(body, headers)
    at = whole.index(b"\r\n\r\n") + 4
    yield [whole], 1
    for cut in (1, at - 2, at, at + 5, len(whole) - 1, *(draw.randrange(1, len(whole)) for _ in range(4))):
        yield [whole[:cut], whole[cut:]], 1
    yield [whole + packet(*sums(draw))], 2
    yield [whole + whole[:20], whole[20:]], 2
    yield [b"\r\n" + whole], 1
    yield [whole.replace(b"host: x", b"host: y")], 1
    chunks = b"5\r\n" + body[:5] + b"\r\n" + f"{len(body) - 5:x}\r\n".encode() + body[5:] + b"\r\n0\r\n\r\n"
    length = f"content-length: {len(body)}".encode()
    yield [whole[:at].replace(length, b"transfer-encoding: chunked") + chunks], 1
    yield [whole[:at].replace(b"host: x", b"host: x\r\nexpect: 100-continue"), body], 1
    for instead in (
        b"host: x\r\nconnection: close", b"host: x\r\nconnection: keep-alive", b"host: x\r\nHost: x", b"Host: x",
        b"host: x\r\naccept-encoding: gzip", b"host: x\r\naccept-encoding: identity", b"host: x\r\norigin: http://a",
        b"host: x\r\ncontent-encoding: gzip", b"host: x\r\nx-other: 1", b"host: x\r\nx-request-id: mine", b"host:x",
        b"host: x\r\n folded: 1", b"host : x", b"ho\x00st: x", b"a: b",
        b"host: x\r\nupgrade: h2c\r\nconnection: upgrade",
        b"host: x\r\n" + length, b"host: x\r\ncontent-length: 1", b"host: x\r\nx: " + b"y" * 70_000,
    ):  # fmt: skip
        yield [whole.replace(b"host: x", instead)], 1
    for line in (
        "POST /v2/models/simple/infer HTTP/1.0", "GET /v2/models/simple/infer HTTP/1.1",
        "POST /v2/models/simple/infer?a=b HTTP/1.1", "POST /v2/models/simpl%65/infer HTTP/1.1",
        "POST /v2/models/simple/versions/1/infer HTTP/1.1", "POST /v2/models/simple/versions/2/infer HTTP/1.1",
        "POST /v2/models/none/infer HTTP/1.1", "POST /v2/models/simple/infer HTTP/9.9", "POST  HTTP/1.1",
    ):  # fmt: skip
        yield [packet(body, headers, line=line)], 1
    for wrong in (b'"INPUT9"', b'"INPUT1"'):
        yield [whole.replace(b'"INPUT0"', wrong)], 1
    yield [whole.replace(b"INT32", b"INT16")], 1
    yield [whole.replace(b"[1, 16]", b"[2, 16]")], 1
    yield [whole.replace(b'"inputs"', b'"input9"')], 1
    yield [packet(body[:-1], headers)], 1
    yield [packet(body + b"0", headers)], 1
    yield [packet(body, {HEADER: str(len(body) + 1)})], 1
    yield [packet(body, {HEADER: "x"})], 1
    yield [packet(body + bytes(LIMIT), headers)], 1
    for more in (
        {"id": "7"}, {"outputs": [{"name": "OUTPUT1"}]},
        {"outputs": [{"name": "OUTPUT0", "parameters": {"classification": 2}}]},
        {"outputs": [{"name": "OUTPUT1", "parameters": {"binary_data": False}}]},
    ):  # fmt: skip
        yield [packet(*sums(draw, **more))], 1


@pytest.mark.parametrize("seed", range(2))
def test_whatever_is_not_the_same_is_answered_the_usual_way(url: str, n_quick: list[int], seed: int) -> None:
    draw = random.Random(seed)
    for packets, n in others(draw):
        known = packet(*sums(draw))
        with Connection(url) as warm, Connection(url) as fresh:
            before = [warm.ask(known) for _ in range(3)]
            assert before[0] == before[1] == before[2]
            assert warm.ask(*packets, n=n) == fresh.ask(*packets, n=n), packets[0][:300]
    assert len(n_quick) > 2


@pytest.mark.parametrize("seed", range(3))
def test_numbers_are_those_of_the_request_itself(url: str, n_quick: list[int], seed: int) -> None:
    """Several heads on one connection, in any order; all but the first two of each are answered at once."""
    draw = random.Random(seed)
    kinds: list[Callable[[], tuple[bytes, str]]] = [
        lambda: (packet(*sums(draw)), "simple"),
        lambda: (packet(*sums(draw, id="7")), "simple"),
        lambda: (packet(*sums(draw, outputs=[{"name": "OUTPUT1"}])), "simple"),
        lambda: (packet(draw.randbytes(4), {HEADER: "0"}, "same_INT32"), "same_INT32"),
    ]
    assert len(kinds) <= MAX_REQUESTS
    with Connection(url) as warm:
        for kind in kinds:
            for _ in range(2):
                warm.ask(kind()[0])
        assert not n_quick
        for i in range(60):
            asked, model = draw.choice(kinds)()
            with Connection(url) as fresh:
                assert warm.ask(asked) == fresh.ask(asked), model
            assert len(n_quick) == i + 1


def test_what_is_converted_or_told_by_its_values_is_never_answered_at_once(url: str, n_quick: list[int]) -> None:
    strings = struct.pack("<I", 3) + b"abc"
    for model, asked, raw in (
        ("same_BOOL", one("BOOL", [1, 2], parameters={"binary_data_size": 2}), b"\x02\x00"),
        ("strings", one("BYTES", [1, 1], parameters={"binary_data_size": len(strings)}), strings),
        ("same_FP32", one("FP32", [1, 1], [0.5]), b""),
    ):
        body, headers = binary([asked], raw)
        with Connection(url) as warm:
            found = [warm.ask(packet(body, headers, model)) for _ in range(4)]
        assert all(answer == found[0] for answer in found) and found[0][0][0].startswith(b"HTTP/1.1 200"), found
    assert not n_quick


def test_quick_requests_are_counted_and_logged_as_others(
    url: str, n_quick: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[tuple[str, str, str, int]] = []
    monkeypatch.setattr(BufferedRequestLog, "add", lambda self, *told: lines.append(told[:4]))

    def counts() -> list[Any]:
        (told,) = httpx.get(f"{url}/v2/models/simple/stats").json()["model_stats"]
        stages = [told["inference_stats"][stage]["count"] for stage in ("success", "queue", "compute_infer")]
        sizes = sum(size["compute_infer"]["count"] for size in told["batch_stats"])
        metrics = httpx.get(f"{url}/metrics").text
        name = 'millrace:http_requests_total{path="/v2/models/{model}/infer",status="200"} '
        (line,) = (line for line in metrics.splitlines() if line.startswith(name))
        closed = sum(told["batch_closed"].values())
        n = float(line.removeprefix(name))
        return [told["inference_count"], told["execution_count"], *stages, sizes, closed, n]

    draw = random.Random(0)
    with Connection(url) as warm:
        warm.ask(packet(*sums(draw)))
        before = counts()
        for _ in range(10):
            warm.ask(packet(*sums(draw)))
        assert [b - a for a, b in zip(before, counts(), strict=True)] == [10] * len(before)
    assert len(n_quick) == 9 <= len(lines) <= 11, "one line for each that did not take the usual way"
    assert {(method, path, status) for method, path, _, status in lines} == {("POST", "/v2/models/simple/infer", 200)}
    assert len({request_id for _, _, request_id, _ in lines}) == len(lines)


def test_a_model_that_is_loaded_anew_answers_and_the_old_one_is_forgotten(
    tmp_path: Path, n_quick: list[int], small_heap: None
) -> None:
    def models() -> list[ResizableModel]:
        gc.collect()
        return [
            found for found in gc.get_objects() if type(found) is ResizableModel
        ]  # isinstance would ask what others deprecate

    write_models(tmp_path, {"simple": ADD_SUB})
    draw, others = random.Random(0), {id(model) for model in models()}  # of the servers of other tests
    with (
        in_process(tmp_path, model_control_mode="explicit", load_model=("*",)) as served,
        Connection(served.url) as warm,
    ):
        for _ in range(3):
            warm.ask(packet(*sums(draw)))
        assert len(n_quick) == 1
        write_models(tmp_path, {"simple": ADD_SUB.replace("max_batch_size: 8", "max_batch_size: 2")})
        assert httpx.post(f"{served.url}/v2/repository/models/simple/load").status_code == 200
        assert warm.ask(packet(*sums(draw)))[0][0].startswith(b"HTTP/1.1 200") and len(n_quick) == 1
        until(lambda: [m.config.max_batch_size for m in models() if id(m) not in others] == [2])
        assert httpx.post(f"{served.url}/v2/repository/models/simple/unload").status_code == 200
        assert warm.ask(packet(*sums(draw)))[0][0].startswith(b"HTTP/1.1 404")


def test_lines_that_are_written_together_say_what_others_say() -> None:
    first: Line = (1.5, "POST", "/v2/models/a/infer", "i1", 200, 0.123, "")
    second: Line = (2.25, "GRPC", "/x", "i2", 3, 1.0, "no such thing")
    third: Line = (1_764_000_000.999, "GRPC", "/x", "i3", 0, 12_345.65, "")
    lines = BatchedRequestLogs([first, second, third])
    together = logging.LogRecord(ACCESS, logging.INFO, "", 0, "%s", (lines,), None)
    setattr(together, LOG_ATTRIBUTE, lines)
    for formatter in (TextFormatter(), JsonFormatter()):
        alone = []
        for at_s, method, path, request_id, status, total_ms, error in lines:
            entry = RequestLog(method, path, request_id, status, total_ms, error=error or None)
            record = logging.LogRecord(ACCESS, logging.INFO, "", 0, "%s", (entry,), None)
            record.created = at_s
            setattr(record, LOG_ATTRIBUTE, entry)
            alone.append(formatter.format(record))
        assert formatter.format(together).split("\n") == alone


# ---------------------------------------------------------------------- over gRPC


def _sums(draw: np.random.Generator, **more: Any) -> Any:
    raw = [draw.integers(-1000, 1000, 16, dtype=np.int32).tobytes() for _ in range(2)]
    inputs = [grpc_one("INT32", [1, 16], f"INPUT{i}") for i in range(2)]
    return grpc_request("simple", inputs, raw, **more)


def test_messages_are_answered_as_others(
    served: Threaded, client: Client, n_quick: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = np.random.default_rng(16)
    call = client.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    kinds: list[dict[str, Any]] = [{}, {"id": "a"}, {"model_version": "1"}, {"outputs": [{"name": "OUTPUT1"}]}]
    asked = [_sums(draw, **kind).SerializeToString() for kind in kinds for _ in range(5)]
    quick = [call(data, timeout=20) for data in asked]
    assert len(n_quick) == 3 * len(kinds)
    monkeypatch.setattr(GrpcFastPath, "answer", lambda self, data, arrived_ns: None)
    assert [call(data, timeout=20) for data in asked] == quick
    for data, told in zip(asked[:5], quick[:5], strict=True):
        left, right = (
            np.frombuffer(raw, "<i4") for raw in message("ModelInferRequest").FromString(data).raw_input_contents
        )
        found = message("ModelInferResponse").FromString(told)
        assert list(found.raw_output_contents) == [(left + right).tobytes(), (left - right).tobytes()]


def test_tensors_that_only_look_like_the_end_of_a_message_are_none(client: Client, n_quick: list[int]) -> None:
    """The same bytes once more, in a field that nobody knows, behind the true ones."""
    draw = np.random.default_rng(1)
    call = client.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

    def hidden(shown: Any) -> bytes:
        data: bytes = shown.SerializeToString()
        other = _sums(draw)
        tail = b"".join(b"\x3a\x40" + raw for raw in (shown.raw_input_contents if same else other.raw_input_contents))
        return data + b"\xfa\x01" + bytes((len(tail) | 128, len(tail) >> 7)) + tail  # field 31

    same = True
    shown = _sums(draw)
    wanted = [call(hidden(shown), timeout=20) for _ in range(4)]
    same = False
    assert call(hidden(shown), timeout=20) == wanted[0] and not n_quick


def test_wrong_sizes_behind_a_known_beginning_are_refused_as_ever(client: Client) -> None:
    import grpc

    draw = np.random.default_rng(2)
    call = client.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    known = _sums(draw)
    for _ in range(3):
        call(known.SerializeToString(), timeout=20)
    left, right = known.raw_input_contents
    wrong = grpc_request("simple", known.inputs, [left + right[:4], right[4:]])  # as long as the right one
    with pytest.raises(grpc.RpcError) as refused:
        call(wrong.SerializeToString(), timeout=20)
    assert "byte size mismatch" in refused.value.details()
