"""Conversations with tools through the server: calls that must be, whole and streamed, and those that are read."""

import json
from typing import Any

import openai
import pytest

from tests.e2e.live import MODEL, Live

ASK: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8, "enum": ["Paris", "Rome"]},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object", "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/n"}},
            "required": ["a", "b"], "additionalProperties": False,
            "$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
        },
    },
}  # fmt: skip
NAMED: Any = {"type": "function", "function": {"name": "add"}}


def check(name: str, arguments: str) -> None:
    given = json.loads(arguments)
    if name == "add":
        assert set(given) == {"a", "b"} and all(0 <= n <= 99 for n in given.values())
    else:
        assert name == "get_weather" and given["city"] in ("Paris", "Rome") and len(given) == 2


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(2, 12))])
def test_a_call_that_must_be_is_valid(tiny_client: openai.OpenAI, seed: int) -> None:
    common: Any = {"model": MODEL, "messages": ASK, "tools": [WEATHER, ADD], "seed": seed, "max_tokens": 400}
    answer = tiny_client.chat.completions.create(**common, tool_choice="required", parallel_tool_calls=seed % 2 == 0)
    choice = answer.choices[0]
    assert choice.message.tool_calls and choice.message.content is None
    cut_off = choice.finish_reason == "length"  # of many calls, the last may be
    assert cut_off or choice.finish_reason == "tool_calls"
    for call in choice.message.tool_calls[: -1 if cut_off else None]:
        assert call.type == "function" and call.id
        check(call.function.name, call.function.arguments)
    if seed % 2:
        assert len(choice.message.tool_calls) == 1 and not cut_off
    named = tiny_client.chat.completions.create(**common, tool_choice=NAMED).choices[0].message
    assert named.tool_calls and [call.function.name for call in named.tool_calls if call.type == "function"] == ["add"]


def test_a_stream_says_the_same(tiny_client: openai.OpenAI) -> None:
    common: Any = {"model": MODEL, "messages": ASK, "tools": [WEATHER, ADD], "seed": 3, "n": 2, "max_tokens": 300}
    whole = tiny_client.chat.completions.create(**common, tool_choice="required", parallel_tool_calls=False)
    streamed: list[list[list[str]]] = [[], []]
    finishes = {}
    for chunk in tiny_client.chat.completions.create(
        **common, tool_choice="required", parallel_tool_calls=False, stream=True
    ):
        for choice in chunk.choices:
            for part in choice.delta.tool_calls or ():
                assert part.function is not None
                if part.id:
                    streamed[choice.index].append([part.function.name or "", ""])
                streamed[choice.index][part.index][1] += part.function.arguments or ""
            finishes[choice.index] = choice.finish_reason
    assert set(finishes.values()) == {"tool_calls"}
    for choice, calls in zip(whole.choices, streamed, strict=True):
        assert choice.message.tool_calls
        assert [
            [c.function.name, c.function.arguments] for c in choice.message.tool_calls if c.type == "function"
        ] == calls


def test_a_conversation_with_results_is_rendered(tiny: Live) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    talk = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "3"}]  # fmt: skip
    reply = tiny.post("/tokenize", {"messages": talk, "tools": [ADD], "add_generation_prompt": True}).json()
    text = tiny.post("/detokenize", {"tokens": reply["tokens"]}).json()["prompt"]
    assert '"name": "add"' in text and "<tool_response>\n3\n</tool_response>" in text and "<tools>" in text
    answer = tiny.post(
        "/v1/chat/completions", {"messages": talk, "tools": [ADD], "tool_choice": "auto", "max_tokens": 4}
    )
    assert answer.status_code == 200 and answer.json()["choices"][0]["finish_reason"] in ("length", "stop")


def test_the_last_message_is_gone_on_with(tiny: Live) -> None:
    talk = [*ASK, {"role": "assistant", "content": "Once upon a"}]
    asked = {"messages": talk, "continue_final_message": True}
    reply = tiny.post("/tokenize", asked).json()
    assert tiny.post("/detokenize", {"tokens": reply["tokens"]}).json()["prompt"].endswith("Once upon a")
    assert tiny.post("/v1/chat/completions", {**asked, "max_tokens": 3}).status_code == 200
    refused = tiny.post("/v1/chat/completions", {**asked, "add_generation_prompt": True})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "continue_final_message"


def test_text_and_schema_may_stand_beside_tools(tiny_client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    for seed in range(3):
        message = tiny_client.chat.completions.create(
            model=MODEL, messages=ASK, tools=[ADD], response_format=form, seed=seed, max_tokens=200
        ).choices[0].message  # fmt: skip
        for call in message.tool_calls or ():
            assert call.type == "function" and call.function.name == "add"
            assert set(json.loads(call.function.arguments)) == set(ADD["function"]["parameters"]["properties"])
        if not message.tool_calls:
            assert isinstance(json.loads(message.content or "")["a"], bool)
