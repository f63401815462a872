"""Agent loops of Codex CLI, Claude Code and Ollama's clients: their requests, field by field, over two turns.

The first two were recorded from Codex CLI 0.171 and Claude Code 2.1, with shorter texts; Ollama's own client asks here.
"""

import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from tests.runtime.fakes import limits
from tests.serve.support import VOCABULARY, Fake, post, serving_with
from tests.serve.thinkers import ASK, MESSAGES, OLLAMA, RESPONSES, Thinker, streamed, thinker_of

SCHEMA = {
    "type": "object",
    "properties": {"cmd": {"type": "string"}},
    "required": ["cmd"],
    "additionalProperties": False,
}
CALL = '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "ls"}}\n</tool_call>'
DONE = "All is done."
CONTEXT = 1024  # of the model: much less than the limits that these clients send, as 8,192 is less than 64,000


@pytest.fixture(scope="module")
def model() -> Iterator[Thinker]:
    yield from thinker_of("writes <think>")


def text(role: str, *texts: str, kind: str = "input_text") -> dict[str, Any]:
    parts = [{"type": kind, "text": each} for each in texts]
    return {"type": "message", "id": f"msg_{role}", "role": role, "content": parts}


def test_codex(model: Thinker) -> None:
    model.executor.says, model.executor.opened = CALL, ""
    function = {"type": "function", "strict": False, "description": "Runs a command.", "parameters": SCHEMA}
    tools = [
        {**function, "name": "exec_command"}, {**function, "name": "write_stdin"},
        {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": [{**function, "name": "x"}]},
        {"type": "web_search", "external_web_access": False},
    ]  # fmt: skip
    items = [
        text("developer", "You are an agent."),
        text("developer", "Skills."),
        text("user", "Here."),
        text("user", "Go."),
    ]
    body = {
        "model": "fake", "input": items, "tools": tools, "tool_choice": "auto", "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"}, "store": False, "stream": True, "include": ["reasoning.encrypted_content"],
        "max_output_tokens": 32000, "prompt_cache_key": "01a2", "client_metadata": {"installation": "x"},
    }  # fmt: skip
    answer = streamed(model, RESPONSES, body)
    assert answer.calls == [("exec_command", {"cmd": "ls"})] and answer.ended == "completed"
    model.executor.says = DONE
    call = {"type": "function_call", "status": "completed", "id": "fc_1", "name": "exec_command",
            "arguments": '{"cmd": "ls"}', "call_id": "call_1"}  # fmt: skip
    result = {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": "Exit code 0\nOutput:\n"}
    answer = streamed(model, RESPONSES, {**body, "input": [*items, call, result]})
    assert (answer.content, answer.calls) == (DONE, [])
    ignored = post(model.served.url, RESPONSES, {**body, "stream": False}).headers["x-millrace-ignored"]
    assert ignored == (
        "client_metadata, include.reasoning.encrypted_content, reasoning, tools.namespace, tools.web_search"
    )


def test_claude_code(model: Thinker) -> None:
    model.executor.says, model.executor.opened = CALL, ""
    cached = {"cache_control": {"type": "ephemeral"}}
    body: dict[str, Any] = {
        "model": "fake", "max_tokens": 64000, "stream": True, "thinking": {"type": "adaptive"},
        "metadata": {"user_id": "{}"}, "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "system": [{"type": "text", "text": "x-billing: a"}, {"type": "text", "text": "You are.", **cached}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "A."}, {"type": "text", "text": "Go.", **cached}]},
            {"role": "system", "content": "Available agents."},
        ],
        "tools": [{"name": "exec_command", "description": "Runs.", "input_schema": {"$schema": "x", **SCHEMA}}],
    }  # fmt: skip
    answer = streamed(model, MESSAGES, body)
    assert answer.calls == [("exec_command", {"cmd": "ls"})] and answer.ended == "tool_use"
    assert post(model.served.url, f"{MESSAGES}?beta=true", {**body, "stream": False}).status_code == 200
    model.executor.says = DONE
    used = {"type": "tool_use", "id": "call_1", "name": "exec_command", "input": {"cmd": "ls"}}
    result = {"tool_use_id": "call_1", "type": "tool_result", "content": "(no output)", "is_error": False, **cached}
    turns = [{"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
    answer = streamed(model, MESSAGES, {**body, "messages": body["messages"] + turns})
    assert (answer.content, answer.ended) == (DONE, "end_turn")


FIXED: list[tuple[str, dict[str, Any], str]] = [
    (MESSAGES, {"messages": ASK, "max_tokens": 64000}, "max_tokens"),
    (RESPONSES, {"input": ASK, "max_output_tokens": 32000}, "incomplete"),
    (OLLAMA, {"messages": ASK, "options": {"num_predict": 32000}}, "length"),
]


@pytest.mark.parametrize("path, body, ended", FIXED, ids=[path for path, _, _ in FIXED])
def test_a_limit_beyond_the_context_ends_with_the_context(
    model: Thinker, path: str, body: dict[str, Any], ended: str
) -> None:
    """Claude Code asks every model for 64,000 tokens: the answer has what the prompt leaves."""
    model.executor.says, model.executor.opened = "a" * 2 * CONTEXT, ""
    answer = streamed(model, path, body)
    assert answer.ended == ended and set(answer.content) == {"a"}
    n_prompt = len(model.executor.words.encode(model.executor.prompt, False))
    assert len(model.executor.words.encode(answer.content, False)) == CONTEXT - n_prompt


@pytest.mark.parametrize(
    "path, body", [("/v1/chat/completions", {"messages": ASK}), ("/v1/completions", {"prompt": "a"})]
)
def test_openais_limits_must_fit(model: Thinker, path: str, body: dict[str, Any]) -> None:
    """As vLLM has it."""
    reply = post(model.served.url, path, {**body, "max_tokens": 2 * CONTEXT})
    assert reply.status_code == 400 and f"max_tokens of {2 * CONTEXT} was asked for" in reply.json()["error"]["message"]


def test_the_context_ends_where_the_pages_end() -> None:
    """A server may have fewer pages than one context has."""
    few = limits(vocab_size=VOCABULARY, max_context=512, n_pages=16, page_tokens=4, max_step_tokens=64)
    with serving_with(Fake(limits=few)) as server:
        for path, body in (
            (MESSAGES, {"messages": ASK, "max_tokens": 64000}),
            ("/api/generate", {"prompt": "a", "raw": True, "stream": False, "options": {"num_predict": 32000}}),
            ("/api/generate", {"prompt": "a", "stream": False, "options": {"num_predict": 10**9}}),
        ):
            reply = post(server.url, path, body)
            assert reply.status_code == 200, reply.text
            of = reply.json()
            both = sum(of["usage"].values()) if "usage" in of else of["prompt_eval_count"] + of["eval_count"]
            assert both == 64


def test_ollamas_client(model: Thinker) -> None:
    client = ollama.Client(model.served.url)

    def exec_command(cmd: str) -> str:
        """Runs a command.

        Args:
          cmd: the command
        """
        return f"{cmd}: nothing"

    model.executor.says, model.executor.opened = CALL, ""
    messages: list[Any] = [{"role": "user", "content": "Go."}]
    options = {"num_predict": 32000, "repeat_last_n": 64, "num_ctx": 4096, "temperature": 0}
    first = client.chat(model="fake:latest", messages=messages, tools=[exec_command], options=options, keep_alive="5m")
    assert first.message.tool_calls
    messages.append(first.message)
    for call in first.message.tool_calls:
        result = exec_command(**call.function.arguments)
        messages.append(
            {"role": "tool", "content": result, "tool_name": call.function.name, "name": call.function.name}
        )
    model.executor.says = DONE
    parts = client.chat(model="fake", messages=messages, tools=[exec_command], options=options, stream=True)
    assert "".join(part.message.content or "" for part in parts) == DONE
    shown = json.loads(model.executor.prompt.split("<tool_call>\n")[1].split("\n</tool_call>")[0])
    assert shown == {"name": "exec_command", "arguments": {"cmd": "ls"}} and "ls: nothing" in model.executor.prompt
    client._client.close()
