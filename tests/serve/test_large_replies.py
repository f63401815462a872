"""Whole answers with very many log probabilities: bounded before they are computed, written off the event loop."""

import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest

from millrace.engine.executor import StepInputs
from millrace.runtime.request.sampling_params import TokenLogprobs
from millrace.serve.http.server_context import OFF_LOOP_STEP
from millrace.serve.llm import logprobs
from millrace.serve.llm.logprobs import (
    CollectedChatLogprobs,
    CollectedCompletionLogprobs,
    OffsetLogprobs,
    chat_logprobs,
)
from millrace.serve.protocols.openai import chat as chat_module
from millrace.serve.protocols.openai import completions as completions_module
from millrace.serve.settings import ServerSettings
from tests.runtime.fakes import limits
from tests.serve.support import VOCABULARY, Fake, Running, post, running, tokenizer, until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
N = OFF_LOOP_STEP // 21 + 4  # choices, of which one step is large


@pytest.fixture(scope="module")
def wide() -> Iterator[Running]:
    many = limits(vocab_size=VOCABULARY, max_sequences=64, max_context=256, n_pages=8192, max_step_tokens=128)
    with running(Fake(limits=many), ServerSettings(port=0, max_unread_bytes=2_000_000)) as server:
        yield server


def asked(path: str, n_top: int = 20, **fields: object) -> dict[str, Any]:
    if path == CHAT:
        chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": n_top}
        return {**chat, "seed": 1, **fields}
    return {"prompt": "a", "logprobs": n_top, "seed": 1, **fields}


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_what_could_not_be_held_is_refused_before_it_is_computed(wide: Running, path: str) -> None:
    per_token = 21 * (logprobs.CHAT_BYTES if path == CHAT else logprobs.COMPLETION_BYTES)
    most = 2_000_000 // (per_token * 64)  # tokens of each of 64 choices
    before = wide.wait_until_idle().generation_tokens_total
    reply = post(wide.url, path, asked(path, n=64, max_tokens=most + 1))
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "logprobs"), error
    assert f"{64 * (most + 1)} tokens, with 21 log probabilities" in error["message"] and "stream" in error["message"]
    assert wide.stats().generation_tokens_total == before
    assert post(wide.url, path, asked(path, n=64, max_tokens=most)).status_code == 200
    assert post(wide.url, path, asked(path, n=64, max_tokens=most + 1, stream=True)).status_code == 200


def test_a_length_that_is_not_said_counts(wide: Running) -> None:
    """The rest of the context for a chat, a few tokens for a text."""
    assert post(wide.url, CHAT, asked(CHAT, n=64)).status_code == 400
    assert post(wide.url, TEXT, asked(TEXT, n=64)).status_code == 200
    lists = [[1, 2]] * 64
    assert post(wide.url, TEXT, asked(TEXT, prompt=lists, max_tokens=200)).json()["error"]["param"] == "logprobs"


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_whole_answer_says_what_the_stream_says(wide: Running, path: str) -> None:
    body = asked(path, n=N, max_tokens=12)
    whole = {choice["index"]: choice["logprobs"] for choice in post(wide.url, path, body).json()["choices"]}
    parts: dict[int, list[Any]] = {i: [] for i in range(N)}
    with httpx.stream("POST", wide.url + path, json=body | {"stream": True}, timeout=20) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                for choice in msgspec.json.decode(line[6:])["choices"]:
                    if choice["logprobs"] is not None:
                        parts[choice["index"]].append(choice["logprobs"])
    for i, pieces in parts.items():
        for name in ("content",) if path == CHAT else ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert whole[i][name] == [item for piece in pieces for item in piece[name] or ()]
    assert sorted(whole) == list(range(N)) and any(parts.values())


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("large", [True, False])
def test_large_steps_are_written_off_the_event_loop(
    wide: Running, path: str, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, threads = (CollectedChatLogprobs if path == CHAT else CollectedCompletionLogprobs), set[int]()
    real: Callable[[Any, Any], int] = kind.add

    def add(self: Any, piece: Any) -> int:
        threads.add(threading.get_ident())
        return real(self, piece)

    monkeypatch.setattr(kind, "add", add)
    assert post(wide.url, path, asked(path, n=N if large else 1, max_tokens=3)).status_code == 200
    assert bool(threads - {wide.thread.ident}) == large and threads


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_what_is_held_is_the_json(path: str) -> None:
    """40,000 log probabilities; as objects they took six times as much."""
    names, n = tokenizer(), 20
    top = tuple((i, -0.123456789 * i) for i in range(20, 20 + n))
    tracemalloc.start()
    try:
        chat, text = CollectedChatLogprobs(), CollectedCompletionLogprobs()
        offsets = OffsetLogprobs(names, [1], True, None)
        for i in range(40_000 // n):
            step = [TokenLogprobs(i % 90, -0.5, 1, top)]
            if path == CHAT:
                chat.add(chat_logprobs(names, step))
            else:
                text.add(offsets.take(step, True))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    whole = msgspec.json.encode(chat.finish() if path == CHAT else text.finish())
    first = msgspec.json.decode(whole)
    assert len(first["content" if path == CHAT else "tokens"]) == 40_000 // n
    assert peak < 1.5 * len(whole) + 2**18


@pytest.mark.nightly
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_all_of_them_together_are_bounded(wide: Running, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fits alone; beside each other they do not, and who is one too many is told, and takes nothing along."""
    all_there = threading.Event()
    many = limits(vocab_size=VOCABULARY, max_sequences=128, max_context=256, n_pages=8192, max_step_tokens=512)
    body = asked(path, n=31, max_tokens=6, ignore_eos=True)
    bound = 2 * len(post(wide.url, path, body).content)
    monkeypatch.setattr(
        chat_module if path == CHAT else completions_module, "CHAT_BYTES" if path == CHAT else "COMPLETION_BYTES", 1
    )

    def wait(step: StepInputs) -> None:
        assert not waiting.is_set() or all_there.wait(20)

    waiting = threading.Event()
    fake = Fake(limits=many, before_run=wait)
    with running(fake, ServerSettings(port=0, max_unread_bytes=bound)) as server, ThreadPoolExecutor(4) as clients:
        waiting.set()
        replies = [clients.submit(post, server.url, path, body) for _ in range(4)]
        until(lambda: server.stats().waiting + server.stats().running == 4 * 31)
        all_there.set()
        statuses = sorted(reply.result().status_code for reply in replies)
        assert statuses[0] == 200 and statuses[-1] == 503
        told = next(reply.result() for reply in replies if reply.result().status_code == 503)
        assert told.json()["error"]["code"] == "too_many_answers" and told.headers["retry-after"]
        for _ in range(4):
            assert post(server.url, path, body).status_code == 200
