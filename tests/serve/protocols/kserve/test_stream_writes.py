"""How a stream writes: at once where nothing is on its way, in order behind what is, and never after its end."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.model_repository.request.infer_request import InferRequest, InferResponse, TokenUsage
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.model_repository.request.tensors import objects
from millrace.serve.protocols.kserve.grpc.infer import GrpcOutputOptions
from millrace.serve.protocols.kserve.grpc.infer_message_cache import InferMessage
from millrace.serve.protocols.kserve.grpc.protobuf_messages import message
from millrace.serve.protocols.kserve.grpc.send_budget import SendBudget
from millrace.serve.protocols.kserve.grpc.stream import Stream

Receive = Callable[[InferResponse | None, StatusError | None, bool], None]


class Decoupled:
    """A model that answers when the test does."""

    name, version, labels, is_decoupled = "llm", 1, dict[str, Any](), True

    def __init__(self) -> None:
        self.unread_bytes, self.cancelled = 0, 0
        self.receive: Receive

    def submit(self, asking: InferRequest, receive: Receive) -> None:
        self.receive = receive

    def cancel(self, asking: InferRequest) -> None:
        self.cancelled += 1


class Front:
    def __init__(self, model: Decoupled) -> None:
        self._model = model

    async def decode_infer(self, data: bytes) -> Any:
        return message("ModelInferRequest").FromString(data), None

    def model(self, told: Any) -> Any:
        return self._model

    async def check_infer(self, data: bytes, told: Any, *_: Any) -> tuple[InferRequest, InferMessage]:
        return InferRequest({}, request_id=told.id), InferMessage(GrpcOutputOptions())

    async def encode_off_loop(self, n_bytes: int, write: Callable[[], bytes]) -> bytes:
        await asyncio.sleep(0)  # in a thread, say
        return write()


SHARE = partial(SendBudget(1 << 50).lease, lambda: "somebody")


class Opened:
    """A stream with one request. write: what is done with a message"""

    def __init__(
        self, write: Callable[[bytes], Coroutine[Any, Any, None]], write_s: float = 5, model: Decoupled | None = None
    ) -> None:
        self.model = model or Decoupled()
        caller: Any = SimpleNamespace(token_usage=TokenUsage())
        front: Any = Front(self.model)
        self.stream = Stream(front, lambda n: nullcontext(), SHARE, write_s, False, caller)
        self._requests: list[bytes | None] = [
            message("ModelInferRequest")(model_name="llm", id="7").SerializeToString(),
            None,
        ]
        self.task = asyncio.ensure_future(self.stream.run(partial(asyncio.sleep, 0), self._read, write))

    async def _read(self) -> bytes | None:
        return self._requests.pop(0)

    def say(self, text: str, final: bool = False, error: StatusError | None = None) -> None:
        response = None if error else InferResponse({"text_output": objects([text.encode()])})
        self.model.receive(response, error, final)

    async def begun(self) -> "Opened":
        while not hasattr(self.model, "receive"):
            await asyncio.sleep(0)
        return self


def texts(written: list[bytes]) -> list[str]:
    found = []
    for data in written:
        told = message("ModelStreamInferResponse").FromString(data)
        raw = told.infer_response.raw_output_contents
        found.append(told.error_message or (raw[0][4:].decode() if raw else ""))
    return found


@pytest.mark.parametrize("seed", range(30))
def test_whatever_comes_when_is_told_in_order_and_once(seed: int) -> None:
    """Bursts and pauses, writes that are done at once or later, errors between, long texts; nothing stays counted."""
    rng = random.Random(seed)

    async def run() -> None:
        written, busy = list[bytes](), 0

        async def write(data: bytes) -> None:
            nonlocal busy
            busy += 1
            assert busy == 1, "one write at a time"
            for _ in range(rng.choice((0, 0, 1, 3))):
                await asyncio.sleep(rng.choice((0, 0.001)))
            written.append(data)
            busy -= 1

        opened, said = await Opened(write).begun(), []
        for i in range(60):
            said.append(f"{i} " + "x" * rng.choice((0, 0, 5, 70_000)))
            if rng.random() < 0.1:
                said[-1] = f"error {i}"
                opened.say("", error=StatusError(Code.INTERNAL, said[-1]))
            else:
                opened.say(said[-1])
            if rng.random() < 0.5:
                await asyncio.sleep(rng.choice((0, 0, 0.001, 0.003)))
        said.append("last")
        opened.say("last", final=True)
        await asyncio.wait_for(opened.task, 10)
        assert texts(written) == said and opened.model.unread_bytes == 0

    asyncio.run(run())


def test_a_token_is_written_within_its_callback() -> None:
    async def run() -> None:
        written = list[bytes]()

        async def write(data: bytes) -> None:
            written.append(data)
            await asyncio.sleep(0.01)

        opened = await Opened(write).begun()
        await asyncio.sleep(0.01)  # the stream waits
        opened.say("a")
        assert texts(written) == ["a"], "before anybody else had a turn"
        opened.say("b")
        assert texts(written) == ["a"], "and the next behind it"
        await asyncio.sleep(0.05)
        assert texts(written) == ["a", "b"] and opened.model.unread_bytes == 0
        opened.say("c", final=True)
        await asyncio.wait_for(opened.task, 5)

    asyncio.run(run())


@pytest.mark.parametrize("later", [False, True])
def test_a_write_that_fails_ends_the_stream(later: bool) -> None:
    async def run() -> None:
        async def write(data: bytes) -> None:
            if later:
                await asyncio.sleep(0.001)
            raise ConnectionError("the client is gone")

        opened = await Opened(write).begun()
        await asyncio.sleep(0.01)
        opened.say("a")
        with pytest.raises(ConnectionError, match="the client is gone"):
            await asyncio.wait_for(opened.task, 5)
        assert opened.model.cancelled == 1 and opened.model.unread_bytes == 0
        opened.say("b")  # which nobody hears

    asyncio.run(run())


def test_a_token_that_nobody_reads_ends_the_stream_in_time() -> None:
    async def run() -> None:
        async def write(data: bytes) -> None:
            await asyncio.sleep(60)

        opened = await Opened(write, write_s=0.05).begun()
        await asyncio.sleep(0.01)
        opened.say("a")
        with pytest.raises(StatusError, match=r"the stream was not read for 0\.05 s"):
            await asyncio.wait_for(opened.task, 5)
        assert opened.model.cancelled == 1 and opened.model.unread_bytes == 0

    asyncio.run(run())


def test_a_client_that_goes_away_in_the_middle_of_a_write_leaves_nothing_behind() -> None:
    async def run() -> None:
        gate, written = asyncio.Event(), list[bytes]()

        async def write(data: bytes) -> None:
            await gate.wait()
            written.append(data)

        opened = await Opened(write).begun()
        await asyncio.sleep(0.01)
        opened.say("a")
        opened.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opened.task
        assert opened.model.cancelled == 1 and opened.model.unread_bytes == 0
        gate.set()  # gRPC is done with it, late
        await asyncio.sleep(0.01)
        opened.say("b")
        assert opened.model.unread_bytes == 0 and len(written) == 1

    asyncio.run(run())
