"""Clients come and go: nobody's answer depends on it, and nothing of theirs stays behind."""

import asyncio
import itertools
import json
import random
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import httpx
import openai
import pytest

from millrace.engine.executor import StepInputs
from millrace.runtime.request.sampling_params import FinishReason, TokenLogprobs
from millrace.runtime.service import ServiceOptions
from millrace.serve.http import routes
from millrace.serve.http.server_context import OFF_LOOP_STEP
from millrace.serve.llm.logprobs import OffsetLogprobs
from millrace.serve.llm.request_decoding import pop_ignored_fields
from millrace.serve.llm.request_types import Body
from millrace.serve.llm.response_types import CompletionLogprobs
from millrace.serve.settings import ServerSettings
from tests.runtime.fakes import limits
from tests.serve.support import MODEL, VOCABULARY, Fake, http_requests, post, running, tokenizer, until

# 320 tokens for 8 sequences: preemption
TIGHT = limits(vocab_size=VOCABULARY, n_pages=80, page_tokens=4, max_sequences=8, max_step_tokens=24)


def slowly(seconds: float) -> Fake:
    return Fake(before_run=lambda step: time.sleep(seconds))


def slow_encode(seconds: float) -> Callable[[object, str, bool], list[int]]:
    def encode(self: object, text: str, special: bool) -> list[int]:
        time.sleep(seconds if len(text) > 512 else 0)
        return [1] * min(300, len(text))

    return encode


class Client:
    """One of many, with a question of its own."""

    def __init__(self, api: openai.AsyncOpenAI, seed: int) -> None:
        rng = random.Random(seed)
        self.api, self.seed = api, seed
        self.chat, self.stream = rng.random() < 0.5, rng.random() < 0.8
        self.words = " ".join(rng.choice(["river", "mill", "wheel", "sacks"]) for _ in range(rng.randint(1, 8)))
        self.n_tokens = rng.randint(20, 60)

    async def ask(self, leaves_after: int | None = None) -> str:
        """The answer; `leaves_after` so many events, the client is gone."""
        common = {"model": MODEL, "max_tokens": self.n_tokens, "seed": self.seed, "stream": self.stream}
        if self.chat:
            messages = [{"role": "user", "content": self.words}]
            reply = await self.api.chat.completions.create(messages=messages, **common)  # type: ignore[call-overload]
        else:
            reply = await self.api.completions.create(prompt=self.words, **common)  # type: ignore[call-overload]
        if not self.stream:
            choice = reply.choices[0]
            return str(choice.message.content if self.chat else choice.text)
        text, n_events = "", 0
        async for event in reply:
            choice = event.choices[0]
            text += (choice.delta.content or "") if self.chat else choice.text
            n_events += 1
            if leaves_after is not None and n_events >= leaves_after:
                await reply.close()
                break
        return text


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_64_streams_of_which_a_third_go_away(seed: int) -> None:
    rng, crowded = random.Random(seed), threading.Event()

    def lasting(step: StepInputs) -> None:
        if crowded.is_set():  # steps so short that each answer ends before the next comes need no preemption
            time.sleep(0.002)

    with running(Fake(limits=TIGHT, before_run=lasting)) as server:

        async def one(client: Client, leaves: bool, solo: str) -> None:
            await asyncio.sleep(rng.random() * 0.2)
            if not leaves:
                assert await client.ask() == solo
                return
            asking = asyncio.create_task(client.ask(leaves_after=rng.randint(1, 20)))
            await asyncio.wait([asking], timeout=rng.random() * 0.5)
            asking.cancel()  # the others go away while they wait for their first token, or for all of it
            await asyncio.wait([asking])

        async def main() -> None:
            async with openai.AsyncOpenAI(base_url=server.openai, api_key="x", max_retries=0, timeout=60) as api:
                clients = [Client(api, 100 * seed + i) for i in range(64)]
                solos = [await client.ask() for client in clients]
                leaving = set(rng.sample(range(64), 21))
                crowded.set()
                await asyncio.gather(*(one(clients[i], i in leaving, solos[i]) for i in range(64)))

        asyncio.run(main())
        stats = server.wait_until_idle()
        assert stats.finished_total[FinishReason.LENGTH] >= 64 + 43
        assert stats.finished_total[FinishReason.ABORT] > 0
        assert stats.preemptions_total > 0 or seed, "by night other work may leave clients slower than steps"
        assert stats.finished_total[FinishReason.ERROR] == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_p13_a_client_that_goes_away_cancels_its_requests(stream: bool, prompt: str | list[str]) -> None:
    with running(slowly(0.01)) as server:
        with pytest.raises(httpx.ReadTimeout):
            body = {"prompt": prompt, "max_tokens": 400, "stream": stream}
            with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=0.15) as reply:
                first = next(reply.iter_lines()) if stream else reply.read()
                assert first
                raise httpx.ReadTimeout("enough")
        assert server.wait_until_idle(2).finished_total[FinishReason.ABORT] == (1 if prompt == "a" else 2)
        assert http_requests(server, "/v1/completions", 499) == 1


def test_a_client_that_goes_away_while_its_text_is_prepared() -> None:
    entered, released, ended = threading.Event(), threading.Event(), threading.Event()

    def encode(self: object, text: str, special: bool) -> list[int]:
        entered.set()
        assert released.wait(20)
        ended.set()
        return [1]

    with running() as server, patch.object(type(tokenizer()), "_encode", encode):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + "/v1/completions", json={"prompt": "a" * 1000, "max_tokens": 9}, timeout=0.1)
        assert entered.is_set()
        until(lambda: http_requests(server, "/v1/completions", 499))
        released.set()
        assert ended.wait(20) and httpx.get(server.url + "/health").status_code == 200  # the event loop had its turn
        assert server.stats().prompt_tokens_total == 1  # of the warm-up: the request never came to the engine


def test_a_slow_reader_is_dropped_and_others_are_not() -> None:
    wide = limits(vocab_size=VOCABULARY, max_sequences=32, max_context=1024, n_pages=8192)
    fake = Fake(limits=wide, options=ServiceOptions(max_undelivered_tokens=256))
    with running(fake, ServerSettings(port=0, write_timeout_s=0.5)) as server:
        messages = [{"role": "user", "content": "a"}]  # what follows is some 40 MB, more than a socket's buffers take
        body = {"messages": messages, "max_tokens": 900, "n": 31, "stream": True, "logprobs": True, "top_logprobs": 20}
        content = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
            slow.sendall(head.encode() + content)
            until_s = time.monotonic() + 20
            # dropped while it writes, or as soon as the engine sees that it lags behind
            while not any(http_requests(server, "/v1/chat/completions", status) for status in (200, 499)):
                assert time.monotonic() < until_s, server.stats()
                assert post(server.url, "/v1/completions", {"prompt": "b", "max_tokens": 5}).status_code == 200
            stats = server.wait_until_idle()
            assert stats.finished_total[FinishReason.ABORT] == 31


def test_p21_a_full_queue_is_a_429_with_retry_after() -> None:
    one_by_one = limits(vocab_size=VOCABULARY, max_sequences=1, max_context=128, n_pages=64)
    fake = Fake(limits=one_by_one, options=ServiceOptions(max_queued=2), before_run=lambda step: time.sleep(0.005))
    with running(fake) as server:

        async def main() -> list[httpx.Response]:
            async with httpx.AsyncClient(timeout=30) as api:
                body = {"prompt": "a", "max_tokens": 20}
                return await asyncio.gather(*(api.post(server.url + "/v1/completions", json=body) for _ in range(12)))

        replies = asyncio.run(main())
        refused = [r for r in replies if r.status_code == 429]
        assert refused and {r.status_code for r in replies} == {200, 429}
        for reply in refused:
            assert 1 <= int(reply.headers["retry-after"]) <= 60 and reply.json()["error"]["code"] == "queue_full"
        assert post(server.url, "/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200
        several = post(server.url, "/v1/completions", {"prompt": ["a"] * 3, "n": 1, "max_tokens": 2})
        assert several.status_code == 200  # as many as the queue and the free place hold


def test_too_many_texts_at_once_are_a_429() -> None:
    with (
        running(settings=ServerSettings(port=0, max_preparing=2)) as server,
        patch.object(type(tokenizer()), "_encode", slow_encode(0.3)),
    ):

        async def main() -> list[int]:
            async with httpx.AsyncClient(timeout=30) as api:
                body = {"prompt": "a" * 1000, "max_tokens": 2}
                asked = (api.post(server.url + "/v1/completions", json=body) for _ in range(5))
                return [reply.status_code for reply in await asyncio.gather(*asked)]

        assert sorted(asyncio.run(main())) == [200, 200, 429, 429, 429]


def test_long_prompts_of_others_do_not_disturb_a_stream() -> None:
    """Preparing a text takes 100 ms here, in which a stream gets 20 tokens."""

    with running(slowly(0.005)) as server, patch.object(type(tokenizer()), "_encode", slow_encode(0.1)):

        async def poster(api: httpx.AsyncClient) -> None:
            while True:
                body = {"prompt": "river " * 17_000, "max_tokens": 300}
                assert (await api.post(server.url + "/v1/completions", json=body)).status_code == 400

        async def main() -> list[float]:
            async with httpx.AsyncClient(timeout=30) as api:
                posting = [asyncio.create_task(poster(api)) for _ in range(2)]
                body = {"prompt": "a", "max_tokens": 200, "stream": True}
                times = []
                async with api.stream("POST", server.url + "/v1/completions", json=body) as reply:
                    async for line in reply.aiter_lines():
                        if line:
                            times.append(time.perf_counter())
                for task in posting:
                    assert not task.done()
                    task.cancel()
                await asyncio.wait(posting)
                return [b - a for a, b in itertools.pairwise(times)]

        gaps = asyncio.run(main())
        assert statistics.quantiles(gaps, n=20)[-1] < 0.05, "the event loop waited for somebody's tokenisation"


def test_steps_are_coalesced_into_one_write() -> None:
    """16 choices a step arrive as one chunk of the body, however many events that is."""
    gate: list[StepInputs] = []
    with running(Fake(limits=limits(vocab_size=VOCABULARY, max_sequences=16), before_run=gate.append)) as server:
        n_before = len(gate)
        body = {"prompt": "a", "max_tokens": 40, "n": 16, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body) as reply:
            blocks = list(reply.iter_raw())
        n_steps = len(gate) - n_before
        assert reply.headers["content-type"].startswith("text/event-stream") and b"".join(blocks).endswith(
            b"[DONE]\n\n"
        )
        assert b"".join(blocks).count(b"data: {") > n_steps, (
            "several events a step; of a busy server several steps each"
        )
        assert len(blocks) <= n_steps + 3


def test_the_first_event_comes_with_the_first_token() -> None:
    """Otherwise clients that time it would be told a time to first token that is not true."""
    with running(Fake(before_run=lambda step: time.sleep(0.06))) as server:
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "stream": True}
        start_s = time.monotonic()
        with httpx.stream("POST", server.url + "/v1/chat/completions", json=body) as reply:
            first = next(reply.iter_lines())
            assert '"role":"assistant"' in first and time.monotonic() - start_s > 0.059


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_what_was_rendered_is_let_go_of(path: str, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoded, messages are many times the body, and the answer may take minutes."""
    held: list[list[object]] = []
    answering, seen = threading.Event(), threading.Event()

    def see(asked: Any, kind: type[Body], unknown: Sequence[str]) -> tuple[str, ...]:
        held.append(asked.messages if path.endswith("chat/completions") else asked.prompt)
        return pop_ignored_fields(asked, kind, unknown)

    def wait(step: StepInputs) -> None:
        if held:
            answering.set()
            assert seen.wait(20)

    monkeypatch.setattr(routes, "pop_ignored_fields", see)
    body: dict[str, Any] = {"max_tokens": 3, "stream": stream, "prompt": ["a", "b"]}
    if path.endswith("chat/completions"):
        del body["prompt"]
        body["messages"] = [{"role": "user", "content": "a", "annotations": [{}] * 9}]
    with running(Fake(before_run=wait)) as server, ThreadPoolExecutor(1) as threads:
        reply = threads.submit(post, server.url, path, body)
        assert answering.wait(20)
        try:
            until(lambda: sys.getrefcount(held[0]) == 2, 5)  # of this test, and of the question itself
        finally:
            seen.set()
        assert reply.result().status_code == 200


def test_the_names_of_a_large_echo_are_written_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 choices, each told of 21 tokens at every place of the prompt: in pieces, and not where others are served."""
    told: list[tuple[int, bool]] = []
    take = OffsetLogprobs.take
    with running() as server:

        def taken(self: OffsetLogprobs, tokens: Sequence[TokenLogprobs], with_top: bool) -> CompletionLogprobs:
            told.append((sum(1 + len(t.top) for t in tokens), threading.current_thread() is server.thread))
            return take(self, tokens, with_top)

        monkeypatch.setattr(OffsetLogprobs, "take", taken)
        body = {"prompt": [5] * 100, "echo": True, "logprobs": 20, "max_tokens": 0, "n": 8, "stream": True}
        reply = post(server.url, "/v1/completions", body)
    assert reply.status_code == 200 and sum(n for n, _ in told) == 8 * 99 * 21
    assert not [n for n, on_loop in told if on_loop and n > OFF_LOOP_STEP]
    assert sum(n for n, on_loop in told if not on_loop) > sum(n for n, on_loop in told if on_loop)
