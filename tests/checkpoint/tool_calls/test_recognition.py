"""A format is found by how a template renders a call, whatever else the template mentions.

The templates have the shapes of public ones, shortened: only the frame of a turn and how it writes calls.
"""

import re
from functools import cache
from typing import Any

import pytest

from millrace.checkpoint.chat.chat_template import ChatLimits, ChatTemplate
from millrace.checkpoint.tool_calls import formats
from millrace.checkpoint.tool_calls.answer_parser import AnswerParser, joined
from millrace.checkpoint.tool_calls.families import GENERIC, ToolFormat
from millrace.checkpoint.tool_calls.formats import tool_format
from millrace.checkpoint.tool_calls.prompt import with_tools

CHATML = ("<|im_start|>{role}\n", "<|im_end|>\n")
LLAMA_3 = ("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>")
BARE = ("<|{role}|>", "<|end|>")
GEMMA = ("<start_of_turn>{role}\n", "<end_of_turn>\n")
INST = ("[{role}]", "</s>")
NAME, ARGUMENTS = "{{ f.name }}", "{{ f.arguments | tojson }}"
OBJECT = '{"name": "' + NAME + '", "arguments": ' + ARGUMENTS + "}"
PYTHON = NAME + "({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}{% endfor %})"
XML = "<parameter={{ k }}>\n{{ v }}\n</parameter>\n"


def template(frame: tuple[str, str], call: str, before: str = "", after: str = "", joiner: str = "") -> str:
    """call: what is written for each call `c`, whose function is `f`; before and after: around all of them"""
    opens, closes = (part.replace("{role}", "{{ m.role }}") for part in frame)
    loop = "{% for c in m.tool_calls %}{% set f = c.function %}" + call
    loop += ("{% if not loop.last %}" + joiner + "{% endif %}" if joiner else "") + "{% endfor %}"
    body = "{% if m.tool_calls %}" + before + loop + after + "{% else %}{{ m.content or '' }}{% endif %}"
    tools = "{% if tools %}" + opens.replace("{{ m.role }}", "system") + "{{ tools | tojson }}" + closes + "{% endif %}"
    start = "{% if add_generation_prompt %}" + opens.replace("{{ m.role }}", "assistant") + "{% endif %}"
    return tools + "{% for m in messages %}" + opens + body + closes + "{% endfor %}" + start


def loop(each: str) -> str:
    return "{% for k, v in f.arguments.items() %}" + each + "{% endfor %}"


CALLS, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
PYTHON_TAG = '{# <|python_tag|> and {"name": ..., "parameters": ...} #}{% if builtin_tools %}<|python_tag|>{% endif %}'
NATIVE: dict[str, tuple[str, str]] = {
    "Llama 3.1 to 3.3": ("llama3", PYTHON_TAG + template(
        LLAMA_3, '{"name": "' + NAME + '", "parameters": ' + ARGUMENTS + "}")),
    "Llama, behind its tag": ("llama3", template(
        LLAMA_3, '<|python_tag|>{"name": "' + NAME + '", "parameters": ' + ARGUMENTS + "}")),
    "an object alone": ("json", template(CHATML, OBJECT)),
    "Hermes, Qwen 2.5": ("hermes", template(CHATML, "<tool_call>\n" + OBJECT + "\n</tool_call>", joiner="\n")),
    "Granite 4": ("hermes", template(BARE, "<tool_call>\n" + OBJECT + "\n</tool_call>\n")),
    "Hermes, arguments first": ("hermes", template(
        CHATML, '<tool_call>{"arguments": ' + ARGUMENTS + ', "name": "' + NAME + '"}</tool_call>')),
    "Qwen 3, with an empty thought": ("hermes", template(
        CHATML, "<tool_call>\n" + OBJECT + "\n</tool_call>", before="<think>\n\n</think>\n\n")),
    "Mistral v3": ("mistral", template(INST, "{{ f | tojson }}", "[TOOL_CALLS] [", "]", ", ")),
    "Mistral Nemo": ("mistral", template(INST, "{{ f | tojson }}", "[TOOL_CALLS][", "]", ", ")),
    "Mistral v11": ("mistral", template(INST, "[TOOL_CALLS]" + NAME + "[ARGS]" + ARGUMENTS)),
    "Mistral, with ids": ("mistral", template(INST, "[TOOL_CALLS]" + NAME + "[CALL_ID]{{ c.id }}[ARGS]" + ARGUMENTS)),
    "Mistral, name and object": ("mistral", template(INST, "[TOOL_CALLS]" + NAME + ARGUMENTS)),
    "DeepSeek V3, R1": ("deepseek_v3", template(
        BARE, CALL + "function" + SEP + NAME + "\n```json\n{{ f.arguments }}\n```" + CALL_END, CALLS, END, "\n")),
    "DeepSeek V3.1": ("deepseek_v31", template(BARE, CALL + NAME + SEP + "{{ f.arguments }}" + CALL_END, CALLS, END)),
    "Functionary 3.1": ("functionary", "{# <|python_tag|> #}" + template(
        LLAMA_3, "<function=" + NAME + ">" + ARGUMENTS + "</function>", after="<|eom_id|>")),
}  # fmt: skip
IN_WORDS: dict[str, str] = {
    "Qwen3-Coder": template(CHATML, "<tool_call>\n<function=" + NAME + ">\n" + loop(XML) + "</function>\n</tool_call>"),
    "GLM-4.5": template(
        BARE, "<tool_call>" + NAME + "\n" + loop("<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n")
        + "</tool_call>"),
    "Kimi K2": template(
        BARE,
        "<|tool_call_begin|>functions." + NAME + ":0<|tool_call_argument_begin|>" + ARGUMENTS + "<|tool_call_end|>",
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    "gpt-oss": template(
        ("<|start|>{role}", "<|call|>"),
        " to=functions." + NAME + "<|channel|>commentary json<|message|>" + ARGUMENTS),
    "Phi-4-mini": template(BARE, OBJECT, "<|tool_call|>[", "]<|/tool_call|>", ", "),
    "Granite 3": template(BARE, OBJECT, "<|tool_call|>[", "]", ", "),
    "Granite 3.3": template(BARE, OBJECT, "<tool_call>[", "]</tool_call>", ", "),
    "xLAM": template(CHATML, OBJECT, "[", "]", ", "),
    "Command-R": template(
        BARE, '{"tool_name": "' + NAME + '", "parameters": ' + ARGUMENTS + "}", "Action: ```json\n[", "]\n```", ","),
    "Command-R7B": template(
        BARE, '{"tool_call_id": "0", "tool_name": "' + NAME + '", "parameters": ' + ARGUMENTS + "}",
        "<|START_ACTION|>[", "]<|END_ACTION|>", ","),
    "Hunyuan": template(
        BARE, "<tool_call>" + NAME + "\n```json\n" + ARGUMENTS + "\n```</tool_call>", "<tool_calls>", "</tool_calls>"),
    "MiniMax": template(BARE, OBJECT + "\n", "<tool_calls>\n", "</tool_calls>"),
    "MiniMax M2": template(
        BARE,
        '<invoke name="' + NAME + '">\n' + loop('<parameter name="{{ k }}">{{ v }}</parameter>\n') + "</invoke>\n",
        "<minimax:tool_call>\n", "</minimax:tool_call>"),
    "Jamba": template(BARE, OBJECT, "<tool_calls>[", "]</tool_calls>", ", "),
    "Nemotron": template(LLAMA_3, OBJECT, "<TOOLCALL>[", "]</TOOLCALL>", ", "),
    "LFM2": template(CHATML, PYTHON, "<|tool_call_start|>[", "]<|tool_call_end|>", ", "),
    "Llama 4, pythonic": template(LLAMA_3, PYTHON, "<|python_start|>[", "]<|python_end|>", ", "),
    "OLMo 3": template(CHATML, PYTHON + "\n", "<function_calls>", "</function_calls>"),
    "Gemma": template(GEMMA, "```tool_code\n" + PYTHON + "\n```"),
    "FunctionGemma": template(
        GEMMA, "<start_function_call>call:" + NAME + "{" + loop("{{ k }}:{{ v }}") + "}<end_function_call>"),
    "Functionary 2": template(("<|from|>{role}\n", "<|stop|>\n"), "<|recipient|>" + NAME + "\n<|content|>" + ARGUMENTS),
    "Functionary 3.2": template(LLAMA_3, ">>>" + NAME + "\n" + ARGUMENTS),
    "InternLM 2": template(
        CHATML, '{"name": "' + NAME + '", "parameters": ' + ARGUMENTS + "}", "<|action_start|><|plugin|>\n",
        "<|action_end|>"),
    "Qwen's ReAct": template(CHATML, "Action: " + NAME + "\nAction Input: " + ARGUMENTS),
    "a dict of Python": template(CHATML, "<tool_call>{{ f }}</tool_call>"),
    "calls that are left out": "{# <tool_call> [TOOL_CALLS] #}{{ tools }}" + template(CHATML, ""),
    "tools without calls": "{# <tool_call> #}{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "a broken one": "{% if tools %}<tool_call>{% for m in messages %}",
}  # fmt: skip
CALL_OF_OURS = {"id": "abcdefgh0", "type": "function", "function": {"name": "find", "arguments": '{"tide": 5}'}}
TALK: list[dict[str, object]] = [
    {"role": "user", "content": "When?"}, {"role": "assistant", "content": None, "tool_calls": [CALL_OF_OURS]},
]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]


@cache
def format_of(source: str) -> ToolFormat:
    return tool_format(source)


def calls(source: str, text: str) -> tuple[str, list[tuple[str | None, str]]]:
    reader = AnswerParser(format_of(source), None, tools=["find"])
    said = joined(reader.push(text), reader.flush())
    return said.content, [(part.name, part.arguments) for part in said.calls]


@pytest.mark.parametrize("name", NATIVE)
def test_a_call_is_read_in_the_format_that_the_template_writes(name: str) -> None:
    expected, source = NATIVE[name]
    of = format_of(source)
    assert of.name == expected and of.native and of.describes_tools and not of.single
    rendering = ChatTemplate(source, {})
    try:
        whole = rendering.render(with_tools(TALK, TOOLS, of), add_generation_prompt=False, extra={"tools": TOOLS})
        begun = rendering.render(with_tools(TALK[:1], TOOLS, of), extra={"tools": TOOLS})
    finally:
        rendering.close()
    assert whole.startswith(begun)
    text = re.sub(r"<think>\s*</think>", "", whole[len(begun) :])
    content, found = calls(source, text)
    assert found and found[0][0] == "find" and "".join(part for _, part in found) == '{"tide": 5}', text
    assert "find" not in content and "tide" not in content
    again = of.syntax.calls([("find", '{"tide": 5}')])
    assert calls(source, again)[1][0][0] == "find"


@pytest.mark.parametrize("call", [
    '<tool_call>{"name": "' + NAME + '", "parameters": ' + ARGUMENTS + "}</tool_call>",
    '<tool_call>\n{"name": "' + NAME + '", "parameters": ' + ARGUMENTS + "}\n</tool_call>",
    '<tool_call> {"name":"' + NAME + '","arguments":' + ARGUMENTS + "} </tool_call>",
    '<tool_call>{"id": 0, "name": "' + NAME + '", "arguments": ' + ARGUMENTS + "}</tool_call>",
])  # fmt: skip
def test_a_forced_call_is_written_as_the_template_writes_it(call: str) -> None:
    of = format_of(template(CHATML, call))
    assert of.name == "hermes"
    assert of.syntax.calls([("find", '{"tide": 5}')]) == call.replace(NAME, "find").replace(ARGUMENTS, '{"tide": 5}')
    assert calls(template(CHATML, call), of.syntax.calls([("find", '{"tide": 5}')]))[1][0][0] == "find"


@pytest.mark.parametrize("name", IN_WORDS)
def test_every_other_format_is_told_in_words(name: str) -> None:
    source = IN_WORDS[name]
    assert tool_format(source) == GENERIC
    told: Any = with_tools(TALK, TOOLS, GENERIC)
    assert '"find"' in told[0]["content"] and "tool_calls" not in told[2] and "<tool_call>" in told[2]["content"]


def test_text_in_functionarys_format_is_a_call() -> None:
    source = NATIVE["Functionary 3.1"][1]
    text = '<function=find>{"tide": 1}</function><function=find>{"tide": [2, "</function>"]}</function>'
    content, found = calls(source, "One moment. " + text + "<|eom_id|>")
    assert found == [("find", '{"tide": 1}'), ("find", '{"tide": [2, "</function>"]}')]
    assert content.startswith("One moment.")
    assert calls(source, "a <function=find> b")[1] == [] and calls(source, "<function=find>")[0] == "<function=find>"


def test_a_template_that_refuses_calls_without_results_is_read() -> None:
    """As Mistral's newer ones, which count both."""
    one = NATIVE["Mistral Nemo"][1]
    count = "{% set n = messages | selectattr('tool_calls') | list | length %}"
    count += "{% if n != messages | selectattr('role', 'equalto', 'tool') | list | length %}"
    assert tool_format(count + "{{ raise_exception('results!') }}{% endif %}" + one).name == "mistral"


def test_a_template_that_takes_one_call_is_found_by_trying_two() -> None:
    one = NATIVE["Hermes, Qwen 2.5"][1]
    for refuse, single in (
        ("{% if m.tool_calls | length != 1 %}{{ raise_exception('one!') }}{% endif %}", True),
        ("{% if m.tool_calls | length == 1 %}one{% endif %}{# raise_exception #}", False),
    ):
        source = one.replace("{% if m.tool_calls %}", "{% if m.tool_calls %}" + refuse.replace("one{% e", "{% e"))
        assert tool_format(source).single is single


def test_a_template_that_does_not_tell_of_tools_is_found() -> None:
    expected, source = NATIVE["Hermes, Qwen 2.5"]
    silent = source.replace("{{ tools | tojson }}", "")
    assert (
        tool_format(silent).name == expected
        and not tool_format(silent).describes_tools
        and tool_format(source).describes_tools
    )


def test_a_template_without_an_end_is_given_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_LIMITS", ChatLimits(timeout_s=0.3))
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ tools }}"
    assert tool_format(endless) is GENERIC


def test_a_template_that_mentions_no_tools_is_not_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(formats, "ChatTemplate")
    assert tool_format("{{ messages[0].content }}") is GENERIC
