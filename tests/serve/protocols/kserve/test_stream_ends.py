"""How a stream ends: stopped or broken while it reads, its requests told once, its client gone; nothing is left."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.model_repository.request import response_stream
from millrace.model_repository.request.infer_request import InferRequest, InferResponse, TokenUsage
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.model_repository.request.tensors import objects
from millrace.serve.protocols.kserve.grpc.protobuf_messages import SERVICE, message
from millrace.serve.protocols.kserve.grpc.stream import Stream
from millrace.serve.settings import ServerSettings
from tests.serve.protocols.kserve.test_grpc_stream import repeat, text
from tests.serve.protocols.kserve.test_stream_writes import SHARE, Decoupled, Front, Opened, texts
from tests.serve.support import until
from tests.support.http2 import Http2, http2
from tests.support.kserve_grpc import connected, one
from tests.support.python_models import ANY, HEAD, SAY, write
from tests.support.repository import REPEAT, in_process, write_models

STREAM = f"{SERVICE}ModelStreamInfer"
ASKED: bytes = message("ModelInferRequest")(model_name="llm", id="7").SerializeToString()


class Slow(Front):
    """Reads the requests from the second on once it is let."""

    def __init__(self, model: Decoupled, at_once: int) -> None:
        super().__init__(model)
        self.let, self._at_once = asyncio.Event(), at_once

    async def decode_infer(self, data: bytes) -> Any:
        if self._at_once:
            self._at_once -= 1
        else:
            await self.let.wait()
        return await super().decode_infer(data)


class Open:
    """A stream whose client sends `n` requests and waits. n_admitted: of requests that are not over"""

    def __init__(self, front: Front, n: int, write: Callable[[bytes], Any]) -> None:
        self.n_admitted, self._asked, self._never = 0, [ASKED] * n, asyncio.Event()
        caller: Any = SimpleNamespace(token_usage=TokenUsage())
        of: Any = front
        self.stream = Stream(of, self._admit, SHARE, 5, False, caller)
        self.task = asyncio.ensure_future(self.stream.run(partial(asyncio.sleep, 0), self._read, write))

    async def _read(self) -> bytes | None:
        if not self._asked:
            await self._never.wait()
        return self._asked.pop()

    @contextmanager
    def _admit(self, n_bytes: int) -> Iterator[None]:
        self.n_admitted += 1
        try:
            yield
        finally:
            self.n_admitted -= 1


def test_a_request_is_told_once_that_its_answers_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model is told to cancel it, and answers that at once, as an ensemble does."""
    monkeypatch.setattr(response_stream, "MAX_UNREAD_BYTES", 3000)
    monkeypatch.setattr(response_stream, "UNCOUNTED_RESPONSE_BYTES", 1000)

    async def run() -> None:
        written = list[bytes]()

        async def write(data: bytes) -> None:
            written.append(data)
            await asyncio.sleep(0)

        class AnswersAtOnce(Decoupled):
            def cancel(self, asking: InferRequest) -> None:
                super().cancel(asking)
                self.receive(None, StatusError(Code.CANCELLED, "request was cancelled"), True)

        opened = await Opened(write, model=AnswersAtOnce()).begun()
        await asyncio.sleep(0)
        for said in ("a", "b", "c"):
            opened.say(said)
        await asyncio.wait_for(opened.task, 5)
        assert texts(written)[:2] == ["a", "b"] and opened.model.cancelled == 1
        (last,) = texts(written)[2:]
        assert last.startswith("[request id: 7] responses of") and opened.model.unread_bytes == 0

    asyncio.run(run())


def test_what_a_stream_reads_when_it_is_stopped_is_answered() -> None:
    async def run() -> None:
        written, model = list[bytes](), Decoupled()

        async def write(data: bytes) -> None:
            written.append(data)

        front = Slow(model, at_once=0)
        opened = Open(front, 2, write)
        await asyncio.sleep(0.01)
        opened.stream.stop()
        front.let.set()
        await asyncio.sleep(0.01)
        model.receive(None, StatusError(Code.INTERNAL, "as it happens"), True)
        await asyncio.wait_for(opened.task, 5)
        assert texts(written) == ["as it happens"], "and the second was not read"
        assert opened.n_admitted == 0

    asyncio.run(run())


def test_a_stream_that_is_stopped_while_its_client_is_silent_ends() -> None:
    async def run() -> None:
        async def write(data: bytes) -> None:
            raise AssertionError("nothing was asked")

        for wait_s in (0, 0.01):
            opened = Open(Front(Decoupled()), 0, write)
            if wait_s:
                await asyncio.sleep(wait_s)
            opened.stream.stop()
            await asyncio.wait_for(opened.task, 5)

    asyncio.run(run())


def test_what_a_stream_reads_when_it_breaks_is_given_up() -> None:
    """Whichever is first in the same turn of the loop: the failed write, or what was read."""

    async def run(read_first: bool) -> None:
        model = Decoupled()
        front = Slow(model, at_once=1)
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def write(data: bytes) -> None:
            await taken

        opened = Open(front, 2, write)
        await asyncio.sleep(0.01)
        model.receive(InferResponse({"text_output": objects([b"a"])}), None, False)
        opened_by = front.let.set, partial(taken.set_exception, ConnectionError("the client is gone"))
        for step in opened_by if read_first else reversed(opened_by):
            step()
        with pytest.raises(ConnectionError, match="the client is gone"):
            await asyncio.wait_for(opened.task, 5)
        assert opened.n_admitted == 0 and model.unread_bytes == 0

    asyncio.run(run(True))
    asyncio.run(run(False))


def test_a_stream_that_is_cancelled_while_it_ends_leaves_nothing() -> None:
    """gRPC does that to one whose write has failed before."""

    async def run() -> None:
        is_ending = asyncio.Event()

        async def write(data: bytes) -> None:
            raise ConnectionError("the client is gone")

        class Lingers(Open):
            async def _read(self) -> bytes | None:
                try:
                    return await super()._read()
                except asyncio.CancelledError:
                    is_ending.set()
                    await asyncio.sleep(0.01)
                    raise

        model = Decoupled()
        opened = Lingers(Front(model), 1, write)
        await asyncio.sleep(0.01)
        model.receive(None, StatusError(Code.INTERNAL, "not the last"), False)
        await is_ending.wait()
        opened.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opened.task
        assert model.cancelled == 1 and model.unread_bytes == 0 and opened.n_admitted == 0

    asyncio.run(run())


def test_a_response_that_cannot_be_told_ends_the_stream() -> None:
    """And is no error of the model's callback, after which the stream would go on without it."""

    async def run() -> None:
        written = list[bytes]()

        async def write(data: bytes) -> None:
            written.append(data)

        opened = await Opened(write).begun()
        await asyncio.sleep(0.01)  # the stream waits
        opened.say("a")
        opened.model.receive(InferResponse({"\ud800": objects([b"b"])}), None, False)
        with pytest.raises(UnicodeEncodeError):
            await asyncio.wait_for(opened.task, 5)
        assert texts(written) == ["a"] and opened.model.cancelled == 1 and opened.model.unread_bytes == 0

    asyncio.run(run())


def test_a_client_that_goes_away_is_no_bug_of_the_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A write that waits for its reader often fails before gRPC cancels the call."""
    root, asked = write_models(tmp_path, {"repeat_int32": REPEAT}), repeat(range(100), [1] * 100, "a")
    with caplog.at_level(logging.INFO), in_process(root, grpc_port=0) as served:
        for i in range(24):
            with http2(served.grpc_url) as client:
                client.ask(STREAM, [asked.SerializeToString()], window=0)
                time.sleep(0.015)
                if i % 2:
                    client.reset()
        until(lambda: caplog.text.count(f"{STREAM} request_id=") == 24)
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []
    assert caplog.text.count("status=1 ") == 24, "cancelled"


def test_a_reader_that_takes_nothing_at_all_is_told_why_it_was_left(tmp_path: Path) -> None:
    root, asked = write_models(tmp_path, {"repeat_int32": REPEAT}), repeat([1, 2], [0, 0], "a")
    settings = ServerSettings(port=0, write_timeout_s=0.2)
    with in_process(root, settings, grpc_port=0) as served, http2(served.grpc_url) as client:
        client.ask(STREAM, [asked.SerializeToString()], window=0)
        time.sleep(0.4)
        client.take(1 << 20)
        client.read_until(b"the stream was not read for 0.2 s")


BIG = f"""{HEAD}
    def execute(self, requests):
        return [said("x" * 1_000_000) for request in requests]
{SAY}"""


@pytest.mark.parametrize("call", ["ModelInfer", "ModelStreamInfer"])
def test_answers_that_nobody_takes_are_bounded_together(tmp_path: Path, call: str) -> None:
    """Also once their streams were left; whoever goes away makes room."""
    write(tmp_path, "big", BIG, ANY % "")
    asked, path, refusal = text("big", b"x"), SERVICE + call, b"wait for their readers"
    settings = ServerSettings(port=0, write_timeout_s=0.1, max_unread_bytes=900_000)
    with in_process(tmp_path, settings, grpc_port=0) as served:

        def is_answered(one: Http2, window: int) -> bool:
            one.ask(path, [asked.SerializeToString()], window)
            return refusal not in one.read_until(b"x" * 100, refusal)

        def is_refused() -> bool:
            with http2(served.grpc_url) as one:
                return not is_answered(one, 1 << 21)

        assert not is_refused(), "one alone may be larger"
        with ExitStack() as lazy:
            until(lambda: is_answered(lazy.enter_context(http2(served.grpc_url)), 1000))
            until(is_refused)
            time.sleep(0.2)
            assert is_refused()
        until(lambda: not is_refused())


@pytest.mark.parametrize("call", ["ModelInfer", "ModelStreamInfer"])
def test_one_that_takes_nothing_leaves_room_for_the_answers_of_others(tmp_path: Path, call: str) -> None:
    """It gets to half of what there is, however many calls it has, or requests of one."""
    write(tmp_path, "big", BIG, ANY % "")
    asked, settings = text("big", b"x"), ServerSettings(port=0, max_unread_bytes=8_000_000)
    n_requests, n_calls = (30, 1) if call == "ModelStreamInfer" else (1, 30)
    with (
        in_process(tmp_path, settings, grpc_port=0) as served,
        http2(served.grpc_url) as lazy,
        connected(served.grpc_url) as client,
    ):
        lazy.ask(SERVICE + call, [asked.SerializeToString()] * n_requests, 0, n_calls)
        until(lambda: client.call("ModelStatistics", name="big").model_stats[0].execution_count >= 4)
        for _ in range(20):
            (answer,) = client.stream(iter([asked]))
            assert not answer.error_message
            assert len(client.infer("big", [one("BYTES", [1], "IN")], [b"\1\0\0\0x"]).raw_output_contents[0]) > 1e6
        for stream in range(1, 2 * n_calls, 2):
            lazy.take(1 << 25, stream)
        lazy.read_until(b"of them for this connection")
