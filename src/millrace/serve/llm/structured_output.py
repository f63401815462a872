"""Structured output of a request: OpenAI's `response_format`, vLLM's `guided_*` and `structured_outputs`."""

from collections.abc import Mapping

from millrace.errors import RequestError, check_names
from millrace.runtime.request.structured_outputs import StructuredOutputsParams, parse_structured_outputs
from millrace.serve.llm.request_types import SamplingFields

GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
FIELDS = ("response_format", "structured_outputs", *GUIDED)
_TYPES = (
    '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}'
)
_OF_SCHEMA = {"name": str, "schema": dict, "strict": bool, "description": str}


def structured_outputs(request: SamplingFields) -> StructuredOutputsParams | None:
    """Return the constraint of a request; None if it has none. raises RequestError naming the field"""
    names = [name for name in FIELDS if getattr(request, name) is not None]
    formats = {name: _field_constraint(name, getattr(request, name)) for name in names}
    constraining = [name for name, value in formats.items() if value is not None]
    if len(constraining) > 1:
        first, second = constraining[:2]
        raise RequestError(
            f"{first} and {second} are both set", "one of them: an answer has one form", f"leave {second} out", second
        )
    return formats[constraining[0]] if constraining else None


def _field_constraint(name: str, value: object) -> StructuredOutputsParams | None:
    if name == "response_format":
        return response_format(value)
    if name == "structured_outputs":
        return parse_structured_outputs(value, name)
    return parse_structured_outputs({name.removeprefix("guided_"): value}, name)


def response_format(value: object) -> StructuredOutputsParams | None:
    """Return the constraint of `response_format`; schemas are always enforced, so `strict` changes nothing."""
    fields = _object(value, "response_format", {"type", "json_schema"}, _TYPES)
    kind, described = fields.get("type"), fields.get("json_schema")
    if kind not in ("text", "json_object", "json_schema"):
        raise _wrong(f"response_format.type is {kind!r:.60}", _TYPES)
    if (kind == "json_schema") != (described is not None):
        missing = "is missing" if described is None else f'stands beside the type "{kind}"'
        raise _wrong(f"response_format.json_schema {missing}", _TYPES)
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True, field_name="response_format")
    expected = "an object with a schema, and beside it name, strict and description"
    schema = _object(described, "response_format.json_schema", set(_OF_SCHEMA), expected)
    for name, field_type in _OF_SCHEMA.items():
        if schema.get(name) is not None and not isinstance(schema[name], field_type):
            raise _wrong(f"response_format.json_schema.{name} is of type {type(schema[name]).__name__}", expected)
    if schema.get("schema") is None:
        raise _wrong("response_format.json_schema.schema is missing", expected)
    return StructuredOutputsParams(json=schema["schema"], field_name="response_format")  # type: ignore[arg-type]


def _object(value: object, path: str, allowed: set[str], expected: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise _wrong(f"{path} is of type {type(value).__name__}", expected)
    check_names(value, allowed, path, "response_format")
    return value


def _wrong(what: str, expected: str) -> RequestError:
    return RequestError(what, expected, "correct response_format", "response_format")
