"""Several names of one model, and patterns; bodies of JSON under any name."""

from collections.abc import Iterator

import anthropic
import httpx
import pytest

from millrace.cli.serve.run import _common_fields
from millrace.serve.backend import _fits
from tests.serve.support import MODEL, Fake, Running, post, serving_with

ASK = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def named() -> Iterator[Running]:
    with serving_with(Fake(aliases=("second", "claude-*", "*/gpt-*-mini"))) as server:
        yield server


@pytest.mark.parametrize("name", [MODEL, "second", "claude-opus-4-8", "claude-", "openai/gpt-5-mini"])
def test_a_name_that_fits_is_answered_by_that_name(named: Running, name: str) -> None:
    for path, more in (("/v1/messages", {"max_tokens": 2}), ("/v1/chat/completions", {"max_tokens": 2}),
                       ("/api/chat", {"stream": False, "options": {"num_predict": 2}})):  # fmt: skip
        reply = post(named.url, path, {"messages": ASK, "model": name, **more})
        assert reply.status_code == 200 and reply.json()["model"] == name
    assert httpx.get(f"{named.url}/v1/models/{name}").json()["id"] == name


@pytest.mark.parametrize("name", ["claude", "Claude-opus", "gpt-5-mini", "x/gpt-mini", ""])
def test_a_name_that_fits_none_is_not_there(named: Running, name: str) -> None:
    reply = post(named.url, "/v1/chat/completions", {"messages": ASK, "model": name})
    assert reply.status_code == 404 and '"claude-*"' in reply.json()["error"]["message"]


def test_patterns_are_not_listed(named: Running) -> None:
    assert [card["id"] for card in httpx.get(f"{named.url}/v1/models").json()["data"]] == [MODEL, "second"]
    assert [model["name"] for model in httpx.get(f"{named.url}/api/tags").json()["models"]] == [MODEL, "second"]


@pytest.mark.parametrize(
    "name, pattern, fits",
    [
        ("", "*", True), ("abc", "*", True), ("abc", "a*c", True), ("ac", "a*c", True), ("a", "a*a", False),
        ("aba", "a*a", True), ("abcabc", "*bc*bc", True), ("abc", "*bc*bc", False), ("a.cd", "a?c*", False),
        ("a[b]", "a[*]", True), ("xaybz", "*a*b*", True), ("xbyaz", "*a*b*", False), ("aab", "*ab*b", False),
    ],
)  # fmt: skip
def test_a_star_stands_for_any_characters(name: str, pattern: str, fits: bool) -> None:
    assert _fits(name, pattern) is fits


def test_bodies_are_json_whatever_they_are_called(named: Running) -> None:
    """As `curl -d` sends them, and programs that name no type."""
    body = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": false}'
    paths = ("/v1/chat/completions", "/v1/messages", "/api/chat", "/tokenize", "/v1/responses")
    for path in paths:
        sent = b'{"input": "a", "max_output_tokens": 2}' if path == "/v1/responses" else body
        sent = b'{"prompt": "a"}' if path == "/tokenize" else sent
        sent = b'{"messages": [], "stream": false}' if path == "/api/chat" else sent
        for kind in (None, "application/x-www-form-urlencoded", "text/plain;charset=UTF-8", "application/octet-stream"):
            headers = {} if kind is None else {"content-type": kind}
            reply = httpx.post(named.url + path, content=sent, headers=headers, timeout=20)
            assert reply.status_code == 200, (path, kind, reply.text)
    for kind in ("application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        reply = httpx.post(named.url + paths[0], content=b"a=b", headers={"content-type": kind})
        assert reply.status_code == 415 and kind.split(";")[0] in reply.text
    page = {"content-type": "text/plain", "origin": "https://a.example"}
    assert httpx.post(named.url + paths[0], content=body, headers=page).status_code == 415, "a page must ask first"


def test_flags_become_names() -> None:
    class Opened:
        name = "own"
        tokenizer = isa = implementation = None

        class engine:  # noqa: N801
            folder = None

            class manifest:  # noqa: N801
                max_context, source, identity, architecture, precision, n_parameters = 1, "", "", "", "", 0

                class cpu:  # noqa: N801
                    weights_bytes = 0

    for given, name, aliases in (
        ((), "own", ()), (("a",), "a", ()), (("a", "b", "a"), "a", ("b",)), (("*",), "own", ("*",)),
        (("*", "b"), "b", ("*",)),
    ):  # fmt: skip
        known = _common_fields(Opened(), given)  # type: ignore[arg-type]
        assert (known["name"], known["aliases"]) == (name, aliases)


def test_anthropics_client_lists_models(server: Running) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        page = client.models.list()
        model = page.data[0]
        assert (model.type, model.id, model.display_name) == ("model", MODEL, MODEL) and page.has_more is False
        assert model.created_at.timestamp() == server.model.created and page.last_id == page.data[-1].id
        assert client.models.retrieve(MODEL) == model
        with pytest.raises(anthropic.NotFoundError) as missing:
            client.models.retrieve("claude")
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert httpx.get(f"{server.url}/v1/models").json()["object"] == "list"


@pytest.mark.parametrize(
    "path, says",
    [
        ("/api/embed", "a request to /api/chat or /api/generate"),
        ("/api/embeddings", "/api/chat"),
        ("/api/chat", "/api/tags"),
    ],
)
def test_ollamas_errors_name_its_paths(server: Running, path: str, says: str) -> None:
    body = {"model": "claude" if path == "/api/chat" else MODEL, "messages": [], "input": "a", "prompt": "a"}
    known = {
        "/api/chat": ("model", "messages"),
        "/api/embed": ("model", "input"),
        "/api/embeddings": ("model", "prompt"),
    }
    error = post(server.url, path, {name: body[name] for name in known[path]}).json()["error"]
    assert says in error and "/v1/" not in error
