"""Long texts, medium and short ones never wait for each other; what cannot fit is refused before it is tokenised."""

import asyncio
import dataclasses
import itertools
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import msgspec
import pytest

from millrace.checkpoint.chat.chat_template import ChatTemplate
from millrace.checkpoint.tokenizer.tokenizer import Tokenizer
from millrace.checkpoint.tokenizer.tokenizer_files import open_tokenizer
from millrace.checkpoint.tokenizer.tokenizer_process import TokenizerProcess
from millrace.errors import BusyError, CheckpointError
from millrace.runtime.request.token_lower_bound import TokenLowerBound, n_words, reach
from millrace.serve.http import bounded_executor
from millrace.serve.http.bounded_executor import BoundedExecutor
from millrace.serve.llm.request_decoding import decode
from millrace.serve.llm.request_types import ChatRequest
from millrace.serve.settings import ServerSettings
from tests.serve.support import ROOMY, Fake, Running, post, running, tokenizer
from tests.support.vocabularies import save_byte_fallback, save_byte_level, save_sentencepiece

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """With processes for long texts, as `millrace serve` has them."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save_byte_level(folder, 700)
    with running(Fake(folder=folder), ServerSettings(port=0)) as server:
        yield server


def chat_s(server: Running, content: str) -> float:
    """How long one such chat takes."""
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "seed": 1}
    start_s = time.perf_counter()
    assert post(server.url, CHAT, body).status_code == 200
    return time.perf_counter() - start_s


@contextmanager
def beside(server: Running, path: str, body: dict[str, Any], n: int) -> Iterator[None]:
    """While `n` clients ask for that again and again."""
    content, over, begun = msgspec.json.encode(body), threading.Event(), threading.Barrier(n + 1)
    request = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content
    address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))

    def ask() -> None:  # without a library that would need the interpreter for itself
        for i in itertools.count():
            if over.is_set():
                return
            with socket.create_connection(address, timeout=1) as raw, suppress(TimeoutError):
                raw.sendall(request)
                if not i:
                    begun.wait(20)
                raw.recv(65536)

    clients = [threading.Thread(target=ask) for _ in range(n)]
    for client in clients:
        client.start()
    try:
        begun.wait(20)
        yield
    finally:
        over.set()
        for client in clients:
            client.join()


STARVING: list[tuple[str, dict[str, Any], int]] = [
    ("/tokenize", {"prompt": "river " * 1_270_000, "return_token_strs": True}, 5),
    (CHAT, {"messages": [{"role": "user", "content": ""}] * 210_000}, 2),
    ("/detokenize", {"tokens": [1] * 2_600_000}, 2),
]


each_load = pytest.mark.parametrize("path, body, n", STARVING, ids=["texts", "messages", "ids"])


def chats_s(server: Running, path: str, body: dict[str, Any], n: int) -> tuple[float, list[float]]:
    """Of chats of 550 and of 2 characters: the slowest on an idle server, and all that came beside such a load."""
    medium, short = "ab " * 184, "hi"
    idle_s = max(chat_s(server, content) for content in (medium, short) for _ in range(2))
    with beside(server, path, body, n):
        return idle_s, [chat_s(server, content) for content in (medium, short) for _ in range(3)]


@pytest.mark.nightly
@each_load
def test_a_chat_does_not_wait_for_long_texts(served: Running, path: str, body: dict[str, Any], n: int) -> None:
    """It took 13.6 s beside five such texts, and 2.9 s beside the messages."""
    idle_s, busy_s = chats_s(served, path, body, n)
    assert statistics.median(busy_s) < 3 * idle_s + 1, (idle_s, busy_s)  # room for a machine with other work


@pytest.mark.timing
@each_load
def test_a_chat_stays_quick_beside_long_texts(served: Running, path: str, body: dict[str, Any], n: int) -> None:
    idle_s, busy_s = chats_s(served, path, body, n)
    assert max(busy_s) < idle_s + 0.5, (idle_s, busy_s)


def test_what_cannot_fit_by_its_bytes_is_refused_before_it_is_tokenised(served: Running) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise AssertionError("it was rendered, or tokenised")

    most = reach(tokenizer())
    assert most is not None
    text = "abc" * 100_000
    asked: list[tuple[str, str, dict[str, Any]]] = [
        (TEXT, "prompt", {"prompt": text}),
        (TEXT, "prompt", {"prompt": ["a", text]}),
        (CHAT, "messages", {"messages": [{"role": "user", "content": text}]}),
        (CHAT, "messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]}),
        (CHAT, "messages", {"messages": [{"role": "user", "content": ""}] * 513}),
    ]
    with patch.object(TokenizerProcess, "encode", refuse), patch.object(ChatTemplate, "render", refuse):
        for path, param, body in asked:
            reply = post(served.url, path, body)
            error = reply.json()["error"]
            assert (reply.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param), error
            assert "This model's maximum context length is 512 tokens, but the prompt has at least" in error["message"]
    least = int(post(served.url, TEXT, asked[0][2]).json()["error"]["message"].split("at least ")[1].split()[0])
    assert least == -(-len(text) // most.n_bytes) <= len(tokenizer().encode(text))


def test_what_cannot_fit_by_its_words_is_refused_before_it_is_tokenised(tmp_path: Path) -> None:
    """9,000 characters, which 1,000 tokens could cover by their bytes, but 2,570 words, two a token at most."""
    save_byte_level(tmp_path, 700)
    assert (most := reach(tokenizer())) is not None and most.words == 2 and 9000 / most.n_bytes < 1000

    def refuse(*_: object, **__: object) -> Any:
        raise AssertionError("it was tokenised")

    roomy = dataclasses.replace(ROOMY, max_context=1000)
    with (
        running(Fake(limits=roomy, folder=tmp_path), ServerSettings(port=0)) as server,
        patch.object(TokenizerProcess, "encode", refuse),
    ):
        text = "a mill " * 1285
        for path, param, body, least in (
            (TEXT, "prompt", {"prompt": ["a", text]}, 1285),
            (CHAT, "messages", {"messages": [{"role": "user", "content": text}]}, 1286),  # the template's words, too
        ):
            error = post(server.url, path, body).json()["error"]
            assert (error["code"], error["param"]) == ("context_length_exceeded", param), error
            assert f"the prompt has at least {least} tokens" in error["message"]
    assert len(tokenizer().encode(text)) >= 1285


@pytest.mark.parametrize(
    "text", ["", " ", "a", " a", "a ", "a\tb", "\n\na  b\r\nc", "\u00a0a\u00a0", "界 界", "a\x0bb\x0cc"]
)
def test_words_are_what_stands_between_spaces(text: str) -> None:
    assert n_words(text.encode()) == len([word for word in text.split(" ") if word])


def test_texts_may_be_counted_beyond_the_context(served: Running) -> None:
    text = "mill " * 4000
    reply = post(served.url, "/tokenize", {"prompt": text, "return_token_strs": True}).json()
    ids = tokenizer().encode(text)
    assert reply["tokens"] == ids and reply["count"] == len(ids) > 512
    assert "".join(reply["token_strs"]) == text


def test_a_token_s_reach_bounds_every_text(tmp_path: Path) -> None:
    """And there is no bound where a tokenizer makes texts shorter before it cuts them."""
    for i, save in enumerate((save_byte_level, save_byte_fallback, save_sentencepiece)):
        folder = tmp_path / str(i)
        folder.mkdir()
        save(folder)
        one: Tokenizer = open_tokenizer(folder)
        most = reach(one)
        for text in ("a" * 3000, "  \n" * 500, "é界😀" * 300, "The mill turns. " * 200, "a b\tc " * 300):
            n = len(one.encode(text))
            assert most is None or len(text.encode()) <= most.n_bytes * n, (save, text[:9])
            assert most is None or n_words(text.encode()) <= most.words * n, (save, text[:9])
    assert reach(tokenizer()) is not None


class _Shrinking(Tokenizer):
    """Drops what is no ASCII, as a normaliser may."""

    def __init__(self) -> None:
        super().__init__(700, tokenizer().specials)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return tokenizer().encode(text.encode("ascii", "ignore").decode(), add_special_tokens)

    def _token_bytes(self, token_id: int) -> bytes:
        return tokenizer().token_bytes(token_id)

    _first_bytes = _token_bytes


def test_a_tokenizer_that_drops_characters_gives_no_bound() -> None:
    assert reach(_Shrinking()) is None
    TokenLowerBound(_Shrinking(), 64).check("é " * 9000, "prompt")


@pytest.mark.parametrize("body", [{"prompt": "a " * 6000}, {"messages": [{"role": "user", "content": "a " * 6000}]}])
def test_a_tokenizer_that_fails_is_no_broken_template(served: Running, body: dict[str, Any]) -> None:
    def late(*_: object) -> list[int]:
        raise CheckpointError("a text was not tokenised: the process for it took too long", "tokens", "send less")

    with patch.object(TokenizerProcess, "encode", late):
        reply = post(served.url, "/tokenize", body)
    error = reply.json()["error"]
    assert reply.status_code == 503 and error["code"] == "tokenizer_failed" and "took too long" in error["message"]
    assert int(reply.headers["retry-after"]) >= 1


def test_messages_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[type] = []
    real = msgspec.json.decode

    def counting(body: bytes, *, type: Any = Any) -> Any:
        calls.append(type)
        return real(body, type=type)

    monkeypatch.setattr(msgspec.json, "decode", counting)
    asked = decode(b'{"messages": [{"role": "user", "content": "x"}], "tools": [], "user": "me"}', ChatRequest)
    assert asked.messages[0].content == "x" and len(calls) == 1


# ------------------------------------------------------------------ lanes


def in_loop(work: Callable[[], Any]) -> Any:
    return asyncio.run(work())


def test_a_lane_is_bounded_in_number_and_bytes() -> None:
    async def main() -> None:
        gate, lane = threading.Event(), BoundedExecutor("test", max_pending=2)
        first = [asyncio.create_task(lane.run(gate.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            await lane.run(gate.wait)
        gate.set()
        assert await asyncio.gather(*first) == [True, True]
        gate.clear()
        large = asyncio.create_task(
            lane.run(gate.wait, bounded_executor.MAX_HELD_BYTES + 1)
        )  # alone it may be as large as it is
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            await lane.run(gate.wait, 1)
        gate.set()
        assert await large
        with pytest.raises(ZeroDivisionError):
            await lane.run(lambda: 1 / 0)
        lane.close()

    in_loop(main)


def test_abandoned_work_leaves_the_queue_or_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_executor, "ABANDONED_S", 0.05)

    async def main() -> None:
        stopped, entered, done = threading.Event(), threading.Event(), list[str]()

        def long() -> None:
            entered.set()
            assert stopped.wait(10)

        def quick() -> None:
            entered.set()
            time.sleep(0.02)

        lane = BoundedExecutor("test", max_pending=9, stop=stopped.set)
        running_, waiting = (asyncio.create_task(lane.run(work)) for work in (long, lambda: done.append("waiting")))
        behind = asyncio.create_task(lane.run(lambda: done.append("behind")))
        assert await asyncio.to_thread(entered.wait, 10)
        for task in (running_, waiting):
            task.cancel()
        await behind
        assert stopped.is_set() and done == ["behind"]
        stopped.clear()
        entered.clear()
        short = asyncio.create_task(lane.run(quick))
        assert await asyncio.to_thread(entered.wait, 10)
        short.cancel()
        await lane.run(lambda: time.sleep(0.2))
        assert not stopped.is_set(), "what comes after it is not stopped in its place"
        lane.close()

    in_loop(main)


@pytest.mark.nightly
def test_a_client_that_goes_away_frees_the_process_of_its_text(served: Running) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(served.url + "/tokenize", json={"prompt": "river " * 1_200_000}, timeout=0.3)
    start_s = time.monotonic()
    reply = httpx.post(served.url + "/tokenize", json={"prompt": "mill " * 30_000}, timeout=30)
    assert reply.status_code == 200 and time.monotonic() - start_s < 10
