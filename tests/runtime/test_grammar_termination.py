"""Forms that no finite text meets, told from those that some text does: each against one that is written out."""

import json
import random
from typing import Any

import pytest

from millrace.errors import RequestError
from millrace.runtime.request.structured_outputs import MAX_BYTES, StructuredOutputsParams
from millrace.runtime.structured_output.grammar import GrammarCompiler
from millrace.runtime.structured_output.grammar_termination import check_terminates
from tests.serve.support import VOCABULARY, tokenizer

ENDLESS = "cannot be met by any text that ends"
NAMES = "abcd"


def ends(kind: str, text: str) -> bool:
    try:
        check_terminates(StructuredOutputsParams(**{kind: text}), text, text)  # type: ignore[arg-type]
    except RequestError as error:
        assert ENDLESS in error.what
        return False
    return True


def node(**required: Any) -> dict[str, Any]:
    return {"type": "object", "properties": required, "required": list(required), "additionalProperties": False}


def of(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


def rooted(**defs: Any) -> dict[str, Any]:
    return {"$defs": defs, **of("a")}


SELF = {"$ref": "#"}
SCHEMAS: list[tuple[dict[str, Any], bool]] = [
    (rooted(a=node(n=of("a"))), False),
    (rooted(a={**node(n=of("a")), "required": []}), True),
    (rooted(a=node(n=of("b")), b=node(n=of("a"))), False),
    (rooted(a=node(n=of("b")), b={"anyOf": [of("a"), {"type": "null"}]}), True),
    (rooted(a=node(n={"anyOf": [of("a"), node(m=of("a"))]})), False),
    (rooted(a=node(n={"oneOf": [of("a"), {"type": "array", "items": of("a")}]})), True),
    ({"type": ["object", "null"], "properties": {"n": SELF}, "required": ["n"]}, True),
    ({"properties": {"n": SELF}, "required": ["n"]}, True),
    ({"type": "object", "additionalProperties": SELF, "required": ["n"]}, False),
    ({"type": "object", "additionalProperties": SELF}, True),
    ({"type": "object", "patternProperties": {"n": {}}, "additionalProperties": SELF, "required": ["n"]}, True),
    ({"allOf": [node(n=SELF)]}, False),
    ({"type": "array", "items": SELF, "minItems": 1}, False),
    ({"type": "array", "items": SELF}, True),
    ({"type": "array", "prefixItems": [{"type": "null"}, SELF], "minItems": 2}, False),
    ({"type": "array", "prefixItems": [{"type": "null"}, SELF], "minItems": 1}, True),
    ({"type": "array", "prefixItems": [{}], "items": SELF, "minItems": 2}, False),
    ({"$defs": {"x/y": node(n={"$ref": "#/$defs/x~1y"})}, "$ref": "#/$defs/x~1y"}, False),
    ({"$defs": {"x y": node(n={"$ref": "#/$defs/x%20y"})}, "$ref": "#/$defs/x%20y"}, False),
    ({"$defs": {"x": {"$anchor": "x", **node(n={"$ref": "#x"})}}, "$ref": "#x"}, True),  # not understood
    ({"$defs": {"x": {"$id": "http://x/y", **node(n={"$ref": "#/$defs/x"})}}, "$ref": "#/$defs/x"}, True),  # nor this
    ({"$defs": {"x": {"required": 3, "type": [1], "minItems": "a", "properties": []}}, "type": "null"}, True),
]


@pytest.mark.parametrize("schema, ending", SCHEMAS, ids=[json.dumps(schema)[:70] for schema, _ in SCHEMAS])
def test_a_schema_that_needs_itself(schema: dict[str, Any], ending: bool) -> None:
    assert ends("json", json.dumps(schema)) is ending


GRAMMARS: list[tuple[str, bool]] = [
    ('start: "a" start', False),
    ('start: "a" start | "b"', True),
    ('start: "a" start?', True),
    ('start: ("x" start)*', True),
    ('start: ("x" start)+', False),
    ('start: ["x" start] "y"', True),
    ('start: b{0,3}\nb: "x" b', True),
    ('start: b{1,3}\nb: "x" b', False),
    ('start: ( ( "a" | start ) b | "c" start )\nb: "d" start | /x/', True),
    ('start: ( ( "a" | start ) b | "c" start )\nb: "d" start // | /x/', False),
    ('start: x\n  | y\nx: "a" x\ny: "|" y\n  | "b" x', False),
    ('start: "\\"|" /\\/|:/ start', False),
    ('start: X start | X\nX: "a"', True),
    ("start: x\nx[max_tokens=3]: Y x\nY: /a/", True),  # it is cut
    ('start: %json {"type": "null"}', True),
    (f'start: "a" %json {json.dumps(rooted(a=node(n=of("a"))))}', False),
    ('start: "a" start -> b', True),  # not understood
]


@pytest.mark.parametrize("lark, ending", GRAMMARS, ids=[lark for lark, _ in GRAMMARS])
def test_a_grammar_that_needs_itself(lark: str, ending: bool) -> None:
    assert ends("grammar", lark) is ending


def some_value(schema: dict[str, Any], root: dict[str, Any], depth: int) -> bool:
    """One of at most so many levels can be written out."""
    if depth == 0:
        return False
    if "$ref" in schema:
        return some_value(root["$defs"][schema["$ref"][-1]], root, depth - 1)
    if "anyOf" in schema:
        return any(some_value(one, root, depth - 1) for one in schema["anyOf"])
    parts: list[Any] = list(schema.get("properties", {}).values()) + [schema.get("items")] * schema.get("minItems", 0)
    return all(some_value(part, root, depth - 1) for part in parts)


def some_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.choice(["ref", "ref", "leaf", "node", "list", "any"] if depth else ["ref", "ref", "leaf"])
    if kind == "ref":
        return of(rng.choice(NAMES))
    if kind == "leaf":
        return {"type": "integer"} if rng.random() < 0.3 else of(rng.choice(NAMES))
    if kind == "node":
        return node(**{name: some_schema(rng, depth - 1) for name in "xy"[: rng.randint(1, 2)]})
    if kind == "list":
        return {"type": "array", "items": some_schema(rng, depth - 1), "minItems": rng.choice([0, 1, 1])}
    return {"anyOf": [some_schema(rng, depth - 1) for _ in range(rng.randint(1, 2))]}


def test_schemas_by_chance_end_where_a_value_can_be_written_out() -> None:
    rng, told = random.Random(7), {True: 0, False: 0}
    for _ in range(300):
        schema = rooted(**{name: some_schema(rng, 2) for name in NAMES})
        ending = some_value(
            schema, schema, 14
        )  # a shortest way names no part twice: three levels of each, and the first
        assert ends("json", json.dumps(schema)) is ending, schema
        told[ending] += 1
    assert min(told.values()) > 50, told


MIN_POSITIVE: list[tuple[dict[str, Any], bool]] = [
    ({"type": "object", "minProperties": 2}, False),
    ({"type": "object", "minProperties": 1}, True),  # one is one, however often
    ({"type": "object", "minProperties": 2, "required": ["a"]}, False),  # a, and "\u0061"
    ({"type": "object", "minProperties": 2, "required": ["a", "a"]}, False),
    ({"type": "object", "minProperties": 2, "required": ["a", "b"]}, True),
    ({"type": "string", "minProperties": 2}, True),
    ({"minProperties": 2}, False),
    ({"$defs": {"x": {"type": "object", "minProperties": 2}}, "$ref": "#/$defs/x"}, False),
    ({"type": "array", "items": {"anyOf": [{"type": "null"}, {"type": "object", "minProperties": 3}]}}, False),
    ({"$defs": {"x": {"$id": "http://x/y", "type": "object", "minProperties": 2}}, "$ref": "#/$defs/x"}, False),
    ({"type": "object", "properties": {"minProperties": {"type": "null"}}}, True),
    ({"enum": [{"minProperties": 2}]}, True),
]


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    eos = tokenizer().eos_token_id
    assert eos is not None
    return GrammarCompiler(tokenizer(), VOCABULARY, [eos])


@pytest.mark.parametrize("schema, taken", MIN_POSITIVE, ids=[json.dumps(schema) for schema, _ in MIN_POSITIVE])
def test_properties_that_could_be_one_twice_are_not_counted(
    grammars: GrammarCompiler, schema: dict[str, Any], taken: bool
) -> None:
    asked = StructuredOutputsParams(json=schema, field_name="guided_json")
    if taken:
        assert len(grammars.matchers(asked, 1)) == 1
        return
    with pytest.raises(RequestError, match=r'its json has "minProperties": [23] with [01] required') as error:
        grammars.matchers(asked, 1)
    assert error.value.param == "guided_json"


@pytest.mark.parametrize(
    "given",
    [{"json": SCHEMAS[0][0]}, {"grammar": 'start: "a" start'}, {"grammar": 'root ::= "a" root'}],
    ids=str,
)
def test_what_has_no_end_is_refused_where_it_is_compiled(grammars: GrammarCompiler, given: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=ENDLESS) as error:
        grammars.matchers(StructuredOutputsParams(**given), 1)
    assert error.value.param == "structured_outputs"


def chain(n: int, last: dict[str, Any]) -> str:
    links = {f"a{i}": node(n={"$ref": f"#/$defs/a{i + 1}"}) for i in range(n)}
    return json.dumps({"$defs": {**links, f"a{n}": last}, "$ref": "#/$defs/a0"})


@pytest.mark.timeout(120)
def test_hostile_ones_take_time_by_their_length() -> None:
    """By rounds over all that is there, these would be some million steps each, and by recursion too deep."""
    n = MAX_BYTES // 110
    assert ends("json", chain(n, {"type": "null"})) and not ends("json", chain(n, {"$ref": "#"}))
    assert not ends("json", json.dumps({"anyOf": [SELF] * 7000}))
    assert not ends("grammar", "start: " + "(" * 60_000 + "start" + ")" * 60_000)
    assert ends("grammar", "start: " + "a[" * 30_000 + '"a"' + "]" * 30_000)
    assert ends("grammar", 'start: "a" %json ' + '{"a":' * 20_000 + "1" + "}" * 20_000)
