"""A small load against our own server, over HTTP as a client sees it: streamed chats, timed chunk by chunk.

Standard library only, and small: `millrace demo` uses it. A benchmark asks for more (arrival times, warm-up, repeats).
"""

import http.client
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from millrace.errors import MachineError

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One chat request. `ignore_eos` makes the answer exactly `max_tokens` long."""

    text: str
    max_tokens: int
    seed: int
    ignore_eos: bool = False

    def body(self) -> dict[str, object]:
        return {
            "messages": [{"role": "user", "content": self.text}], "max_tokens": self.max_tokens, "seed": self.seed,
            "ignore_eos": self.ignore_eos, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip


@dataclass(slots=True)
class Heard:
    """What one client saw: seconds from asking to each chunk of text, and the usage that the server tells."""

    text: str = ""
    chunk_s: list[float] = field(default_factory=list)
    n_prompt: int = 0
    n_output: int = 0
    finish_reason: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.chunk_s[0]

    @property
    def inter_token_s(self) -> float:
        """Mean time from one token to the next: a chunk holds all tokens that were ready together."""
        return (self.chunk_s[-1] - self.chunk_s[0]) / max(self.n_output - 1, 1)

    @property
    def pauses_s(self) -> list[float]:
        """Between chunks of text."""
        return [b - a for a, b in zip(self.chunk_s, self.chunk_s[1:], strict=False)]


def ask(url: str, asked: Ask, show: Callable[[str], None] | None = None) -> Heard:
    """Sends one request and reads its stream to the end. raises MachineError where the answer is no answer"""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=TIMEOUT_S)
    heard = Heard()
    start_s = time.perf_counter()
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(asked.body()), {"content-type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            raise _no_answer(f"status {response.status}: {response.read(500).decode(errors='replace')}")
        for event in _events(response):
            text = _take(heard, event, time.perf_counter() - start_s)
            if show is not None and text:
                show(text)
    except (OSError, http.client.HTTPException) as error:
        raise _no_answer(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()
    if heard.finish_reason is None or not heard.chunk_s:
        raise _no_answer("the stream broke off")
    return heard


def ask_all(url: str, asks: Sequence[Ask], concurrency: int) -> tuple[list[Heard], float]:
    """All requests, so many at a time; and the seconds that took."""
    start_s = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        heard = list(pool.map(lambda asked: ask(url, asked), asks))
    return heard, time.perf_counter() - start_s


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, object]]:
    while line := response.readline():
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            event: dict[str, object] = json.loads(line[6:])
            yield event


def _take(heard: Heard, event: dict[str, object], at_s: float) -> str:
    """Adds one event to what was heard; gives its text."""
    match event:
        case {"error": error}:
            raise _no_answer(str(error))
        case {"usage": {"prompt_tokens": int(n_prompt), "completion_tokens": int(n_output)}}:
            heard.n_prompt, heard.n_output = n_prompt, n_output
    text = ""
    match event:
        case {"choices": [{"delta": delta, "finish_reason": finish_reason}, *_]}:
            text = delta.get("content") or "" if isinstance(delta, dict) else ""
            if isinstance(finish_reason, str):
                heard.finish_reason = finish_reason
    if text:
        heard.text += text
        heard.chunk_s.append(at_s)
    return text


def _no_answer(what: str) -> MachineError:
    return MachineError(f"the server gave no answer ({what})", "a streamed chat completion", "its log says more")
