"""Histories of other servers: calls of tools that are unavailable here are rendered, or left out and named."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.support import post
from tests.serve.thinkers import CHAT, MESSAGES, RESPONSES, Thinker, thinker_of

ASK = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go."}]}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Looking."}]}


@pytest.fixture(scope="module")
def model() -> Iterator[Thinker]:
    yield from thinker_of("writes <think>")


def asked(model: Thinker, *items: dict[str, Any]) -> tuple[str, str]:
    """The prompt, and what the header names."""
    model.executor.says, model.executor.opened = "Done.", ""
    body = {"model": "fake", "input": [ASK, *items], "max_output_tokens": 20, "store": False}
    reply = post(model.served.url, RESPONSES, body)
    assert reply.status_code == 200, reply.text
    return model.executor.prompt, reply.headers.get("x-millrace-ignored", "")


def call(name: str, arguments: object) -> str:
    """As the template writes one."""
    shown = {"name": name, "arguments": json.dumps(arguments)}
    return json.dumps(shown)


CODEX: list[dict[str, Any]] = [
    {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "s"}], "content": None,
     "encrypted_content": "gAAA"},
    {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "mills"}},
    {"type": "custom_tool_call", "status": "completed", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"},
    {"type": "custom_tool_call_output", "call_id": "c1", "output": "patched"},
    {"type": "local_shell_call", "id": None, "call_id": "c2", "status": "completed",
     "action": {"type": "exec", "command": ["ls", "-l"], "timeout_ms": 1000}},
    {"type": "function_call_output", "call_id": "c2", "output": "total 0"},
    {"type": "function_call", "call_id": "c3", "name": "mcp__a__b", "namespace": "mcp__a", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c3", "output": [{"type": "input_text", "text": "seen"}]},
    {"type": "ghost_snapshot", "ghost_commit": {"id": "a"}},
    {"type": "compaction", "encrypted_content": "gBBB"},
    SAID,
]  # fmt: skip


def test_what_codex_replays(model: Thinker) -> None:
    prompt, ignored = asked(model, *CODEX)
    assert ignored == "input.compaction, input.ghost_snapshot, input.web_search_call"
    for name, given in (("apply_patch", {"input": "*** Begin"}),
                        ("local_shell", {"type": "exec", "command": ["ls", "-l"], "timeout_ms": 1000}),
                        ("mcp__a__b", {})):  # fmt: skip
        assert json.dumps(given)[1:-1] in prompt.replace("\\", "") and name in prompt
    at = [prompt.index(text) for text in ("apply_patch", "patched", "local_shell", "total 0", "seen", "Looking.")]
    assert at == sorted(at) and "gAAA" not in prompt and "mills" not in prompt


def test_other_calls_and_outputs(model: Thinker) -> None:
    prompt, ignored = asked(
        model,
        {"type": "shell_call", "call_id": "s", "action": {"commands": ["pwd"]}},
        {"type": "shell_call_output", "call_id": "s", "output": [{"stdout": "/srv", "outcome": {"type": "exit"}}]},
        {"type": "apply_patch_call", "call_id": "p", "operation": {"type": "delete_file", "path": "a.txt"}},
        {"type": "apply_patch_call_output", "call_id": "p", "status": "completed"},
        {"type": "mcp_call", "id": "m", "name": "roll", "server_label": "dice", "arguments": "{}", "output": "4"},
        {"type": "local_shell_call", "id": "l", "action": {"command": ["id"]}},
        {"type": "local_shell_call_output", "id": "l", "output": "uid=0"},
    )
    assert ignored == ""
    for text in ("pwd", "/srv", "delete_file", "completed", "roll", "\n4<|im_end|>", "uid=0"):
        assert text in prompt, text


def test_the_output_of_what_is_left_out_goes_with_it(model: Thinker) -> None:
    prompt, ignored = asked(
        model,
        {"type": "computer_call", "call_id": "c", "id": "i", "action": {"type": "screenshot"}},
        {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}},
        {"type": "quantum_call", "call_id": "q"},
        {"type": "function_call_output", "call_id": "q", "output": "of a call that nobody sees"},
        {"type": "function_call_output", "call_id": "before", "output": "of a stored response"},
    )
    told = ("computer_call", "computer_call_output", "function_call_output", "quantum_call")
    assert ignored == ", ".join(f"input.{kind}" for kind in told)
    assert "nobody sees" not in prompt and "of a stored response" in prompt


@pytest.mark.parametrize(
    ("item", "what"),
    [
        ({"type": "function_cal", "call_id": "c", "name": "f", "arguments": "{}"}, 'did you mean "function_call"?'),
        ({"type": "custom_tool_call", "call_id": "c", "name": "f"}, "a whole call with its call_id"),
        ({"type": "function_call", "id": "c", "name": "f", "arguments": "{}"}, "a whole call with its call_id"),
        ({"type": "function_call_output", "call_id": "c"}, "a whole call with its call_id"),
        ({"type": "local_shell_call", "call_id": "c", "action": "ls"}, "a whole call with its call_id"),
        ({"type": "input_image", "image_url": "a"}, "images, files and sound are not read"),
        ({"type": "item_reference", "id": "a"}, "the item itself"),
        ({"type": 5}, "a message, a function_call"),
    ],
    ids=str,
)
def test_what_is_no_item(model: Thinker, item: dict[str, Any], what: str) -> None:
    reply = post(model.served.url, RESPONSES, {"model": "fake", "input": [ASK, item], "max_output_tokens": 2})
    assert reply.status_code == 400 and what in reply.json()["error"]["message"], reply.text
    assert reply.json()["error"]["param"] == "input"


def test_many_unknown_types(model: Thinker) -> None:
    items = [{"type": f"item {i}"} for i in range(1200)]
    reply = post(model.served.url, RESPONSES, {"model": "fake", "input": [ASK, *items], "max_output_tokens": 2})
    assert reply.status_code == 400 and "more than 1024 different unknown types" in reply.text


def test_custom_calls_of_a_chat(model: Thinker) -> None:
    """Of another server, as Chat Completions have them."""
    model.executor.says, model.executor.opened = "Done.", ""
    call = {"id": "c", "type": "custom", "custom": {"name": "apply_patch", "input": "*** Begin"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Go."}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "patched"},
    ]  # fmt: skip
    reply = post(model.served.url, CHAT, {"model": "fake", "messages": messages, "max_tokens": 20})
    assert reply.status_code == 200, reply.text
    prompt = model.executor.prompt
    assert "apply_patch" in prompt and "*** Begin" in prompt and prompt.index("*** Begin") < prompt.index("patched")
    for wrong in ({"id": "c", "type": "custom"}, {"id": "c", "type": "function"}, {"id": "c", "type": "other"}):
        messages[1]["tool_calls"] = [wrong]
        reply = post(model.served.url, CHAT, {"model": "fake", "messages": messages, "max_tokens": 20})
        assert reply.status_code == 400 and "tool_calls[0]" in reply.text, reply.text


def test_tools_of_anthropics_servers(model: Thinker) -> None:
    model.executor.says, model.executor.opened = "Done.", ""
    searched: list[dict[str, Any]] = [
        {"type": "text", "text": "Looking."},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "mills"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result", "url": "u"}]},
        {"type": "text", "text": "Found."},
    ]
    messages = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": searched},
                {"role": "user", "content": "On."}]  # fmt: skip
    reply = post(model.served.url, MESSAGES, {"model": "fake", "max_tokens": 20, "messages": messages})
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-millrace-ignored"] == "messages.server_tool_use, messages.web_search_tool_result"
    assert "Looking.\nFound." in model.executor.prompt and "mills" not in model.executor.prompt
    wrong = [{"role": "user", "content": [{"type": "tol_use"}]}]
    reply = post(model.served.url, MESSAGES, {"model": "fake", "max_tokens": 20, "messages": wrong})
    assert reply.status_code == 400 and "a block of the type" in reply.text
