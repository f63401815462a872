"""What changes nothing is named in a header, what would change the answer is refused: in every protocol alike."""

from typing import Any

import httpx
import pytest
from msgspec import UNSET

from millrace.serve.app import PROTOCOLS
from millrace.serve.fields import decode, let_go, take_ignored
from millrace.serve.protocol import Body
from tests.serve.support import Running, post

CHAT, RESPONSES, MESSAGES, OLLAMA_CHAT = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
GENERATE = "/api/generate"
ENCRYPTED = "reasoning.encrypted_content"
ASK = [{"role": "user", "content": "Tell me of the mill."}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": ASK, "max_tokens": 2},
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    RESPONSES: {"input": ASK, "max_output_tokens": 2},
    MESSAGES: {"messages": ASK, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": ASK},
    OLLAMA_CHAT: {"messages": ASK, "stream": False, "options": {"num_predict": 2}},
    GENERATE: {"prompt": "a", "stream": False, "options": {"num_predict": 2}},
}
TOLD: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"think": False, "user": "me", "store": True, "verbosity": None}, "think"),
    ("/v1/completions", {"low_vram": True, "mirostat_tau": 5}, "low_vram, mirostat_tau"),
    (RESPONSES, {"reasoning": {"effort": "low"}, "include": [ENCRYPTED]}, f"include.{ENCRYPTED}, reasoning"),
    (RESPONSES, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}, ""),
    (RESPONSES, {"text": {"verbosity": "low"}, "stream_options": {}}, "stream_options, text.verbosity"),
    (RESPONSES, {"store": False, "metadata": {"a": "b"}, "user": "me", "text": {}, "prompt_cache_key": "a"}, ""),
    (MESSAGES, {"context_management": {}, "container": "c", "metadata": {}}, "container, context_management"),
    (MESSAGES, {"thinking": {"type": "disabled"}, "service_tier": "auto"}, ""),
    ("/v1/messages/count_tokens", {"betas": ["a"], "thinking": {"type": "disabled"}}, "betas"),
    (OLLAMA_CHAT, {"think": False}, ""),
    (OLLAMA_CHAT, {"keep_alive": "5m", "truncate": True}, "keep_alive, truncate"),
    (OLLAMA_CHAT, {"options": {"num_ctx": 99, "f16_kv": None, "top_k": 5}}, "options.num_ctx"),
    (OLLAMA_CHAT, {"options": {"mirostat": 0, "mirostat_eta": 0.1, "typical_p": 1.0}}, "options.mirostat_eta"),
    (OLLAMA_CHAT, {"messages": [], "keep_alive": 0, "options": {"num_ctx": 99}}, "keep_alive, options.num_ctx"),
    (GENERATE, {"prompt": "", "options": {"num_keep": 0, "num_gpu": 1, "top_k": 5}}, "options.num_gpu"),
    (GENERATE, {"shift": True, "system": "Be short.", "options": {"use_mmap": True}}, "options.use_mmap, shift"),
]  # fmt: skip
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (RESPONSES, {"max_tool_calls": 1}, "max_tool_calls"),
    (OLLAMA_CHAT, {"options": {"mirostat": 2}}, "options.mirostat"),
    (OLLAMA_CHAT, {"options": {"typical_p": 0.2}}, "options.typical_p"),
    (OLLAMA_CHAT, {"options": {"tfs_z": 0.3}}, "options.tfs_z"),
    (OLLAMA_CHAT, {"options": {"repeat_last_n": 0}}, "options.repeat_last_n"),
    (OLLAMA_CHAT, {"options": {"penalize_newline": False}}, "options.penalize_newline"),
    (GENERATE, {"options": {"num_keep": 4}}, "options.num_keep"),
    (GENERATE, {"prompt": "", "options": {"num_keep": 4}}, "options.num_keep"),
    (OLLAMA_CHAT, {"messages": [], "options": {"mirostat": 2}}, "options.mirostat"),
    (CHAT, {"mirostat": 2}, "mirostat"),
]  # fmt: skip


def ask(server: Running, path: str, **more: object) -> httpx.Response:
    return post(server.url, path, {**BODIES[path], **more})


@pytest.mark.parametrize("path, fields, told", TOLD, ids=[f"{path} {list(fields)}" for path, fields, _ in TOLD])
def test_what_changes_nothing_is_told(server: Running, path: str, fields: dict[str, Any], told: str) -> None:
    reply = ask(server, path, **fields)
    assert reply.status_code == 200 and reply.headers.get("x-millrace-ignored", "") == told, reply.text


@pytest.mark.parametrize("path, fields, name", REFUSED, ids=[f"{path} {name}" for path, _, name in REFUSED])
def test_what_would_change_the_answer_is_refused(server: Running, path: str, fields: dict[str, Any], name: str) -> None:
    reply = ask(server, path, **fields)
    assert reply.status_code == 400 and f"{name} is not supported yet" in reply.text


def test_values_that_ask_for_what_happens_are_taken(server: Running) -> None:
    for fields in ({"top_logprobs": 0, "max_tool_calls": None}, {"top_logprobs": None, "include": None}):
        reply = ask(server, RESPONSES, **fields)
        assert reply.status_code == 200 and "x-millrace-ignored" not in reply.headers, reply.text


def test_an_option_that_ollama_does_not_know_is_refused(server: Running) -> None:
    assert 'did you mean "num_ctx"?' in ask(server, OLLAMA_CHAT, options={"num_ctxs": 5}).json()["error"]


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"options": {"temperature": -1}}, "options.temperature is -1"),
    ({"options": {"top_p": 1.5}}, "options.top_p is 1.5"),
    ({"options": {"top_k": "x"}}, "options.top_k is 'x'"),
    ({"options": {"num_predict": -3}}, "options.num_predict is -3"),
    ({"options": {"seed": 1.5}}, "options.seed is 1.5"),
    ({"options": {"min_p": True}}, "options.min_p is True"),
    ({"options": {"stop": 5}}, "options.stop is 5"),
    ({"options": {"stop": [5]}}, "options.stop[0] is of type int"),
    ({"options": {"num_keep": "4"}}, "options.num_keep is not supported yet"),
    ({"options": {"num_keeps": 4}}, 'did you mean "num_keep"?'),
    ({"options": [1]}, "options is of type array"),
    ({"format": "xml"}, "format is 'xml'"),
    ({"queue_timeout_s": -1}, "queue_timeout_s"),
]


@pytest.mark.parametrize("empty", [{}, {"prompt": ""}, {"messages": []}], ids=["asks", "loads", "loads for a chat"])
@pytest.mark.parametrize("fields, says", BAD_OPTIONS, ids=[str(fields) for fields, _ in BAD_OPTIONS])
def test_what_is_wrong_in_ollamas_requests_is_told(
    server: Running, empty: dict[str, Any], fields: dict[str, Any], says: str
) -> None:
    """Of those that ask for nothing, but have the model there, as of others."""
    reply = ask(server, OLLAMA_CHAT if "messages" in empty else GENERATE, **empty, **fields)
    assert reply.status_code == 400 and says in reply.json()["error"], reply.text


_KINDS = (e.operation.request for p in PROTOCOLS for e in p.endpoints)
KINDS = {kind.__name__: kind for kind in _KINDS if kind is not None}
NEEDED = {"messages": '[{"role": "user", "content": "a"}]', "prompt": '"a"', "input": '"a"', "tokens": "[1]"}
NEEDED |= {"max_tokens": "1", "model": '"m"', "text_1": '"a"', "text_2": '"a"', "query": '"a"', "documents": '["a"]'}
# They say something about accounts and billing, or about caches of their servers: nobody misses them.
UNSAID = {"user", "metadata", "store", "service_tier", "safety_identifier"}
UNSAID |= {"prompt_cache_key", "prompt_cache_retention"}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_struct_says_what_it_ignores(kind: type[Body]) -> None:
    """Each name that it takes with any value and does not have, and nothing that it has and uses."""
    own = set(kind.__struct_fields__)
    assert own >= kind.UNUSED and not own & (kind.OTHERS | set(kind.NOT_YET)) and not kind.OTHERS & set(kind.NOT_YET)
    needed = ", ".join(f'"{name}": {value}' for name, value in NEEDED.items() if name in own)
    body = ", ".join(filter(None, [needed, *(f'"{name}": [[]]' for name in sorted(kind.OTHERS))]))
    asked = decode(f"{{{body}}}".encode(), kind)
    assert set(take_ignored(asked, kind)) == kind.OTHERS - UNSAID
    held = {name for name in asked.__struct_fields__ if getattr(asked, name) not in (UNSET, None)}
    assert held == own & NEEDED.keys()
    let_go(asked)
    assert not [name for name in held - {"max_tokens"} if getattr(asked, name)]
