"""The fields that hold an answer to a form: how they are said, and what is wrong with some."""

import json
from typing import Any

import pytest

from millrace.errors import RequestError
from millrace.serve.fields import chat_params, completion_params, decode
from millrace.serve.protocol import ChatRequest, CompletionRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def asked(**fields: Any) -> Any:
    chat = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    held = chat_params(decode(json.dumps(chat).encode(), ChatRequest)).structured_outputs
    of_text = completion_params(decode(json.dumps({"prompt": "Hi", **fields}).encode(), CompletionRequest))
    assert of_text.structured_outputs == held, "both endpoints take them"
    return held


def form(**described: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": described}


@pytest.mark.parametrize(
    "fields, kind",
    [
        ({"response_format": {"type": "json_object"}}, "json_object"),
        ({"response_format": form(name="a", schema=SCHEMA, strict=True)}, "json"),
        ({"response_format": form(schema=SCHEMA, strict=None, description="what it is")}, "json"),
        ({"guided_json": SCHEMA}, "json"),
        ({"guided_json": '{"type": "object"}'}, "json"),
        ({"guided_regex": "a+"}, "regex"),
        ({"guided_choice": ["a", "b"]}, "choice"),
        ({"guided_grammar": 'start: "a"'}, "grammar"),
        ({"structured_outputs": {"regex": "a+"}}, "regex"),
        ({"structured_outputs": {"json_object": True}}, "json_object"),
        ({"structured_outputs": {"regex": "a", "json": None}, "response_format": {"type": "text"}}, "regex"),
    ],
    ids=str,
)
def test_each_way_to_say_it(fields: dict[str, Any], kind: str) -> None:
    held = asked(**fields)
    assert held.kind == kind and held.asked_as in fields and held.text()


@pytest.mark.parametrize("fields", [{}, {"response_format": None}, {"response_format": {"type": "text"}}], ids=str)
def test_text_is_held_to_nothing(fields: dict[str, Any]) -> None:
    assert asked(**fields) is None


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {}}, "response_format", "response_format.type is None"),
    ({"response_format": "json"}, "response_format", "response_format is of type string"),
    ({"response_format": {"type": "xml"}}, "response_format", "response_format.type is 'xml'"),
    ({"response_format": {"type": ["text"]}}, "response_format", "response_format.type is ['text']"),
    ({"response_format": {"type": "json_object", "shema": {}}}, "response_format", "has no 'shema'"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema is missing"),
    ({"response_format": {"type": "text", "json_schema": {}}}, "response_format", 'stands beside the type "text"'),
    ({"response_format": form()}, "response_format", "json_schema.schema is missing"),
    ({"response_format": form(schema=[1])}, "response_format", "json_schema.schema is of type list"),
    ({"response_format": form(schema=SCHEMA, strict=1)}, "response_format", "json_schema.strict is of type int"),
    ({"response_format": form(schema=SCHEMA, nmae="a")}, "response_format", 'did you mean "name"?'),
    ({"structured_outputs": {}}, "structured_outputs", "it says nothing"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "it says json and regex"),
    ({"structured_outputs": {"json_shema": {}}}, "structured_outputs", "has no 'json_shema'"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "has no 'structural_tag'"),
    ({"guided_regex": 3}, "guided_regex", "guided_regex is of type integer"),
    ({"guided_choice": ["a", 1]}, "guided_choice", "guided_choice[1] is of type integer"),
    ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex", "guided_json and guided_regex are both set"),
    (
        {"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice",
        "response_format and guided_choice are both set",
    ),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "ignore_eos is True beside guided_regex"),
    ({"guided_regex": "a", "min_tokens": 2, "max_tokens": 9}, "min_tokens", "min_tokens is 2 beside guided_regex"),
]  # fmt: skip


@pytest.mark.parametrize("fields, param, says", BAD, ids=[says for _, _, says in BAD])
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(RequestError) as error:
        asked(**fields)
    assert error.value.param == param and says in str(error.value), str(error.value)
