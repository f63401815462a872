"""What a server shows of itself: traces of requests, the timeline, the playground's page, receipts."""

import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace import __version__
from millrace.cli.main import run
from millrace.engine.artifact.engine import Engine
from millrace.kernels.library import usable_isas
from tests.e2e.live import Live

CHAT = "/v1/chat/completions"


def ask(tiny: Live, request_id: str, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "Tell me of a mill. " * 24}], "max_tokens": 6, "seed": 1, **fields}
    return httpx.post(tiny.url + CHAT, json=body, headers={"x-request-id": request_id}, timeout=60)


def test_a_trace_adds_up(tiny: Live) -> None:
    began_s = time.perf_counter()
    usage = ask(tiny, "trace-1", cache_salt="a").json()["usage"]
    took_ms = (time.perf_counter() - began_s) * 1e3
    (first,) = httpx.get(tiny.url + "/v1/requests/trace-1/trace").json()["data"]
    assert first["id"] == "trace-1" and first["prompt_tokens"] == usage["prompt_tokens"]
    assert first["generated_tokens"] == usage["completion_tokens"] == sum(s["drawn_tokens"] for s in first["steps"])
    assert sum(s["prompt_tokens"] for s in first["steps"]) == usage["prompt_tokens"] and first["cached_tokens"] == 0
    assert 0 <= first["queued_ms"] <= first["first_token_ms"] <= first["first_sent_ms"] <= first["last_sent_ms"]
    assert first["first_token_ms"] <= first["total_ms"] <= first["last_sent_ms"]
    assert first["preparing_ms"] > 0 and first["preparing_ms"] + first["last_sent_ms"] < took_ms, (
        "its client waited longer"
    )
    for n in (0, 2, 10**8):
        (some,) = httpx.get(f"{tiny.url}/v1/requests/trace-1/trace?steps={n}").json()["data"]
        assert some == {
            **first,
            "steps": first["steps"][-n:] if n else [],
            "prefill_saved_ms": some["prefill_saved_ms"],
        }
    for wrong in ("steps=-1", "steps=", "steps=a", "step=3", "steps=1&x"):
        refused = httpx.get(f"{tiny.url}/v1/requests/trace-1/trace?{wrong}")
        assert (
            refused.status_code == 400
            and refused.json()["error"]["param"] == wrong.rpartition("&")[2].partition("=")[0]
        )
    times = [step["at_ms"] for step in first["steps"]]
    assert times == sorted(times) and all(step["took_ms"] > 0 for step in first["steps"])
    ask(tiny, "trace-2", cache_salt="a")
    (second,) = httpx.get(tiny.url + "/v1/requests/trace-2/trace").json()["data"]
    assert second["cached_tokens"] > 0 == first["prefill_saved_ms"]
    assert second["prefill_saved_ms"] > 0
    assert sum(s["prompt_tokens"] for s in second["steps"]) + second["cached_tokens"] == usage["prompt_tokens"]


def test_requests_of_one_id_are_told_apart(tiny: Live) -> None:
    """Clients choose ids: a reply about one is bounded."""
    for seed in range(12):
        ask(tiny, "again", seed=seed, max_tokens=1 + seed % 3)
    found = httpx.get(tiny.url + "/v1/requests/again/trace").json()["data"]
    assert [one["generated_tokens"] for one in found] == [1 + seed % 3 for seed in range(4, 12)]
    assert all(sum(step["drawn_tokens"] for step in one["steps"]) == one["generated_tokens"] for one in found)


def test_an_unknown_request_has_no_trace(tiny: Live) -> None:
    reply = httpx.get(tiny.url + "/v1/requests/none/trace")
    assert reply.status_code == 404 and "x-request-id" in reply.json()["error"]["message"]


def test_the_timeline_shows_who_was_in_which_step(tiny: Live) -> None:
    ask(tiny, "<b>line", n=2)  # an id that is not sane is replaced
    ask(tiny, "line-7", n=2)
    page = httpx.get(tiny.url + "/timeline")
    assert page.headers["content-type"].startswith("text/html") and "<script" not in page.text
    assert "line-7 0" in page.text and "line-7 1" in page.text and "prompt tokens" in page.text
    assert not re.search(r"(src|href)=.http", page.text)


def test_the_playground_needs_nobody_else(tiny: Live) -> None:
    page = httpx.get(tiny.url + "/")
    assert page.status_code == 200 and "connect-src 'self'" in page.headers["content-security-policy"]
    assert not re.search(r"https?://", page.text), "no CDN"
    for path in set(re.findall(r'(?:fetch\(|href=)["`](/[\w/.]*)', page.text)) - {"/v1/requests/"}:
        assert httpx.get(tiny.url + path).status_code in (200, 405), path


def test_an_answer_with_a_receipt(tiny: Live, tiny_engine: Path) -> None:
    reply = ask(tiny, "r-1", receipt=True, n=2).json()["millrace"]
    receipt = reply["receipt"]
    assert receipt["path"] == CHAT and receipt["seed"] == reply["seed"] == 1 and len(receipt["answers"]) == 2
    assert len(set(receipt["answers"])) == 2 and receipt["release"] == __version__
    assert receipt["engine"] == Engine.open(tiny_engine).manifest.identity and receipt["isa"] == usable_isas()[0]
    again = ask(tiny, "r-2", receipt=True, n=2).json()["millrace"]["receipt"]
    assert again == receipt
    other = ask(tiny, "r-3", receipt=True, n=2, seed=2).json()["millrace"]["receipt"]
    assert other["prompt"] == receipt["prompt"] and other["answers"] != receipt["answers"]
    refused = ask(tiny, "r-4", receipt=True, stream=True)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "receipt"


def lies(request: dict[str, Any], response: dict[str, Any]) -> dict[str, tuple[dict[str, Any], dict[str, Any], str]]:
    """Of what was asked and told, and why each is found."""
    (choice,), receipt = response["choices"], response["millrace"]["receipt"]
    answers, engine = {**receipt, "answers": ["0" * 32]}, {**receipt, "engine": "0" * 32}
    return {
        "text": (request, {**response, "choices": [{**choice, "text": "another"}]}, "not what its tokens say"),
        "prompt": ({**request, "prompt": "Once upon the"}, response, "the request has another prompt"),
        "answers": (request, {**response, "millrace": {"receipt": answers}}, "the answer is another"),
        "engine": (request, {**response, "millrace": {"receipt": engine}}, "is of the engine 0"),
        "nothing": (request, {}, "the response has no receipt"),
    }


NIGHT = [pytest.param(lie, marks=pytest.mark.nightly) for lie in ("prompt", "answers", "engine")]


@pytest.mark.parametrize("lie", ["text", "nothing", *NIGHT])
def test_a_receipt_is_verified_by_a_server_of_its_own(
    tiny: Live, tiny_engine: Path, tmp_path: Path, lie: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    request: dict[str, Any] = {"prompt": "Once upon a", "max_tokens": 8, "receipt": True}
    response = tiny.post("/v1/completions", request).json()
    asked, told = tmp_path / "request.json", tmp_path / "response.json"
    command = ["verify", str(tiny_engine), str(asked), str(told)]
    if lie == "text":
        asked.write_text(json.dumps(request))
        told.write_text(json.dumps(response))
        assert run(command) == 0 and "the same: 1 answer" in capsys.readouterr().err
    *both, why = lies(request, response)[lie]
    for file, said in zip((asked, told), both, strict=True):
        file.write_text(json.dumps(said))
    assert run(command) == 2 and why in capsys.readouterr().err
