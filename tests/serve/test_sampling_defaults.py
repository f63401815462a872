"""What samples where a request does not say it: the model's own settings, Ollama's defaults on /api, llama.cpp's."""

from collections.abc import Mapping
from typing import Any, cast

import httpx
import pytest

from millrace.checkpoint.config.generation_config import LLAMA_CPP, read_generation
from millrace.runtime.request.sampling_params import SamplingParams
from millrace.serve.llm.language_model import TextBackend
from millrace.serve.protocols.ollama.endpoints import _params
from millrace.serve.protocols.ollama.protocol import OllamaChatRequest
from tests.serve.support import Fake, post, serving_with

ASK = [{"role": "user", "content": "hi"}]
QWEN = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
OLLAMA = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.0}
ALL = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "repeat_last_n", "seed")


class Model:
    def __init__(self, generation: Mapping[str, object]) -> None:
        said = read_generation(generation)
        self.defaults, self.defaults_origin = said.sampling, said.origin


CASES: list[tuple[Mapping[str, object], dict[str, Any] | None, dict[str, Any]]] = [
    ({}, None, OLLAMA),
    (LLAMA_CPP, None, OLLAMA),
    (QWEN, None, {**OLLAMA, **QWEN}),
    ({"temperature": 0.6}, None, {**OLLAMA, "temperature": 0.6}),
    ({"do_sample": False}, None, {**OLLAMA, "temperature": 0.0}),
    ({**QWEN, "repetition_penalty": 1.05}, None, {**OLLAMA, **QWEN, "repetition_penalty": 1.05}),
    (LLAMA_CPP, {"temperature": 0, "repeat_penalty": 1.2}, {**OLLAMA, "temperature": 0, "repetition_penalty": 1.2}),
    (QWEN, {"top_k": 5, "seed": -1}, {**OLLAMA, **QWEN, "top_k": 5}),
    (
        QWEN,
        {"repeat_penalty": 1.1, "repeat_last_n": -1},
        {**OLLAMA, **QWEN, "repetition_penalty": 1.1, "repeat_last_n": -1},
    ),
    (QWEN, {"top_k": None, "seed": 7}, {**OLLAMA, **QWEN, "seed": 7}),
]


@pytest.mark.parametrize("generation, options, expected", CASES)
def test_what_ollamas_clients_get(
    generation: Mapping[str, object], options: dict[str, Any] | None, expected: dict[str, Any]
) -> None:
    params = _params(OllamaChatRequest(messages=[], options=options), cast(TextBackend, Model(generation)))
    plain = SamplingParams()
    assert {name: getattr(params, name) for name in ALL} == {
        name: ({"repeat_last_n": 64} | expected).get(name, getattr(plain, name)) for name in ALL
    }


def test_the_defaults_are_shown() -> None:
    for generation, shown, origin in (({}, None, None), (QWEN, QWEN, None), (LLAMA_CPP, "set", "llama.cpp")):
        with serving_with(Fake(sampling=generation)) as server:
            (card,) = httpx.get(f"{server.url}/v1/models").json()["data"]
            values = {name: value for name, value in LLAMA_CPP.items() if name != "millrace_sampling_of"}
            assert card.get("default_sampling") == (values if shown == "set" else shown)
            assert card.get("default_sampling_of") == origin
            parameters = post(server.url, "/api/show", {"model": "fake"}).json()["parameters"]
            assert parameters == ("temperature 0.6\ntop_k 20\ntop_p 0.95" if generation is QWEN else "")


def test_they_decide_what_is_drawn() -> None:
    """The same seed gives the same answer as with the values said, and another one than without them."""
    body = {"messages": ASK, "max_tokens": 24, "seed": 5}

    def said(reply: httpx.Response) -> str:
        return str(reply.json()["choices"][0]["message"]["content"])

    values = {name: value for name, value in LLAMA_CPP.items() if name != "millrace_sampling_of"}
    with serving_with(Fake(sampling=LLAMA_CPP)) as server, serving_with() as plain:
        by_default = said(post(server.url, "/v1/chat/completions", body))
        assert by_default == said(post(plain.url, "/v1/chat/completions", {**body, **values}))
        lines = post(
            server.url, "/api/chat", {"messages": ASK, "stream": False, "options": {"num_predict": 24, "seed": 5}}
        )
        by_ollama = said(post(plain.url, "/v1/chat/completions", {**body, **OLLAMA}))
        assert lines.json()["message"]["content"] == by_ollama
