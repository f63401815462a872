"""JSON schemas: what restricts nothing is accepted, numbers are exact or refused; against plain comparisons."""

import itertools
import json
import re
from collections.abc import Sequence
from decimal import Decimal
from random import Random
from typing import Any

import pytest

from millrace.errors import RequestError
from millrace.runtime.request.structured_outputs import StructuredOutputsParams
from millrace.runtime.structured_output.grammar import GrammarCompiler
from millrace.runtime.structured_output.json_schema import simplify
from tests.serve.support import VOCABULARY, tokenizer

REQUEST = StructuredOutputsParams(json={}, field_name="guided_json")
WORDS = tokenizer()


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    assert WORDS.eos_token_id is not None
    return GrammarCompiler(WORDS, VOCABULARY, [WORDS.eos_token_id])


def simplified(schema: dict[str, Any]) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    simplify(copy, REQUEST.refused)
    return copy


ARRAY: dict[str, Any] = {"type": "array", "items": {"type": "boolean"}}
OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
TEXT: dict[str, Any] = {"type": "string"}
Pair = tuple[dict[str, Any], dict[str, Any]]


def beside(schema: dict[str, Any], *more: dict[str, Any]) -> list[Pair]:
    return [(schema, one) for one in more]


NEUTRAL: list[Pair] = [
    *beside(ARRAY,
        {"uniqueItems": False}, {"minItems": 0}, {"maxItems": 2**31 - 1 + 1}, {"maxItems": 2**64}, {"minContains": 1},
        {"contains": TEXT, "minContains": 0}, {"unevaluatedItems": True}, {"unevaluatedItems": {"title": "any"}},
        {"unevaluatedItems": False}, {"propertyNames": {"pattern": "a"}}, {"dependentRequired": {"a": ["b"]}},
        {"minimum": 2**70}, {"format": "date"},
    ),
    *beside(OBJECT,
        {"propertyNames": {"type": "string"}}, {"propertyNames": True}, {"propertyNames": {}},
        {"propertyNames": {"type": ["null", "string"], "title": "a name", "minLength": 0}}, {"minProperties": 0},
        {"propertyNames": {"type": "string", "format": "name", "maxLength": 2**40, "minItems": 3}},
        {"if": TEXT, "then": {"minProperties": 0, "format": "x"}},
        {"maxProperties": 2**40}, {"dependentRequired": {}}, {"dependentRequired": {"b": ["a"], "c": []}},
        {"dependentSchemas": {}}, {"dependentSchemas": {"a": True, "b": {}}}, {"dependencies": {"b": ["a"]}},
        {"unevaluatedProperties": True}, {"unevaluatedProperties": {}}, {"if": TEXT}, {"then": TEXT, "else": TEXT},
        {"if": {"required": ["a"]}, "then": True, "else": {"$comment": "either way"}}, {"uniqueItems": True},
    ),
    *beside(TEXT,
        {"format": "password"}, {"format": "binary"}, {"format": "path"}, {"format": "regex"}, {"format": "no-such"},
        {"minLength": 0}, {"minLength": 0.0}, {"maxLength": 2**53 + 1}, {"not": False}, {"not": {"not": {}}},
        {"default": "x"}, {"examples": ["x"]}, {"title": "T"}, {"description": "D"}, {"$comment": "C"},
        {"readOnly": True, "writeOnly": False, "deprecated": True}, {"contentEncoding": "base64"},
        {"contentMediaType": "text/html", "contentSchema": {"type": "object"}}, {"multipleOf": 9007199254740993},
        {"$schema": "https://example.com/schema"},
    ),
    ({"type": "integer"}, {"multipleOf": 1}),
    ({"type": "integer"}, {"format": "int64", "exclusiveMinimum": False}),
    ({"type": "number"}, {"format": "double"}),
]  # fmt: skip


@pytest.mark.parametrize("schema, more", NEUTRAL, ids=lambda part: json.dumps(part)[:50])
def test_a_keyword_that_restricts_nothing_is_removed(schema: dict[str, Any], more: dict[str, Any]) -> None:
    assert simplified({**schema, **more}) == schema
    assert simplified({"properties": {"x": {**schema, **more}}}) == {"properties": {"x": schema}}


def test_unknown_keywords_and_those_of_openapi_are_accepted(grammars: GrammarCompiler) -> None:
    more = {"nullable": False, "discriminator": {"propertyName": "a"}, "xml": {"name": "b"}, "x-order": 3, "unheard": 1}
    schema = {**OBJECT, **more, "externalDocs": {"url": "https://example.com"}}
    grammars.matchers(StructuredOutputsParams(json=schema), 1)


def test_a_known_format_stays(grammars: GrammarCompiler) -> None:
    assert takes(grammars, {**TEXT, "format": "date"}, '"2026-02-28"')
    assert not takes(grammars, {**TEXT, "format": "date"}, '"2026-02-31"')
    assert takes(grammars, {**TEXT, "format": "binary"}, '"2026-02-31"')


def test_what_one_keyword_forbids_another_can_say() -> None:
    assert simplified({**OBJECT, "unevaluatedProperties": False}) == {**OBJECT, "additionalProperties": False}
    shorter = {"type": "array", "prefixItems": [True]}
    assert simplified({**shorter, "unevaluatedItems": False}) == {**shorter, "items": False}


RESTRICTS: list[tuple[dict[str, Any], str]] = [
    ({**ARRAY, "uniqueItems": True}, '"uniqueItems" at #/properties/x'),
    ({**ARRAY, "contains": True}, '"contains" at #/properties/x'),
    ({**ARRAY, "contains": TEXT, "minContains": 0, "maxContains": 2}, '"contains"'),
    ({**OBJECT, "propertyNames": {"pattern": "a"}}, '"propertyNames"'),
    ({**OBJECT, "propertyNames": {"minLength": 1}}, '"propertyNames"'),
    ({**OBJECT, "dependentRequired": {"b": ["c"]}}, '"dependentRequired"'),
    ({**OBJECT, "dependencies": {"b": TEXT}}, '"dependencies"'),
    ({**OBJECT, "unevaluatedProperties": False, "anyOf": [{}]}, '"unevaluatedProperties"'),
    ({**OBJECT, "if": TEXT, "then": False}, '"if"'),
    ({"not": {}}, '"not"'), ({"not": TEXT}, '"not"'), ({"$dynamicRef": "#a"}, '"$dynamicRef"'),
    ({**TEXT, "minLength": -1}, "-1"), ({**TEXT, "maxLength": 1.5}, "1.5"), ({**TEXT, "minLength": 2**31}, "2147"),
    ({"type": "number", "multipleOf": 0}, '"multipleOf"'), ({"type": "number", "multipleOf": -0.5}, '"multipleOf"'),
    ({"type": "number", "multipleOf": 0.07}, "exactly"), ({"type": "integer", "multipleOf": 2**53 + 1}, "exactly"),
    ({"type": "integer", "multipleOf": 2**32 - 1}, "exactly"),
    ({"type": "integer", "allOf": [{"multipleOf": 99989}, {"multipleOf": 99991}]}, "together"),
    ({"const": 2**53 + 1}, "9007199254740993"), ({"enum": ["a", [{"b": 2**53 + 1}]]}, "9007199254740993"),
    ({"const": float(2**53)}, "exactly"), ({"const": -(2**63)}, "exactly"), ({"enum": [1e300]}, "exactly"),
    ({"type": "integer", "maximum": 2**64}, '"maximum"'), ({"minimum": 2**53 + 1}, '"minimum"'),
    ({"type": "integer", "minimum": "x", "exclusiveMinimum": 0}, "'x'"), ({"maximum": True}, "is True"),
    ({"exclusiveMinimum": 2**53 + 2}, "exclusiveMinimum"),
]  # fmt: skip


@pytest.mark.parametrize("schema, says", RESTRICTS, ids=lambda part: json.dumps(part)[:50])
def test_what_restricts_and_cannot_be_enforced_is_refused(schema: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=re.escape(says)) as error:
        simplify({"properties": {"x": schema}}, REQUEST.refused)
    assert error.value.param == "guided_json"


@pytest.mark.parametrize("key", [
    "type", "minimum", "multipleOf", "minLength", "required", "properties", "items", "allOf", "enum", "contains",
    "dependentRequired", "propertyNames", "if", "maxContains", "$ref", "$schema", "format", "exclusiveMinimum",
])  # fmt: skip
def test_a_value_of_a_wrong_type_is_the_clients_mistake(grammars: GrammarCompiler, key: str) -> None:
    for value in ("x", True, None, [], {}, [5], {"a": 5}, 1.5):
        schema = {"type": ["object", "array", "number"], "contains": {}, "minContains": 0, key: value}
        try:
            grammars.matchers(StructuredOutputsParams(json=schema), 1)
        except RequestError as error:
            assert "cannot be compiled" not in error.what, (key, value, error)


def test_only_what_the_root_leads_to_is_looked_at() -> None:
    unused = {"$defs": {"a": {**ARRAY, "uniqueItems": True}}, **TEXT}
    assert simplified(unused) == unused
    for reference in ("#/$defs/a", "#anchor", "inner.json"):
        with pytest.raises(RequestError, match="uniqueItems"):
            simplified({"$ref": reference, **unused})
    ring = {"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/b"}}, "b": {"$ref": "#/$defs/a"}}}
    assert simplified(ring) == ring


def takes(grammars: GrammarCompiler, schema: dict[str, Any], text: str) -> bool:
    (matcher,) = grammars.matchers(StructuredOutputsParams(json=schema), 1)
    guide = matcher.guide
    return bool(guide.consume_tokens(WORDS.encode(text, add_special_tokens=False)) and guide.is_accepting())


some_pairs = pytest.mark.parametrize("n", [10, pytest.param(24, marks=pytest.mark.nightly)])


def pairs(
    lows: Sequence[float | None], highs: Sequence[float | None], n: int
) -> list[tuple[float | None, float | None]]:
    """At most `n` pairs of a lower and an upper bound that have something between them."""
    every = [(a, b) for a, b in itertools.product(lows, highs) if a is None or b is None or a <= b]
    return Random(3).sample(every, min(len(every), n))


ENDS = [-(2**63) - 1, -(2**63), -(2**53) - 2, -(2**53) - 1, -(10**18), -10, 0, 9, 2**53, 2**53 + 1, 2**53 + 2, 10**18,
        2**63 - 1024, 2**63 - 1, 2**63, 2.5]  # fmt: skip
NEAR = sorted({int(end) + more for end in ENDS for more in (-1025, -1, 0, 1, 2, 1023)})


@some_pairs
@pytest.mark.parametrize("lower", [None, "minimum", "exclusiveMinimum"])
@pytest.mark.parametrize("upper", [None, "maximum", "exclusiveMaximum"])
def test_bounds_of_integers_are_exact_or_refused(
    grammars: GrammarCompiler, lower: str | None, upper: str | None, n: int
) -> None:
    n_taken = 0
    for low, high in pairs(ENDS if lower else [None], ENDS if upper else [None], n):
        schema = {"type": "integer", **({lower: low} if lower else {}), **({upper: high} if upper else {})}
        try:
            (matcher,) = grammars.matchers(StructuredOutputsParams(json=schema), 1)
        except RequestError:
            continue
        n_taken += 1
        for value in NEAR:
            over = low is None or (value >= low if lower == "minimum" else value > low)
            under = high is None or (value <= high if upper == "maximum" else value < high)
            guide = matcher.compiled.matcher.deep_copy()
            taken = guide.consume_tokens(WORDS.encode(str(value), add_special_tokens=False)) and guide.is_accepting()
            is_lowest = -(2**63) <= value < -(2**63) + 1024  # of int64: never generated
            outside = value < -(2**63) or value > 2**63 - 1
            if not outside and not is_lowest:
                assert taken == (over and under), (schema, value)
            assert not taken or (over and under), (schema, value)
    assert n_taken


@pytest.mark.parametrize("schema", [
    {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, {"minimum": -(2**63), "maximum": 2**63 - 1},
    {"type": ["integer", "null"], "minimum": 0, "maximum": 2**63 - 1},
    {"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1},
])  # fmt: skip
def test_bounds_of_int64_are_accepted(grammars: GrammarCompiler, schema: dict[str, Any]) -> None:
    assert takes(grammars, schema, "12") and takes(grammars, schema, "9007199254740991")


@pytest.mark.parametrize(
    ("key", "bound"),
    [
        ("exclusiveMaximum", -(2**63)), ("exclusiveMinimum", -(2**63)), ("exclusiveMinimum", 2**63 - 1),
        ("exclusiveMaximum", 2**60 + 3), ("maximum", 2**64), ("minimum", -(2**70)),
    ],
)  # fmt: skip
def test_errors_quote_the_bound_that_was_sent(key: str, bound: int) -> None:
    for kind in ("integer", "number") if abs(bound) < 2**63 - 1 or abs(bound) > 2**63 else ("integer",):
        with pytest.raises(RequestError) as refused:
            simplified({"type": kind, key: bound})
        assert f'"{key}" at # is {bound}, which cannot be enforced exactly' in refused.value.what


def test_a_constant_beyond_float64_is_exact(grammars: GrammarCompiler) -> None:
    big = 2**53 + 2
    assert takes(grammars, {"const": big}, str(big)) and not takes(grammars, {"const": big}, str(big + 1))


FRACTIONS = [-1.5, -1, -0.5, 0, 0.5, 1, 1.5, 10]
SPELLINGS = ["0", "0.0", "1", "1.0", "-1", "0.5", "-0.5", "0.25", "-0.25", "1.5", "-1.5", "1.25", "-1.25", "0.75", "-2",
             "2", "10", "9.75", "10.5"]  # fmt: skip


@some_pairs
@pytest.mark.parametrize("lower", [None, "minimum", "exclusiveMinimum"])
@pytest.mark.parametrize("upper", [None, "maximum", "exclusiveMaximum"])
@pytest.mark.parametrize("apart", [False, True], ids=["together", "in allOf"])
def test_no_number_is_beyond_its_bounds(grammars: GrammarCompiler, lower: str, upper: str, apart: bool, n: int) -> None:
    """llguidance takes n itself where n is an exclusive bound, and the other is within the same unit."""
    n_taken = 0
    for low, high in pairs(FRACTIONS if lower else [None], FRACTIONS if upper else [None], n):
        below, above = ({lower: low} if lower else {}), ({upper: high} if upper else {})
        schema = {"allOf": [{"type": "number", **below}, above]} if apart else {"type": "number", **below, **above}
        try:
            (matcher,) = grammars.matchers(StructuredOutputsParams(json=schema), 1)
        except RequestError:
            continue
        for text in SPELLINGS:
            guide, value = matcher.compiled.matcher.deep_copy(), Decimal(text)
            if guide.consume_tokens(WORDS.encode(text, add_special_tokens=False)) and guide.is_accepting():
                n_taken += 1
                assert low is None or (value >= low if lower == "minimum" else value > low), (schema, text)
                assert high is None or (value <= high if upper == "maximum" else value < high), (schema, text)
    assert n_taken > 5
