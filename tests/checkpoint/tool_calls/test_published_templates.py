"""What the families' own templates write for calls, beside what is read as calls and what answers are held to.

The templates are shortened, and write what the published ones do: Meta's for Llama 3.1 and 3.2, Qwen's for 2.5 and 3,
Mistral's for 7B v0.3 and Nemo, Nous' for Hermes 2 Pro, MeetKai's for Functionary 3.1, DeepSeek's for V3 and V3.1.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import tokenizers

from millrace.checkpoint.chat.chat_template import ChatTemplate
from millrace.checkpoint.tokenizer.tokenizer import VocabularyTokenizer
from millrace.checkpoint.tokenizer.tokenizer_files import open_tokenizer
from millrace.checkpoint.tool_calls.answer_parser import AnswerParser, joined
from millrace.checkpoint.tool_calls.families import (
    DEEPSEEK,
    DEEPSEEK_PLAIN,
    FUNCTION_TAG,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_NEMO,
    Reasoning,
    ToolFormat,
)  # fmt: skip
from millrace.checkpoint.tool_calls.formats import reasoning, tool_format
from millrace.checkpoint.tool_calls.grammar import calls_grammar
from millrace.checkpoint.tool_calls.prompt import with_tools
from millrace.errors import RequestError
from millrace.runtime.request.structured_outputs import StructuredOutputsParams
from millrace.runtime.structured_output.grammar import GrammarCompiler
from tests.support.vocabularies import save_byte_level

LLAMA_3 = """{{- bos_token }}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- if messages[0].role == 'system' %}{% set system, messages = messages[0].content, messages[1:] %}{% endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{ "Environment: ipython\\n" }}{% endif %}
{{- system | default("") | trim }}{{ "<|eot_id|>" }}
{%- for m in messages %}
    {%- if 'tool_calls' in m %}
        {%- if not m.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{ "}<|eot_id|>" }}
    {%- elif m.role == "tool" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + (m.content | tojson) + "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
        {%- if loop.first %}{% for t in tools or [] %}{{ (t | tojson(indent=4)) + "\\n\\n" }}{% endfor %}{% endif %}
        {{- m.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

_CHATML_TOOLS = """{%- if tools %}{{ '<|im_start|>system\\n' }}<tools>
    {%- for tool in tools %}{{ "\\n" + (tool | tojson) }}{% endfor %}{{ '\\n</tools><|im_end|>\\n' }}{% endif %}
"""
_CHATML_RESULTS = """{%- elif m.role == "tool" %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
QWEN_25 = (
    _CHATML_TOOLS
    + """{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {{- '<|im_start|>assistant' }}{% if m.content %}{{ '\\n' + m.content }}{% endif %}
        {%- for call in m.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
        {%- endfor %}{{ '<|im_end|>\\n' }}
    """
    + _CHATML_RESULTS
)
QWEN_3 = (
    _CHATML_TOOLS
    + """{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{ '\\n' }}{% endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}{{ call.function.arguments }}
            {%- else %}{{ call.function.arguments | tojson }}{% endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}{{ '<|im_end|>\\n' }}
    """
    + _CHATML_RESULTS
)
HERMES_2_PRO = (
    _CHATML_TOOLS
    + """{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- for call in m.tool_calls %}{% set call = call.function %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}{{ '}\\n</tool_call>' }}
        {%- endfor %}{{ '<|im_end|>\\n' }}
    """
    + _CHATML_RESULTS
)
MISTRAL_V3 = """{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == "user" %}
        {%- if tools and m == (messages | selectattr("role", "equalto", "user") | list)[-1] %}
            {{- "[AVAILABLE_TOOLS] " + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + m.content + "[/INST]" }}
    {%- elif m.tool_calls %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in m.tool_calls %}
            {%- if call.id|length != 9 %}{{ raise_exception("Tool call IDs should have length 9!") }}{% endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif m.role == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{ " " + m.content + eos_token }}{% endif %}
{%- endfor %}"""
NEMO = re.sub(r"(\[(?:AVAILABLE_TOOLS|INST|TOOL_CALLS|TOOL_RESULTS)\]) ", r"\1", MISTRAL_V3)
DEEPSEEK_V3 = """{{ bos_token }}
{%- for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}
    {%- elif m.role == 'assistant' and m.content is none %}
        {{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
        {%- for tool in m.tool_calls %}
            {{- '' if loop.first else '\\n' }}{{ '<｜tool▁call▁begin｜>' + tool.type + '<｜tool▁sep｜>' }}
            {{- tool.function.name + '\\n```json\\n' + tool.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}{{ '<｜tool▁calls▁end｜>' + eos_token }}
    {%- elif m.role == 'tool' %}
        {{- '<｜tool▁outputs▁begin｜>' if messages[loop.index0 - 1].role != 'tool' else '\\n' }}
        {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
    {%- elif m.role == 'assistant' %}{{ '<｜tool▁outputs▁end｜>' + m.content + eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""
DEEPSEEK_V31 = """{{ bos_token }}
{%- for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '<｜User｜>' + m.content + '<｜Assistant｜></think>' }}
    {%- elif m.role == 'assistant' and m.tool_calls %}
        {{- '' if m.content is none else m.content }}{{ '<｜tool▁calls▁begin｜>' }}
        {%- for tool in m.tool_calls %}
            {{- '<｜tool▁call▁begin｜>' + tool.function.name + '<｜tool▁sep｜>' + tool.function.arguments }}
            {{- '<｜tool▁call▁end｜>' }}
        {%- endfor %}{{ '<｜tool▁calls▁end｜>' + eos_token }}
    {%- elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
    {%- elif m.role == 'assistant' %}{{ m.content + eos_token }}{% endif %}
{%- endfor %}"""


FUNCTIONARY_31 = """{{- bos_token }}
{%- if tools %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\nYou have access to the following functions:\\n' }}
    {%- for t in tools %}{{ "Use '" + t.function.name + "':\\n" + (t.function | tojson) + "\\n" }}{% endfor %}
    {{- 'Reply with <function=example_function_name>{"parameter": "value"}</function><|eot_id|>' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + m.content + '<|eot_id|>' }}
    {%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}{{ m.content or '' }}
        {%- for call in m.tool_calls or [] %}
            {%- if call.function.name == 'python' %}{{ '<|python_tag|>' + call.function.arguments }}
            {%- else %}
                {{- '<function=' + call.function.name + '>' + (call.function.arguments | tojson) + '</function>' }}
            {%- endif %}
        {%- endfor %}{{ '<|eom_id|>' if m.tool_calls else '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""


@dataclass(frozen=True)
class Family:
    """end: what stands behind an assistant's turn; result: how the template writes that a tool returned 21"""

    template: str
    of: ToolFormat
    end: str
    result: str
    n_calls: int = 2  # that it writes in one message, at most 2 here
    describes_tools: bool = True  # of the tools


FAMILIES = {
    "Llama 3.1 and 3.2": Family(LLAMA_3, LLAMA, "<|eot_id|>", 'ipython<|end_header_id|>\n\n"21"<|eot_id|>', n_calls=1),
    "Qwen 2.5": Family(QWEN_25, HERMES, "<|im_end|>", "<tool_response>\n21\n</tool_response>"),
    "Qwen 3": Family(QWEN_3, HERMES, "<|im_end|>", "<tool_response>\n21\n</tool_response>"),
    "Hermes 2 Pro": Family(HERMES_2_PRO, HERMES, "<|im_end|>", "<tool_response>\n21\n</tool_response>"),
    "Mistral 7B v0.3": Family(
        MISTRAL_V3, MISTRAL, "</s>", '[TOOL_RESULTS] {"content": 21, "call_id": "abcdefgh0"}[/TOOL_RESULTS]'
    ),
    "Mistral Nemo": Family(
        NEMO, MISTRAL_NEMO, "</s>", '[TOOL_RESULTS]{"content": 21, "call_id": "abcdefgh0"}[/TOOL_RESULTS]'
    ),
    "Functionary 3.1": Family(
        FUNCTIONARY_31, FUNCTION_TAG, "<|eom_id|>", "ipython<|end_header_id|>\n\n21<|eot_id|>"
    ),
    "DeepSeek V3": Family(
        DEEPSEEK_V3, DEEPSEEK, "</s>",
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>21<｜tool▁output▁end｜>", describes_tools=False,
    ),
    "DeepSeek V3.1": Family(
        DEEPSEEK_V31, DEEPSEEK_PLAIN, "</s>", "<｜tool▁output▁begin｜>21<｜tool▁output▁end｜>", describes_tools=False
    ),
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {"type": "integer"}}},
    "required": ["city", "days"], "additionalProperties": False,
}  # fmt: skip
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"get_weather": SCHEMA, "now": NOTHING}
TOOLS = [{"type": "function", "function": {"name": n, "description": "", "parameters": s}} for n, s in SCHEMAS.items()]
CALLS = [("get_weather", '{"city": "Zürich \\"Süd\\"", "days": [1, 2]}'), ("now", "{}")]
USER: dict[str, object] = {"role": "user", "content": "How is it there?"}


def asked(calls: Sequence[tuple[str, str]], **more: object) -> dict[str, object]:
    written = [
        {"id": f"abcdefgh{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": None, "tool_calls": written, **more}


def results(n: int) -> list[dict[str, object]]:
    return [{"role": "tool", "content": f"{21 + i}", "tool_call_id": f"abcdefgh{i}"} for i in range(n)]


@pytest.fixture(params=list(FAMILIES.values()), ids=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    chosen: Family = request.param
    return chosen


@pytest.fixture
def template(family: Family) -> Iterator[ChatTemplate]:
    template = ChatTemplate(family.template, {"bos_token": "<s>", "eos_token": "</s>"})
    yield template
    template.close()


@cache
def format_of(source: str) -> ToolFormat:
    return tool_format(source)


def rendered(template: ChatTemplate, messages: Sequence[dict[str, object]], opens: bool = False) -> str:
    said = with_tools(messages, TOOLS, format_of(template.source))
    return template.render(said, add_generation_prompt=opens, extra={"tools": TOOLS})


def turn(family: Family, template: ChatTemplate, message: dict[str, object]) -> str:
    """What the model would have written: behind the prompt that it was given, up to the end of its turn."""
    prompt, whole = rendered(template, [USER], opens=True), rendered(template, [USER, message])
    assert whole.startswith(prompt) and whole.rstrip("\n").endswith(family.end)
    return whole[len(prompt) :].rstrip("\n").removesuffix(family.end)


def read(of: ToolFormat, text: str, thoughts: Reasoning | None = None) -> tuple[str, str, list[tuple[str, str]]]:
    reader = AnswerParser(of, thoughts, tools=list(SCHEMAS))
    said = joined(reader.push(text), reader.flush())
    calls = list[tuple[str, str]]()
    for part in said.calls:
        calls += [(part.name, "")] if part.name is not None else []
        calls[-1] = calls[-1][0], calls[-1][1] + part.arguments
    return said.reasoning, said.content, calls


def test_the_format_is_found(family: Family) -> None:
    found = format_of(family.template)
    assert found.syntax == family.of.syntax and found.opens == family.of.opens
    assert found.native and found.describes_tools is family.describes_tools and found.single is (family.n_calls == 1)


@pytest.mark.parametrize("n", [1, 2])
def test_calls_are_written_read_and_held_to_alike(family: Family, template: ChatTemplate, n: int) -> None:
    of, calls = format_of(family.template), CALLS[:n]
    if n > family.n_calls:
        with pytest.raises(RequestError, match="single tool-calls"):
            rendered(template, [USER, asked(calls)])
        return
    text = turn(family, template, asked(calls))
    assert read(of, text) == ("", "", calls)
    if of.short_ids:  # history alone has them
        text, n_ids = re.subn(r', "id": "\w{9}"', "", text)
        assert n_ids == n
    assert text == of.syntax.calls(calls) and read(of, text) == ("", "", calls)
    for marks in ((), tuple(dict.fromkeys(re.findall(r"<[|｜][^<>]+?[|｜]>|\[[A-Z_]+\]", text)))):
        assert takes(of, marks, text), f"the grammar does not take {text!r} where {marks} are special tokens"
        assert not takes(of, marks, text[:-1]), "it ends where the call does"


def test_results_are_written_behind_their_calls(family: Family, template: ChatTemplate) -> None:
    n = family.n_calls
    whole = rendered(template, [USER, asked(CALLS[:n]), *results(n)])
    assert whole.index(family.result) > whole.index("get_weather", whole.index(str(USER["content"])))
    assert n == 1 or whole.index("22") > whole.index(family.result)


def test_the_model_is_told_of_its_tools(family: Family, template: ChatTemplate) -> None:
    """By its template, or in words and with an example of its own format."""
    prompt = rendered(template, [{"role": "system", "content": "Be brief."}, USER], opens=True)
    if "[INST]" not in family.template:  # these have no place for a system message
        assert "Be brief." in prompt
    names = re.findall(r'"name": "(get_weather|now)"', prompt)
    assert names == list(SCHEMAS), prompt
    example = format_of(family.template).syntax.calls([("name of the function", '{"name of an argument": ')])
    assert (example.partition('{"name of an argument"')[0] in prompt) is not family.describes_tools


def test_calls_beside_an_empty_text_are_calls(family: Family, template: ChatTemplate) -> None:
    """Some clients send "" where others send null."""
    empty = rendered(template, [USER, asked(CALLS[:1], content="")])
    assert empty == rendered(template, [USER, asked(CALLS[:1])])


def test_qwen_3_thinks_before_it_calls() -> None:
    template = ChatTemplate(QWEN_3, {})
    text = turn(FAMILIES["Qwen 3"], template, asked(CALLS, reasoning_content="I have to look."))
    template.close()
    assert text.startswith("<think>\n")
    assert read(HERMES, text, reasoning(QWEN_3)) == ("I have to look.", "", CALLS)


@cache
def vocabulary(marks: tuple[str, ...]) -> VocabularyTokenizer:
    """In which these are special tokens."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        save_byte_level(folder)
        whole = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        whole.add_special_tokens(list(marks))
        whole.save(str(folder / "tokenizer.json"))
        opened = open_tokenizer(folder)
    assert isinstance(opened, VocabularyTokenizer)
    return opened


@cache
def grammars(marks: tuple[str, ...]) -> GrammarCompiler:
    tokenizer = vocabulary(marks)
    assert tokenizer.eos_token_id is not None
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id])


def takes(of: ToolFormat, marks: tuple[str, ...], text: str) -> bool:
    """An answer that has to call may be this one, token by token, and then its end."""
    tokenizer = vocabulary(marks)

    def special(mark: str) -> int | None:
        token = tokenizer.token_id(mark)
        return token if token in tokenizer.special_ids else None

    lark = calls_grammar(of, {name: in_json(schema) for name, schema in SCHEMAS.items()}, special, max_calls=2)
    (matcher,) = grammars(marks).matchers(StructuredOutputsParams(grammar=lark), 1)
    assert tokenizer.eos_token_id is not None
    for token in (*tokenizer.encode(text, False), tokenizer.eos_token_id):
        mask = grammars(marks).masks([matcher])[0]
        if not mask[token // 32] >> token % 32 & 1:
            return False
        matcher.accept(token)
    return True


def in_json(schema: dict[str, Any]) -> dict[str, Any]:
    """Laid out as json.dumps does."""
    layout = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    assert json.dumps([1, {"a": 2}]) == '[1, {"a": 2}]'
    return {**schema, "x-guidance": layout}
