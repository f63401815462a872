"""The prefix cache as clients see it: in usage, in /metrics, in what they may ask of it."""

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from tests.serve.support import Running, post, running
from tests.serve.test_management import metrics, value

PAGE = 4  # tokens, of the fake engine
PROMPT = [5, 6, 7, 8] * 10 + [9, 9]
ANSWER: dict[str, Any] = {"max_tokens": 2, "seed": 1, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def server() -> Iterator[Running]:
    with running() as served:
        yield served


def completion(server: Running, prompt: object, **more: object) -> dict[str, Any]:
    reply = post(server.url, "/v1/completions", {"prompt": prompt, **ANSWER, **more})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def cached(server: Running, prompt: object, **more: object) -> int:
    n: int = completion(server, prompt, **more)["usage"]["prompt_tokens_details"]["cached_tokens"]
    return n


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    return [msgspec.json.decode(line) for line in lines]


def test_usage_says_what_was_found(server: Running) -> None:
    assert cached(server, PROMPT) == 0 and cached(server, PROMPT) == 40
    assert cached(server, PROMPT[:40]) == 36, "the last token is computed, and so its page"
    assert cached(server, [*PROMPT[:20], 1]) == 20
    assert cached(server, [PROMPT, PROMPT, [4]], n=2) == 80, "of all prompts, each counted once"
    echo = completion(server, PROMPT, echo=True, max_tokens=0)["usage"]
    assert echo["prompt_tokens_details"]["cached_tokens"] == 40 and echo["completion_tokens"] == 0


def test_a_chats_second_turn_finds_the_first(server: Running) -> None:
    messages = [{"role": "user", "content": "Tell me of the mill by the river, and of the miller."}]
    first = post(server.url, "/v1/chat/completions", {"messages": messages, **ANSWER}).json()
    messages += [first["choices"][0]["message"] | {}, {"role": "user", "content": "And then?"}]
    second = post(server.url, "/v1/chat/completions", {"messages": messages, **ANSWER}).json()["usage"]
    n_first = first["usage"]["prompt_tokens"]
    assert n_first - 2 * PAGE <= second["prompt_tokens_details"]["cached_tokens"] < second["prompt_tokens"]


def test_streams_say_it_too(server: Running) -> None:
    cached(server, PROMPT)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": PROMPT, **ANSWER, "stream": True, "stream_options": options}
    usages = [event["usage"] for event in events(post(server.url, "/v1/completions", body))]
    assert len(usages) > 1 and {u["prompt_tokens_details"]["cached_tokens"] for u in usages} == {40}


def test_metrics_tell_queries_hits_and_what_is_kept(server: Running) -> None:
    def read() -> tuple[float, ...]:
        samples = metrics(server)
        names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:prompt_tokens_total")
        return tuple(value(samples, name) for name in names)

    before = read()
    for _ in range(3):
        cached(server, PROMPT)
    queries, hits, prompts = (now - then for now, then in zip(read(), before, strict=True))
    assert (queries, hits, prompts) == (3 * 42, 2 * 40, 3 * 42)
    samples = metrics(server)
    assert value(samples, "vllm:kv_cache_usage_perc") == 0 == value(samples, "millrace:kv_pages_used")
    assert value(samples, "millrace:kv_pages_kept") >= 10
    assert value(samples, "millrace:kv_pages_evicted_total") == 0
