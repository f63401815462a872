"""What a client's report means: gaps that are expected, and those that are not."""

from pathlib import Path

from tests.serve.support import MODEL, post, running
from tools.clients.__main__ import judged
from tools.clients.catalogue import CLIENTS, RESPONSES, SCHEMA, TOOLS, Gap
from tools.nightly.parts import CLIENTS as NIGHTLY

SCRIPTS = Path(__file__).parents[2] / "tools" / "clients" / "scripts"


def test_every_client_of_the_nights_has_a_script_that_tries_its_gaps() -> None:
    assert set(CLIENTS) == set(NIGHTLY)
    for name, client in CLIENTS.items():
        script = (SCRIPTS / f"{name.replace('-', '_')}_client.py").read_text()
        assert all(f'@check("{gap}")' in script for gap in client.gaps), name
        assert all("==" in package for package in client.packages), "pinned: a night compares with yesterday"


def test_a_gap_is_expected_or_an_error() -> None:
    works, fails = {"check": "chat", "ok": True}, {"check": "tools", "ok": False, "why": "400: tools are refused"}
    gaps = {"tools": Gap("not yet", "tools are refused")}
    assert judged([works, fails], gaps) == []
    assert judged([works, fails], {}) == ["tools: 400: tools are refused"]
    assert judged([works, {**fails, "ok": True}], gaps) == ["tools works: take the gap out of the catalogue"]
    assert judged([works], gaps) == ["tools: the catalogue expects it, and nothing tried it"]
    assert judged([], {}) == ["nothing was tried"]


def test_a_gap_that_fails_for_another_reason_is_an_error() -> None:
    crashed = {"check": "tools", "ok": False, "why": "APIConnectionError: Connection error."}
    (said,) = judged([crashed], {"tools": Gap("not yet", "tools is not supported yet")})
    assert "tools is not supported yet" in said and "APIConnectionError" in said


def test_the_reasons_are_what_the_server_says() -> None:
    """Read off the server itself, so that a change of its words is seen here, and not in a night."""
    with running() as server:
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
        tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
        asked = {
            TOOLS: ("/v1/chat/completions", {**chat, "tools": [tool]}),
            SCHEMA: ("/v1/chat/completions", {**chat, "response_format": form}),
            RESPONSES: ("/v1/responses", {"model": MODEL, "input": "Hi"}),
        }
        for gap, (path, body) in asked.items():
            answer = post(server.url, path, body)
            assert answer.is_client_error and gap.says in answer.json()["error"]["message"], answer.text
