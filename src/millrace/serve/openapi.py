"""The OpenAPI document, from the table of routes and from the very structs that requests and replies are."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from millrace import __version__
from millrace.serve.protocol import NOT_YET, other_names
from millrace.serve.replies import ChatChunk, ErrorReply

_STATUSES = {
    "400": "the request is wrong; `param` names the field",
    "401": "the API key is missing or wrong",
    "404": "no such model",
    "413": "the body is too large",
    "422": "the chat template cannot render this",
    "429": "the queue is full; Retry-After says when to come back",
    "500": "the answer failed",
    "503": "the server is shutting down, or its engine has stopped",
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. A ChatChunk among `replies` is what a stream's events are."""

    method: str
    path: str
    summary: str
    protected: bool
    request: type[msgspec.Struct] | None
    replies: tuple[type[msgspec.Struct], ...]


def document(operations: Sequence[Operation]) -> dict[str, Any]:
    """OpenAPI 3.1."""
    types: dict[type[msgspec.Struct], None] = {ErrorReply: None}
    for operation in operations:
        types |= dict.fromkeys(operation.replies)
        if operation.request is not None:
            types[operation.request] = None
    references, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    by_type = dict(zip(types, references, strict=True))
    for operation in operations:
        if operation.request is not None:
            _add_other_fields(operation.request, schemas[operation.request.__name__])
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, by_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Millrace", "version": __version__, "description": "OpenAI's API and NIM's management API."},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _add_other_fields(kind: type[msgspec.Struct], schema: dict[str, Any]) -> None:
    """Fields that are no members of the struct: harmless ones, and those with a single accepted value."""
    properties = schema["properties"]
    for name in sorted(other_names(kind) - NOT_YET[kind].keys()):
        properties[name] = {"description": "accepted; changes nothing"}
    for name, neutral in NOT_YET[kind].items():
        properties[name] = {"enum": [None, *neutral], "description": "other values are not supported yet"}
    schema["additionalProperties"] = False


def _operation(operation: Operation, by_type: dict[type[msgspec.Struct], Any]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": operation.method.lower() + re.sub(r"\W+", "_", operation.path).rstrip("_"),
        "responses": {"200": _success(operation, by_type)},
    }
    if "{" in operation.path:
        name = operation.path.split("{")[1].rstrip("}")
        described["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    if operation.protected:
        described["security"] = [{}, {"key": []}]  # the empty one: a server without keys asks for none
    if operation.request is not None:
        content = {"application/json": {"schema": by_type[operation.request]}}
        described["requestBody"] = {"required": True, "content": content}
        for status, why in _STATUSES.items():
            error = {"application/json": {"schema": by_type[ErrorReply]}}
            described["responses"][status] = {"description": why, "content": error}
    return described


def _success(operation: Operation, by_type: dict[type[msgspec.Struct], Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for reply in operation.replies:
        kind = "text/event-stream" if reply is ChatChunk else "application/json"
        content[kind] = {"schema": by_type[reply]}
    return {"description": "as asked"} | ({"content": content} if content else {})
