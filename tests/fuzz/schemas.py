"""What is fuzzed of structured output: schemas and grammars at the limits of every number and length."""

import json
import math
import operator
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from millrace.errors import RequestError
from millrace.kernels.sample.ref import unpacked
from millrace.runtime.request.structured_outputs import StructuredOutputsParams
from millrace.runtime.structured_output import grammar
from millrace.runtime.structured_output.grammar import GrammarCompiler
from tests.fuzz.driver import Case
from tests.serve.support import VOCABULARY, tokenizer

Schema = dict[str, Any]
POWERS = [sign * 2**n + more for sign in (1, -1) for n in (0, 8, 31, 32, 53, 62, 63, 64, 70) for more in (-1, 0, 1)]
NUMBERS: list[float] = [
    *POWERS, 10**17, 10**18, 10**19, -(10**18), 1e18, 1e19, 1e30, -1e30, 1e300, 5e-324, 0.1, 0.07, -2.25, 1e-7, 0.0,
    99.99, 0.30000000000000004, 123456789.123,
]  # fmt: skip
STEPS: list[float] = [
    1,
    2,
    7,
    10,
    100,
    65535,
    86400,
    10**8,
    10**9,
    2**32 - 1,
    2**32,
    0.1,
    0.01,
    0.25,
    0.07,
    1e-9,
    0,
    -1,
]
SIZES: list[float] = [0, 1, 2, 3, 500, 1000, 65535, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63, 2**64, -1, 1.0, 2.5, 1e6]
COUNTS = [0, 1, 2, 40, 499, 500, 501, 999, 1001, 2600]
PATTERNS = [
    "a*",
    "(a|b)*a(a|b){20}",
    "^.{0,1000}$",
    "(((a{9}){9}){9}){9}",
    "[^",
    "(?=a)",
    "[a-zé]+",
    "(" * 60 + ")" * 60,
]
BOUNDS: dict[str, Callable[[float, float], bool]] = {
    "minimum": operator.ge, "exclusiveMinimum": operator.gt, "maximum": operator.le, "exclusiveMaximum": operator.lt,
}  # fmt: skip
KEYWORDS: dict[str, list[Any]] = {
    **{key: SIZES for key in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")},
    "pattern": PATTERNS, "format": ["date", "uuid", "int64", "password"], "uniqueItems": [False, True],
    "propertyNames": [True, {"type": "string"}, {"pattern": "a"}], "contains": [True, {"type": "null"}],
    "minContains": SIZES, "not": [False, {}], "if": [True], "then": [True, {}], "dependentRequired": [{}, {"a": ["b"]}],
    "unevaluatedProperties": [True, False], "const": NUMBERS, "enum": [NUMBERS[:5], ["a"], [], NUMBERS],
    "$ref": ["#", "#/properties/a", "#/$defs/none", "https://example.com/x"], "nullable": [False], "title": ["t"],
}  # fmt: skip


OTHERS = [
    "type",
    "multipleOf",
    "properties",
    "items",
    "required",
    "anyOf",
    "patternProperties",
    "$defs",
    "$schema",
    "$id",
]


def structured(folder: Path) -> Case:
    words = tokenizer()
    assert words.eos_token_id is not None
    grammars = GrammarCompiler(words, VOCABULARY, [words.eos_token_id])
    grammar.MAX_CACHED = 4  # or their memory would look like a leak

    def case(rng: Random) -> None:
        form = _form(rng)
        try:
            (matcher,) = grammars.matchers(StructuredOutputsParams(**form), 1)
        except RequestError as error:
            assert "cannot be compiled" not in error.what, f"{error.what}: {str(form)[:500]}"
            raise
        said = b""
        for _ in range(40):
            allowed = np.flatnonzero(unpacked(grammars.masks([matcher])[0], VOCABULARY))
            if not len(allowed) or words.eos_token_id in allowed:
                break
            token = int(rng.choice(list(allowed)))
            said += words.token_bytes(token)
            matcher.accept(token)
        if not matcher.error and words.eos_token_id in allowed and "json" in form:
            _check(form["json"], json.loads(said))

    return case


def _check(schema: Schema, value: object) -> None:
    """An answer is within the numbers and lengths of its schema, as far as these say anything of it."""
    if isinstance(value, str):
        least, most = schema.get("minLength", 0), schema.get("maxLength", math.inf)
        assert least <= len(value) <= most, f"{value!r} for {schema}"
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    for key, holds in BOUNDS.items():
        if key in schema and not isinstance(schema[key], bool):  # as draft 4 has them
            exact = isinstance(value, int) and isinstance(schema[key], int)
            near = (value > schema[key]) - (value < schema[key]) if exact else float(value) - float(schema[key])
            assert holds(float(near), 0.0), f"{value} for {schema}"


def _form(rng: Random) -> dict[str, Any]:
    if rng.random() < 0.8:
        schema = _chained(rng) if rng.random() < 0.1 else random_schema(rng, 2)
        if rng.random() < 0.2:
            schema[rng.choice([*KEYWORDS, *BOUNDS, *OTHERS])] = rng.choice(["x", True, None, [], {}, [5], {"a": 5}, 5])
        return {"json": schema}
    n = rng.choice(COUNTS)
    lark = [f'r{i}: "a" r{i + 1}{rng.choice(["", "?", "*", "{2,9}"])}' for i in range(n)]
    gbnf = [f'r{i} ::= "a" r{i + 1}' for i in range(n)]
    inline = f"start: %json {json.dumps(random_schema(rng, 1))}"
    grammars = [
        "\n".join(["start: r0", *lark, f"r{n}: /b/"]),
        "\n".join(["root ::= r0", *gbnf, f'r{n} ::= "b"']),
        inline,
    ]
    return {"grammar": rng.choice(grammars)} if rng.random() < 0.7 else {"regex": rng.choice(PATTERNS)}


def random_schema(rng: Random, depth: int) -> Schema:
    kinds = ["integer", "number", "string", "array", "object", "boolean", ["integer", "null"], "any"]
    schema: Schema = {"type": rng.choice(kinds)} if rng.random() < 0.9 else {}
    for key in BOUNDS:
        if rng.random() < 0.2:
            schema[key] = rng.choice(NUMBERS)
    for key, values in KEYWORDS.items():
        if rng.random() < 0.04:
            schema[key] = rng.choice(values)
    if rng.random() < 0.08:
        schema["multipleOf"] = rng.choice(STEPS)
    if depth:
        if rng.random() < 0.3:
            schema["properties"] = {f"k{i}": random_schema(rng, 0) for i in range(rng.choice(COUNTS[:4]))}
        for key in ("items", "additionalProperties"):
            if rng.random() < 0.2:
                schema[key] = random_schema(rng, depth - 1)
        for key in ("anyOf", "allOf", "oneOf", "prefixItems"):
            if rng.random() < 0.05:
                schema[key] = [random_schema(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return schema


def _chained(rng: Random) -> Schema:
    n, key = rng.choice(COUNTS), rng.choice(["$ref", "anyOf", "items", "allOf", "properties", "additionalProperties"])
    whole: Schema = {"$ref": "#/$defs/a0", "$defs": {f"a{n}": random_schema(rng, 0)}}
    for i in range(n):
        part: Any = {"$ref": f"#/$defs/a{(i * rng.choice((1, 1, 1, 7)) + 1) % (n + 1)}"}
        inner = part if key == "$ref" else {key: {"a": part} if key == "properties" else part}
        whole["$defs"][f"a{i}"] = {key: [part]} if key in ("anyOf", "allOf") else inner
    return whole
