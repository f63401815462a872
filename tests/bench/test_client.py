"""The client against a server whose truth is known, and against servers that answer with anything."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from millrace.bench.client import client as bounds
from millrace.bench.client.client import BenchTarget, Client
from millrace.bench.client.endpoints import CHAT, EMBEDDINGS, ENDPOINTS
from millrace.bench.client.request_record import BenchMessage, BenchRecord, BenchRequest, Failure
from millrace.bench.null_server.ledger import FAULTS, NullTiming
from millrace.errors import ConfigError
from tests.bench.conftest import Null

QUICK = NullTiming(ttft_ms="30", itl_ms="5", tokens_per_chunk=2)
QUESTION = BenchRequest([BenchMessage("system", "be brief"), BenchMessage("user", "one two three")], 7)


def ask(target: BenchTarget, *questions: BenchRequest) -> list[BenchRecord]:
    """One after the other, over one client."""

    async def asking() -> list[BenchRecord]:
        async with Client(target) as client:
            return [await client.ask(question) for question in questions or (QUESTION,)]

    return asyncio.run(asking())


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("name", ENDPOINTS)
def test_every_endpoint_is_heard_as_it_was_sent(null: Null, name: str, streamed: bool) -> None:
    server = null(QUICK)
    headers = {"x-case": f"{name}-{streamed}"}
    target = BenchTarget(f"{server.url}/v1/", ENDPOINTS[name], "m", streamed, headers=headers, keep_text=True)
    before = len(server.truth_list)
    first, second = ask(target, QUESTION, QUESTION)
    for answer, sent in zip((first, second), server.truth_list[before:], strict=True):
        assert (answer.failure, answer.detail, answer.status) == (None, "", 200)
        assert sent.kind == name and sent.n_prompt == 5 and sent.id == answer.id
        assert answer.n_prompt == (None if name == "generate" else 5)
        assert answer.sent_s <= sent.arrived_s <= sent.sent_s[0] <= answer.end_s
        if name == "embeddings":
            assert answer.n_output == 0 and answer.chunk_s == []
            continue
        assert answer.text == " mill" * 7
        assert answer.n_output == (7 if name != "generate" else len(answer.chunk_s)), "generate tells no tokens"
        if streamed:
            delays = [at_s - sent_s for at_s, sent_s in zip(answer.chunk_s, sent.sent_s, strict=True)]
            assert min(delays) >= 0 and answer.chunk_s == sorted(answer.chunk_s)
            assert answer.chunk_s[-1] <= answer.end_s
        else:
            assert answer.chunk_s == []


@pytest.mark.timing
@pytest.mark.parametrize("name", [name for name in ENDPOINTS if name != "embeddings"])
def test_chunks_are_stamped_when_their_bytes_come(null: Null, name: str) -> None:
    server = null(QUICK)
    before = len(server.truth_list)
    (answer,) = ask(BenchTarget(server.url, ENDPOINTS[name], "m"))
    (sent,) = server.truth_list[before:]
    delays = [at_s - sent_s for at_s, sent_s in zip(answer.chunk_s, sent.sent_s, strict=True)]
    assert sorted(delays)[len(delays) // 2] < 0.01


def test_the_tokens_of_a_chunk_are_known_where_the_server_tells(null: Null) -> None:
    url = null(QUICK).url
    (told,) = ask(BenchTarget(url, CHAT, each_usage=True))
    (untold,) = ask(BenchTarget(url, CHAT))
    assert told.chunk_tokens == [2, 4, 6, 7] and told.n_first == 2
    assert untold.chunk_tokens == [] and untold.n_first == 1 and untold.n_output == 7


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_results_with_what_had_come(null: Null, fault: str) -> None:
    server = null(NullTiming(ttft_ms="10", itl_ms="2", fault=fault, fault_every=2))
    good, bad, again = ask(BenchTarget(server.url, CHAT, timeout_s=0.3), QUESTION, QUESTION, QUESTION)
    kinds = {"status": Failure.STATUS, "break": Failure.BROKEN_OFF, "malformed": Failure.MALFORMED,
             "stall": Failure.TIMEOUT, "error": Failure.SERVER_ERROR}  # fmt: skip
    assert good.failure is None and again.failure is None, "and the next one is asked on a connection that works"
    assert bad.failure == kinds[fault] and bad.detail
    assert len(bad.chunk_s) == (0 if fault == "status" else 3) and bad.end_s > bad.sent_s


async def answered(reply: bytes | list[bytes], ask: Callable[[str], Awaitable[Any]], close: bool = True) -> Any:
    """What `ask` gives where every connection is answered with these bytes, written one part at a time."""

    serving: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        await reader.read(1 << 16)
        with contextlib.suppress(ConnectionError):  # the client may go away first
            for part in [reply] if isinstance(reply, bytes) else reply:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.001)
            if not close:
                await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        found = await ask(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await asyncio.gather(*(task for task in serving if task is not None))
        return found


def heard(reply: bytes | list[bytes], target: BenchTarget | None = None, close: bool = True) -> BenchRecord:
    async def asking(url: str) -> BenchRecord:
        endpoint = CHAT if target is None else target.endpoint
        async with Client(BenchTarget(url, endpoint, timeout_s=5, keep_text=True)) as client:
            return await client.ask(QUESTION)

    answer = asyncio.run(answered(reply, asking, close))
    assert isinstance(answer, BenchRecord)
    return answer


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
TEXT = b'data: {"choices":[{"delta":{"content":"h\xc3\xa9"}}]}\n\n'
STOP = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\r\n\r\ndata: [DONE]\r\n\r\n'
JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"


def test_bytes_may_come_one_by_one() -> None:
    parts = [bytes([b]) for b in HEAD + b": a comment\n\nevent: x\n" + TEXT + TEXT + STOP]
    answer = heard(parts)
    assert answer.failure is None and answer.text == "héhé" and len(answer.chunk_s) == 2
    assert answer.chunk_s[1] > answer.chunk_s[0]


def test_chunks_of_one_read_have_one_stamp() -> None:
    answer = heard(HEAD + TEXT + TEXT + STOP)
    assert answer.failure is None and answer.chunk_s[0] == answer.chunk_s[1]


HINTS = b"HTTP/1.1 103 Early Hints\r\ncontent-type: application/json\r\nlink: </a>\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n" + HINTS


@pytest.mark.parametrize("parts", [[INTERIM + HEAD + TEXT + STOP], [INTERIM, HEAD, TEXT + STOP]])
def test_what_comes_before_an_answer_is_none(parts: list[bytes]) -> None:
    answer = heard(parts)
    assert (answer.failure, answer.status, answer.text) == (None, 200, "h\u00e9")
    gone = heard([part.replace(b"200 OK", b"404 Not Found") for part in parts])
    assert (gone.failure, gone.status) == (Failure.STATUS, 404)
    assert heard(HINTS).failure == Failure.BROKEN_OFF


@pytest.mark.parametrize(
    "reply, failure, said",
    [
        (b"hello\r\n\r\n", Failure.MALFORMED, "not HTTP"),
        (b"", Failure.BROKEN_OFF, "closed"),
        (b"HTTP/1.1 200 OK\r\nx: ", Failure.BROKEN_OFF, "closed"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * (bounds.MAX_HEAD_BYTES + 1), Failure.TOO_LARGE, "headers"),
        (HINTS * 2000, Failure.TOO_LARGE, "headers"),
        (b"HTTP/1.1 101 Other Protocol\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", Failure.STATUS, "status 101"),
        (HEAD, Failure.BROKEN_OFF, "without a finish_reason"),
        (HEAD + TEXT, Failure.BROKEN_OFF, "without a finish_reason"),
        (HEAD + STOP, Failure.EMPTY, "no token"),
        (HEAD + b"data: {\n\n", Failure.MALFORMED, "data: {"[6:]),
        (HEAD + b'data: {"choices": 7}\n\n', Failure.MALFORMED, "Expected `array`"),
        (HEAD + b"data: [1]\n\n", Failure.MALFORMED, "Expected `object`"),
        (HEAD + b'data: {"choices": [{"text": "\xf3"}]}\n\n', Failure.MALFORMED, "utf-8"),
        (HEAD + b'data: {"x": ' + b"[" * 5000 + b"\n\n", Failure.MALFORMED, "recursion"),
        (HEAD + b'data: {"choices": [], "usage": {"completion_tokens": -5}}\n\n', Failure.MALFORMED, ">= 0"),
        (HEAD + b'data: {"choices": [], "usage": {"prompt_tokens": 1%s}}\n\n' % (b"0" * 400), Failure.MALFORMED, ""),
        (HEAD + b"".join(b'data: {"choices": [], "usage": {"completion_tokens": %d}}\n\n' % n for n in (7, 3)),
         Failure.MALFORMED, "from 7 output tokens back to 3"),
        (HEAD + b"data: " + b"x" * (bounds.MAX_EVENT_BYTES + 1), Failure.TOO_LARGE, "an event"),
        (HEAD + b'data: {"error": {"message": "no memory"}}\n\n', Failure.SERVER_ERROR, "no memory"),
        (JSON % (2, b"{}"), Failure.EMPTY, "no text"),
        (JSON % (9, b"{}"), Failure.BROKEN_OFF, "closed"),
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 8\r\n\r\nno model", Failure.STATUS, "status 404: no model"),
        (b"HTTP/1.1 302 Found\r\nlocation: /\r\ncontent-length: 0\r\n\r\n", Failure.STATUS, "status 302"),
    ],
)  # fmt: skip
def test_what_is_no_answer_is_counted_by_its_kind(reply: bytes, failure: Failure, said: str) -> None:
    answer = heard(reply)
    assert answer.failure == failure and said.lower() in answer.detail.lower() and answer.end_s >= answer.sent_s > 0


def test_an_answer_without_an_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MAX_ANSWER_BYTES", 100)
    answer = heard(HEAD + TEXT * 3, close=False)
    assert answer.failure == Failure.TOO_LARGE and "more than 100 bytes" in answer.detail


def test_no_embedding_is_no_answer() -> None:
    target = BenchTarget("http://x", EMBEDDINGS)
    assert heard(JSON % (11, b'{"data":[]}'), target).failure == Failure.MALFORMED
    assert heard(JSON % (2, b"{}"), target).failure == Failure.MALFORMED
    assert heard(JSON % (14, b'{"data":[[1]]}'), target).failure is None


def test_a_kept_connection_that_was_closed_is_opened_again() -> None:
    """The server closes after each answer, without saying so: no request may fail for it."""
    body = json.dumps({"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}).encode()

    async def asking(url: str) -> list[BenchRecord]:
        async with Client(BenchTarget(url, CHAT, streamed=False)) as client:
            return [await client.ask(QUESTION) for _ in range(5)]

    answers = asyncio.run(answered(JSON % (len(body), body), asking))
    assert [a.failure for a in answers] == [None] * 5


def test_nobody_listens() -> None:
    (answer,) = ask(BenchTarget("http://127.0.0.1:1", CHAT))
    assert answer.failure == Failure.UNREACHABLE and "Refused" in answer.detail and answer.status == 0


def test_a_cancelled_request_goes_away(null: Null) -> None:
    server = null(NullTiming(ttft_ms="10", itl_ms="20"))

    async def asking() -> None:
        async with Client(BenchTarget(server.url, CHAT)) as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.ask(BenchRequest(QUESTION.messages, 100)), 0.05)
            assert (await client.ask(QUESTION)).failure is None

    asyncio.run(asking())
    cut = server.truth_list[0]
    assert len(cut.due_s) == 100 and len(cut.sent_s) < 20, "its server saw it go"


@pytest.mark.parametrize("url", ["", "http://", "ftp://x", "http://x:99999", "http://x:y", "http://[::1"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError):
        Client(BenchTarget(url, CHAT))


@pytest.mark.parametrize("headers", [{"a": "b\r\nc: d"}, {"a\n": "b"}, {"a": "\u2028"}])
def test_headers_cannot_break_out(headers: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        Client(BenchTarget("http://x", CHAT, headers=headers))
