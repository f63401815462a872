"""What may be asked of an answer's form: one thing at a time, within limits, and each mistake named."""

from typing import Any

import pytest

from millrace import SamplingParams, StructuredOutputsParams
from millrace.errors import RequestError
from millrace.runtime.request.structured_outputs import MAX_BYTES, MAX_CHOICES, MAX_DEPTH, parse_structured_outputs


def nested(depth: int) -> dict[str, Any]:
    """So many objects inside one another."""
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"not": schema}
    return schema


LOOPED: dict[str, Any] = {}
LOOPED["not"] = LOOPED
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({}, "it says nothing"),
    ({"json_object": False}, "it says nothing"),
    ({"json": {}, "regex": "a"}, "it says json and regex"),
    ({"json_object": True, "choice": ["a"]}, "it says choice and json_object"),
    ({"json": 3}, "its json is of type int"),
    ({"regex": ["a"]}, "its regex is of type list"),
    ({"choice": "ab"}, "its choice is one text"),
    ({"choice": {"a": 1}}, "its choice is of type dict"),
    ({"grammar": 1.5}, "its grammar is of type float"),
    ({"json_object": 1}, "its json_object is of type int"),
]
TOO_MUCH: list[tuple[dict[str, Any], str]] = [
    ({"choice": []}, "its choice has 0 texts"),
    ({"choice": ["a", ""]}, r"its choice\[1\] is empty"),
    ({"choice": ["a", 1]}, r"its choice\[1\] is of type int"),
    ({"choice": ["a"] * (MAX_CHOICES + 1)}, "its choice has 1001 texts"),
    ({"choice": ["a" * MAX_BYTES]}, "its choice has 131076 bytes"),
    ({"regex": ""}, "its regex has 0 bytes"),
    ({"regex": "é" * (MAX_BYTES // 2) + "a"}, "its regex has 131073 bytes"),
    ({"grammar": "a" * (MAX_BYTES + 1)}, "its grammar has 131073 bytes"),
    ({"json": "{"}, "its json is not JSON"),
    ({"json": "[]"}, "its json is of type list"),
    ({"json": "true"}, "its json is of type bool"),
    ({"json": {"enum": {1, 2}}}, "cannot be written as JSON"),
    ({"json": LOOPED}, "cannot be written as JSON"),
    ({"json": {"description": "a" * MAX_BYTES}}, "its json has 1310"),
    ({"json": nested(MAX_DEPTH + 1)}, "too deep"),
    ({"json": nested(900)}, "too deep"),
    ({"json": '{"a":' * 5000 + "{}" + "}" * 5000}, "too deep"),
]


@pytest.mark.parametrize("given, says", MISTAKES, ids=[says for _, says in MISTAKES])
def test_mistakes_are_named_at_once(given: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says) as error:
        StructuredOutputsParams(**given, field_name="guided_json")
    assert error.value.param == "guided_json" and error.value.what.startswith("guided_json: ")


@pytest.mark.parametrize("given, says", TOO_MUCH, ids=[says for _, says in TOO_MUCH])
def test_what_is_too_much_is_refused_before_it_is_compiled(given: dict[str, Any], says: str) -> None:
    asked = StructuredOutputsParams(**given)
    with pytest.raises(RequestError, match=says) as error:
        asked.text()
    assert error.value.param == "structured_outputs" and len(str(error.value)) < 1000


def test_what_lies_at_the_limits_is_taken() -> None:
    assert len(StructuredOutputsParams(regex="a" * MAX_BYTES).text()) == MAX_BYTES
    assert StructuredOutputsParams(choice=["a"] * MAX_CHOICES).text().count("a") == MAX_CHOICES
    assert StructuredOutputsParams(json=nested(MAX_DEPTH)).text().count("{") == MAX_DEPTH


def test_sampling_params_take_it_by_name_or_as_a_dict() -> None:
    for given in (StructuredOutputsParams(regex="a+"), {"regex": "a+"}):
        held = SamplingParams(structured_outputs=given).structured_outputs  # type: ignore[arg-type]
        assert held is not None and held.kind == "regex" and held.text() == "a+"


@pytest.mark.parametrize(
    "given, says",
    [
        ("a+", "structured_outputs is of type str"),
        ({"regexp": "a"}, 'did you mean "regex"'),
        ({3: "a"}, "structured_outputs has no 3"),
        ({"field_name": "x", "regex": "a"}, "structured_outputs has no 'field_name'"),
    ],
)
def test_other_things_are_not_taken(given: object, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        parse_structured_outputs(given)


@pytest.mark.parametrize("other", [{"ignore_eos": True}, {"min_tokens": 3}], ids=str)
def test_the_form_says_where_an_answer_ends(other: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="beside structured_outputs"):
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), **other)
