"""A model without a native implementation, served through transformers: the same API, by OpenAI's client."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from millrace.compile.resolve_model import find_engine
from millrace.compile.settings import BuildSettings
from millrace.env import read_env
from millrace.runtime.open_engine import open_engine
from millrace.runtime.settings import RunSettings
from tests.e2e.live import MODEL, Live, serving
from tests.engine.test_transformers import gpt2, write_checkpoint

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["a"],
    "additionalProperties": False,
}}}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("gpt2")
    write_checkpoint(folder, gpt2)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    run = RunSettings(model_impl="transformers", threads=1)
    _, engine = find_engine(str(folder), BuildSettings(max_context=600), read_env(), place=run.place)
    with serving(open_engine(MODEL, engine, run)) as served:
        yield served


@pytest.fixture
def client(server: Live) -> Iterator[Any]:
    with server.client() as client:
        yield client


def test_a_stream_has_the_tokens_of_the_whole_answer(client: Any) -> None:
    question = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, "seed": 3}
    whole = client.chat.completions.create(**question)
    stream = client.chat.completions.create(**question, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == whole.choices[0].message.content and whole.usage.completion_tokens == 12
    completion = client.completions.create(model=MODEL, prompt="Once upon", max_tokens=5, logprobs=2, n=2, seed=1)
    assert len(completion.choices) == 2 and all(len(c.logprobs.tokens) == 5 for c in completion.choices if c.logprobs)


def test_an_answer_keeps_to_its_schema_and_to_a_required_tool(client: Any) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=60, seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    )  # fmt: skip
    assert json.loads(answer.choices[0].message.content or "")["n"] in (1, 2)
    called = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=100, seed=1, tools=[TOOL],
        tool_choice="required",
    )  # fmt: skip
    calls = called.choices[0].message.tool_calls
    assert calls
    for call in calls:
        assert call.type == "function" and call.function.name == "add"
        assert json.loads(call.function.arguments)["a"] in range(10)


def test_it_says_that_it_does_not_run_natively(server: Live) -> None:
    (card,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert card["implementation"] == "transformers"
    about = httpx.get(f"{server.url}/v1/metadata").json()["millrace"]
    assert about["implementation"] == "transformers" and about["architecture"] == "GPT2LMHeadModel"
    assert f'vllm:generation_tokens_total{{model_name="{MODEL}"}}' in httpx.get(f"{server.url}/metrics").text


def test_embedding_rows_are_refused(server: Live) -> None:
    response = server.post("/v1/completions", {"model": MODEL, "prompt_embeds": [[0.0] * 48], "max_tokens": 2})
    assert response.status_code == 400 and "takes token ids only" in response.json()["error"]["message"]
