"""`millrace verify`: what of a response is checked, without a server; tests/e2e/test_seeing.py has one."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from millrace import __version__
from millrace.cli.main import run
from millrace.cli.verify import run as verify

REQUEST: dict[str, Any] = {"prompt": "a", "max_tokens": 3, "receipt": True}
RECEIPT = {"path": "/v1/completions", "release": __version__, "engine": "e" * 32, "isa": "avx2", "seed": 7,
           "prompt": "b" * 32, "answers": ["c" * 32]}  # fmt: skip
RESPONSE: dict[str, Any] = {
    "id": "cmpl-1", "created": 1, "model": "tiny", "system_fingerprint": "fp tiny", "object": "text_completion",
    "choices": [{"index": 0, "text": "abc", "logprobs": None, "finish_reason": "length"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4,
              "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0}},
    "millrace": {"seed": 7, "receipt": RECEIPT},
}  # fmt: skip


@pytest.fixture
def verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    served: list[tuple[str, ...]] = []

    class Server:
        url = "http://x"

    @contextmanager
    def process(model: str, flags: tuple[str, ...], start_s: float) -> Iterator[Server]:
        served.append(flags)
        yield Server()

    def answer(url: str, body: dict[str, Any]) -> dict[str, Any]:
        flag = [flag for flag in served[-1] if flag.startswith("--served-model-name=")]
        named = flag[0].partition("=")[2] if flag else "tiny"
        return {**json.loads(json.dumps(RESPONSE)), "model": named, "id": "cmpl-2", "system_fingerprint": f"fp {named}"}

    monkeypatch.setattr(verify, "ServerProcess", process)
    monkeypatch.setattr(verify, "_ask", answer)

    def check(request: Any, response: Any) -> int:
        for name, content in (("request", request), ("response", response)):
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / f"{name}.json").write_text(text)
        return run(["verify", "tiny", str(tmp_path / "request.json"), str(tmp_path / "response.json")])

    return check


def changed(path: str, value: Any) -> dict[str, Any]:
    """The response with another value at a path."""
    response: dict[str, Any] = json.loads(json.dumps(RESPONSE))
    *names, last = path.split(".")
    part = response
    for name in names:
        part = part[name]
    if value is None:
        del part[last]
    else:
        part[last] = value
    return response


def test_a_response_as_it_came(verified: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert verified(REQUEST, RESPONSE) == 0 and "the same" in capsys.readouterr().err
    assert verified(REQUEST, changed("usage.prompt_tokens_details.cached_tokens", 1)) == 0, "the cache had other pages"
    assert verified({**REQUEST, "model": "alias"}, changed("model", "alias")) == 0
    assert verified(REQUEST, {**RESPONSE, "model": "mine", "system_fingerprint": "fp mine"}) == 0, "served by that name"


@pytest.mark.parametrize(
    "path, value, says",
    [
        ("usage.completion_tokens", 30, "usage"), ("usage.completion_tokens", 3.0, "usage"),
        ("usage.total_tokens", 5, "usage"), ("usage.prompt_tokens", True, "usage"), ("usage", None, "usage"),
        ("usage.prompt_tokens_details.cached_tokens", 2, "usage"), ("usage.more", 1, "usage"),
        ("model", "gpt-5", "fingerprint"), ("model", None, "model"),
        ("model", "*", "model"), ("system_fingerprint", "fp x", "fingerprint"), ("millrace.seed", 8, "seed"),
    ],
)  # fmt: skip
def test_forged_fields_are_found(
    verified: Callable[..., int], capsys: pytest.CaptureFixture[str], path: str, value: Any, says: str
) -> None:
    assert verified(REQUEST, changed(path, value)) == 2 and says in capsys.readouterr().err


def test_the_model_that_a_request_names_is_the_responses(
    verified: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert verified({**REQUEST, "model": "alias"}, RESPONSE) == 2 and "model is" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["request", "response", "within"])
def test_keys_that_come_twice_are_refused(
    verified: Callable[..., int], capsys: pytest.CaptureFixture[str], where: str
) -> None:
    request, response = json.dumps(REQUEST), json.dumps(RESPONSE)
    if where == "request":
        request = request.replace("{", '{"prompt": "b", ', 1)
    elif where == "response":
        response = response.replace("{", '{"choices": [], ', 1)
    else:
        response = response.replace('{"prompt_tokens"', '{"total_tokens": 9, "prompt_tokens"')
    assert verified(request, response) == 2 and "twice" in capsys.readouterr().err
    assert verified(REQUEST, json.dumps(RESPONSE).replace("null", "NaN")) == 2
