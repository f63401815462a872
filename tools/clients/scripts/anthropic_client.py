"""Anthropic's own Python client: messages, streams, tools and their results, counts, errors."""

import anthropic
from report import MODEL, URL, check

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
HELLO = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {"name": "now", "description": "The time.", "input_schema": {"type": "object", "properties": {}}}


@check("message")
def _() -> None:
    answer = client.messages.create(model=MODEL, messages=HELLO, max_tokens=16, system="Answer in a word.")
    assert answer.content[0].text and answer.usage.output_tokens <= 16


@check("stream")
def _() -> None:
    with client.messages.stream(model=MODEL, messages=HELLO, max_tokens=16) as stream:
        assert "".join(stream.text_stream) == stream.get_final_text() != ""


@check("tools")
def _() -> None:
    asked = {"model": MODEL, "messages": HELLO, "tools": [TOOL], "max_tokens": 100}
    message = client.messages.create(**asked, tool_choice={"type": "tool", "name": "now"})
    (use,) = message.content
    assert use.type == "tool_use" and use.input == {} and message.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "noon"}
    talk = [*HELLO, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**{**asked, "messages": talk}, tool_choice={"type": "none"}).content


@check("stop sequences")
def _() -> None:
    answer = client.messages.create(model=MODEL, messages=HELLO, max_tokens=64, stop_sequences=["a"])
    assert answer.stop_reason == "stop_sequence" and answer.stop_sequence == "a"


@check("tokens are counted")
def _() -> None:
    assert client.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens > 5


@check("a wrong model is not found")
def _() -> None:
    try:
        client.messages.create(model="none", messages=HELLO, max_tokens=4)
    except anthropic.NotFoundError:
        return
    raise AssertionError("no error")
