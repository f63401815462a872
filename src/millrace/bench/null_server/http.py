"""A server without a model and with known timing, against which measurements of a load generator can be checked.

It answers streamed and complete chats, completions and responses, embeddings, and KServe's protocol (`kserve.py`; over
gRPC `grpc.py`). Times are random by seed and request number. Send times are fixed when a request arrives, so delays do
not accumulate. `/truth` reports the actual times, on the machine's monotonic clock, which all processes share.
"""

import asyncio
import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import httptools

from millrace.bench.null_server import kserve as kserve
from millrace.bench.null_server import replies as replies
from millrace.bench.null_server.ledger import Ledger, Sent

HOST = "127.0.0.1"
_MAX_BODY_BYTES = 256 << 20
_KSERVE = re.compile(r"/v2/models/([^/]+)(?:/versions/([0-9]+))?/(infer|generate|generate_stream)")


class NullServer:
    """The null server; it listens on a free port of localhost once started."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    async def start(self) -> asyncio.Server:
        return await asyncio.get_running_loop().create_server(
            lambda: _ServerConnection(self.ledger), HOST, 0, backlog=2048
        )


class _ServerConnection(asyncio.Protocol):
    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._loop = ledger, asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._n_json: int | None = None  # bytes of the body's JSON, where tensors follow it
        self._start()

    def _start(self) -> None:
        self._path, self._id, self._body, self._n_json = b"", "", bytearray(), None

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
        elif name.lower() == kserve.HEADER.lower().encode():
            self._n_json = int(value) if value.isdigit() else -1

    def on_body(self, body: bytes) -> None:
        self._body += body
        if len(self._body) > _MAX_BODY_BYTES:
            self._close()

    def on_message_complete(self) -> None:
        path, name, body, n_json = self._path.decode("latin-1"), self._id, bytes(self._body), self._n_json
        self._start()
        if path == "/truth":
            self._write(replies.plain(200, [asdict(sent) for sent in self._ledger.truth]))
        elif path == "/metrics" and self._ledger.timing.kv_tokens:
            self._write(replies.metrics(*self._ledger.load(time.perf_counter())))
        elif path in replies.PATHS:
            self._answer(replies.PATHS[path], name, body)
        elif not path.startswith("/v2"):
            self._write(replies.plain(404, {"error": {"message": f"there is no {path}"}}))
        elif match := _KSERVE.fullmatch(path):
            if match[3] == "infer":
                self._infer(match[1], match[2] or "", name, body, n_json)
            else:
                self._answer("generate", name, body, streamed=match[3] == "generate_stream")
        else:
            method, ledger = self._parser.get_method().decode(), self._ledger
            self._write(kserve.metadata_reply(method, path, ledger.truth, ledger.timing.instances))

    def _answer(self, kind: str, name: str, body: bytes, streamed: bool | None = None) -> None:
        """Answer a request. streamed: if the path determines it"""
        try:
            request: dict[str, Any] = json.loads(body)
        except ValueError:
            return self._write(replies.plain(400, {"error": {"message": "the body is not JSON"}}))
        ledger, number = self._ledger, len(self._ledger.truth)
        n = 1 if kind == "embeddings" else replies.n_requested(request)
        sent, fault = ledger.record_request(name, kind, replies.prompt_of(request), n), ledger.fault_of(number)
        if fault == "status":
            return self._write(replies.plain(500, {"error": {"message": "as it was told to"}}))
        if streamed is None:
            streamed = bool(request.get("stream")) and kind != "embeddings"
        options = request.get("stream_options") or {}
        _Stream(self, sent, ledger.timing.tokens_per_chunk if streamed else n, fault).run(
            streamed, bool(options.get("continuous_usage_stats"))
        )
        return None

    def _infer(self, model: str, version: str, name: str, body: bytes, n_json: int | None) -> None:
        ledger = self._ledger
        try:
            target = kserve.model_of(model, version)
            request, inputs = kserve.read_request(body, n_json)
            outputs, n = target.echo(inputs)
        except kserve.RefusedError as error:
            return self._write(replies.plain(error.status, {"error": str(error)}))
        sent, fault = ledger.record_inference(name, model, n), ledger.fault_of(len(ledger.truth) - 1)
        reply = kserve.infer_reply(model, request, outputs)
        self.later(sent.arrived_s + sent.due_s[0], lambda: self._reply_inference(sent, n, reply, fault))
        return None

    def _reply_inference(self, sent: Sent, n: int, reply: bytes, fault: str | None) -> None:
        match fault:
            case "status" | "error":
                return self._write(replies.plain(500, {"error": "as it was told to"}))
            case "break":
                self._write(reply[: len(reply) // 2])
                return self._close()
            case "malformed":
                return self._write(reply.replace(b'"outputs"', b'"outpost"'))
            case "stall":
                return None
        sent.sent_s.append(time.perf_counter())
        sent.n_tokens.append(n)
        return self._write(reply)

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
    """A streamed answer in progress."""

    connection: _ServerConnection
    sent: Sent
    tokens_per_chunk: int
    fault: str | None
    _n_sent: int = 0  # tokens
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
        """Send all tokens that are due; a chunk is due with its first token."""
        sent, n = self.sent, len(self.sent.due_s)
        now = time.perf_counter()
        while self.connection.is_open and self._n_sent < n and sent.arrived_s + sent.due_s[self._n_sent] <= now:
            if self.fault is not None and self._n_sent >= n // 2 and self._fails():
                return
            n_tokens = min(self.tokens_per_chunk, n - self._n_sent)
            self._n_sent += n_tokens
            usage = replies.usage(sent.kind, sent.n_prompt, self._n_sent) if self._each_usage else None
            data = replies.text_event(sent.kind, n_tokens, usage)
            sent.sent_s.append(time.perf_counter())
            sent.n_tokens.append(n_tokens)
            self.connection.write(data)
        if not self.connection.is_open:
            return
        if self._n_sent < n:
            self._wait(self._n_sent, self._chunk)
        else:
            self.connection.write(replies.last_events(sent.kind, sent.n_prompt, n))

    def _fails(self) -> bool:
        """Apply the fault; True if it ends the answer."""
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
        self.connection.write(replies.full_body(self.sent.kind, self.sent.n_prompt, len(self.sent.due_s)))
