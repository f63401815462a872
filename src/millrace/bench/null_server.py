"""A server without a model, of known timing: what a load generator measures of it can be held against what it did.

It speaks streamed and whole chats, completions and responses, and embeddings. Times are drawn by seed and number of the
request; tokens are sent at times fixed when the request has arrived, so no delay adds to another. What it really did
stands in `/truth`: the clock of all stamps is the machine's monotonic one, which every process here shares.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import httptools

from millrace.bench import null_replies as replies
from millrace.bench.spread import Spread

FAULTS = ("status", "break", "malformed", "stall", "error")
HOST = "127.0.0.1"
_MOST_BODY_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class NullTiming:
    """ttft_ms: from the request's last byte to the first token; itl_ms: from one token to the next."""

    ttft_ms: str = "100"
    itl_ms: str = "20"
    tokens_per_chunk: int = 1
    seed: int = 0
    fault: str | None = None  # one of FAULTS: half-way through an answer, but `status`, which is at once
    fault_every: int = 1  # of so many requests the last

    def token_s(self, number: int, n: int) -> list[float]:
        """When each of `n` tokens of request `number` is due, in seconds after its arrival."""
        rng, due = random.Random(f"{self.seed}/{number}"), []
        ttft, itl = Spread.parse(self.ttft_ms, "ttft_ms"), Spread.parse(self.itl_ms, "itl_ms")
        at = ttft.draw(rng) / 1e3
        for _ in range(n):
            due.append(at)
            at += itl.draw(rng) / 1e3
        return due


@dataclass(slots=True)
class Sent:
    """What was done for one request. sent_s, n_tokens: of each chunk"""

    id: str
    kind: str
    arrived_s: float
    n_prompt: int
    due_s: list[float] = field(default_factory=list)
    sent_s: list[float] = field(default_factory=list)
    n_tokens: list[int] = field(default_factory=list)


class NullServer:
    """Listens on a free port of this machine alone once started."""

    def __init__(self, timing: NullTiming) -> None:
        self.timing, self.truth = timing, list[Sent]()

    async def start(self) -> asyncio.Server:
        return await asyncio.get_running_loop().create_server(lambda: _Connection(self), HOST, 0, backlog=2048)


class _Connection(asyncio.Protocol):
    def __init__(self, server: NullServer) -> None:
        self._server, self._loop = server, asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._start()

    def _start(self) -> None:
        self._path, self._id, self._body = b"", "", bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._close()

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self._id = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body += body
        if len(self._body) > _MOST_BODY_BYTES:
            self._close()

    def on_message_complete(self) -> None:
        path, name, body = self._path.decode("latin-1"), self._id, bytes(self._body)
        self._start()
        if path == "/truth":
            self._write(replies.plain(200, [asdict(sent) for sent in self._server.truth]))
        elif path not in replies.PATHS:
            self._write(replies.plain(404, {"error": {"message": f"there is no {path}"}}))
        else:
            self._answer(replies.PATHS[path], name, body)

    def _answer(self, kind: str, name: str, body: bytes) -> None:
        try:
            asked: dict[str, Any] = json.loads(body)
        except ValueError:
            return self._write(replies.plain(400, {"error": {"message": "the body is not JSON"}}))
        server, timing = self._server, self._server.timing
        number = len(server.truth)
        n = 1 if kind == "embeddings" else replies.n_asked(asked)
        sent = Sent(name, kind, time.perf_counter(), replies.prompt_of(asked), timing.token_s(number, n))
        server.truth.append(sent)
        fault = timing.fault if timing.fault and number % timing.fault_every == timing.fault_every - 1 else None
        if fault == "status":
            return self._write(replies.plain(500, {"error": {"message": "as it was told to"}}))
        streamed = bool(asked.get("stream")) and kind != "embeddings"
        options = asked.get("stream_options") or {}
        _Stream(self, sent, timing.tokens_per_chunk if streamed else n, fault).run(
            streamed, bool(options.get("continuous_usage_stats"))
        )
        return None

    def later(self, due_s: float, call: Callable[[], None]) -> None:
        """due_s: by the machine's clock"""
        self._timer = self._loop.call_later(max(0.0, due_s - time.perf_counter()), call)

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def _write(self, data: bytes) -> None:
        if self._transport is not None and self.is_open:
            self._transport.write(data)

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    write, close = _write, _close


@dataclass(slots=True)
class _Stream:
    """One answer on its way."""

    connection: _Connection
    sent: Sent
    tokens_per_chunk: int
    fault: str | None
    _told: int = 0  # tokens
    _each_usage: bool = False

    def run(self, streamed: bool, each_usage: bool) -> None:
        self._each_usage = each_usage
        if streamed:
            self.connection.write(replies.STREAM_HEAD)
            self._wait(0, self._chunk)
        else:
            self._wait(-1, self._all)

    def _wait(self, token: int, call: Callable[[], None]) -> None:
        self.connection.later(self.sent.arrived_s + self.sent.due_s[token], call)

    def _chunk(self) -> None:
        """What is due goes out: a chunk's tokens when its first is."""
        sent, n = self.sent, len(self.sent.due_s)
        now = time.perf_counter()
        while self.connection.is_open and self._told < n and sent.arrived_s + sent.due_s[self._told] <= now:
            if self.fault is not None and self._told >= n // 2 and self._fails():
                return
            n_tokens = min(self.tokens_per_chunk, n - self._told)
            self._told += n_tokens
            told = replies.usage(sent.kind, sent.n_prompt, self._told) if self._each_usage else None
            data = replies.text_event(sent.kind, n_tokens, told)
            sent.sent_s.append(time.perf_counter())
            sent.n_tokens.append(n_tokens)
            self.connection.write(data)
        if not self.connection.is_open:
            return
        if self._told < n:
            self._wait(self._told, self._chunk)
        else:
            self.connection.write(replies.last_events(sent.kind, sent.n_prompt, n))

    def _fails(self) -> bool:
        """True where the answer ends here."""
        match self.fault:
            case "break":
                self.connection.close()
            case "malformed":
                line = b'data: {"choices": [\n\n'
                self.connection.write(b"%x\r\n%b\r\n" % (len(line), line) + replies.END)
            case "error":
                self.connection.write(replies.event({"error": {"message": "as it was told to"}}) + replies.END)
        return True  # "stall": nothing more comes

    def _all(self) -> None:
        self.sent.sent_s.append(time.perf_counter())
        self.sent.n_tokens.append(len(self.sent.due_s))
        self.connection.write(replies.whole(self.sent.kind, self.sent.n_prompt, len(self.sent.due_s)))


async def _serve(timing: NullTiming) -> None:
    """Until stdin ends, as it does with the process that started this one."""
    server = await NullServer(timing).start()
    sys.stdout.write(f"http://{HOST}:{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve(NullTiming(**json.loads(sys.argv[1]))))
