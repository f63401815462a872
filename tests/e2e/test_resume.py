"""Answers of `tiny` that are resumed over HTTP and from Python, under a grammar, a penalty and a seed."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from millrace import LLM, SamplingParams, StructuredOutputsParams
from tests.e2e.live import Live

PROMPT = "Once upon a time"
SCHEMA: dict[str, Any] = {
    "type": "object", "required": ["name", "n"], "additionalProperties": False,
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
}  # fmt: skip


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", precision="w4a8", evaluate=False) as model:
        yield model


@pytest.mark.parametrize("more", [{}, {"frequency_penalty": 0.7, "repetition_penalty": 1.1},
                                  {"structured_outputs": StructuredOutputsParams(json=SCHEMA)}],
                         ids=["plain", "penalties", "schema"])  # fmt: skip
def test_the_rest_is_the_uninterrupted_answers(llm: LLM, more: dict[str, Any]) -> None:
    params = SamplingParams(seed=7, temperature=1.1, max_tokens=60, logprobs=1, **more)
    whole = llm.generate(PROMPT, params)[0].outputs[0]
    assert len(whole.token_ids) > 10
    for cut in (1, len(whole.token_ids) // 2, len(whole.token_ids) - 1):
        asked = {"prompt": PROMPT, "resume_token_ids": whole.token_ids[:cut]}
        rest = llm.generate(asked, params)[0].outputs[0]
        assert rest.token_ids == whole.token_ids[cut:] and rest.logprobs == (whole.logprobs or [])[cut:]
        assert whole.text.endswith(rest.text) and rest.finish_reason == whole.finish_reason


def test_over_http(tiny: Live) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT, "seed": 3, "max_tokens": 20, "n": 2, "return_token_ids": True}

    def choices(**more: object) -> list[dict[str, Any]]:
        answer = httpx.post(f"{tiny.url}/v1/completions", json={**asked, **more}, timeout=60)
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()["choices"]
        return found

    whole = choices()
    delivered = [choice["token_ids"][:n] for choice, n in zip(whole, (5, 11), strict=True)]
    for before, rest, ids in zip(whole, choices(resume_token_ids=delivered), delivered, strict=True):
        assert rest["token_ids"] == before["token_ids"][len(ids) :] and before["text"].endswith(rest["text"])
    assert all(len(choice["prompt_token_ids"]) > 3 for choice in whole)
    whole, again = choices(logprobs=0), choices(logprobs=0, resume_token_ids=delivered)
    for before, rest, ids in zip(whole, again, delivered, strict=True):
        places = before["logprobs"]["text_offset"][len(ids) :]
        assert rest["logprobs"]["text_offset"] == [place - places[0] for place in places]
    assert [c["text"] for c in choices(resume_token_ids=[])] == [c["text"] for c in whole]


def test_a_stream_tells_the_ids_that_resume_it(tiny: Live) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT, "seed": 5, "max_tokens": 20, "stream": True, "return_token_ids": True}

    def pieces(**more: object) -> list[dict[str, Any]]:
        with httpx.stream("POST", f"{tiny.url}/v1/completions", json={**asked, **more}, timeout=60) as reply:
            lines = [line[6:] for line in reply.iter_lines() if line.startswith("data: {")]
        return [choice for line in lines for choice in json.loads(line)["choices"]]

    whole = pieces()
    assert "prompt_token_ids" in whole[0] and not any("prompt_token_ids" in piece for piece in whole[1:])
    ids = [token for piece in whole for token in piece["token_ids"]]
    assert len(ids) == 20
    rest = pieces(resume_token_ids=ids[:9])
    assert [token for piece in rest for token in piece["token_ids"]] == ids[9:]
    assert "".join(piece["text"] for piece in whole).endswith("".join(piece["text"] for piece in rest))


def test_a_long_answer_is_resumed_off_the_event_loop(tiny: Live) -> None:
    asked: dict[str, Any] = {
        "prompt": PROMPT,
        "seed": 5,
        "max_tokens": 400,
        "ignore_eos": True,
        "return_token_ids": True,
    }

    def ids(**more: object) -> list[int]:
        answer = httpx.post(f"{tiny.url}/v1/completions", json={**asked, **more}, timeout=60)
        found: list[int] = answer.json()["choices"][0]["token_ids"]
        return found

    whole = ids()
    assert ids(resume_token_ids=whole[:390]) == whole[390:]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"])
def test_other_endpoints_refuse_it(tiny: Live, path: str) -> None:
    message = [{"role": "user", "content": "a"}]
    asked = {"messages": message, "max_tokens": 2, "resume_token_ids": [5]}
    if path == "/v1/responses":
        asked = {"input": "a", "resume_token_ids": [5]}
    if path == "/api/chat":
        del asked["max_tokens"]
    answer = httpx.post(f"{tiny.url}{path}", json=asked, timeout=60)
    assert answer.status_code == 400 and "resume_token_ids" in answer.text


@pytest.mark.parametrize(("more", "why"), [
    ({"prompt": ["a", "b"]}, "cannot be combined with 2 prompts"),
    ({"echo": True}, "cannot be combined with echo"),
    ({"receipt": True}, "cannot be combined with a receipt"),
    ({"resume_token_ids": [1 << 20]}, "has token 1048576"),
    ({"resume_token_ids": [5] * 4000}, "has 4000 tokens"),
])  # fmt: skip
def test_what_is_refused(tiny: Live, more: dict[str, Any], why: str) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 20, "resume_token_ids": [5], **more}
    answer = httpx.post(f"{tiny.url}/v1/completions", json=asked, timeout=60)
    assert answer.status_code == 400 and why in answer.json()["error"]["message"], answer.text
    assert answer.json()["error"]["param"] == "resume_token_ids"
