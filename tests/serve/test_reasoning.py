"""Models that think aloud, by every protocol: apart from the answer, whole and streamed."""

import json
from typing import Any

import anthropic
import ollama
import openai

from tests.serve.support import MODEL, post
from tests.serve.thinkers import (
    ASK,
    CALL,
    CALLED,
    CHAT,
    CUT_OFF,
    MESSAGES,
    OLLAMA,
    RESPONSES,
    STOPPED,
    TEXT,
    THOUGHT,
    Answer,
    Ask,
    Thinker,
    body,
    whole,
)


class TestThoughts:
    """In each protocol, whole or streamed."""

    def test_stand_apart_from_the_answer(self, thinker: Thinker, path: str, ask: Ask) -> None:
        thinker.says(TEXT)
        for tools in (False, True):
            answer = ask(thinker, path, body(path, tools=tools))
            assert answer == Answer(THOUGHT, TEXT, [], ["reasoning", "content"], STOPPED[path])
            assert answer.n_thought in (None, thinker.n_thought)

    def test_go_before_calls(self, thinker: Thinker, path: str, ask: Ask) -> None:
        for text in ("", "Let me see."):
            thinker.says(f"{text}\n{CALL}" if text else CALL)
            answer = ask(thinker, path, body(path, tools=True))
            order = ["reasoning", "content"] if text else ["reasoning"]
            assert answer == Answer(THOUGHT, text, [("add", {"a": 5})], order, CALLED[path])

    def test_are_all_there_is_where_they_are_cut_off(self, thinker: Thinker, path: str, ask: Ask) -> None:
        thinker.says(TEXT, thought="a" * 2000)
        for form in (False, path != MESSAGES):
            answer = ask(thinker, path, body(path, form=form, n=40))
            assert set(answer.reasoning) == {"a"} and answer.order == ["reasoning"]
            assert answer.n_thought in (None, 40)
            assert answer.ended == CUT_OFF[path] and not answer.calls

    def test_are_not_there_where_they_are_turned_off(self, thinker: Thinker, path: str, ask: Ask) -> None:
        plainly: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
        others: dict[str, dict[str, Any]] = {MESSAGES: {"thinking": {"type": "disabled"}}, OLLAMA: {"think": False}}
        off = others.get(path, plainly)
        thinker.executor.says, thinker.executor.opened = TEXT, "<think>\n\n</think>\n\n"
        answer = ask(thinker, path, {**body(path), **off})
        assert answer == Answer("", TEXT, [], ["content"], STOPPED[path]) and not answer.n_thought
        assert thinker.executor.prompt.endswith("<think>\n\n</think>\n\n")


def test_events_of_a_thought_in_a_response(thinker: Thinker) -> None:
    thinker.says(TEXT)
    text = post(thinker.served.url, RESPONSES, {**body(RESPONSES), "stream": True}).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    kinds = [event["type"] for event in events]
    in_order = [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]

    def of(name: str) -> list[str]:
        part = ["output_item.added", "content_part.added", f"{name}.delta", f"{name}.done", "content_part.done"]
        return [f"response.{kind}" for kind in (*part, "output_item.done")]

    begin, end = ["response.created", "response.in_progress"], ["response.completed"]
    assert in_order == [*begin, *of("reasoning_text"), *of("output_text"), *end]
    about = [event for event in events if "reasoning_text" in event["type"]]
    done = next(event for event in events if event["type"] == "response.output_item.done")
    assert {(event["output_index"], event["content_index"]) for event in about} == {(0, 0)}
    assert {event["item_id"] for event in about} == {done["item"]["id"]} and done["item"]["type"] == "reasoning"
    assert about[-1]["text"] == THOUGHT == done["item"]["content"][0]["text"]
    assert events[-1]["response"]["output"][0] == done["item"]


def test_log_probabilities_of_a_response_are_of_its_text_alone(thinker: Thinker) -> None:
    thinker.says(f"{TEXT}\n{CALL}")
    asked = {**body(RESPONSES, tools=True), "include": ["message.output_text.logprobs"]}
    _, message, _ = post(thinker.served.url, RESPONSES, asked).json()["output"]
    told = b"".join(bytes(token["bytes"]) for token in message["content"][0]["logprobs"])
    assert told.decode().strip() == TEXT == message["content"][0]["text"]


def test_the_official_clients_read_them(thinker: Thinker) -> None:
    """And stream them."""
    url = thinker.served.url
    thinker.says(f"See.\n{CALL}")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none needed", max_retries=0) as client:
        asked = body(RESPONSES, tools=True)
        with client.responses.stream(model=MODEL, **asked) as events:
            final = events.get_final_response()
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
        assert final.output[0].content[0].text == THOUGHT  # type: ignore[union-attr, index]
        chat = client.chat.completions.create(model=MODEL, **body(CHAT, tools=True))
        assert chat.choices[0].message.reasoning_content == THOUGHT
    with anthropic.Anthropic(base_url=url, api_key="none needed", max_retries=0) as claude:
        with claude.messages.stream(model=MODEL, **body(MESSAGES, tools=True)) as said:
            message = said.get_final_message()
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        assert message.content[0].thinking == THOUGHT  # type: ignore[union-attr]
    with ollama.Client(url) as llama:
        parts = list(llama.chat(model=MODEL, **body(OLLAMA, tools=True), stream=True, think=True))
    assert "".join(part.message.thinking or "" for part in parts) == THOUGHT
    assert [call.function.name for part in parts for call in part.message.tool_calls or ()] == ["add"]


def test_what_was_thought_is_given_back_to_the_template(thinker: Thinker) -> None:
    """As each protocol's clients send it, and by the id of a response."""
    thinker.says(TEXT)
    url, more = thinker.served.url, [{"role": "user", "content": "Why?"}]
    chat = post(url, CHAT, body(CHAT)).json()["choices"][0]["message"]
    response = post(url, RESPONSES, body(RESPONSES)).json()
    message = post(url, MESSAGES, body(MESSAGES)).json()
    line = post(url, OLLAMA, {**body(OLLAMA), "stream": False}).json()["message"]
    next_turns: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": [*ASK, chat, *more]}),
        (RESPONSES, {"input": [*ASK, *response["output"], *more]}),
        (RESPONSES, {"input": "Why?", "previous_response_id": response["id"]}),
        (MESSAGES, {"messages": [*ASK, {"role": "assistant", "content": message["content"]}, *more]}),
        (OLLAMA, {"messages": [*ASK, line, *more], "stream": False}),
    ]
    for path, turn in next_turns:
        thinker.executor.prompt = ""
        reply = post(url, path, {**body(path), **turn})
        assert reply.status_code == 200, reply.text
        assert f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}<|im_end|>" in thinker.executor.prompt


def test_white_space_may_go_before_a_thought(thinker: Thinker) -> None:
    thinker.says(TEXT)
    thinker.executor.says = "\n" + thinker.executor.says
    n_before = 0 if thinker.opened else len(thinker.executor.words.encode("\n", False))
    for path in (CHAT, RESPONSES):
        answer = whole(thinker, path, body(path))
        assert (answer.reasoning, answer.content) == (THOUGHT, TEXT)
        assert answer.n_thought == thinker.n_thought - n_before
