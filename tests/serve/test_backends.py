"""Models found by name, of several kinds in one server; protocols with errors of their own."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import msgspec
import pytest
from starlette.responses import Response
from starlette.types import ASGIApp

from millrace.errors import ConfigError
from millrace.prometheus import MetricFamily
from millrace.serve.app import PROTOCOLS, create_app
from millrace.serve.backend import Backend, Models, ServedModel
from millrace.serve.http.http_request import RequestContext
from millrace.serve.http.openapi import Operation
from millrace.serve.http.routes import HttpEndpoint, Protocol
from millrace.serve.http.server_context import ServerContext
from millrace.serve.llm.request_types import DetokenizeRequest
from millrace.serve.ops.health import Phase
from millrace.serve.ops.metrics import counter
from millrace.serve.settings import ServerSettings
from tests.serve.support import Fake


@dataclass(frozen=True)
class Beat:
    healthy: bool = True
    idle: bool = True
    last_step_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Adder(ServedModel):
    """A model that adds up numbers: the least that a kind of its own needs."""

    def backend(self, serving: ServerContext) -> "AdderBackend":
        return AdderBackend(self, serving)


class AdderBackend(Backend):
    kind_name = "a model that adds"
    beat = Beat()

    def start(self) -> None: ...

    async def warm_up(self) -> str | None:
        return None

    def health(self) -> Beat:
        return self.beat

    def collect(self) -> Iterator[MetricFamily]:
        yield counter(self.model.name, "vllm:prompt_tokens", "Prompt tokens computed", 7)

    async def abort(self, within_s: float) -> None: ...

    def close(self) -> None: ...


async def add(backend: AdderBackend, call: RequestContext, asked: DetokenizeRequest) -> ASGIApp:
    return Response(json.dumps({"model": call.model, "sum": sum(asked.tokens)}), media_type="application/json")


SUMS = HttpEndpoint(Operation("POST", "/v9/sums", "Add up", True, DetokenizeRequest, msgspec.Struct), add, AdderBackend)
NINE = Protocol((SUMS,), lambda problem: json.dumps({"oops": problem.message, "n": problem.status}).encode())
ADDER = Adder(name="adder", aliases=("plus",), created=1, max_context=8)


class Site:
    """The application itself, in this thread; its engines are not started."""

    def __init__(self, models: list[ServedModel]) -> None:
        self.models = Models(ServerContext(ServerSettings(port=0)), models)
        self._app = create_app(self.models, (*PROTOCOLS, NINE))

    def ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app=self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://site") as client:
                return await client.request(method, path, json=body)

        return asyncio.run(send())

    def refused(self, path: str, body: Any) -> dict[str, Any]:
        reply = self.ask("POST", path, body)
        assert reply.status_code in (400, 404), reply.text
        found: dict[str, Any] = reply.json()["error"]
        return found | {"status": reply.status_code}


@contextmanager
def site(*models: ServedModel) -> Iterator[Site]:
    made = Site(list(models))
    try:
        yield made
    finally:
        made.models.close()


@pytest.fixture
def both() -> Iterator[Site]:
    with site(Fake(aliases=("org/alias",)).model(), ADDER) as made:
        yield made


CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def test_a_model_is_found_by_its_names(both: Site) -> None:
    assert both.ask("POST", "/tokenize", {"model": "org/alias", "prompt": "the"}).json()["count"] > 0
    assert both.ask("POST", "/v9/sums", {"model": "plus", "tokens": [1, 2]}).json() == {"model": "plus", "sum": 3}
    listed = both.ask("GET", "/v1/models").json()["data"]
    assert [(card["id"], card["root"]) for card in listed] == [
        ("fake", "fake"), ("org/alias", "fake"), ("adder", "adder"), ("plus", "adder")
    ]  # fmt: skip
    assert both.ask("GET", "/v1/models/plus").json()["max_model_len"] == 8
    assert [m["shortName"] for m in both.ask("GET", "/v1/metadata").json()["modelInfo"]] == ["fake", "adder"]


def test_without_a_name_the_first_that_is_able_answers() -> None:
    with site(ADDER, Fake().model(), replace(ADDER, name="later", aliases=())) as server:
        assert server.ask("POST", "/v9/sums", {"tokens": [4, 5]}).json() == {"model": "adder", "sum": 9}
        assert server.ask("POST", "/tokenize", {"prompt": "the"}).status_code == 200
        assert server.ask("GET", "/tokenizer_info").json()["model_max_length"] == 512


def test_an_unknown_name_is_told_all_that_there_are(both: Site) -> None:
    error = both.refused("/v1/completions", {"model": "gpt-4o", "prompt": "a"})
    assert error["status"] == 404 and error["code"] == "model_not_found" and error["param"] == "model"
    assert '"fake", "org/alias", "adder", "plus"' in error["message"]


@pytest.mark.parametrize("path, body", [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "a"})])
def test_a_model_is_asked_for_what_it_cannot_do(both: Site, path: str, body: dict[str, Any]) -> None:
    error = both.refused(path, {"model": "plus", **body})
    assert error["status"] == 400 and error["code"] == "model_cannot" and error["param"] == "model"
    assert f'"plus" is a model that adds, and cannot answer {path}' in error["message"]
    assert "expected: a request to /v9/sums; to fix: ask it there, or choose another model: fake" in error["message"]


def test_nobody_can_do_it() -> None:
    with site(Fake().model()) as server:
        reply = server.ask("POST", "/v9/sums", {"tokens": [1]})
        assert reply.status_code == 400 and '"fake" is a language model' in reply.json()["oops"]
        assert "a request to /v1/chat/completions or /v1/completions or /v1/responses" in reply.json()["oops"]
        assert "choose a server of another model" in reply.json()["oops"]
    with site(ADDER) as server:
        assert "is a model that adds" in server.refused("/v1/chat/completions", CHAT)["message"]
        assert server.ask("GET", "/tokenizer_info").status_code == 404


def test_a_protocol_writes_its_errors_in_its_own_way(both: Site) -> None:
    for method, body, status in (("POST", {"model": "x", "tokens": []}, 404), ("POST", {"tokens": 1}, 400),
                                 ("POST", {"tokens": [], "tokenz": 1}, 400), ("GET", None, 405)):  # fmt: skip
        reply = both.ask(method, "/v9/sums", body)
        assert reply.status_code == status and set(reply.json()) == {"oops", "n"} and reply.json()["n"] == status
    assert set(both.ask("GET", "/v9/nothing").json()) == {"error"}, "nobody's: as the first protocol does"


def test_the_documentation_is_of_what_the_models_can(both: Site) -> None:
    paths = both.ask("GET", "/openapi.json").json()["paths"]
    example = paths["/v9/sums"]["post"]["requestBody"]["content"]["application/json"]["example"]
    assert example["model"] == "adder" and "/v1/chat/completions" in paths
    with site(ADDER) as server:
        assert "/v1/chat/completions" not in server.ask("GET", "/openapi.json").json()["paths"]


def test_metrics_of_several_models_are_one_family_with_a_line_for_each(both: Site) -> None:
    lines = both.ask("GET", "/metrics").text.splitlines()
    assert lines.count("# TYPE vllm:prompt_tokens_total counter") == 1
    assert 'vllm:prompt_tokens_total{model_name="fake"} 0.0' in lines
    assert 'vllm:prompt_tokens_total{model_name="adder"} 7.0' in lines
    assert 'vllm:e2e_request_latency_seconds_count{model_name="adder"} 0.0' in lines


def test_a_server_is_as_well_as_its_sickest_model() -> None:
    with site(replace(ADDER, name="well", aliases=()), ADDER) as server:
        server.models.heartbeat.phase = Phase.SERVING
        assert server.ask("GET", "/v1/health/ready").json()["message"] == "well, adder is ready"
        sick = server.models.backends[1]
        assert isinstance(sick, AdderBackend)
        for beat, why in ((Beat(healthy=False), "stopped"), (Beat(idle=False, last_step_s=99.0), "stuck")):
            sick.beat = beat
            reply = server.ask("GET", "/v1/health/ready")
            assert reply.status_code == 503 and why in reply.json()["message"]


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match='2 models are called "plus"'):
        Models(ServerContext(ServerSettings(port=0)), [ADDER, replace(ADDER, name="plus", aliases=())])
