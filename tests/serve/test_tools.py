"""The fields that tell of tools: how they are said, what is wrong with some, and what answers are held to."""

import json
from dataclasses import replace
from typing import Any

import pytest

from millrace.checkpoint.tool_calls.formats import HERMES, LLAMA, MISTRAL, MISTRAL_ARGS
from millrace.errors import RequestError
from millrace.kernels.sample.ref import unpacked
from millrace.runtime.request.structured_outputs import StructuredOutputsParams
from millrace.runtime.request.tool_specs import MAX_TOOLS
from millrace.runtime.structured_output.grammar import GrammarCompiler
from millrace.serve.llm.tools import Tools, tools_of
from tests.serve.support import VOCABULARY, tokenizer

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add", "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}  # fmt: skip
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "now"}}


def tools(given: Any = (ADD, NOW), choice: object = None, parallel: bool | None = None) -> Tools:
    found = tools_of(given, choice, parallel)
    assert found is not None
    return found


def test_what_is_asked() -> None:
    auto = tools()
    assert auto.schemas["add"] == {"additionalProperties": False, **ADD["function"]["parameters"]}
    assert auto.specs == (ADD, NOW)
    open_ended = {"type": "function", "function": {"name": "f", "parameters": {"additionalProperties": True}}}
    assert tools([open_ended]).schemas["f"]["additionalProperties"] is True
    assert auto.schemas["now"] == {"type": "object", "properties": {}, "additionalProperties": False}
    assert (auto.must, auto.only, auto.max_calls(HERMES), auto.strict) == (False, None, 16, False)
    assert tools(choice="required").must and tools(choice="required", parallel=False).max_calls(HERMES) == 1
    named = tools(choice=NAMED)
    assert named.must and named.only == "now" and named.max_calls(HERMES) == 1
    assert auto.max_calls(replace(HERMES, single=True)) == 1, "a template that takes one call back"
    assert tools([{**ADD, "function": {**ADD["function"], "strict": True}}]).strict
    for nothing in (tools_of(None, None, None), tools_of([], "none", True), tools_of([ADD], "none", None)):
        assert nothing is None


def nested(depth: int) -> dict[str, Any]:
    """An object in an object: two levels each, its `properties` too."""
    return {"type": "object", "properties": {"a": nested(depth - 1)}} if depth else {"type": "string"}


DEEP: dict[str, Any] = {"type": "function", "function": {"name": "deep", "parameters": nested(40)}}


def test_a_schema_that_nothing_is_held_to_is_the_models_to_read() -> None:
    assert tools_of([DEEP], "auto", None) is not None


BAD: list[tuple[Any, Any, str, str]] = [
    ([{}], None, "tools", "tools[0].type is None"),
    ([{"type": "web_search"}], None, "tools", "tools[0].type is 'web_search'"),
    ([{"type": "function"}], None, "tools", "tools[0] has no function"),
    ([{"type": "function", "function": {}}], None, "tools", "tools[0] has no name"),
    ([{"type": "function", "function": {"name": ""}}], None, "tools", "tools[0] has no name"),
    ([{"type": "function", "function": {"name": "a b"}}], None, "tools", "name is 'a b'"),
    ([{"type": "function", "function": {"name": "a" * 65}}], None, "tools", "name is 'aaaa"),
    ([{"type": "function", "function": {"name": 3}}], None, "tools", "name is of type int"),
    ([{"type": "function", "function": {"name": "a", "parameters": []}}], None, "tools", "parameters is of type list"),
    ([{"type": "function", "name": "a"}], None, "tools", "tools[0] has no function"),
    (
        [NOW, {"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}],
        None,
        "tools",
        "tools[1].function.parameters.type is 'string'",
    ),
    (
        [{"type": "function", "function": {"name": "a", "parameters": {"type": ["array", "null"]}}}],
        None,
        "tools",
        "parameters.type is [",
    ),
    ([ADD, ADD], None, "tools", "has the name 'add' again"),
    ([ADD] * (MAX_TOOLS + 1), None, "tools", "tools has 129 tools"),
    ([DEEP], "required", "tools", "the parameters of the tool 'deep': its schema is too deep"),
    ([{**DEEP, "function": {**DEEP["function"], "strict": True}}], "auto", "tools", "its schema is too deep"),
    (None, "required", "tool_choice", "there are no tools"),
    ([ADD], "any", "tool_choice", "tool_choice is 'any'"),
    ([ADD], 3, "tool_choice", "tool_choice is 3"),
    ([ADD], {"type": "function", "function": {"name": "ad"}}, "tool_choice", "names 'ad'"),
    ([ADD], {"type": "function"}, "tool_choice", "tool_choice is {"),
    ([ADD], {"type": "allowed_tools"}, "tool_choice", 'type "allowed_tools" is not supported yet'),
]


@pytest.mark.parametrize("given, choice, param, says", BAD)
def test_each_mistake_is_named(given: Any, choice: Any, param: str, says: str) -> None:
    with pytest.raises(RequestError) as refused:
        tools_of(given, choice, None)
    assert refused.value.param == param and says in str(refused.value) and refused.value.expected


def lark(of: Any, asked: Tools, special: Any = lambda text: None, beside: Any = None) -> str:
    form = asked.constraint(of, special, beside)
    assert form is not None and isinstance(form.grammar, str)
    return form.grammar


def test_what_a_call_that_must_be_is_held_to() -> None:
    assert tools().constraint(HERMES, lambda text: None, None) is None, "a model that may call is free to"
    one = lark(HERMES, tools(choice=NAMED))
    assert '"<tool_call>\\n{\\"name\\": \\""' in one and '"now\\", \\"arguments\\": "' in one and "add\\" not in one
    assert "{0," not in one and "one: call_0\n" in one
    assert "{0,15}" in lark(HERMES, tools(choice="required")) and "call_1" in lark(LLAMA, tools(choice="required"))
    ids = {"[TOOL_CALLS]": 9, "[ARGS]": 32}
    assert lark(MISTRAL, tools(choice=NAMED), ids.get).splitlines()[1].startswith('calls: <[9]> " [{\\"name')
    newer = lark(MISTRAL_ARGS, tools(choice=NAMED), ids.get)
    assert "calls: <[9]> one" in newer and 'call_0: "now" <[32]> %json' in newer


def test_forms_beside_tools() -> None:
    schema = StructuredOutputsParams(json={"type": "object", "title": "T"}, field_name="response_format")
    both = lark(HERMES, tools(), beside=schema)
    assert both.startswith("start: calls | answer\nanswer: %json ") and '"title": "T"' in both
    for choice, beside in (("required", schema), (None, StructuredOutputsParams(regex="a"))):
        with pytest.raises(RequestError):
            tools(choice=choice).constraint(HERMES, lambda text: None, beside)


def test_names_are_written_as_json() -> None:
    odd = [{"type": "function", "function": {"name": "a/b.c:d-e"}}]
    assert json.dumps("a/b.c:d-e")[1:-1] in lark(HERMES, tools(odd, "required"))


A, B = ({"type": "object", "properties": {n: {"const": 1}}, "required": [n]} for n in "ab")
ELSEWHERE: list[tuple[dict[str, Any], list[str]]] = [
    ({"$ref": "#/$defs/a", "$defs": {"a": A}}, ['{"a": 1}']),
    ({"anyOf": [A, B]}, ['{"a": 1}', '{"b": 1}']),
    ({"allOf": [A]}, ['{"a": 1}']),
    ({"type": ["object", "null"], **{k: v for k, v in A.items() if k != "type"}}, ['{"a": 1}']),
]


@pytest.mark.parametrize("i", range(len(ELSEWHERE)))
def test_properties_may_be_named_elsewhere(i: int) -> None:
    """As pydantic writes models that hold themselves, and unions: their arguments may come, and nothing less."""
    parameters, able = ELSEWHERE[i]
    schema = tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}], "required").schemas["f"]
    end = tokenizer().eos_token_id or 0
    grammars = GrammarCompiler(tokenizer(), VOCABULARY, [end])

    def may_come(text: str) -> bool:
        (matcher,) = grammars.matchers(StructuredOutputsParams(json=schema), 1)
        for token in [*tokenizer().encode(text, add_special_tokens=False), end]:
            if not unpacked(grammars.masks([matcher])[0], VOCABULARY)[token]:
                return False
            matcher.accept(token)
        return True

    assert [text for text in ('{"a": 1}', '{"b": 1}', "{}", "null", "[]", '"a"') if may_come(text)] == able
