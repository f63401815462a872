"""JSON schemas as llguidance takes them: keywords that restrict nothing are removed, numbers are exact or refused.

llguidance reads every number as a float64, refuses keywords by their name whatever their value, and refuses formats
that it does not know. Here a schema is rewritten in place, as far as it can be reached from its root, so that

- annotations, unknown formats and keywords at their neutral value disappear;
- a bound, constant or length is what the client wrote, or the request is refused;
- a keyword that restricts and cannot be enforced is refused by its name and place.
"""

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from millrace.runtime.structured_output.json_schema_numbers import (
    LOWER,
    UPPER,
    NumberBounds,
    Refuse,
    Schema,
    check_constant,
    check_steps,
    is_number,
)

_MAX_REFS = 32  # references followed to decide whether a keyword is neutral; with more, it counts as not neutral
LONGEST = 2**31  # characters, items or properties: no answer is as long

TYPES = frozenset(("null", "boolean", "number", "integer", "string", "array", "object"))
ANNOTATIONS = (
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment",
    "contentEncoding", "contentMediaType", "contentSchema", "$vocabulary", "$dynamicAnchor", "$recursiveAnchor",
)  # fmt: skip
# Formats that llguidance enforces. Any other is an annotation (JSON Schema 2020-12, Validation 7.2.1).
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)  # fmt: skip
UNSUPPORTED = (
    "uniqueItems", "propertyNames", "contains", "not", "if", "dependentRequired", "dependentSchemas", "dependencies",
    "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref", "if", "then", "else", "dependentSchemas", "not")
_SIZES = {
    "minLength": "string", "maxLength": "string", "minItems": "array", "maxItems": "array",
    "minProperties": "object", "maxProperties": "object",
}  # fmt: skip
_ONE = ("additionalProperties", "items", "additionalItems")
_MANY = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_PROPERTY_KEYS = ("properties", "patternProperties")
_DEFINITIONS = ("$defs", "definitions")


def simplify(root: Schema, refuse: Refuse) -> None:
    """Rewrite the schema in place as this module describes. raises RequestError"""
    combines = any(_combines(schema) for schema, _ in reachable(root))
    steps: set[Decimal] = set()
    for schema, path in reachable(root):
        _simplify_one(root, schema, path, refuse, combines)
        if is_number(schema.get("multipleOf")):
            steps.add(Decimal(repr(schema["multipleOf"])))
    if combines and len(steps) > 1:
        check_steps(steps, refuse)


def _combines(schema: Schema) -> bool:
    """Whether bounds of several schemas may apply to one number."""
    bounds = (*LOWER, *UPPER, "multipleOf")
    return "allOf" in schema or (any(key in schema for key in _IN_PLACE) and any(key in schema for key in bounds))


def reachable(root: Schema) -> Iterator[tuple[Schema, str]]:
    """Yield each schema once that the root leads to, with its JSON pointer; a schema before those within it."""
    todo: list[tuple[object, str]] = [(root, "#")]
    visited: dict[int, object] = {}  # keeps the objects alive, so that ids are not reused
    while todo:
        schema, path = todo.pop()
        if not isinstance(schema, dict) or id(schema) in visited:
            continue
        visited[id(schema)] = schema
        yield schema, path
        todo += reversed(list(subschemas(root, schema, path)))


def subschemas(root: Schema, schema: Schema, path: str = "#") -> Iterator[tuple[object, str]]:
    """Yield the schemas within one, the target of its reference among them, each with its JSON pointer."""
    for key in _ONE:
        if isinstance(schema.get(key), dict):
            yield schema[key], f"{path}/{key}"
    for key in _MANY:
        if isinstance(schema.get(key), list):
            yield from ((part, f"{path}/{key}/{i}") for i, part in enumerate(schema[key]))
    for key in _PROPERTY_KEYS:
        yield from _within(schema, key, path)
    if "$ref" in schema:
        target = resolved(root, schema["$ref"])
        if target is not None:
            yield target, str(schema["$ref"])
        else:  # an anchor, or relative to an inner $id: it may be any of them
            for key in _DEFINITIONS:
                yield from _within(root, key, "#")


def _within(schema: Schema, key: str, path: str) -> Iterator[tuple[object, str]]:
    if isinstance(schema.get(key), dict):
        yield from ((part, f"{path}/{key}/{name}") for name, part in schema[key].items())


def resolved(root: object, reference: object, missing: object = None) -> object:
    """Return what a JSON pointer into the root leads to, or `missing` if it is none or leads nowhere."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return missing
    here: Any = root
    for part in unquote(reference).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(here, dict) and name in here:
            here = here[name]
        elif isinstance(here, list) and re.fullmatch("[0-9]{1,6}", name) and int(name) < len(here):
            here = here[int(name)]
        else:
            return missing
    return here


def _simplify_one(root: Schema, schema: Schema, path: str, refuse: Refuse, combines: bool) -> None:
    _remove_annotations(schema)
    types = _types(schema)
    _simplify_sizes(schema, types, path, refuse)
    NumberBounds(schema, path, refuse, combines).simplify(types)
    _remove_neutral(root, schema, types)
    for key in UNSUPPORTED:
        if key in schema:
            raise refuse(
                f'"{key}" at {path} cannot be enforced',
                f'a schema without "{key}"',
                f'leave "{key}" out, and check the answer yourself',
            )
    for key in ("const", "enum"):
        if key in schema:
            check_constant(schema[key], f"{path}/{key}", refuse)


def _remove_annotations(schema: Schema) -> None:
    for key in ANNOTATIONS:
        schema.pop(key, None)
    if isinstance(schema.get("format"), str) and schema["format"] not in FORMATS:
        del schema["format"]
    if "json-schema.org/" not in str(schema.get("$schema", "")):
        schema.pop("$schema", None)


def _types(schema: Schema) -> frozenset[str]:
    """Return the types that an instance may have."""
    type_names = schema.get("type")
    if isinstance(type_names, str):
        return frozenset((type_names,))
    return frozenset(t for t in type_names if isinstance(t, str)) if isinstance(type_names, list) else TYPES


def _simplify_sizes(schema: Schema, types: frozenset[str], path: str, refuse: Refuse) -> None:
    for key, applies_to in _SIZES.items():
        value = schema.get(key)
        if not is_number(value):
            continue
        if isinstance(value, float):
            if not value.is_integer():
                raise refuse(f'"{key}" at {path} is {value!r:.40}', "a whole number", "")
            schema[key] = value = int(value)
        assert isinstance(value, int)
        if value < 0:
            raise refuse(f'"{key}" at {path} is {value!s:.40}', "0 or more", "")
        if _is_neutral(key, value) or applies_to not in types:
            del schema[key]
        elif value >= LONGEST:
            raise refuse(f'"{key}" at {path} is {value!s:.40}', f"less than {LONGEST}", "")


def _remove_neutral(root: Schema, schema: Schema, types: frozenset[str]) -> None:
    """Remove keywords that restrict nothing at this value, and rewrite those that another keyword expresses."""
    if "string" not in types:
        schema.pop("format", None)
    if "array" not in types or schema.get("uniqueItems") is False or schema.get("maxItems") in (0, 1):
        schema.pop("uniqueItems", None)
    if "object" not in types or _allows_strings(root, schema.get("propertyNames", False)):
        schema.pop("propertyNames", None)
    if "contains" not in schema or "array" not in types or _counts_freely(schema):
        for key in ("contains", "minContains", "maxContains"):
            schema.pop(key, None)
    if _is_false(schema.get("not", True)):
        del schema["not"]
    branches = [schema[key] for key in ("then", "else") if key in schema]
    if "if" not in schema or all(is_true(branch) for branch in branches):
        for key in ("if", "then", "else"):
            schema.pop(key, None)
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        if "object" not in types or _depends_on_nothing(schema, schema.get(key)):
            schema.pop(key, None)
    for key, applies_to, other in (
        ("unevaluatedProperties", "object", "additionalProperties"), ("unevaluatedItems", "array", "items")
    ):  # fmt: skip
        if key not in schema:
            continue
        if applies_to not in types or is_true(schema[key]) or (other in schema and not isinstance(schema[other], list)):
            del schema[key]
        elif not any(name in schema for name in (*_IN_PLACE, other)):
            schema[other] = schema.pop(key)


def is_true(schema: object) -> bool:
    """Return whether everything matches the schema: it has only annotations, unknown keywords and neutral values."""
    return schema is True or (isinstance(schema, dict) and not _left(schema))


def _left(schema: Schema) -> set[str]:
    """Return the keywords of a schema that restrict, apart from those whose values are neutral."""
    copy = dict(schema)
    _remove_annotations(copy)
    for key, applies_to in _SIZES.items():
        value, types = copy.get(key), _types(copy)
        if applies_to not in types or (isinstance(value, int | float) and _is_neutral(key, value)):
            copy.pop(key, None)
    return copy.keys() & _RESTRICTING


def _is_neutral(size: str, value: float) -> bool:
    return value >= LONGEST if size.startswith("max") else value == 0


def _is_false(schema: object) -> bool:
    return schema is False or (isinstance(schema, dict) and set(schema) == {"not"} and is_true(schema["not"]))


def _allows_strings(root: Schema, schema: object) -> bool:
    for _ in range(_MAX_REFS):
        if not isinstance(schema, dict) or set(schema) - set(ANNOTATIONS) != {"$ref"}:
            break
        schema = resolved(root, schema["$ref"])
    if not isinstance(schema, dict):
        return schema is True
    left = _left(schema)
    return not left or (left == {"type"} and "string" in _types(schema))


def _counts_freely(schema: Schema) -> bool:
    most = schema.get("maxContains", LONGEST)
    return schema.get("minContains") == 0 and isinstance(most, int | float) and most >= LONGEST


def _depends_on_nothing(schema: Schema, rules: object) -> bool:
    """Return whether `dependentRequired` and its like restrict nothing beyond the required names."""
    if not isinstance(rules, Mapping):
        return False
    required = schema.get("required")
    names = set(map(str, required)) if isinstance(required, list) else set()
    return all(set(map(str, rule)) <= names if isinstance(rule, list) else is_true(rule) for rule in rules.values())


_RESTRICTING = frozenset(
    (
        *_IN_PLACE, *LOWER, *UPPER, *_SIZES, *_ONE, *_MANY, *_PROPERTY_KEYS, *UNSUPPORTED, "type", "const", "enum",
        "required", "pattern", "format", "multipleOf", "minContains", "maxContains",
    )
)  # fmt: skip
