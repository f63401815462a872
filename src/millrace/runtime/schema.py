"""JSON schemas as llguidance takes them: keywords that restrict nothing are removed, numbers are exact or refused.

llguidance reads every number as a float64, refuses keywords by their name whatever their value, and refuses formats
that it does not know. Here a schema is rewritten in place, as far as it can be reached from its root, so that

- annotations, unknown formats and keywords at their neutral value disappear;
- a bound, constant or length is what the client wrote, or the request is refused;
- a keyword that restricts and cannot be enforced is refused by its name and place.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from millrace.errors import RequestError

Refuse = Callable[[str, str, str], RequestError]
Schema = dict[str, Any]

EXACT = 2**53  # from here on not every integer is a float64
INT64_LOW, INT64_HIGH = -(2**63), 2**63 - 1
# Nothing above -2^63 is as near to it, as a float64; -2^63 itself overflows in llguidance.
LOWEST = INT64_LOW + 1024
LONGEST = 2**31  # characters, items or properties: no answer has as many
# Without an upper bound llguidance needs a power of ten above the lower one, in 64 bits.
OPEN_ENDED = 10**18

TYPES = frozenset(("null", "boolean", "number", "integer", "string", "array", "object"))
ANNOTATIONS = (
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment",
    "contentEncoding", "contentMediaType", "contentSchema", "$vocabulary",
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
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_SIZES = {
    "minLength": "string", "maxLength": "string", "minItems": "array", "maxItems": "array",
    "minProperties": "object", "maxProperties": "object",
}  # fmt: skip
_ONE = ("additionalProperties", "items", "additionalItems")
_MANY = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties")
_DEFINITIONS = ("$defs", "definitions")
_U32 = 2**32


def simplify(root: Schema, refuse: Refuse) -> None:
    """Rewrite the schema in place as this module describes. raises RequestError"""
    steps: set[Decimal] = set()
    combines = False
    for schema, path in reachable(root):
        _simplify_one(root, schema, path, refuse)
        if "multipleOf" in schema:
            steps.add(Decimal(repr(schema["multipleOf"])))
        combines |= any(key in schema for key in ("allOf", "anyOf", "oneOf", "$ref"))
    if combines and len(steps) > 1:
        _check_steps(steps, refuse)


def reachable(root: Schema) -> Iterator[tuple[Schema, str]]:
    """Yield each schema once that the root leads to, with its JSON pointer; a schema before those within it."""
    todo: list[tuple[object, str]] = [(root, "#")]
    seen: dict[int, object] = {}  # holds the objects, whose ids are not reused meanwhile
    while todo:
        schema, path = todo.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen[id(schema)] = schema
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
    for key in _NAMED:
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


def resolved(root: object, reference: object) -> object:
    """Return what a JSON pointer into the root leads to, or None if it is none or leads nowhere."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    here: Any = root
    for part in unquote(reference).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(here, dict) and name in here:
            here = here[name]
        elif isinstance(here, list) and re.fullmatch("[0-9]{1,6}", name) and int(name) < len(here):
            here = here[int(name)]
        else:
            return None
    return here


def _simplify_one(root: Schema, schema: Schema, path: str, refuse: Refuse) -> None:
    _remove_annotations(schema)
    types = _types(schema)
    _simplify_sizes(schema, types, path, refuse)
    _Bounds(schema, path, refuse).simplify(types)
    _remove_neutral(root, schema, types)
    for key in UNSUPPORTED:
        if key in schema:
            raise refuse(f'"{key}" at {path} cannot be enforced', f'a schema without "{key}"', "")
    for key in ("const", "enum"):
        if key in schema:
            _check_constant(schema[key], f"{path}/{key}", refuse)


def _remove_annotations(schema: Schema) -> None:
    for key in ANNOTATIONS:
        schema.pop(key, None)
    if isinstance(schema.get("format"), str) and schema["format"] not in FORMATS:
        del schema["format"]
    if "json-schema.org/" not in str(schema.get("$schema", "")):
        schema.pop("$schema", None)


def _types(schema: Schema) -> frozenset[str]:
    """Return the types that an instance may have."""
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset((named,))
    return frozenset(t for t in named if isinstance(t, str)) if isinstance(named, list) else TYPES


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _simplify_sizes(schema: Schema, types: frozenset[str], path: str, refuse: Refuse) -> None:
    for key, applies_to in _SIZES.items():
        value = schema.get(key)
        if not _is_number(value):
            continue
        if isinstance(value, float):
            if not value.is_integer():
                raise refuse(f'"{key}" at {path} is {value!r:.40}', "a whole number", "")
            schema[key] = value = int(value)
        assert isinstance(value, int)
        if value < 0:
            raise refuse(f'"{key}" at {path} is {value!s:.40}', "0 or more", "")
        neutral = value >= LONGEST if key.startswith("max") else value == 0
        if neutral or applies_to not in types:
            del schema[key]
        elif value >= LONGEST:
            raise refuse(f'"{key}" at {path} is {value!s:.40}', f"less than {LONGEST}", "")


class _Bounds:
    """The numeric keywords of one schema."""

    def __init__(self, schema: Schema, path: str, refuse: Refuse) -> None:
        self._schema, self._path, self._refuse = schema, path, refuse

    def simplify(self, types: frozenset[str]) -> None:
        """Make bounds exact, and integers' bounds inclusive. raises RequestError if that is not possible"""
        schema = self._schema
        if not types & {"number", "integer"}:
            for key in (*_LOWER, *_UPPER, "multipleOf"):
                schema.pop(key, None)
            return
        for bound, exclusive in (_LOWER, _UPPER):  # draft 4 has a boolean beside the bound
            if schema.get(exclusive) is True and _is_number(schema.get(bound)):
                schema[exclusive] = schema.pop(bound)
            elif isinstance(schema.get(exclusive), bool):
                del schema[exclusive]
        for key in (*_LOWER, *_UPPER):
            if _is_number(schema.get(key)):
                schema[key] = self._exact(key, schema[key])
        if "number" in types:
            self._narrow_reals()
        else:
            self._narrow_integers()
        if _is_number(schema.get("multipleOf")):
            self._check_step(schema["multipleOf"], "number" not in types)

    def _exact(self, key: str, value: float) -> float:
        """Return the bound, an integer as int."""
        if isinstance(value, int):
            return value
        if not math.isfinite(value) or abs(value) >= EXACT:
            raise self._inexact(key, value)
        return int(value) if value.is_integer() else value

    def _inexact(self, key: str, value: object) -> RequestError:
        return self._refuse(
            f'"{key}" at {self._path} is {value!s:.60}, which cannot be enforced exactly',
            f"a number between -2^53 and 2^53 (or an int64 bound: {INT64_LOW} or {INT64_HIGH})",
            "",
        )

    def _narrow_reals(self) -> None:
        for key in (*_LOWER, *_UPPER):
            value = self._schema.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and abs(value) > EXACT:
                if value in (INT64_LOW, INT64_HIGH):
                    self._schema[key] = LOWEST if value < 0 else -LOWEST
                elif abs(value) > INT64_HIGH or int(float(value)) != value or key.startswith("exclusive"):
                    raise self._inexact(key, value)  # together with "integer" elsewhere, 1 is added to exclusive ones

    def _narrow_integers(self) -> None:
        """Replace the bounds of an integer by inclusive ones that float64 and int64 represent."""
        schema = self._schema
        lows = [low for key in _LOWER if (low := self._inclusive(key)) is not None]
        highs = [high for key in _UPPER if (high := self._inclusive(key)) is not None]
        low, high = (
            (max(lows, key=lambda b: b[1]) if lows else None),
            (min(highs, key=lambda b: b[1]) if highs else None),
        )
        for key in (*_LOWER, *_UPPER):
            if _is_number(schema.get(key)):
                del schema[key]
        if low is not None:
            written = LOWEST if low[1] == INT64_LOW else low[1]
            too_open = high is None and written >= OPEN_ENDED
            if too_open or not LOWEST <= written <= INT64_HIGH or not _is_int64_float(written):
                raise self._inexact(*low)
            schema["minimum"] = written
        if high is not None:
            too_open = low is None and high[1] <= -OPEN_ENDED
            if too_open or not LOWEST <= high[1] <= INT64_HIGH or not _is_int64_float(high[1]):
                raise self._inexact(*high)
            schema["maximum"] = high[1]

    def _inclusive(self, key: str) -> tuple[str, int] | None:
        """Return the keyword and the outermost integer that it allows."""
        value = self._schema.get(key)
        if not _is_number(value):
            return None
        assert isinstance(value, int | float)
        if key in _LOWER:
            return key, math.floor(value) + 1 if key.startswith("exclusive") else math.ceil(value)
        return key, math.ceil(value) - 1 if key.startswith("exclusive") else math.floor(value)

    def _check_step(self, step: float, integer: bool) -> None:
        """Check that llguidance's conversion of `multipleOf` to a decimal is exact."""
        if not math.isfinite(step) or step <= 0:
            raise self._refuse(f'"multipleOf" at {self._path} is {step!s:.40}', "a number above 0", "")
        if isinstance(step, float) and step.is_integer() and step < EXACT:
            step = int(step)
        self._schema["multipleOf"] = step
        if integer and step == 1:
            del self._schema["multipleOf"]
            return
        coefficient, n_digits = float(step) if step < EXACT else math.inf, 0
        while coefficient < _U32 and not coefficient.is_integer():
            coefficient, n_digits = coefficient * 10, n_digits + 1
        if coefficient >= _U32 or Decimal(coefficient).scaleb(-n_digits) != Decimal(repr(step)):
            raise self._refuse(
                f'"multipleOf" at {self._path} is {step!s:.60}, which cannot be enforced exactly',
                f"a decimal with fewer digits, or an integer below {_U32}", "",
            )  # fmt: skip


def _is_int64_float(value: int) -> bool:
    """llguidance saturates 2^63 to the largest int64."""
    return value == INT64_HIGH or int(float(value)) == value


def _check_steps(steps: Iterable[Decimal], refuse: Refuse) -> None:
    """Check that the least common multiple of all steps, which llguidance forms in 32 bits, does not overflow."""
    n_digits = max(max(0, -int(step.as_tuple().exponent)) for step in steps)
    common = 1
    for step in steps:
        scaled = int(step.scaleb(n_digits))
        if common * scaled >= _U32:
            raise refuse('its "multipleOf" values together cannot be enforced', "fewer digits of them", "")
        common = math.lcm(common, scaled)


def _check_constant(value: object, path: str, refuse: Refuse) -> None:
    todo = [value]
    while todo:
        part = todo.pop()
        if isinstance(part, dict | list):
            todo += part.values() if isinstance(part, dict) else part
        elif _is_number(part):
            assert isinstance(part, int | float)
            is_exact = (
                abs(part) < EXACT if isinstance(part, float) else abs(part) <= INT64_HIGH and int(float(part)) == part
            )
            if not is_exact:
                raise refuse(
                    f"{path} has {part!s:.60}, which cannot be enforced exactly",
                    "numbers between -2^53 and 2^53", "send larger ones as strings",
                )  # fmt: skip


def _remove_neutral(root: Schema, schema: Schema, types: frozenset[str]) -> None:
    """Remove keywords that restrict nothing at this value, and rewrite those that another keyword can say."""
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
    """Everything meets the schema: only annotations and unknown keywords are in it."""
    return schema is True or (isinstance(schema, dict) and not schema.keys() & _RESTRICTING)


def _is_false(schema: object) -> bool:
    return schema is False or (isinstance(schema, dict) and set(schema) == {"not"} and is_true(schema["not"]))


def _allows_strings(root: Schema, schema: object) -> bool:
    for _ in range(32):
        if not isinstance(schema, dict) or set(schema) - set(ANNOTATIONS) != {"$ref"}:
            break
        schema = resolved(root, schema["$ref"])
    if not isinstance(schema, dict):
        return schema is True
    left = {key for key in schema.keys() & _RESTRICTING if not (key == "minLength" and schema[key] == 0)}
    return not left or (left == {"type"} and "string" in _types(schema))


def _counts_freely(schema: Schema) -> bool:
    return schema.get("minContains") == 0 and ("maxContains" not in schema or schema["maxContains"] >= LONGEST)


def _depends_on_nothing(schema: Schema, rules: object) -> bool:
    """Of `dependentRequired` and its like: the names are required anyway, and the schemas restrict nothing."""
    if not isinstance(rules, Mapping):
        return False
    required = schema.get("required")
    names = set(map(str, required)) if isinstance(required, list) else set()
    return all(set(map(str, rule)) <= names if isinstance(rule, list) else is_true(rule) for rule in rules.values())


_RESTRICTING = frozenset(
    (
        *_IN_PLACE, *_LOWER, *_UPPER, *_SIZES, *_ONE, *_MANY, *_NAMED, *UNSUPPORTED, "type", "const", "enum",
        "required", "pattern", "format", "multipleOf", "minContains", "maxContains",
    )
)  # fmt: skip
