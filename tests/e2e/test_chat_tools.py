"""`LLM.chat(messages, tools=[...])`: the server's prompt, the model's raw text."""

import dataclasses
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace import LLM, SamplingParams
from millrace.checkpoint.chat.chat_template import ChatTemplate
from millrace.errors import RequestError
from tests.e2e.live import Live


@pytest.fixture(scope="module")
def llm(tiny_engine: Path) -> Iterator[LLM]:
    with LLM(tiny_engine) as model:
        yield model


def test_tools_are_in_the_prompt_as_the_server_has_them(llm: LLM, tiny: Live) -> None:
    """vLLM's `LLM.chat(messages, tools=[...])`; the text of an answer is raw."""
    function = {"name": "weather", "description": "of a town", "parameters": {"type": "object", "properties": {}}}
    tools: list[dict[str, object]] = [{"type": "function", "function": function}]
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    hello: list[dict[str, object]] = [{"role": "user", "content": "Is it raining?"}]
    called: list[dict[str, object]] = [*hello, {"role": "assistant", "content": None, "tool_calls": [call]},
              {"role": "tool", "tool_call_id": "c1", "content": "yes"}]  # fmt: skip
    answers = llm.chat([hello, called], SamplingParams(max_tokens=4), tools=tools)
    for messages, answer in zip((hello, called), answers, strict=True):
        asked = {"messages": messages, "tools": tools}
        body = urllib.request.Request(
            f"{tiny.url}/tokenize", json.dumps(asked).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(body) as reply:
            assert answer.prompt_token_ids == json.load(reply)["tokens"]
        assert "weather" in llm.tokenizer.decode(answer.prompt_token_ids) and answer.outputs[0].text
    (without,) = llm.chat(hello, SamplingParams(max_tokens=4), tools=[])
    assert "weather" not in llm.tokenizer.decode(without.prompt_token_ids)


@pytest.mark.parametrize(
    ("tools", "what"),
    [
        ("weather", "tools is 'weather'"),
        ([{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name is 'a b'"),
        ([{"type": "function", "function": {"name": "f"}}] * 2, "tools[1] has the name 'f' again"),
        ([{"type": "web_search"}], "tools[0].type is 'web_search'"),
        ([{"type": "function", "function": {"name": "f", "parameters": {"x": b"bytes"}}}], "is not JSON"),
    ],
    ids=str,
)
def test_what_is_no_tool(llm: LLM, tools: Any, what: str) -> None:
    with pytest.raises(RequestError) as error:
        llm.chat([{"role": "user", "content": "Hi"}], tools=tools)
    assert what in error.value.what and error.value.param == "tools"


def test_penalties_look_back_at_the_last_tokens(llm: LLM) -> None:
    """As far as repeat_last_n says: at all of them, or none."""

    def said(**given: Any) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, **given)
        return [*llm.generate("The river runs. The river", params)[0].outputs[0].token_ids]

    whole, plain = said(repetition_penalty=1.8), said()
    assert said(repetition_penalty=1.8, repeat_last_n=-1) == said(repetition_penalty=1.8, repeat_last_n=999) == whole
    assert said(repetition_penalty=1.8, frequency_penalty=1.0, repeat_last_n=0) == plain != whole
    for n in (8, 16):
        tokens = said(repetition_penalty=50.0, repeat_last_n=n)
        assert all(tokens[i] not in tokens[max(0, i - n) : i] for i in range(32)) and len({*tokens}) < 32


def test_a_system_message_joins_the_users_where_the_template_refuses_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over the server's protocols (tests/serve/test_prompts.py)."""
    refuses = """{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
    {%- for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"""
    template = ChatTemplate(refuses, {})
    opened: Any = llm._opened
    monkeypatch.setattr(llm, "_opened", dataclasses.replace(opened, chat_template=template))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    (answer,) = llm.chat(messages, SamplingParams(max_tokens=1))
    template.close()
    assert llm.tokenizer.decode(answer.prompt_token_ids) == "[user]Be brief.\n\nHi"
