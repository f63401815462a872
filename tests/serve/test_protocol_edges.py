"""What every protocol takes and says alike: terms of a request, fields by their own names, responses that go on."""

import asyncio
import contextlib
import gc
import json
import threading
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from millrace.runtime.loop import EngineLoop
from millrace.runtime.request.prefix_cache_options import CacheOptions
from millrace.runtime.request.tool_specs import checked_functions
from millrace.serve.http.errors import HttpError
from millrace.serve.llm import tools as tools_module
from millrace.serve.protocols.responses import store as store_module
from millrace.serve.protocols.responses.answer import ActiveResponse
from millrace.serve.protocols.responses.endpoints import MAX_BEHIND_BYTES, EventBroadcast
from millrace.serve.protocols.responses.store import OVERHEAD_BYTES, ResponseStore, StoredResponse
from tests.serve.support import Fake, Running, post, serving_with, until

RESPONSES = "/v1/responses"
ASK = [{"role": "user", "content": "Tell me of the mill by the river, and of the miller."}]
BODIES: dict[str, dict[str, Any]] = {
    RESPONSES: {"input": ASK, "max_output_tokens": 2},
    "/v1/messages": {"messages": ASK, "max_tokens": 2},
    "/v1/chat/completions": {"messages": ASK, "max_tokens": 2},
    "/api/chat": {"messages": ASK, "options": {"num_predict": 2}, "stream": False},
    "/api/generate": {"prompt": ASK[0]["content"], "options": {"num_predict": 2}, "stream": False},
    "/api/generate raw": {"prompt": ASK[0]["content"], "raw": True, "options": {"num_predict": 2}, "stream": False},
}


def ask(server: Running, way: str, **more: object) -> httpx.Response:
    return post(server.url, way.split()[0], {**BODIES[way], **more})


@pytest.mark.parametrize("way", BODIES)
def test_terms_reach_the_engine(server: Running, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, prepare = [], EngineLoop.prepare

    def watched(self: EngineLoop, *given: Any, **named: Any) -> Any:
        request = prepare(self, *given, **named)
        seen.append((request.options.cache, request.options.queue_options.priority))
        return request

    monkeypatch.setattr(EngineLoop, "prepare", watched)
    assert ask(server, way, cache_salt="s", cache_priority=7, cache_ttl_s=9.5, priority=-3).status_code == 200
    assert ask(server, way, cache_pin=True, cache_ttl_s=0.05).status_code == 200
    assert seen == [(CacheOptions(salt="s", priority=7, ttl_s=9.5), -3), (CacheOptions(pin=True, ttl_s=0.05), 0)]


@pytest.mark.parametrize("way", BODIES)
def test_a_salt_keeps_prompts_apart(way: str, server: Running) -> None:
    def hits(salt: str) -> int:
        before = server.wait_until_idle().prefix_hits_total
        assert ask(server, way, cache_salt=salt).status_code == 200
        return server.wait_until_idle().prefix_hits_total - before

    assert hits(f"a {way}") == 0 < hits(f"a {way}") and hits(f"b {way}") == 0


LONG = [{"role": "user", "content": "The mill. " * 300}]
STOPS = [str(n) for n in range(17)]
NAMED: list[tuple[str, dict[str, Any], str, str]] = [
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens is 0", "max_output_tokens"),
    (RESPONSES, {"input": LONG, "max_output_tokens": None}, "maximum context length", "input"),
    (RESPONSES, {"input": LONG, "max_output_tokens": 9999}, "larger --max-context", "input"),
    (RESPONSES, {"max_tokens": 5}, 'unknown field "max_tokens"', "max_tokens"),
    (RESPONSES, {"text": {"format": {"type": "xml"}}}, "text.format.type is 'xml'", "text.format"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema is", "text.format"),
    (RESPONSES, {"priority": 5000}, "priority is 5000", "priority"),
    ("/v1/messages", {"stop_sequences": STOPS}, "stop_sequences has 17 strings", ""),
    ("/v1/messages", {"cache_ttl_s": 5}, "cache_ttl_s is set", ""),
    ("/api/chat", {"options": {"num_predict": 0}}, "options.num_predict is 0", ""),
    ("/api/chat", {"messages": LONG, "options": {"num_predict": 9999}}, "larger --max-context", ""),
    ("/api/generate raw", {"prompt": "The mill. " * 300}, "larger --max-context", ""),
    ("/v1/messages", {"messages": LONG, "max_tokens": 9999}, "larger --max-context", ""),
    ("/v1/chat/completions", {"max_tokens": 9999}, "max_tokens of 9999 was asked for", "max_tokens"),
    ("/api/chat", {"options": {"repeat_penalty": "x"}}, "options.repeat_penalty is 'x'", ""),
    ("/api/chat", {"options": {"stop": STOPS}}, "options.stop has 17 strings", ""),
    ("/api/chat", {"cache_priority": 101}, "cache_priority is 101", ""),
    ("/api/generate raw", {"options": {"top_p": 2}}, "options.top_p is 2", ""),
    ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens is 0", "max_tokens"),
]  # fmt: skip


@pytest.mark.parametrize("way, fields, says, param", NAMED, ids=[f"{way} {says}" for way, _, says, _ in NAMED])
def test_errors_name_what_the_client_sent(
    server: Running, way: str, fields: dict[str, Any], says: str, param: str
) -> None:
    reply = ask(server, way, **fields)
    error = reply.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert reply.status_code == 400 and says in message, reply.text
    assert not param or error["param"] == param
    if way == RESPONSES and param != "max_tokens":
        assert "max_tokens" not in message and "messages" not in message and "response_format" not in message


# ------------------------------------------------------------------ responses in the background


@pytest.fixture
def gate() -> Iterator[threading.Semaphore]:
    """As many steps as it is released; at the end all."""
    steps = threading.Semaphore(0)
    yield steps
    steps.release(10_000)


@pytest.fixture
def gated(gate: threading.Semaphore) -> Iterator[Running]:
    is_up = threading.Event()

    def before_run(step: object) -> None:
        if is_up.is_set():
            assert gate.acquire(timeout=20)

    with serving_with(Fake(before_run=before_run)) as started:
        is_up.set()
        yield started
        gate.release(10_000)


def stored(server: Running, response_id: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server.url}{RESPONSES}/{response_id}").json()
    return found


def ended(server: Running, response_id: str) -> dict[str, Any]:
    until(lambda: stored(server, response_id)["status"] != "in_progress")
    return stored(server, response_id)


LATER = {"input": "Hi", "max_output_tokens": 20, "seed": 3, "background": True}


def test_a_stream_in_the_background_goes_on_without_its_reader(gated: Running, gate: threading.Semaphore) -> None:
    with httpx.stream("POST", gated.url + RESPONSES, json={**LATER, "stream": True}, timeout=20) as stream:
        lines = stream.iter_lines()
        first = next(json.loads(line[6:]) for line in lines if line.startswith("data: "))
        assert first["type"] == "response.created" and first["response"]["status"] == "in_progress"
        gate.release(5)
        next(line for line in lines if "response.output_text.delta" in line)
    own = first["response"]["id"]
    assert stored(gated, own)["status"] == "in_progress"
    gate.release(1000)
    found = ended(gated, own)
    whole = post(gated.url, RESPONSES, {**LATER, "background": False}).json()
    assert found["status"] == whole["status"] == "incomplete" and found["usage"]["output_tokens"] == 20
    assert found["output"][0]["content"] == whole["output"][0]["content"] != []


def test_a_reader_who_stays_gets_all_of_it(gated: Running, gate: threading.Semaphore) -> None:
    gate.release(1000)
    text = post(gated.url, RESPONSES, {**LATER, "stream": True}).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]
    assert last["type"] == "response.incomplete" and last["response"] == stored(gated, last["response"]["id"])
    said = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert said == last["response"]["output"][0]["content"][0]["text"]


def test_cancelled_it_tells_its_reader(gated: Running, gate: threading.Semaphore) -> None:
    with httpx.stream("POST", gated.url + RESPONSES, json={**LATER, "stream": True}, timeout=20) as stream:
        lines = (line[6:] for line in stream.iter_lines() if line.startswith("data: "))
        own = json.loads(next(lines))["response"]["id"]
        httpx.post(f"{gated.url}{RESPONSES}/{own}/cancel")
        gate.release(1000)
        *_, last = lines
    assert json.loads(last)["type"] == "response.incomplete" and json.loads(last)["response"]["status"] == "cancelled"


def test_a_reader_who_is_too_far_behind_is_told_and_holds_nothing() -> None:
    async def run() -> list[bytes]:
        feed, block = EventBroadcast(), b"x" * 100_000
        for _ in range(40):
            feed.put(block)
            assert feed._n_bytes <= MAX_BEHIND_BYTES + len(block)
        assert not feed._blocks
        feed.end()
        return [block async for block in feed.blocks(lambda: b"too late")]

    assert asyncio.run(run()) == [b"too late"]


def test_one_that_is_being_answered_cannot_be_gone_on_from(gated: Running, gate: threading.Semaphore) -> None:
    own = post(gated.url, RESPONSES, LATER).json()["id"]
    reply = post(gated.url, RESPONSES, {"input": "x", "previous_response_id": own})
    error = reply.json()["error"]
    assert reply.status_code == 409 and error["code"] == "response_in_progress", reply.text
    assert error["param"] == "previous_response_id" and own in error["message"]
    gate.release(1000)
    ended(gated, own)
    assert post(gated.url, RESPONSES, {**LATER, "background": False, "previous_response_id": own}).status_code == 200


def test_one_that_was_cancelled_can_be_gone_on_from_at_once(gated: Running, gate: threading.Semaphore) -> None:
    """While its last step is still being computed; what comes of that changes nothing."""
    own = post(gated.url, RESPONSES, {**LATER, "max_output_tokens": 60}).json()["id"]
    gate.release(8)
    until(lambda: gated.stats().generation_tokens_total >= 5)
    cancelled = httpx.post(f"{gated.url}{RESPONSES}/{own}/cancel").json()
    said = cancelled["output"][0]["content"][0]["text"]
    after = post(gated.url, RESPONSES, {**LATER, "previous_response_id": own})
    assert cancelled["status"] == "cancelled" and said and after.status_code == 200, after.text
    gate.release(1000)
    ended(gated, after.json()["id"])
    assert stored(gated, own) == cancelled
    hi = {"role": "user", "content": LATER["input"]}
    talk = [hi, {"role": "assistant", "content": said}, hi]
    whole = post(gated.url, RESPONSES, {**LATER, "background": False, "input": talk}).json()
    assert whole["output"][0]["content"] == stored(gated, after.json()["id"])["output"][0]["content"] != []


def test_one_without_an_answer_cannot_be_gone_on_from(gated: Running, gate: threading.Semaphore) -> None:
    """It is cancelled within its prompt, which takes two steps."""
    own = post(gated.url, RESPONSES, {**LATER, "input": "abcdefgh " * 12}).json()["id"]
    until(lambda: gated.stats().running == 1)
    httpx.post(f"{gated.url}{RESPONSES}/{own}/cancel")
    time.sleep(0.02)
    gate.release(1000)
    until(lambda: gated.stats().running == 0)
    assert ended(gated, own)["output"] == []
    reply = post(gated.url, RESPONSES, {"input": "x", "previous_response_id": own})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["code"] == "response_without_answer" and "cancelled" in error["message"]
    assert error["param"] == "previous_response_id"


# ------------------------------------------------------------------ what is stored of them


def test_stored_responses_take_the_memory_that_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a body whose lists are 20 times as large decoded; with tools that are not told to the model."""
    stores, keep = dict[int, ResponseStore](), ResponseStore.add

    def seen(self: ResponseStore, kept: StoredResponse) -> None:
        stores[id(self)] = self
        keep(self, kept)

    monkeypatch.setattr(ResponseStore, "add", seen)
    function = {"type": "function", "name": "f", "parameters": {"x": [[]] * 20_000}}
    body = {"input": "Hi", "max_output_tokens": 2, "tools": [function], "tool_choice": "none", "metadata": {"a": "b"}}
    with serving_with() as own:
        for _ in range(2):  # what is made once
            assert post(own.url, RESPONSES, body).status_code == 200
        (store,) = stores.values()
        tracemalloc.start()
        try:
            before_bytes, (before, _) = store.n_bytes, tracemalloc.get_traced_memory()
            reply = [post(own.url, RESPONSES, body) for _ in range(8)][-1].json()
            assert reply["tools"] == [function] and stored(own, reply["id"]) == reply
            gc.collect()
            counted, grown = store.n_bytes - before_bytes, tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
    assert counted >= 8 * 60_000 and grown < 2 * counted + 3 * 2**20, (counted, grown)


TOOL: dict[str, Any] = {"description": "x" * 70_000, "parameters": {"type": "object"}}
LARGE: list[tuple[str, dict[str, Any], Any]] = [
    ("/v1/chat/completions", {"type": "function", "function": {"name": "f", **TOOL}}, "none"),
    (RESPONSES, {"type": "function", "name": "f", **TOOL}, "none"),
    ("/v1/messages", {"name": "f", "description": TOOL["description"], "input_schema": {}}, {"type": "none"}),
]


@pytest.mark.parametrize("way, tool, choice", LARGE, ids=[way for way, _, _ in LARGE])
def test_large_tools_are_read_beside_the_event_loop(
    server: Running, way: str, tool: dict[str, Any], choice: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, checked = list[str](), checked_functions

    def watched(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return checked(*given)

    monkeypatch.setattr(tools_module, "checked_functions", watched)
    assert ask(server, way, tools=[tool], tool_choice=choice).status_code == 200
    assert threads == ["millrace-replies"]


def kept(n: int, n_bytes: int, answered: bool = True, tenant: str = "") -> StoredResponse:
    said = b"x" * (n_bytes - OVERHEAD_BYTES)
    return StoredResponse(f"resp_{n}", tenant, said, status="completed" if answered else "in_progress")


def test_the_store_is_bounded_in_bytes_and_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_RESPONSES", 5)
    monkeypatch.setattr(store_module, "MAX_STORED_BYTES", 10_000)
    store = ResponseStore()
    store.add(kept(0, 4000, answered=False))
    for n in (1, 2):
        store.add(kept(n, 3000))
    assert store.get("resp_1", "").id == "resp_1" and store.n_bytes == 10_000
    store.add(kept(3, 3000))  # in the place of 2, which was not asked for
    for n, there in enumerate((True, True, False, True)):
        with contextlib.nullcontext() if there else pytest.raises(HttpError, match="no response"):
            store.get(f"resp_{n}", "")
    one = store.get("resp_3", "")
    one.messages_json = b"x" * 20_000
    store.update(one)
    assert store.n_bytes == 7000 and store.get("resp_1", ""), "it is too large itself, and goes alone"
    with pytest.raises(HttpError, match="no response"):
        store.get("resp_3", "")
    for n in range(10, 20):
        store.add(kept(n, OVERHEAD_BYTES))
    assert [n for n in range(10, 20) if f"resp_{n}" in store._responses] == [16, 17, 18, 19]


@pytest.mark.parametrize("sizes", [(2000, 2000), (2000, 5000)], ids=["too many", "too large"])
def test_no_tenant_pushes_out_what_another_stored(sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_RESPONSES", 5)
    monkeypatch.setattr(store_module, "MAX_STORED_BYTES", 20_000)
    store = ResponseStore()
    for n in range(2):
        store.add(kept(n, sizes[0], tenant="a"))
    for n in range(2, 50):
        store.add(kept(n, sizes[1], tenant="b"))
    assert [kept.tenant for kept in store._responses.values()] == ["a", "a", "b", "b", "b"]
    assert store.get("resp_49", "b") and store.n_bytes == 2 * sizes[0] + 3 * sizes[1]
    for n in (0, 1, 47, 48, 49):
        store.delete(f"resp_{n}")
    assert store.n_bytes == 0 and not store._bytes and not store._number, "tenants who have none cost nothing"


def watched_store(monkeypatch: pytest.MonkeyPatch) -> list[ResponseStore]:
    """The store into which the last response was put."""
    stores, keep = list[ResponseStore](), ResponseStore.add

    def watched(self: ResponseStore, kept: StoredResponse) -> None:
        stores[:] = [self]
        keep(self, kept)

    monkeypatch.setattr(ResponseStore, "add", watched)
    return stores


LARGE_RESPONSES: list[dict[str, Any]] = [
    {"max_output_tokens": 200, "include": ["message.output_text.logprobs"], "top_logprobs": 2},
    {"metadata": {"a": "x" * 20_000}},
]


@pytest.mark.parametrize("more", LARGE_RESPONSES, ids=["its answer", "before it"])
def test_a_response_too_large_to_be_kept_says_so_and_leaves_others(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = watched_store(monkeypatch)
    with serving_with(Fake()) as server:
        small = ask(server, RESPONSES).json()
        monkeypatch.setattr(store_module, "MAX_STORED_BYTES", 4 * stores[0].n_bytes)
        whole = ask(server, RESPONSES, **more).json()
        lines = ask(server, RESPONSES, stream=True, **more).text.splitlines()
        streamed = [json.loads(line[6:]) for line in lines if line.startswith("data: ")][-1]["response"]
        for large in (whole, streamed):
            assert large["status"] == "incomplete" and large["store"] is False
            assert httpx.get(f"{server.url}{RESPONSES}/{large['id']}").status_code == 404
        found = httpx.get(f"{server.url}{RESPONSES}/{small['id']}")
        assert small["store"] is True and found.status_code == 200 and found.json() == small
        if "metadata" in more:
            refused = ask(server, RESPONSES, background=True, **more)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "background"


@pytest.mark.parametrize("background", [False, True])
def test_whoever_reads_the_last_event_can_go_on_at_once(background: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The response is settled before the event is written."""
    stores, under_way = watched_store(monkeypatch), list[bool]()
    event = ActiveResponse._event

    def watched(self: ActiveResponse, kind: str, **fields: object) -> bytes:
        if kind == "response.incomplete":
            under_way.append(stores[0].get(self.reply.id, "").is_under_way)
        return event(self, kind, **fields)

    monkeypatch.setattr(ActiveResponse, "_event", watched)
    with serving_with(Fake()) as server:
        assert ask(server, RESPONSES, stream=True, background=background).status_code == 200
    assert under_way == [False]
