"""The table of KServe's routes: each is answered as it says, in openapi.json, and known to metrics and restrictions."""

import os
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from millrace.serve.protocols.kserve.http.frontend import OF_MODEL
from millrace.serve.protocols.kserve.restricted_apis import group_of_path
from millrace.serve.protocols.kserve.routes import PUBLIC_PATHS, ROUTES, pattern_of
from millrace.serve.settings import ServerSettings
from tests.serve.support import Fake, running
from tests.support.repository import identity, in_process, write_models

PATHS = [(route, path) for route in ROUTES for path in (route.path, *route.aliases)]
# What these examples ask of a server without shared memory, of a model that is not decoupled, and has no text.
REFUSED = {"generate": 400, "generate_stream": 400, "sharedmemory": 501}


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[bool, str]]:
    """With keys, and without."""
    root = write_models(tmp_path_factory.mktemp("models"), {"MODEL": identity("FP32", "4", "max_batch_size: 2")})
    mode: dict[str, Any] = {"model_control_mode": "explicit", "load_model": ("*",)}
    keyed = ServerSettings(port=0, api_keys=("secret",))
    with in_process(root, **mode) as first, in_process(root, keyed, **mode) as second:
        yield {False: first.url, True: second.url}


def described(url: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{url}/openapi.json").json()
    return found


def test_the_document_has_every_route(urls: dict[bool, str]) -> None:
    document = described(urls[False])
    below = {path: set(methods) for path, methods in document["paths"].items() if path.startswith("/v2")}
    assert below == {path: {method.lower() for method in route.methods} for route, path in PATHS}
    actions = {path.removeprefix("/v2/models/{model}").strip("/") for path in below if path.startswith("/v2/models/{m")}
    assert {a for a in actions if not a.startswith("versions/")} == {"", *OF_MODEL}
    references = set(re.findall(r"#/components/schemas/(\w+)", str(document)))
    assert "InferBody" in references <= set(document["components"]["schemas"])
    ids = [one["operationId"] for methods in document["paths"].values() for one in methods.values()]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("with_key", [False, True])
def test_every_example_is_answered_by_its_route(urls: dict[bool, str], with_key: bool) -> None:
    url, document = urls[with_key], described(urls[with_key])
    for route, path in PATHS:
        for method in route.methods:
            one = document["paths"][path][method.lower()]
            command = one["x-codeSamples"][0]["source"].replace("{origin}", url)
            assert ("authorization" in command) == (with_key and path not in PUBLIC_PATHS) == bool(one.get("security"))
            if path.endswith("/unload"):
                continue  # the others need the model
            done = subprocess.run(
                ["bash", "-c", command.replace("curl ", "curl -s -o /dev/null -w '%{http_code}' ", 1)],
                env={**os.environ, "KEY": "secret"}, capture_output=True, text=True, check=True,
            )  # fmt: skip
            expected = next((status for word, status in REFUSED.items() if word in path), 200)
            assert int(done.stdout) == expected, (command, done.stdout)


def test_other_methods_are_refused_and_nothing_else_is_there(urls: dict[bool, str]) -> None:
    url = urls[False]
    for route, path in PATHS:
        shown = path.format(model="MODEL", version="1", region="REGION")
        for method in {"GET", "POST", "DELETE"} - set(route.methods):
            reply = httpx.request(method, url + shown)
            assert (reply.status_code, reply.json()) == (405, {"error": "Method Not Allowed"}), (method, path)
    for path in ("/v2/nothing", "/v2/models/MODEL/nothing", "/v2/models/MODEL/versions/1/trace/setting"):
        assert httpx.get(url + path).json() == {"error": "Not Found"} and pattern_of(path) == "/v2"


def test_patterns_are_few_and_each_is_restricted() -> None:
    for route, path in PATHS:
        shown = path.format(model="a%2Fb", version="12", region="r/../x".replace("/", "%2F"))
        assert pattern_of(shown) == route.path and group_of_path(shown) is not None
    for path in ("/v2/", "/v2/models", "/v2/models/a/versions", "/v2/models/a/x", "/v2/x/region/y", "/v2/models//x//"):
        assert pattern_of(path) == "/v2"


def test_where_there_are_no_tensor_models_nothing_is_said_of_them() -> None:
    with running(Fake()) as server:
        assert not [path for path in described(server.url)["paths"] if path.startswith("/v2")]
