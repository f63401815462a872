"""The prefix cache as clients see it: in usage, in /metrics, in what they may ask of it."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from millrace.runtime.kv.kv_offload import HEADER, RECORD
from tests.serve.support import ROOMY, Fake, Running, post, running, tokenizer, until
from tests.serve.test_management_api import metrics, value

PAGE = 4  # tokens, of the fake engine
PROMPT = [5, 6, 7, 8] * 10 + [9, 9]
ANSWER: dict[str, Any] = {"max_tokens": 2, "seed": 1, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def server() -> Iterator[Running]:
    with running() as served:
        yield served


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    """One request may need all but four pages."""
    with running(Fake(limits=replace(ROOMY, max_context=128, n_pages=36))) as served:
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
    assert cached(server, PROMPT) == 0 and cached(server, PROMPT) == 41, "all but the token that is computed to draw"
    assert cached(server, PROMPT[:40]) == 39, "the last token is computed, the rest of its page copied"
    assert cached(server, [*PROMPT[:20], 1]) == 20
    assert cached(server, [PROMPT, PROMPT, [4]], n=2) == 82, "of all prompts, each counted once"
    echo = completion(server, PROMPT, echo=True, max_tokens=0)["usage"]
    assert echo["prompt_tokens_details"]["cached_tokens"] == 41 and echo["completion_tokens"] == 0


def test_a_chats_second_turn_finds_the_first(server: Running) -> None:
    messages = [{"role": "user", "content": "Tell me of the mill by the river, and of the miller."}]
    first = post(server.url, "/v1/chat/completions", {"messages": messages, **ANSWER}).json()
    messages += [first["choices"][0]["message"] | {}, {"role": "user", "content": "And then?"}]
    second = post(server.url, "/v1/chat/completions", {"messages": messages, **ANSWER}).json()["usage"]
    n_first = first["usage"]["prompt_tokens"]
    assert n_first - 2 * PAGE <= second["prompt_tokens_details"]["cached_tokens"] < second["prompt_tokens"]


@pytest.mark.parametrize("n_words", [2, pytest.param(6, marks=pytest.mark.nightly), 14])
def test_a_chat_of_20_short_turns_costs_its_new_tokens(n_words: int) -> None:
    """Over HTTP, in pages of 64: turns of some 25, 45 and 85 tokens, template and answers included."""
    rng, messages = random.Random(n_words), list[dict[str, str]]()
    of = replace(ROOMY, page_tokens=64, max_context=4096, n_pages=128, max_step_tokens=512)
    (letter,) = tokenizer().encode("q")
    said = {**ANSWER, "max_tokens": 2 * n_words, "logit_bias": {str(letter): 100}}
    with running(Fake(limits=of)) as served:
        before = served.stats().step_tokens_total
        for _ in range(20):
            text = " ".join("".join(rng.choices("abcdefgh", k=4)) for _ in range(n_words))
            messages.append({"role": "user", "content": text})
            reply = post(served.url, "/v1/chat/completions", {"messages": messages, **said}).json()
            messages.append(reply["choices"][0]["message"])
            assert tokenizer().encode(str(messages[-1]["content"])) == [letter] * 2 * n_words, "or it is another answer"
        cost = (served.stats().step_tokens_total - before) / reply["usage"]["total_tokens"]
    assert cost <= 1.3, f"{reply['usage']['total_tokens']} new tokens: {cost:.3f} times that computed"


def test_streams_say_it_too(server: Running) -> None:
    cached(server, PROMPT)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": PROMPT, **ANSWER, "stream": True, "stream_options": options}
    usages = [event["usage"] for event in events(post(server.url, "/v1/completions", body))]
    assert len(usages) > 1 and {u["prompt_tokens_details"]["cached_tokens"] for u in usages} == {41}


def test_metrics_tell_queries_hits_and_what_is_kept(server: Running) -> None:
    def read() -> tuple[float, ...]:
        samples = metrics(server)
        names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:prompt_tokens_total")
        return tuple(value(samples, name) for name in names)

    before = read()
    for _ in range(3):
        cached(server, PROMPT)
    queries, hits, prompts = (now - then for now, then in zip(read(), before, strict=True))
    assert (queries, hits, prompts) == (3 * 42, 2 * 41, 3 * 42)
    samples = metrics(server)
    assert value(samples, "vllm:kv_cache_usage_perc") == 0 == value(samples, "millrace:kv_pages_used")
    assert value(samples, "millrace:kv_pages_kept") >= 10
    assert value(samples, "millrace:kv_pages_evicted_total") == 0


def test_metrics_tell_of_the_second_tier(server: Running, tmp_path: Path) -> None:
    assert not [name for name in metrics(server) if "kv_tier" in str(name)], "there is none"
    with running(Fake(limits=replace(ROOMY, max_context=64, n_pages=16), tier=tmp_path / "tier")) as served:
        for first in (1, 2, 1):
            cached(served, [first, *PROMPT])
        samples = metrics(served)
        names = ("pages", "stored_total", "found_total", "damaged_total", "dropped_total", "bytes")
        pages, stored, found, damaged, dropped, n_bytes = (value(samples, f"millrace:kv_tier_{n}") for n in names)
        assert (damaged, dropped) == (0, 0) and pages == stored > 0 and found > 0, samples
        record = (value(samples, "millrace:kv_tier_bytes") - 2 * HEADER.size) / pages
        assert (
            n_bytes == sum(path.stat().st_size for path in tmp_path.iterdir()) and record == RECORD.size + 2 * 8 * PAGE
        )


def test_requests_say_with_whom_and_how_long(server: Running) -> None:
    assert [cached(server, PROMPT, cache_salt=salt) for salt in ("a", "b", "a", None)] == [0, 0, 41, 0]
    assert cached(server, PROMPT, cache_salt="b", cache_pin=True, cache_ttl_s=60) == 41
    assert value(metrics(server), "millrace:kv_pages_pinned") == 10
    assert cached(server, PROMPT, cache_priority=90, cache_ttl_s=0.5) == 41
    pinned = post(server.url, "/v1/completions", {"prompt": PROMPT, **ANSWER, "cache_salt": "b"})
    assert "x-millrace-ignored" not in pinned.headers
    messages = [{"role": "user", "content": "Tell me of the mill by the river."}]
    chat = {"messages": messages, **ANSWER, "cache_salt": "c", "cache_pin": True, "cache_ttl_s": 0.01}
    assert post(server.url, "/v1/chat/completions", chat).status_code == 200
    cached(server, PROMPT, cache_salt="b", cache_pin=True, cache_ttl_s=0.01)
    until(lambda: server.stats().pages_used == 0)


@pytest.mark.parametrize(
    ("field", "sent", "message"),
    [
        ("cache_priority", 101, "cache_priority is 101"),
        ("cache_priority", "high", "cache_priority is of type string"),
        ("cache_ttl_s", -1, "cache_ttl_s is -1"),
        ("cache_salt", "x" * 300, "cache_salt has 300 characters"),
        ("cache_pin", True, "at most 4;"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_what_is_out_of_range_is_refused(small: Running, path: str, field: str, sent: object, message: str) -> None:
    said = [{"role": "user", "content": "Tell me of the mill by the river."}]
    prompt = {"messages": said} if "chat" in path else {"prompt": PROMPT}
    beside = {"cache_priority": 3} if field == "cache_ttl_s" else {}
    reply = post(small.url, path, {**prompt, **ANSWER, **beside, field: sent})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == field and message in error["message"], error


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_without_the_cache_siblings_share_their_prompt_and_nobody_else_does(path: str) -> None:
    """By the tokens that are computed: of a sibling's prompt what is not in a full page, and all of a stranger's."""
    question = [{"role": "user", "content": "Tell me of the mill by the river, and of the miller."}]
    asked = {"messages": question} if "chat" in path else {"prompt": PROMPT}

    def computes(served: Running, n: int) -> int:
        before = served.stats().step_tokens_total
        reply = post(served.url, path, {**asked, **ANSWER, "temperature": 1, "n": n})
        assert len(reply.json()["choices"]) == n, reply.text
        usage = reply.json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        stats = served.wait_until_idle()
        n_prompt = usage["prompt_tokens"]
        assert stats.pages_used == 0 and n_prompt > 5 * PAGE
        # a sibling computes what is in no full page, at least the last token, and each the first token of its answer
        assert stats.step_tokens_total - before == n_prompt + (n - 1) * (n_prompt % PAGE or 1) + n
        return int(n_prompt)

    with running(Fake(prefix_cache=False)) as served:
        for n in (3, 3):
            computes(served, n)
        n_kept = served.stats().pages_kept
        computes(served, 1)
        assert served.stats().pages_kept == n_kept, "what nobody can find does not take the place of what somebody can"
        samples = metrics(served)
        for name in ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"):
            assert value(samples, name) == 0
