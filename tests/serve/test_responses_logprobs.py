"""Log probabilities in responses: of the tokens that the text is made of, in the part and in the events."""

import json
import random
from typing import Any

import httpx
import msgspec
import openai
import pytest

from millrace.checkpoint.tokenizer.tokenizer import Detokenizer
from millrace.checkpoint.tool_calls.answer_parser import AnswerParser, ParsedDelta
from millrace.checkpoint.tool_calls.formats import HERMES, LLAMA, Reasoning, ToolFormat
from millrace.runtime.request.sampling_params import Delta, FinishReason, TokenLogprobs
from millrace.serve.http.server_context import OFF_LOOP_STEP
from millrace.serve.llm import generation_stream
from millrace.serve.llm.logprobs import ContentLogprobs
from millrace.serve.llm.output_parsing import OutputParser
from millrace.serve.protocols.responses import endpoints
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
            error = reply.json()["error"]
            assert reply.status_code == 400 and error["param"] == "top_logprobs"
            assert "lower max_output_tokens or the number of log probabilities" in error["message"]
            reply = post(small.url, PATH, {**ASK, "max_output_tokens": 100, "stream": stream})
            assert reply.status_code == (400 if stream else 200), "the end of a stream has them four times"
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 200, "n": 2, "logprobs": True}
        assert "lower n, max_tokens or" in post(small.url, "/v1/chat/completions", chat).json()["error"]["message"]
        monkeypatch.setattr(generation_stream.GenerationStream, "reserve_unsent_bytes", _no_room)
        whole = post(small.url, PATH, ASK)
        assert whole.status_code == 503 and whole.json()["error"]["code"] == "too_many_answers"
        assert events(small)[-1]["response"]["error"]["code"] == "too_many_answers"
        small.wait_until_idle()


def _no_room(self: Any, n_bytes: int) -> None:
    """Others hold all that may be held."""
    others = self._unsent._pool.lease()
    others.add(20_000)
    try:
        self._unsent.add(n_bytes)
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
    reader = OutputParser(AnswerParser(HERMES, Reasoning(), tools=["f"]), None)
    told, shown, read, own = ContentLogprobs(tokenizer(), [], True), Detokenizer(tokenizer()), "", list[int]()
    done = 0
    while done < len(ids):
        some = ids[done : done + rng.choice([1, 1, 1, 2, 5])]
        logprobs = tuple(TokenLogprobs(token, -1.0, done + i) for i, token in enumerate(some))  # rank: which it is
        done += len(some)
        is_last = done == len(ids)
        text = shown.push(some) + (shown.flush() if is_last else "")
        delta = Delta(0, text, tuple(some), logprobs, FinishReason.LENGTH if is_last else None)
        said = reader.read(delta)
        pieces = told.take(delta, said)
        assert bool(pieces) <= bool(said.content)
        read += said.content
        own += [piece.rank for piece in pieces]
    assert read == content and own == sorted(own) and set(own) >= set(expected)
    beside = set(own) - set(expected)  # parts of characters: they have none that is whole
    assert all(tokenizer().token_text(ids[i]) == "\ufffd" for i in beside), (content, own, expected)


F_CALL = '<tool_call>{"name": "f", "arguments": {"t": "a d"}}</tool_call>'
# Pieces of an answer in turn: what is content, what is not, what is content again ...
CUT: list[tuple[ToolFormat, list[str]]] = [
    (HERMES, ["d"]),
    (HERMES, ["dé"]),
    (HERMES, ["t", F_CALL]),
    (HERMES, ["", "<think>\nt</think>", "t", "\n" + F_CALL]),
    (HERMES, ["", "\n<think>\nt </think>\n\n", "t<t"]),
    (HERMES, ["a", F_CALL, "b", "\n" + F_CALL, "a b"]),
    (HERMES, ["x <tool_call> y"]),
    (HERMES, ['<tool_call>{"a": "x"} é', F_CALL]),
    (LLAMA, ["", '{"name": "f", "parameters": {"a": 1}}']),
    (LLAMA, [' {"a": 1}']),
    (LLAMA, ["", '{"name": "f", "parameters": {}}; ', '{"a": 1}']),
]


@pytest.mark.parametrize("format, pieces", CUT, ids=["".join(pieces) for _, pieces in CUT])
def test_they_do_not_depend_on_how_deltas_were_merged(format: ToolFormat, pieces: list[str]) -> None:
    """Letter by letter, with special tokens shown: which of them is content is known. The last one is the end's."""
    words = tokenizer()
    ids, expected = list[int](), list[int]()
    for i, piece in enumerate(pieces):
        for letter in piece:
            of_letter = words.encode(letter, False)
            expected += range(len(ids), len(ids) + len(of_letter)) if i % 2 == 0 else ()
            ids += of_letter
    (end,) = words.encode("<|im_end|>", False)
    ids.append(end)
    for cuts in ([], list(range(1, len(ids))), *([at] for at in range(1, len(ids)))):
        reader = OutputParser(AnswerParser(format, Reasoning(), tools=["f"]), None)
        told, shown, own, read = ContentLogprobs(words, [], False), Detokenizer(words, False), list[int](), ""
        for begin, until in zip([0, *cuts], [*cuts, len(ids)], strict=True):
            is_last = until == len(ids)
            text = shown.push(ids[begin : until - is_last]) + (shown.flush() if is_last else "")
            logprobs = tuple(TokenLogprobs(ids[i], -1.0, i) for i in range(begin, until))
            delta = Delta(0, text, tuple(ids[begin:until]), logprobs, FinishReason.STOP if is_last else None)
            said = reader.read(delta)
            named = told.take(delta, said)
            assert bool(named) <= bool(said.content)
            own, read = own + [token.rank for token in named], read + said.content
        assert read == "".join(pieces[::2]), cuts
        assert own == expected, cuts


def test_an_answer_without_a_reader_is_all_content() -> None:
    words = tokenizer()
    (end,) = words.encode("<|im_end|>", False)
    ids = [*words.encode("d", False), end]
    for each in ([ids], [[token] for token in ids]):
        told, own = ContentLogprobs(words, [], False), list[int]()
        for i, some in enumerate(each):
            finish = FinishReason.STOP if i == len(each) - 1 else None
            logprobs = tuple(TokenLogprobs(token, -1.0, 0) for token in some)
            delta = Delta(0, "d" if some[0] != end else "", tuple(some), logprobs, finish)
            own += [token.token_id for token in told.take(delta, ParsedDelta(delta.text))]
        assert own == ids[:-1]


def test_tokens_of_a_call_are_not_kept() -> None:
    """However long it is: nobody is told of them."""
    words = tokenizer()
    reader, told = OutputParser(AnswerParser(HERMES, None, tools=["f"]), None), ContentLogprobs(words, [], True)
    text = 'a<tool_call>{"name": "f", "arguments": {"t": "' + "a" * 2000
    most = 0
    for letter in text:
        (token,) = words.encode(letter, False)
        delta = Delta(0, letter, (token,), (TokenLogprobs(token, -1.0, 0),))
        told.take(delta, reader.read(delta))
        most = max(most, len(told._tokens))
    assert most <= len('<tool_call>{"name": "f"') and not told._tokens


def test_each_event_of_the_end_is_written_by_itself(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """That has all of the text's log probabilities. Without them they are one write; and they are counted as often."""
    blocks, held = list[bytes](), list[int]()
    followed, hold = endpoints._stream_events, generation_stream.GenerationStream.reserve_unsent_bytes

    async def watched(*args: Any) -> Any:
        async for block in followed(*args):
            blocks.append(block)
            yield block

    def counted(self: Any, n_bytes: int) -> None:
        held.append(n_bytes)
        hold(self, n_bytes)

    monkeypatch.setattr(endpoints, "_stream_events", watched)
    monkeypatch.setattr(generation_stream.GenerationStream, "reserve_unsent_bytes", counted)
    post(server.url, PATH, ASK)
    n_once, held[:] = sum(held), []
    told = events(server)
    assert n_once > 0 and sum(held) == 4 * n_once
    whole = msgspec.json.encode(told[-1]["response"]["output"][0]["content"][0]["logprobs"])
    assert [block.count(whole) for block in blocks[-4:]] == [1, 1, 1, 1]
    n_deltas = sum(event["type"] == "response.output_text.delta" for event in told)
    assert b"".join(blocks[:-4]).count(whole) == (n_deltas == 1), "all at once on a busy machine"
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert told[-1]["type"] == "response.incomplete"
    blocks.clear()
    events(server, include=[])
    assert blocks[-1].count(b"event: ") >= 4


def test_many_at_a_time_are_named_in_a_thread(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """And told the same."""
    plain = post(server.url, PATH, {**ASK, "top_logprobs": 20}).json()["output"][0]["content"]
    assert OFF_LOOP_STEP > 21, "one token alone is named where it is"
    monkeypatch.setattr(generation_stream, "OFF_LOOP_STEP", 1)
    assert post(server.url, PATH, {**ASK, "top_logprobs": 20}).json()["output"][0]["content"] == plain
    assert events(server, top_logprobs=20)[-1]["response"]["output"][0]["content"] == plain
