"""Parameters of structured output: a JSON schema, a regular expression, a choice of texts, or a grammar.

The names are vLLM's. `runtime/structured_output/grammar.py` enforces them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from millrace.errors import RequestError, check_names

MAX_BYTES = 128 * 1024  # of a schema, regular expression or grammar, in UTF-8; of all choices together
MAX_DEPTH = 32  # nested objects and lists of a schema; each level of an answer takes two
MAX_CHOICES = 1000
SHORT_CHARACTERS = 8 * 1024  # of names and texts, plus one for each other value
FIELD_NAME = "structured_outputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """What an answer must match; exactly one of the first five is set. raises RequestError naming the field

    json: a JSON schema, as a dict or as a text
    regex: the whole answer matches it (Rust's syntax: no look-around, no back references)
    choice: the answer is one of these texts
    grammar: in Lark's syntax as llguidance reads it, or in llama.cpp's (GBNF)
    json_object: the answer is any JSON object
    field_name: the field that errors name
    """

    json: str | Mapping[str, object] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    field_name: str = FIELD_NAME

    def __post_init__(self) -> None:
        for name, (kind, expected) in _KINDS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise self.refused(f"its {name} is of type {type(value).__name__}", expected)
        if isinstance(self.choice, str):
            raise self.refused("its choice is one text", _KINDS["choice"][1])
        kinds = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(kinds) != 1:
            what = f"it says {' and '.join(kinds)}" if kinds else "it says nothing"
            raise self.refused(
                what, f"one of {', '.join(_KINDS)}", f"leave {kinds[1]} out" if kinds else "say one of them"
            )

    @property
    def kind(self) -> str:
        """Name of the field that is set."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False))

    @property
    def is_short(self) -> bool:
        """Whether it compiles fast, so that it need not wait for slow ones. Examines a bounded part of it."""
        todo: list[object] = [getattr(self, self.kind)]
        left = SHORT_CHARACTERS
        while todo and left > 0:
            part = todo.pop()
            if isinstance(part, Mapping):
                todo += [*islice(part.keys(), left), *islice(part.values(), left)]
            elif isinstance(part, Sequence) and not isinstance(part, str):
                todo += islice(part, left)
            left -= max(1, len(part)) if isinstance(part, str) else 1
        return left > 0

    def text(self) -> str:
        """Return it as text: a schema and choices as JSON. raises RequestError if too large or not writable as JSON"""
        kind = self.kind
        value: Any = _ANY_OBJECT if kind == "json_object" else getattr(self, kind)
        if kind == "choice":
            _check_choices(self, value)
        if not isinstance(value, str):
            value = self._canonical(value if kind == "choice" else dict(value))
        n_bytes = len(value.encode("utf-8", "surrogatepass"))
        if not 0 < n_bytes <= MAX_BYTES:
            raise self.refused(f"its {kind} has {n_bytes} bytes", f"at least 1, and at most {MAX_BYTES}")
        if kind == "json":
            self._check_schema(value)
        return str(value)

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema. raises RequestError as `text` does"""
        assert self.kind in ("json", "json_object"), self.kind
        parsed: dict[str, Any] = json.loads(self.text())
        return parsed

    def refused(self, what: str, expected: str, fix: str = "") -> RequestError:
        return RequestError(
            f"{self.field_name}: {what}", expected, fix or f"correct {self.field_name}", self.field_name
        )

    def _canonical(self, value: object) -> str:
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError) as error:  # values that JSON does not have; a dict that contains itself
            raise self.refused(f"its {self.kind} cannot be written as JSON: {error}", "values that JSON has") from None
        except RecursionError:
            raise self._too_deep() from None

    def _check_schema(self, text: str) -> None:
        try:
            schema = json.loads(text)
        except RecursionError:
            raise self._too_deep() from None
        except ValueError as error:
            raise self.refused(f"its json is not JSON: {error}", "a JSON schema") from None
        if not isinstance(schema, dict):
            raise self.refused(f"its json is of type {type(schema).__name__}", "a JSON schema that is an object")
        level: list[object] = [schema]
        for _ in range(MAX_DEPTH):
            inside = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list))
            level = [value for values in inside for value in values]
        if any(isinstance(value, dict | list) for value in level):
            raise self._too_deep()

    def _too_deep(self) -> RequestError:
        expected = f"at most {MAX_DEPTH} objects and lists inside one another, with those of `properties`"
        return self.refused("its schema is too deep", expected, 'define parts in "$defs", and name them by "$ref"')


_ANY_OBJECT = {"type": "object"}
_KINDS: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    "json": ((str, Mapping), "a JSON schema: an object, or a text"),
    "regex": (str, "a regular expression"),
    "choice": (Sequence, "a list of texts"),
    "grammar": (str, "a grammar"),
    "json_object": (bool, "true or false"),
}


def _check_choices(params: StructuredOutputsParams, choice: Sequence[object]) -> None:
    expected = f"from 1 to {MAX_CHOICES} texts, each of at least a character"
    if not 1 <= len(choice) <= MAX_CHOICES:
        raise params.refused(f"its choice has {len(choice)} texts", expected)
    for i, one in enumerate(choice):
        if not isinstance(one, str) or not one:
            what = "is empty" if one == "" else f"is of type {type(one).__name__}"
            raise params.refused(f"its choice[{i}] {what}", expected)


def parse_structured_outputs(value: object, field_name: str = FIELD_NAME) -> StructuredOutputsParams:
    """Return the parameters from a dict of their names, or as they are. raises RequestError naming the field"""
    if isinstance(value, StructuredOutputsParams):
        return value
    expected = f"an object with one of {', '.join(_KINDS)}"
    if not isinstance(value, Mapping):
        raise RequestError(
            f"{field_name} is of type {type(value).__name__}", expected, f"correct {field_name}", field_name
        )
    check_names(value, _KINDS, field_name, field_name)
    return StructuredOutputsParams(**value, field_name=field_name)
