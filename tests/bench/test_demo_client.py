"""What the load generator hears: streams in chunks, and what is no answer."""

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from millrace.bench.client.demo_client import DemoChatRequest, ask, ask_all, quantile
from millrace.errors import MachineError

ASKED = DemoChatRequest("Hi", 3, seed=1)
USAGE: dict[str, object] = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}
FAILED: dict[str, object] = {"error": {"message": "the engine"}}


def chunk(text: str, finish: str | None = None) -> dict[str, object]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish}]}


@contextmanager
def server(events: list[dict[str, object]], status: int = 200) -> Iterator[str]:
    class Answers(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            self.end_headers()
            for event in events:
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, format: str, *args: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as serving:
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{serving.server_port}"
        finally:
            serving.shutdown()
            thread.join()


def test_a_stream_is_heard_chunk_by_chunk() -> None:
    shown: list[str] = []
    with server([chunk(""), chunk("a "), chunk("mill", "length"), USAGE]) as url:
        heard = ask(url, ASKED, shown.append)
        many, took_s = ask_all(url, [ASKED] * 3, concurrency=2)
    assert heard.text == "a mill" and shown == ["a ", "mill"] and heard.finish_reason == "length"
    assert (heard.n_prompt, heard.n_output) == (5, 3) and len(heard.chunk_s) == 2 and len(heard.pauses_s) == 1
    assert [h.text for h in many] == ["a mill"] * 3 and took_s > 0


@pytest.mark.parametrize(
    "events, status, said",
    [
        ([], 500, "status 500"),
        ([chunk("a")], 200, "broke off"),
        ([chunk("", "stop"), USAGE], 200, "holds no token"),
        ([chunk("a"), FAILED], 200, "the engine"),
    ],
)
def test_what_is_no_answer(events: list[dict[str, object]], status: int, said: str) -> None:
    with server(events, status) as url, pytest.raises(MachineError, match=said):
        ask(url, ASKED)


def test_nobody_listens() -> None:
    with pytest.raises(MachineError, match="Refused"):
        ask("http://127.0.0.1:1", ASKED)


def test_quantiles() -> None:
    assert quantile([3, 1, 2, 4], 0.5) == 3 and quantile([5], 0.99) == 5 and quantile(list(range(100)), 0.99) == 99
