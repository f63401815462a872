"""The OpenAPI document, generated from the table of routes and the structs of requests and replies."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import quote

import msgspec

from millrace import __version__
from millrace.serve.llm.request_types import Body, other_names
from millrace.serve.llm.response_types import ErrorReply
from millrace.serve.llm.unsupported_fields import NEGATIVE

_STATUSES = {
    "400": "the request is wrong; `param` names the field",
    "401": "the API key is missing or wrong",
    "404": "no such model",
    "408": "headers or body did not come in time",
    "413": "the body is too large",
    "415": "the content type is not JSON",
    "422": "the chat template cannot render this",
    "429": "the queue is full; Retry-After says when to come back",
    "431": "the headers are too large",
    "500": "the answer failed",
    "503": "shutting down, the engine has stopped, or no room for another connection or large request; Retry-After",
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    reply: None if it is not JSON; event: one event of a stream of the type `stream_type`, None if there is none
    """

    method: str
    path: str
    summary: str
    protected: bool
    request: type[Body] | None
    reply: type[msgspec.Struct] | None
    event: type[msgspec.Struct] | None = None
    same_as: str | None = None  # the path of which this is another name
    example: Mapping[str, object] = field(default_factory=dict)  # a request's fields, without the model's name
    error: type[msgspec.Struct] = ErrorReply  # as its protocol writes one
    stream_type: str = "text/event-stream"


@dataclass(frozen=True, slots=True)
class ServerDescription:
    """Properties of this server for the document."""

    models: Mapping[str, str]  # path -> the model that answers there
    defaults: Mapping[str, object]  # of its models, for fields of requests
    needs_key: bool


def openapi_document(operations: Sequence[Operation], about: ServerDescription) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document. `x-codeSamples` has a working example of each operation; {origin} is the URL."""
    types: dict[type[msgspec.Struct], None] = {}
    for operation in operations:
        types |= dict.fromkeys(
            kind for kind in (operation.error, operation.reply, operation.event, operation.request) if kind
        )
    references, schemas = msgspec.json.decode(_components(tuple(types)))
    by_type = dict(zip(types, references, strict=True))
    for operation in operations:
        if operation.request is not None:
            _add_other_fields(operation.request, schemas[operation.request.__name__])
    for schema in schemas.values():
        _set_defaults(schema, about.defaults)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, by_type, about)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Millrace",
            "version": __version__,
            "description": "OpenAI's, Anthropic's and Ollama's APIs, and NIM's management.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


@cache
def _components(types: tuple[type[msgspec.Struct], ...]) -> bytes:
    """Return references to the types and their schemas as JSON; takes 50 ms, once per process."""
    return msgspec.json.encode(msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}"))


def _add_other_fields(kind: type[Body], schema: dict[str, Any]) -> None:
    """Add the fields that are no members of the struct: harmless ones, and those with few accepted values."""
    properties = schema["properties"]
    for name in sorted(other_names(kind) - kind.NOT_YET.keys()):
        properties[name] = {"description": "accepted; changes nothing"}
    for name, neutral in kind.NOT_YET.items():
        values = [None, "", [], {}, *(one for one in neutral if one not in ("", [], {}) and one is not NEGATIVE)]
        below = [{"type": "number", "exclusiveMaximum": 0}] if any(one is NEGATIVE for one in neutral) else []
        properties[name] = {"anyOf": [{"enum": values}, *below], "description": "other values are not supported yet"}
    schema["additionalProperties"] = False


def _set_defaults(schema: dict[str, Any], defaults: Mapping[str, object]) -> None:
    """Replace the default null, which only means that a field is left out, by what happens then."""
    for name, field_schema in schema.get("properties", {}).items():
        if "default" in field_schema and field_schema["default"] is None:
            del field_schema["default"]
        if (default := field_schema.pop("x-default", None)) is not None:
            field_schema["default"] = defaults.get(name, default)


def _example(operation: Operation, about: ServerDescription) -> dict[str, object] | None:
    return None if operation.request is None else {"model": about.models[operation.path], **operation.example}


def _curl(operation: Operation, about: ServerDescription) -> str:
    parts = ["curl", shlex.quote("{origin}" + operation.path.replace("{model}", quote(about.models[operation.path])))]
    if operation.protected and about.needs_key:
        parts += ["-H", '"authorization: Bearer $KEY"']
    example = _example(operation, about)
    if example is not None:
        parts += ["-H", "'content-type: application/json'", "-d", shlex.quote(json.dumps(example))]
    elif operation.method != "GET":
        parts += ["-X", operation.method]
    return " ".join(parts)


def _operation(
    operation: Operation, by_type: dict[type[msgspec.Struct], Any], about: ServerDescription
) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "x-codeSamples": [{"lang": "Shell", "source": _curl(operation, about)}],
        "operationId": operation.method.lower() + re.sub(r"\W+", "_", operation.path).rstrip("_"),
        "responses": {"200": _success(operation, by_type)},
    }
    if operation.same_as is not None:
        described["x-same-as"] = operation.same_as
    if "{" in operation.path:
        name = operation.path.split("{")[1].rstrip("}")
        described["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    if operation.protected:
        described["security"] = [{"key": []}] if about.needs_key else []
    if operation.request is not None:
        content = {"application/json": {"schema": by_type[operation.request], "example": _example(operation, about)}}
        described["requestBody"] = {"required": True, "content": content}
        for status, meaning in _STATUSES.items():
            error = {"application/json": {"schema": by_type[operation.error]}}
            described["responses"][status] = {"description": meaning, "content": error}
    return described


def _success(operation: Operation, by_type: dict[type[msgspec.Struct], Any]) -> dict[str, Any]:
    kinds = {"application/json": operation.reply, operation.stream_type: operation.event}
    content = {name: {"schema": by_type[kind]} for name, kind in kinds.items() if kind is not None}
    return {"description": "as asked"} | ({"content": content} if content else {})
