"""The fast path of inferences over HTTP: every request is answered as on the normal path.

The normal path is a server whose fast path knows no heads.
"""

import gc
import logging
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
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
from millrace.serve.protocols.kserve.http.fast_path import HeadCache, HttpFastPath
from tests.serve.protocols.kserve.conftest import LIMIT
from tests.serve.support import until
from tests.support.kserve import HEADER, binary, one
from tests.support.raw_connection import Connection, Response
from tests.support.repository import ADD_SUB, in_process, write_models

_INPUTS = [
    {**one("INT32", [1, 16], parameters={"binary_data_size": 64}), "name": f"INPUT{i}"} for i in range(2)
]  # fmt: skip


@pytest.fixture
def n_fast(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Contains one element for each request that the fast path answered."""
    answered: list[int] = []
    begin = HttpFastPath.begin

    def counted(self: HttpFastPath, *arguments: Any) -> Any:
        response = begin(self, *arguments)
        answered.extend([1] if response is not None else [])
        return response

    monkeypatch.setattr(HttpFastPath, "begin", counted)
    return answered


@pytest.fixture
def normal(url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Response]]:
    """Sends packets on a new connection; no head is known."""

    def send(*packets: bytes, n: int = 1) -> list[Response]:
        with monkeypatch.context() as patch, Connection(url) as fresh:
            patch.setattr(HeadCache, "lookup", lambda self, packet: None)
            patch.setattr(HeadCache, "has_body", lambda self, raw: False)
            return fresh.send(*packets, n=n)

    return send


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
def test_requests_that_are_almost_known_are_answered_as_on_the_normal_path(
    url: str, n_fast: list[int], normal: Callable[..., list[Response]], seed: int
) -> None:
    draw = random.Random(seed)
    for packets, n in others(draw):
        known = packet(*sums(draw))
        with Connection(url) as warm:
            before = [warm.send(known) for _ in range(3)]
            assert before[0] == before[1] == before[2]
            assert warm.send(*packets, n=n) == normal(*packets, n=n), packets[0][:300]
    assert len(n_fast) > 2


@pytest.mark.parametrize("seed", range(3))
def test_heads_in_any_order_are_answered_with_their_own_numbers(
    url: str, n_fast: list[int], normal: Callable[..., list[Response]], seed: int
) -> None:
    """Several heads and ids on one connection, in any order; all but the first of each takes the fast path."""
    draw = random.Random(seed)
    strings = struct.pack("<I", 3) + b"abc"
    kinds: list[Callable[[], bytes]] = [
        lambda: packet(*sums(draw)),
        lambda: packet(*sums(draw, id=str(draw.randrange(10, 100)))),
        lambda: packet(*sums(draw, outputs=[{"name": "OUTPUT1"}])),
        lambda: packet(draw.randbytes(4), {HEADER: "0"}, "same_INT32"),
        lambda: packet(*binary([one("BOOL", [1, 2], parameters={"binary_data_size": 2})], b"\2\0"), "same_BOOL"),
        lambda: packet(*binary([one("BYTES", [1, 1], parameters={"binary_data_size": 7})], strings), "strings"),
        lambda: packet(*binary([one("FP32", [1, 1], [draw.randrange(10, 99) / 2])], b""), "same_FP32"),
    ]
    with Connection(url) as warm:
        for kind in kinds:
            for _ in range(3):  # a data length may differ by one
                warm.send(kind())
        n_before = len(n_fast)
        for _ in range(60):
            data = draw.choice(kinds)()
            assert warm.send(data) == normal(data), data[:300]
    assert len(n_fast) - n_before >= 50


def test_requests_of_the_fast_path_are_counted_and_logged(
    url: str, n_fast: list[int], monkeypatch: pytest.MonkeyPatch
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
        warm.send(packet(*sums(draw)))
        before = counts()
        n_fast.clear()
        for _ in range(10):
            warm.send(packet(*sums(draw)))
        assert [b - a for a, b in zip(before, counts(), strict=True)] == [10] * len(before)
    assert len(n_fast) == 10 <= len(lines) <= 11, "one line for each that did not take the normal path"
    assert {(method, path, status) for method, path, _, status in lines} == {("POST", "/v2/models/simple/infer", 200)}
    assert len({request_id for _, _, request_id, _ in lines}) == len(lines)


def test_a_model_that_is_loaded_anew_answers_and_the_old_one_is_forgotten(
    tmp_path: Path, n_fast: list[int], small_heap: None
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
            warm.send(packet(*sums(draw)))
        assert len(n_fast) == 2
        write_models(tmp_path, {"simple": ADD_SUB.replace("max_batch_size: 8", "max_batch_size: 2")})
        assert httpx.post(f"{served.url}/v2/repository/models/simple/load").status_code == 200
        assert warm.send(packet(*sums(draw)))[0][0].startswith(b"HTTP/1.1 200")
        until(lambda: [m.config.max_batch_size for m in models() if id(m) not in others] == [2])
        assert httpx.post(f"{served.url}/v2/repository/models/simple/unload").status_code == 200
        assert warm.send(packet(*sums(draw)))[0][0].startswith(b"HTTP/1.1 404")


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
