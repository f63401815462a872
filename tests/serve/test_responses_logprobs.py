"""Log probabilities in responses: of the tokens that the text is made of, in the part and in the events."""

import json
import random
from typing import Any

import httpx
import openai
import pytest

from millrace.checkpoint.tokenizer import Detokenizer
from millrace.checkpoint.tool_calls.formats import HERMES, Reasoning
from millrace.checkpoint.tool_calls.reader import Reader
from millrace.runtime.params import Delta, FinishReason, TokenLogprobs
from millrace.serve import generation
from millrace.serve.logprobs import ContentLogprobs
from millrace.serve.serving import LARGE_STEP
from millrace.serve.speech import AnswerReader
from tests.serve.support import MODEL, Fake, Running, post, serving_with, tokenizer

PATH = "/v1/responses"
INCLUDE = ["message.output_text.logprobs"]
ASK: dict[str, Any] = {"input": "hello", "max_output_tokens": 12, "seed": 3, "include": INCLUDE}


def events(server: Running, **fields: Any) -> list[dict[str, Any]]:
    text = post(server.url, PATH, {**ASK, "stream": True, **fields}).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize("n_top", [None, 0, 2])
def test_they_are_those_of_the_same_chat(server: Running, n_top: int | None) -> None:
    asked = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "seed": 3, "logprobs": True}
    chat = post(server.url, "/v1/chat/completions", {**asked, "top_logprobs": n_top}).json()["choices"][0]
    response = post(server.url, PATH, {**ASK, "top_logprobs": n_top}).json()
    (part,) = response["output"][0]["content"]
    assert part["text"] == chat["message"]["content"] and len(part["logprobs"]) == 12
    assert part["logprobs"] == chat["logprobs"]["content"]
    assert response["top_logprobs"] == (n_top or 0)
    assert all(set(token) == {"token", "bytes", "logprob", "top_logprobs"} for token in part["logprobs"])


def test_events_tell_them_as_the_text_comes(server: Running) -> None:
    told = events(server, top_logprobs=2)
    deltas = [event for event in told if event["type"] == "response.output_text.delta"]
    by_type = {event["type"]: event for event in told}
    part = told[-1]["response"]["output"][0]["content"][0]
    assert [token for event in deltas for token in event["logprobs"]] == part["logprobs"]
    assert len(part["logprobs"]) == 12
    for event in deltas:
        of_text = b"".join(bytes(token["bytes"]) for token in event["logprobs"])
        assert of_text.decode("utf-8", "replace") == event["delta"]
    assert by_type["response.output_text.done"]["logprobs"] == part["logprobs"]
    assert by_type["response.content_part.done"]["part"] == part
    assert by_type["response.output_item.done"]["item"]["content"] == [part]
    assert by_type["response.content_part.added"]["part"]["logprobs"] == []
    kept = httpx.get(f"{server.url}{PATH}/{told[-1]['response']['id']}").json()
    assert kept["output"][0]["content"] == [part]


def test_without_include_there_are_none(server: Running) -> None:
    for include in (None, [], ["reasoning.encrypted_content"]):
        told = events(server, include=include, top_logprobs=0)
        assert all(event["logprobs"] == [] for event in told if "output_text" in event["type"])
        assert told[-1]["response"]["output"][0]["content"][0]["logprobs"] == []


def test_the_openai_client_reads_them(server: Running) -> None:
    asked: Any = {"model": MODEL, "input": "hello", "max_output_tokens": 12, "include": INCLUDE, "top_logprobs": 2}
    with openai.OpenAI(base_url=server.openai, api_key="none needed", max_retries=0) as client:
        whole = client.responses.create(**asked, extra_body={"seed": 3})
        with client.responses.stream(**asked, extra_body={"seed": 3}) as stream:
            told = [event for event in stream if event.type == "response.output_text.delta"]
    assert whole.output[0].type == "message" and whole.output[0].content[0].type == "output_text"
    logprobs = whole.output[0].content[0].logprobs
    assert logprobs is not None and len(logprobs) == 12 and whole.top_logprobs == 2
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in logprobs)
    assert [p.logprob for event in told for p in event.logprobs] == [p.logprob for p in logprobs]


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"include": [], "top_logprobs": 2}, "top_logprobs", "top_logprobs is set, but include has no"),
    ({"top_logprobs": 21}, "top_logprobs", "top_logprobs is 21"),
    ({"top_logprobs": -1}, "top_logprobs", "top_logprobs is -1"),
    ({"top_logprobs": "x"}, "top_logprobs", "top_logprobs is of type string"),
    ({"include": ["message.output_text.logprob"]}, "include", 'did you mean "message.output_text.logprobs"?'),
]


@pytest.mark.parametrize("fields, param, says", BAD, ids=[says for *_, says in BAD])
def test_what_is_wrong_is_named(server: Running, fields: dict[str, Any], param: str, says: str) -> None:
    error = post(server.url, PATH, {**ASK, **fields}).json()["error"]
    assert error["param"] == param and says in error["message"]


def test_they_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before they are computed; and beside those of others, where an answer ends with an error of its own."""
    with serving_with(Fake(), max_unread_bytes=20_000) as small:
        for stream in (False, True):
            reply = post(small.url, PATH, {**ASK, "max_output_tokens": 400, "stream": stream})
            assert reply.status_code == 400 and reply.json()["error"]["param"] == "top_logprobs"
        monkeypatch.setattr(generation.Generation, "hold", _no_room)
        whole = post(small.url, PATH, ASK)
        assert whole.status_code == 503 and whole.json()["error"]["code"] == "too_many_answers"
        assert events(small)[-1]["response"]["error"]["code"] == "too_many_answers"
        small.wait_until_idle()


def _no_room(self: Any, n_bytes: int) -> None:
    """Others hold all that may be held."""
    others = self._held._of.share()
    others.add(20_000)
    try:
        self._held.add(n_bytes)
    finally:
        others.release()


@pytest.mark.parametrize("seed", range(30))
def test_each_token_belongs_to_what_it_says(seed: int) -> None:
    """However an answer is cut into tokens and into deltas: thoughts, marks and calls have none of them."""
    rng = random.Random(seed)
    content = rng.choice(["Look: <tool 東京 é.", "<a> <", "\n", "a" * 30, "</think>"])
    thought = rng.choice(["", "<think>\nLook: " + content[:4] + "</think>\n\n"])
    call = rng.choice(["", '\n<tool_call>{"name": "f", "arguments": {"a": "Look:"}}</tool_call>'])
    if not content.strip() and (thought or call):
        content = "b"
    ids = tokenizer().encode(thought + content + call, False)
    if rng.random() < 0.5:  # letter by letter
        letters = [tokenizer().encode(letter, False) for letter in thought + content + call]
        ids = [token for letter in letters for token in letter]
    # which of them have a character of the content: the truth that the marks' own characters cannot stand in for
    alone, at, expected = Detokenizer(tokenizer()), 0, list[int]()
    for i, token in enumerate(ids):
        until = at + len(alone.push([token]))
        if at < len(thought) + len(content) and until > max(at, len(thought)):
            expected.append(i)
        at = until
    reader = AnswerReader(Reader(HERMES, Reasoning(), tools=["f"]), None)
    told, shown, read, own = ContentLogprobs(tokenizer(), [], True), Detokenizer(tokenizer()), "", list[int]()
    done = 0
    while done < len(ids):
        some = ids[done : done + rng.choice([1, 1, 1, 2, 5])]
        logprobs = tuple(TokenLogprobs(token, -1.0, done + i) for i, token in enumerate(some))  # rank: which it is
        done += len(some)
        is_last = done == len(ids)
        text = shown.push(some) + (shown.flush() if is_last else "")
        delta = Delta(0, text, tuple(some), logprobs, FinishReason.STOP if is_last else None)
        said = reader.read(delta)
        pieces = told.take(delta, said)
        assert bool(pieces) <= bool(said.content)
        read += said.content
        own += [piece.rank for piece in pieces]
    assert read == content and own == sorted(own) and set(own) >= set(expected)
    beside = set(own) - set(expected)  # parts of characters: they have none that is whole
    assert all(tokenizer().token_text(ids[i]) == "\ufffd" for i in beside), (content, own, expected)


def test_many_at_a_time_are_named_in_a_thread(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """And told the same."""
    plain = post(server.url, PATH, {**ASK, "top_logprobs": 20}).json()["output"][0]["content"]
    assert LARGE_STEP > 21, "one token alone is named where it is"
    monkeypatch.setattr(generation, "LARGE_STEP", 1)
    assert post(server.url, PATH, {**ASK, "top_logprobs": 20}).json()["output"][0]["content"] == plain
    assert events(server, top_logprobs=20)[-1]["response"]["output"][0]["content"] == plain
