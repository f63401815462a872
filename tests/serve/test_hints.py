"""Paths and fields that clients of other servers send: taken where they ask for nothing else, else told what to use."""

import re

import httpx
import pytest

from millrace.serve.ops.management_api import NOT_YET as FIXES
from tests.serve.support import Running, post
from tests.serve.test_bad_requests import CHAT, TEXT, check


def body_of(path: str, **fields: object) -> dict[str, object]:
    asked = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "a"}
    return {**asked, "max_tokens": 2, **fields}


HINTS = {
    "/v1": "this is the base URL", "/v1/": "this is the base URL",
    "/v1/completions/": 'expected: "/v1/completions"; to fix: leave out the slash', "/health/": 'expected: "/health"',
    "/models/": 'expected: "/v1/models"', "/v1/moderations": "another server", "/v1/audio/speech": "another server",
    "/v1/files/": "another server", "/v1/files/file-1/content": "another server",
    "/v1/assistants": "use /v1/responses", "/api/v1/chat/completions": 'expected: "/v1/chat/completions"',
    "/props": "use /v1/metadata", "/infill": "use /v1/completions", "/apiary": "correct the path",
    "/v1/filest": "correct the path",
}  # fmt: skip


@pytest.mark.parametrize("path", HINTS)
def test_a_path_that_is_not_there_says_where_to_go(server: Running, path: str) -> None:
    check(httpx.get(server.url + path), 404, HINTS[path])


@pytest.mark.parametrize("path", ["/api/pull", "/api/create", "/api", "/api/chat/x"])
def test_below_api_it_is_said_as_ollama_says_it(server: Running, path: str) -> None:
    for reply in (httpx.get(server.url + path), post(server.url, path, {})):
        assert reply.status_code == 404 and list(reply.json()) == ["error"]
        assert "not served yet" in reply.json()["error"], reply.text
    wrong_method = httpx.get(server.url + "/api/chat")
    assert wrong_method.status_code == 405 and "one of POST" in wrong_method.json()["error"]


def test_below_messages_it_is_said_as_anthropic_says_it(server: Running) -> None:
    reply = post(server.url, "/v1/messages/batches", {})
    assert reply.status_code == 404 and reply.json()["type"] == "error"
    assert reply.json()["error"]["type"] == "not_found_error" and "batches" in reply.json()["error"]["message"]
    check(httpx.get(server.url + "/v1/messagesx"), 404, "correct the path")


def test_paths_that_hints_name_are_there(server: Running) -> None:
    named = {p for fix in FIXES.values() for p in re.findall(r"(?<=[ ,])/[\w/]+", fix)} - {"/v1"}
    assert len(named) > 5
    for path in named:
        assert httpx.get(server.url + path).status_code in (200, 405), path


OFF = {
    "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "xtc_probability": 0.0, "xtc_threshold": 0.1,
    "typical_p": 1.0, "tfs_z": 1, "top_a": 0, "dynatemp_range": 0.0, "dry_multiplier": 0.0, "dry_base": 1.75,
    "n_keep": 0, "n_probs": 0, "min_keep": 0, "grammar": "", "penalize_nl": False,
}  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_samplers_that_are_off_change_nothing(server: Running, path: str) -> None:
    body = body_of(path)
    plain, off = post(server.url, path, body | {"seed": 1}), post(server.url, path, body | {"seed": 1} | OFF)
    assert off.status_code == 200 and off.json()["choices"] == plain.json()["choices"]
    assert (
        off.headers["x-millrace-ignored"] == "dry_base, mirostat_eta, mirostat_tau, n_keep, penalize_nl, xtc_threshold"
    )
    for name, value in (
        ("mirostat", 2),
        ("xtc_probability", 0.5),
        ("typical_p", 0.9),
        ("min_keep", 7),
        ("grammar", "x"),
    ):
        check(post(server.url, path, body | {name: value}), 400, f"{name} is not supported yet", name)


def test_of_two_names_for_the_length_the_newer_counts(server: Running) -> None:
    reply = post(server.url, CHAT, body_of(CHAT, max_tokens=3, max_completion_tokens=4, ignore_eos=True))
    assert reply.json()["usage"]["completion_tokens"] == 4 and reply.headers["x-millrace-ignored"] == "max_tokens"
    same = post(server.url, CHAT, body_of(CHAT, max_tokens=3, max_completion_tokens=3, ignore_eos=True))
    assert same.json()["usage"]["completion_tokens"] == 3 and "x-millrace-ignored" not in same.headers
    check(
        post(server.url, CHAT, body_of(CHAT, max_completion_tokens=0)),
        400,
        "max_completion_tokens is 0",
        "max_completion_tokens",
    )
