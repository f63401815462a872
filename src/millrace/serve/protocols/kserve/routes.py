"""Table of KServe's routes for metrics and openapi.json. `http/frontend.py` answers them."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec

from millrace.serve.protocols.kserve.http.infer_request import InferBody

V2_PREFIX = "/v2"
PUBLIC_PATHS = (f"{V2_PREFIX}/health/live", f"{V2_PREFIX}/health/ready")  # without a key, as every server's health
_MODEL, _VERSION, _REGION = f"{V2_PREFIX}/models/{{model}}", "/versions/{version}", "/region/{region}"
_ERROR = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
_ONE = {"inputs": [{"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}


@dataclass(frozen=True, slots=True)
class Route:
    """One route. methods: each with its summary; aliases: further paths of the route; body: example of a POST"""

    path: str
    methods: Mapping[str, str]
    body: Mapping[str, object] | None = None
    aliases: tuple[str, ...] = field(default=())


def _of_model(action: str, method: str, what: str, body: Mapping[str, object] | None = None) -> Route:
    end = f"/{action}" if action else ""
    return Route(f"{_MODEL}{end}", {method: what}, body, (f"{_MODEL}{_VERSION}{end}",))


def _settings(path: str, what: str, body: Mapping[str, object]) -> Route:
    return Route(path, {"GET": f"{what}, as they are", "POST": f"{what}, changed"}, body)


def _shared(kind: str, body: Mapping[str, object]) -> Iterator[Route]:
    above = f"{V2_PREFIX}/{kind}sharedmemory"
    what = f"memory that clients share ({kind})"
    yield Route(f"{above}/status", {"GET": f"Regions of {what}"}, aliases=(f"{above}{_REGION}/status",))
    yield Route(f"{above}{_REGION}/register", {"POST": f"Register a region of {what}"}, body)
    yield Route(
        f"{above}/unregister", {"POST": f"Unregister all regions of {what}"}, {}, (f"{above}{_REGION}/unregister",)
    )


ROUTES = (
    Route(V2_PREFIX, {"GET": "The server, and the extensions of the protocol that it has"}),
    Route(PUBLIC_PATHS[0], {"GET": "Whether it runs"}),
    Route(PUBLIC_PATHS[1], {"GET": "Whether every model that was to be loaded is ready"}),
    _of_model("", "GET", "A model's versions, inputs and outputs"),
    _of_model("ready", "GET", "Whether a model is ready"),
    _of_model("config", "GET", "A model's configuration, completed"),
    _of_model("stats", "GET", "A model's statistics"),
    Route(f"{V2_PREFIX}/models/stats", {"GET": "Statistics of all models"}),
    _of_model("infer", "POST", "Inference: tensors in JSON, or in binary behind it", _ONE),
    _of_model("generate", "POST", "Inference without tensors, one response", {"text_input": "Hello", "max_tokens": 16}),
    _of_model("generate_stream", "POST", "The same, each response as an event",
              {"text_input": "Hello", "max_tokens": 16}),
    Route(f"{V2_PREFIX}/repository/index", {"POST": "Models of the repository, and their states"}, {"ready": True}),
    Route(f"{V2_PREFIX}/repository/models/{{model}}/load",
          {"POST": "Load a model, or say what that would change (dry_run)"}, {"parameters": {"dry_run": True}}),
    Route(f"{V2_PREFIX}/repository/models/{{model}}/unload", {"POST": "Unload a model"},
          {"parameters": {"unload_dependents": False}}),
    _settings(f"{V2_PREFIX}/trace/setting", "Settings of traces", {"trace_level": ["OFF"]}),
    _settings(f"{_MODEL}/trace/setting", "A model's settings of traces", {"trace_level": ["OFF"]}),
    _settings(f"{V2_PREFIX}/logging", "Settings of the log", {"log_verbose_level": 0}),
    *_shared("system", {"key": "/name", "offset": 0, "byte_size": 4096}),
    *_shared("cuda", {"raw_handle": {"b64": ""}, "device_id": 0, "byte_size": 4096}),
)  # fmt: skip
_PATHS = {path: route.path for route in ROUTES for path in (route.path, *route.aliases)}


def pattern_of(path: str) -> str:
    """Return the route of a path, without values from clients, so that there are few; V2_PREFIX if there is none."""
    parts = path.split("/")
    if len(parts) > 3 and parts[2] == "models" and parts[3] != "stats":
        parts[3] = "{model}"
        if len(parts) > 5 and parts[4] == "versions":
            parts[5] = "{version}"
    elif len(parts) > 4 and parts[2:4] == ["repository", "models"]:
        parts[4] = "{model}"
    elif len(parts) > 4 and parts[3] == "region":
        parts[4] = "{region}"
    return _PATHS.get("/".join(parts), V2_PREFIX)


def openapi_paths(needs_key: bool) -> dict[str, dict[str, Any]]:
    """Return the paths of a server with tensor models. MODEL stands for a name, because models may change."""
    return {
        path: {method.lower(): _operation(route, path, method, needs_key) for method in route.methods}
        for route in ROUTES
        for path in (route.path, *route.aliases)
    }


@cache
def openapi_schemas() -> Mapping[str, Any]:
    """Return the schemas of an inference's JSON, by name."""
    _, schemas = msgspec.json.schema_components((InferBody,), ref_template="#/components/schemas/{name}")
    return schemas


def _operation(route: Route, path: str, method: str, needs_key: bool) -> dict[str, Any]:
    body = route.body if method == "POST" else None
    operation: dict[str, Any] = {
        "summary": route.methods[method], "tags": ["KServe v2"],
        "operationId": method.lower() + re.sub(r"\W+", "_", path).rstrip("_"),
        "x-codeSamples": [
            {"lang": "Shell", "source": _curl(path, method, body, needs_key and path not in PUBLIC_PATHS)}
        ],
        "responses": {
            "200": {"description": "as asked"},
            "default": {"description": "what is wrong, with Triton's status and words",
                        "content": {"application/json": {"schema": _ERROR}}},
        },
    }  # fmt: skip
    if path != route.path:
        operation["x-same-as"] = route.path
    if names := re.findall(r"\{(\w+)\}", path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if path not in PUBLIC_PATHS:
        operation["security"] = [{"key": []}] if needs_key else []
    if body is not None:
        is_infer = path.endswith("/infer")
        schema = {"$ref": f"#/components/schemas/{InferBody.__name__}"} if is_infer else {"type": "object"}
        operation["requestBody"] = {"content": {"application/json": {"schema": schema, "example": body}}}
    return operation


def _curl(path: str, method: str, body: Mapping[str, object] | None, with_key: bool) -> str:
    shown = path.replace("{model}", "MODEL").replace("{version}", "1").replace("{region}", "REGION")
    parts = ["curl", shlex.quote("{origin}" + shown)]
    if with_key:
        parts += ["-H", '"authorization: Bearer $KEY"']
    if method == "POST":
        parts += ["-d", shlex.quote(json.dumps(body or {}))]
    return " ".join(parts)
