"""What a client's report means: gaps that are expected, and those that are not."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tools.clients.__main__ import judged
from tools.clients.catalogue import CLIENTS, Gap
from tools.clients.scripted import COMMAND, DONE, SHOWN, scripted
from tools.nightly.packages import npm_commands
from tools.nightly.parts import CLIENTS as NIGHTLY

SCRIPTS = Path(__file__).parents[2] / "tools" / "clients" / "scripts"


def test_every_client_of_the_nights_has_a_script_that_tries_its_gaps() -> None:
    assert set(CLIENTS) == set(NIGHTLY)
    for name, client in CLIENTS.items():
        script = (SCRIPTS / f"{name.replace('-', '_')}_client.py").read_text()
        assert all(f'@check("{gap}")' in script for gap in client.gaps), name
        assert all("==" in package for package in client.packages), "pinned: a night compares with yesterday"
        assert bool(client.packages) != bool(client.npm)
        assert not client.npm or client.npm.rpartition("@")[2].replace(".", "").isdigit()


def test_an_agent_without_npm_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"npm is not installed, and @openai/codex@1.0.0 comes by it: install Node.js"):
        npm_commands(tmp_path / "codex", "@openai/codex@1.0.0")
    assert [*tmp_path.iterdir()] == []


def test_the_scripted_model_calls_a_command_and_ends(tmp_path: Path) -> None:
    """What agents do, without one: both protocols, and a name of the agent's own."""
    tool = {"name": "exec_command", "description": "Runs.", "parameters": {"type": "object"}}
    with scripted("served") as url:
        body: dict[str, Any] = {"model": "served", "input": "Go.", "tools": [{"type": "function", **tool}]}
        (call,) = httpx.post(f"{url}/v1/responses", json=body, timeout=20).json()["output"]
        assert call["name"] == "exec_command" and json.loads(call["arguments"]) == {"cmd": COMMAND}
        items = [{"role": "user", "content": "Go."}, call]
        for output, says in ((SHOWN, DONE), ("nothing", "The tool said something else.")):
            result = {"type": "function_call_output", "call_id": call["call_id"], "output": output}
            reply = httpx.post(f"{url}/v1/responses", json={**body, "input": [*items, result]}, timeout=20).json()
            assert reply["output"][0]["content"][0]["text"] == says
        asked = {"model": "claude-x", "max_tokens": 50, "messages": [{"role": "user", "content": "A title?"}]}
        told = httpx.post(f"{url}/v1/messages", json=asked, timeout=20).json()
        assert told["content"][0]["text"] == DONE


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
