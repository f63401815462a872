"""Which format a chat template means, and what conversations with tools become for it."""

import json
from typing import Any

from millrace.checkpoint.chat.chat_template import ChatTemplate
from millrace.checkpoint.tool_calls.families import DEEPSEEK, GENERIC, HERMES, LLAMA
from millrace.checkpoint.tool_calls.formats import reasoning
from millrace.checkpoint.tool_calls.prompt import with_tools

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TALK: list[dict[str, object]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 and 2?"},
    {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "call_1"},
    {"role": "tool", "content": [{"type": "text", "text": "4"}], "tool_call_id": "call_1"},
]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_the_marks_of_thoughts_are_found() -> None:
    assert reasoning("{{ content.split('</think>') }}") and reasoning("{{ content }}") is None


def test_arguments_are_objects_for_templates() -> None:
    told = with_tools(TALK, [TOOL], HERMES)
    assert told[2]["tool_calls"][0]["function"]["arguments"] == {"a": 1}  # type: ignore[index]
    broken: Any = {**TALK[2], "tool_calls": [{"function": {"name": "add", "arguments": "{a"}}]}
    assert with_tools([broken], [], LLAMA)[0]["tool_calls"][0]["function"]["arguments"] == "{a"  # type: ignore[index]
    empty: Any = {**TALK[2], "tool_calls": [{"function": {"name": "add", "arguments": ""}}]}
    assert with_tools([empty], [], LLAMA)[0]["tool_calls"][0]["function"]["arguments"] == {}  # type: ignore[index]
    assert with_tools(TALK, [TOOL], DEEPSEEK) == TALK, "whose template puts them into its text"


def test_a_template_without_tools_is_told_of_them_in_words() -> None:
    told = with_tools(TALK, [TOOL], GENERIC)
    assert [m["role"] for m in told] == ["system", "user", "assistant", "user"]
    assert str(told[0]["content"]).startswith("Be brief.\n\n") and json.dumps(TOOL) in str(told[0]["content"])
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert told[2]["content"] == f"Let me see.\n{call}\n{call}" and "tool_calls" not in told[2]
    assert told[3]["content"] == "<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>"
    assert [m["role"] for m in with_tools(TALK[1:2], [TOOL], GENERIC)] == ["system", "user"]
    assert with_tools(TALK[:2], [], GENERIC) == TALK[:2]


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_the_last_message_is_gone_on_with() -> None:
    template = ChatTemplate(CHATML, {})
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
    given = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert given == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nWell, "
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert template.render(parts, add_generation_prompt=False, continue_final_message=True).endswith("a\nb")
    template.close()


def test_null_content_of_calls_reaches_a_template_that_writes_calls_beside_null_alone() -> None:
    source = "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"
    template = ChatTemplate(source, {})
    messages: list[dict[str, object]] = [{"role": "assistant", "content": None, "tool_calls": [CALL]}]
    assert json.loads(template.render(messages)) == [CALL]
    template.close()
