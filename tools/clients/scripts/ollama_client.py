"""Ollama's own Python client: chats, prompts, streams, formats, tools, models."""

import json

import ollama
from report import MODEL, URL, check

client = ollama.Client(host=URL)
HELLO = [{"role": "user", "content": "What is the capital of France?"}]
SHORT = {"num_predict": 16}


@check("chat")
def _() -> None:
    answer = client.chat(model=MODEL, messages=HELLO, options=SHORT)
    assert answer.message.content and answer.done and answer.eval_count <= 16


@check("stream")
def _() -> None:
    parts = list(client.chat(model=MODEL, messages=HELLO, options=SHORT, stream=True))
    assert "".join(part.message.content or "" for part in parts) and parts[-1].done


@check("generate")
def _() -> None:
    assert client.generate(model=f"{MODEL}:latest", prompt="Paris is", options=SHORT).response


@check("format")
def _() -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}}, "required": ["name"]}
    answer = client.chat(model=MODEL, messages=HELLO, format=schema, options={"num_predict": 100})
    assert json.loads(answer.message.content)["name"] is not None


@check("tools")
def _() -> None:
    def now() -> str:
        """The time."""
        return "noon"

    assert client.chat(model=MODEL, messages=HELLO, tools=[now], options=SHORT).done


@check("models")
def _() -> None:
    assert MODEL in [model.model for model in client.list().models] and client.show(MODEL).template


@check("a wrong model is not found")
def _() -> None:
    try:
        client.chat(model="none", messages=HELLO)
    except ollama.ResponseError as error:
        assert error.status_code == 404 and "does not exist" in error.error
        return
    raise AssertionError("no error")
