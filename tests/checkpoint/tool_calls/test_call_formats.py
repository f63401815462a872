"""Which format a chat template means, and what conversations with tools become for it."""

import json
from typing import Any

import pytest

from millrace.checkpoint.chat import ChatTemplate
from millrace.checkpoint.tool_calls.formats import DEEPSEEK, GENERIC, HERMES, LLAMA, reasoning, tool_format
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
_MARKS = {
    "hermes": "{% if tools %}{{ tools }}{% endif %}<tool_call>\n{{ tool_call.arguments | tojson }}\n</tool_call>",
    "generic": "{% for message in messages %}<|im_start|>{{ message.content }}{% endfor %}",
    "llama3": '{% if tools is not none %}<|start_header_id|>{{ \'{"name": \' }}"parameters": <|python_tag|>{% endif %}',
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS] [",
    "deepseek_v3": "{{ tool_calls }}<｜tool▁calls▁begin｜>```json",
    "deepseek_v31": "{% if tools %}<｜tool▁calls▁begin｜>{% endif %}",
}


@pytest.mark.parametrize("name", _MARKS)
def test_a_template_tells_its_format(name: str) -> None:
    source = _MARKS[name] + ("{{ tool }}" if name.startswith("deepseek") else "")
    assert tool_format(source).name == name


@pytest.mark.parametrize("source, single", [
    ("{% if not m.tool_calls|length == 1 %}\n{{- raise_exception('one!') }}\n{% endif %}", True),
    ("{% if m.tool_calls | length != 1 %}{{ raise_exception('one!') }}{% endif %}", True),
    ("{% if m.tool_calls | length == 1 %}{{ one }}{% else %}{{ raise_exception('one!') }}{% endif %}", True),
    ("{% if m.tool_calls | length == 1 %}{{ one }}{% else %}{{ all }}{% endif %}", False),
    ("{% if m.tool_calls|length == 1 %}one{% endif %}{% if m.a %}{{ raise_exception('a') }}{% endif %}", False),
    ("{% if not m.role %}{{ raise_exception('role') }}{% endif %}{{ m.tool_calls|length == 1 }}", False),
])  # fmt: skip
def test_a_template_that_counts_calls_need_not_refuse_several(source: str, single: bool) -> None:
    assert tool_format(_MARKS["hermes"] + source).single is single


def test_mistrals_newer_templates_and_formats_that_are_not_known() -> None:
    assert tool_format("{% if tools %}[TOOL_CALLS]{{ name }}[ARGS]{% endif %}").written.middle == "[ARGS]"
    xml = "{% if tools %}<tool_call>\n<function=f>\n<parameter=a>{% endif %}"
    assert tool_format(xml) is GENERIC, "tools are told in words where calls would be XML"
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
