"""Messages that a chat template cannot render as they are, over every protocol: answered, with the right prompt."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from millrace.serve.llm.request_types import CalledFunction, Message, ToolCall
from millrace.serve.protocols.ollama.endpoints import with_call_ids
from tests.serve.support import ROOMY, Fake, Running, post, serving_with

TURNS = """{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>
{%- if '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments":
{{- ' ' }}{{ c.function.arguments | tojson }}}{% endfor %}<|end|>
{%- elif m.role == 'tool' %}[RESULT]{{ m.content | string }}[/RESULT]
{%- else %}<|user|>{{ m.content }}<|end|>{% endif %}{% endfor %}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
ALTERNATES = """{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}
{{- '<|user|>' if m.role == 'user' else '<|assistant|>' }}{{ m.content | trim }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
NAMED = {
    "default": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}",
    "tool_use": "TOOLS {% for t in tools %}{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}",
}
LONG = replace(ROOMY, max_context=1024)
SCHEMA = {"type": "object", "properties": {}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALL_OF_OLLAMA = {"function": {"name": "f", "arguments": {}}}
PARTS = [{"type": "text", "text": "12 C"}, {"type": "text", "text": "rain"}]
RESULT = "12 C\nrain"


def chat(content: Any, result: Any) -> list[dict[str, Any]]:
    assistant = {"role": "assistant", "tool_calls": [CALL]} | ({} if content == "absent" else {"content": content})
    return [{"role": "user", "content": "hi"}, assistant, {"role": "tool", "tool_call_id": "c1", "content": result}]


@pytest.fixture(scope="module")
def turns() -> Iterator[Running]:
    with serving_with(Fake(template=TURNS, limits=LONG)) as server:
        yield server


@pytest.fixture(scope="module")
def alternates() -> Iterator[Running]:
    with serving_with(Fake(template=ALTERNATES, limits=LONG)) as server:
        yield server


def prompt(server: Running, **body: Any) -> str:
    tokens = post(server.url, "/tokenize", body)
    assert tokens.status_code == 200, tokens.text
    text = post(server.url, "/detokenize", {"tokens": tokens.json()["tokens"]}).json()["prompt"]
    assert isinstance(text, str)
    return text


def test_calls_without_text_and_results_in_parts(turns: Running) -> None:
    expected = prompt(turns, messages=chat("", RESULT), tools=[TOOL])
    assert expected.startswith(
        '<|user|>hi<|end|><|assistant|><tool_call>{"name": "f", "arguments": {}}<|end|>[RESULT]12 C'
    )
    contents: list[Any] = [None, "absent", [], ""]
    for content in contents:
        for result in (PARTS, RESULT):
            assert prompt(turns, messages=chat(content, result), tools=[TOOL]) == expected
    assert prompt(turns, messages=[{"role": "user", "content": None}]) == "<|user|><|end|><|assistant|>"


FUNCTION = {"type": "function", "name": "f", "parameters": SCHEMA}
OF_PROTOCOLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": chat(None, PARTS), "tools": [TOOL], "max_tokens": 2}),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": "hi"},
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": RESULT}]},
            ],
            "tools": [FUNCTION], "max_output_tokens": 2,
        },
    ),
    (
        "/v1/messages",
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": PARTS}]},
            ],
            "tools": [{"name": "f", "input_schema": SCHEMA}], "max_tokens": 2,
        },
    ),
    *(
        (
            "/api/chat",
            {
                "messages": [
                    {"role": "user", "content": "hi"},
                    {"role": "assistant", "content": content, "tool_calls": [CALL_OF_OLLAMA]},
                    {"role": "tool", "content": RESULT, "tool_name": "f"},
                ],
                "tools": [TOOL], "stream": False, "options": {"num_predict": 2},
            },
        )
        for content in (None, "")
    ),
]  # fmt: skip


def n_prompt(reply: dict[str, Any]) -> int:
    usage = reply.get("usage", {})
    return int(
        reply.get("prompt_eval_count")
        or usage.get("prompt_tokens")
        or usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    )


@pytest.mark.parametrize("path, body", OF_PROTOCOLS, ids=[path for path, _ in OF_PROTOCOLS])
def test_over_every_protocol(turns: Running, alternates: Running, path: str, body: dict[str, Any]) -> None:
    for server in (turns, alternates):
        reply = post(server.url, path, body)
        assert reply.status_code == 200, reply.text
        plain = post(server.url, "/tokenize", {"messages": chat("", RESULT), "tools": [TOOL]}).json()
        assert n_prompt(reply.json()) == plain["count"]


def test_the_signatures_join_the_first_message_of_the_user(alternates: Running) -> None:
    text = prompt(alternates, messages=[{"role": "user", "content": "hi"}], tools=[TOOL])
    assert text.startswith("<|user|>You can call functions") and text.endswith("hi<|end|><|assistant|>")
    again = [*chat(None, RESULT), {"role": "user", "content": "more"}]
    assert prompt(alternates, messages=again, tools=[TOOL]).startswith(text)


MISTRAL = """{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- elif m.tool_calls %}[TOOL_CALLS][
{%- for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('IDs have length 9') }}{% endif %}
{{- '{"name": "' }}{{ c.function.name }}{{ '", "arguments": ' }}{{ c.function.arguments -}}
{{ ', "id": "' }}{{ c.id }}{{ '"}' }}
{%- if not loop.last %}, {% endif %}{% endfor %}]{% elif m.role == 'tool' %}[TOOL_RESULTS]
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('IDs have length 9') }}{% endif %}
{{- m.tool_call_id }} {{ m.content }}[/TOOL_RESULTS]{% endif %}{% endfor %}{{ tools }}"""


def test_calls_have_ids_that_the_template_takes() -> None:
    """Ollama's clients send none, and others' are too long for Mistral's templates."""
    calls = [{"function": {"name": name, "arguments": {}}} for name in "fg"]
    body = {
        "messages": [
            {"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": calls},
            {"role": "tool", "content": "of g", "tool_name": "g"}, {"role": "tool", "content": "of f"},
        ],
        "tools": [TOOL], "stream": False, "options": {"num_predict": 2},
    }  # fmt: skip
    with serving_with(Fake(template=MISTRAL, limits=LONG)) as server:
        assert post(server.url, "/api/chat", body).status_code == 200
        messages = chat(None, "12")
        for call_id in ("c1", "call_0123456789abcdef01234567", "abcdefgh0"):
            messages[1]["tool_calls"][0]["id"] = messages[2]["tool_call_id"] = call_id
            text = prompt(server, messages=messages, tools=[TOOL])
            (id_of_call, id_of_result) = re.findall(r"(\w{9})(?: 12|\"})", text)
            assert id_of_call == id_of_result and (call_id != "abcdefgh0" or id_of_call == call_id)


def test_results_find_their_calls() -> None:
    calls = [ToolCall(CalledFunction(name)) for name in ("f", "g", "g")]
    results = [Message("tool", "1", name="g"), Message("tool", "2"), Message("tool", "3", name="x")]
    found = with_call_ids([Message("assistant", None, tool_calls=calls), *results, Message("tool", "4")])
    assert [call.id for call in calls] == ["call00001", "call00002", "call00003"]
    assert [message.tool_call_id for message in found[1:]] == ["call00002", "call00001", "call00003", None]


SYSTEM_AND_TURNS: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Be kind."},
                {"role": "user", "content": "a"}, {"role": "user", "content": "b"},
            ],
            "max_tokens": 2,
        },
    ),
    (
        "/v1/responses",
        {
            "instructions": "Be brief.", "max_output_tokens": 2,
            "input": [
                {"role": "developer", "content": "Be kind."}, {"role": "user", "content": "a"},
                {"role": "user", "content": "b"},
            ],
        },
    ),
    (
        "/v1/messages",
        {
            "system": [{"type": "text", "text": "Be brief.\n\nBe kind."}], "max_tokens": 2,
            "messages": [{"role": "user", "content": text} for text in ("a", "b")],
        },
    ),
    (
        "/api/chat",
        {
            "messages": [
                {"role": "system", "content": "Be brief.\n\nBe kind."}, {"role": "user", "content": "a"},
                {"role": "user", "content": "b"},
            ],
            "stream": False, "options": {"num_predict": 2},
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize("path, body", SYSTEM_AND_TURNS, ids=[path for path, _ in SYSTEM_AND_TURNS])
def test_one_question_has_one_prompt_where_turns_must_alternate(
    alternates: Running, path: str, body: dict[str, Any]
) -> None:
    reply = post(alternates.url, path, body)
    assert reply.status_code == 200, reply.text
    same = [{"role": "user", "content": "Be brief.\n\nBe kind.\n\na\n\nb"}]
    assert n_prompt(reply.json()) == post(alternates.url, "/tokenize", {"messages": same}).json()["count"]
    refused = {"messages": [{"role": "assistant", "content": "a"}, *same]}
    sent = post(alternates.url, "/v1/chat/completions", refused)
    assert sent.status_code == 400 and "alternate" in sent.text


def test_the_template_for_tools_is_taken_if_there_are_tools() -> None:
    ask = [{"role": "user", "content": "hi"}]
    with serving_with(Fake(template=NAMED)) as server:
        assert prompt(server, messages=ask) == "<|user|>hi<|end|>"
        assert prompt(server, messages=ask, tools=[TOOL]) == "TOOLS f<|user|>hi<|end|>"
        body = {"messages": ask, "tools": [TOOL], "max_tokens": 2}
        counted = {choice: post(server.url, "/v1/chat/completions", body | {"tool_choice": choice}).json()
                   for choice in ("auto", "none")}  # fmt: skip
        assert n_prompt(counted["auto"]) > n_prompt(counted["none"])
