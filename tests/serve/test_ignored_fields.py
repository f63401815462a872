"""What changes nothing is named in a header, what would change the answer is refused: in every protocol alike."""

import json
import time
from typing import Any

import httpx
import pytest
from msgspec import UNSET

from millrace.errors import RequestError
from millrace.serve.app import PROTOCOLS
from millrace.serve.llm.request_decoding import decode, drop_large_fields, pop_ignored_fields, read_request
from millrace.serve.llm.request_types import Body, ChatRequest
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
    (GENERATE, {"prompt": "", "options": {"num_keep": 0, "num_gpu": 1}}, "options.num_gpu, options.num_keep"),
    (GENERATE, {"shift": True, "system": "Be short.", "options": {"use_mmap": True}}, "options.use_mmap, shift"),
]  # fmt: skip
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (RESPONSES, {"max_tool_calls": 1}, "max_tool_calls"),
    (OLLAMA_CHAT, {"options": {"mirostat": 2}}, "options.mirostat"),
    (OLLAMA_CHAT, {"options": {"typical_p": 0.2}}, "options.typical_p"),
    (OLLAMA_CHAT, {"options": {"tfs_z": 0.3}}, "options.tfs_z"),
    (OLLAMA_CHAT, {"options": {"rep_pen_range": 64, "repeat_penalty": 1.1}}, "options.rep_pen_range"),
    (OLLAMA_CHAT, {"options": {"penalize_newline": False, "presence_penalty": 1}}, "options.penalize_newline"),
    (GENERATE, {"options": {"dry_multiplier": 0.8}}, "options.dry_multiplier"),
    (GENERATE, {"prompt": "", "options": {"min_keep": 4}}, "options.min_keep"),
    (CHAT, {"presence_penalty_range": 64, "presence_penalty": 1.1}, "presence_penalty_range"),
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
    assert 'did you mean "num_predict"?' in ask(server, OLLAMA_CHAT, options={"num_predit": 5}).json()["error"]
    assert ask(server, OLLAMA_CHAT, options={"num_ctxs": 5}).headers["x-millrace-ignored"] == "options.num_ctxs"


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"options": {"temperature": -1}}, "options.temperature is -1"),
    ({"options": {"top_p": 1.5}}, "options.top_p is 1.5"),
    ({"options": {"top_k": "x"}}, "options.top_k is 'x'"),
    ({"options": {"num_predict": -3}}, "options.num_predict is -3"),
    ({"options": {"seed": 1.5}}, "options.seed is 1.5"),
    ({"options": {"min_p": True}}, "options.min_p is True"),
    ({"options": {"stop": 5}}, "options.stop is 5"),
    ({"options": {"stop": [5]}}, "options.stop[0] is of type int"),
    ({"options": {"mirostat": "2"}}, "options.mirostat is not supported yet"),
    ({"options": {"logit_bias": {"5": 1}}}, "options.logit_bias is not supported here"),
    ({"options": {"max_tokens": 4}}, 'did you mean "options.num_predict"?'),
    ({"temperature": 0}, 'did you mean "options.temperature"?'),
    ({"response_format": {"type": "json_object"}}, 'did you mean "format"?'),
    ({"options": {"repeat_penaltie": 4}}, 'did you mean "repeat_penalty"?'),
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
    assert (
        own >= kind.UNUSED
        and not own & (kind.IGNORED_FIELDS | set(kind.NOT_YET))
        and not kind.IGNORED_FIELDS & set(kind.NOT_YET)
    )
    needed = ", ".join(f'"{name}": {value}' for name, value in NEEDED.items() if name in own)
    body = ", ".join(filter(None, [needed, *(f'"{name}": [[]]' for name in sorted(kind.IGNORED_FIELDS))]))
    asked = decode(f"{{{body}}}".encode(), kind)
    assert set(pop_ignored_fields(asked, kind)) == kind.IGNORED_FIELDS - UNSAID
    held = {name for name in asked.__struct_fields__ if getattr(asked, name) not in (UNSET, None)}
    assert held == own & NEEDED.keys()
    drop_large_fields(asked)
    assert not [name for name in held - {"max_tokens"} if getattr(asked, name)]


FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FLAT = {"type": "function", "name": "f", "parameters": {"type": "object"}}
BLOCK = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]
# What clients send, and the server does not know: as they send it.
CLIENTS: list[tuple[str, dict[str, Any], str]] = [
    (
        RESPONSES,  # Codex
        {
            "client_metadata": {"a": "b"}, "prompt_cache_key": "k", "parallel_tool_calls": True, "store": False,
            "include": [ENCRYPTED], "reasoning": {"summary": "auto"}, "tool_choice": "auto",
            "tools": [
                {**FLAT, "strict": False}, {"type": "web_search", "external_web_access": False},
                {"type": "namespace", "name": "mcp", "tools": []}, {"type": "custom", "name": "patch"},
            ],
        },
        f"client_metadata, include.{ENCRYPTED}, reasoning, tools.custom, tools.namespace, tools.web_search",
    ),
    (RESPONSES, {"include": ["something.new"], "text": {"colour": 1}}, "include.something.new, text.colour"),
    (
        MESSAGES,  # Claude Code
        {
            "output_config": {"effort": "high"}, "context_management": {"edits": []}, "metadata": {"user_id": "a"},
            "thinking": {"type": "adaptive", "display": "omitted"}, "system": BLOCK,
            "messages": [{"role": "user", "content": BLOCK}, {"role": "system", "content": "a"}],
            "tools": [
                {"name": "f", "input_schema": {"type": "object"}, "eager_input_streaming": True},
                {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
            ],
        },
        "context_management, output_config.effort, thinking.display, tools.eager_input_streaming, "
        "tools.web_search_20250305",
    ),
    (
        CHAT,  # Cline and LiteLLM give back what they were given
        {
            "messages": [
                {"role": "system", "content": BLOCK, "name": "s"}, *ASK,
                {"role": "assistant", "content": "a", "provider_specific_fields": {}, "reasoning_details": []},
                {"role": "user", "name": "me", "content": "b"},
            ],
        },
        "messages.content.cache_control, messages.provider_specific_fields, messages.reasoning_details",
    ),
    (CHAT, {"tools": [{**FUNCTION, "cache": {}}, {"type": "code_interpreter"}]}, "tools.cache, tools.code_interpreter"),
    (
        CHAT,  # open-webui
        {"chat_id": "a", "session_id": "a", "background_tasks": {}, "features": {}, "variables": {}, "model_item": {}},
        "background_tasks, chat_id, features, model_item, session_id, variables",
    ),
    (
        "/v1/completions",  # SillyTavern sends a field by each of its names, and samplers that are off
        {
            "max_new_tokens": 2, "n_predict": 2, "rep_pen": 1, "repetition_penalty": 1, "rep_pen_range": 512,
            "stop": ["a"], "stopping_strings": ["a"], "typical": 1, "tfs": 1, "do_sample": True, "mode": "instruct",
            "truncation_length": 8192, "smoothing_curve": 1, "dynamic_temperature": False, "guidance_scale": 1,
            "negative_prompt": "", "add_bos_token": True, "ban_eos_token": False, "sampler_priority": ["top_k"],
        },
        "max_new_tokens, mode, n_predict, rep_pen, rep_pen_range, sampler_priority, smoothing_curve, stopping_strings, "
        "truncation_length",
    ),
    (OLLAMA_CHAT, {"options": {"repeat_last_n": 64, "num_keep": 5, "something": 1}, "_debug": True},
     "_debug, options.num_keep, options.something"),
    (OLLAMA_CHAT, {"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}}, ""),
    (CHAT, {"repeat_last_n": 64, "penalty_last_n": 64, "repetition_penalty": 1.1}, "penalty_last_n"),
]  # fmt: skip


@pytest.mark.parametrize(
    "path, fields, told", CLIENTS, ids=[f"{path} {next(iter(fields))}" for path, fields, _ in CLIENTS]
)
def test_what_clients_send_and_changes_nothing_is_told(
    server: Running, path: str, fields: dict[str, Any], told: str
) -> None:
    reply = ask(server, path, **fields)
    assert reply.status_code == 200 and reply.headers.get("x-millrace-ignored", "") == told, reply.text


def test_values_of_other_clients_that_change_nothing(server: Running) -> None:
    """SillyTavern's and llama.cpp's clients'."""
    off = {"logit_bias": [], "top_logprobs": 0, "top_k": -1, "min_p": 0, "n": 1, "stop": [], "seed": -1}
    replies = [ask(server, CHAT, max_tokens=16, temperature=1, **off) for _ in range(2)]
    assert [reply.status_code for reply in replies] == [200, 200], replies[0].text
    assert replies[0].json()["millrace"]["seed"] != replies[1].json()["millrace"]["seed"], "-1 is any seed"
    assert ask(server, CHAT, logit_bias=[[5, 1]]).status_code == 400
    long = {"name": "a" * 128, "input_schema": {"type": "object"}}
    assert ask(server, "/v1/messages/count_tokens", tools=[long]).status_code == 200, "as Anthropic"
    assert "1 to 128 letters" in ask(server, MESSAGES, tools=[{**long, "name": "a" * 129}]).text


def test_an_answer_is_the_same_beside_what_is_ignored(server: Running) -> None:
    """The tokens, and so the prompt."""
    plain = ask(server, CHAT, seed=1, max_tokens=8, tools=[FUNCTION]).json()
    more = {"name_of_nothing": 1, "tools": [{**FUNCTION, "x": 1}, {"type": "web_search"}], "chat_id": "a"}
    again = ask(server, CHAT, seed=1, max_tokens=8, **more).json()
    assert again["choices"] == plain["choices"] and again["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


WOULD_CHANGE: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"max_new_tokens": 5}, 'did you mean "max_tokens"?'),
    (CHAT, {"stopping_strings": ["a"], "stop": ["b"]}, 'did you mean "stop"?'),
    (CHAT, {"temperatur": 1}, 'did you mean "temperature"?'),
    (CHAT, {"tool": []}, 'did you mean "tools"?'),
    (CHAT, {"banned_strings": ["a"]}, "banned_strings is not supported yet"),
    (CHAT, {"messages": [{"role": "user", "contnet": "a"}]}, 'unknown field "messages[0].contnet"'),
    (CHAT, {"tools": [{"type": "functoin", "function": {}}]}, 'did you mean "function"?'),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameter": {}}}]}, 'did you mean "parameters"?'),
    (RESPONSES, {"max_tokens": 5}, 'did you mean "max_output_tokens"?'),
    (RESPONSES, {"messages": []}, 'did you mean "input"?'),
    (RESPONSES, {"stop": ["a"]}, "stop is not supported here"),
    (RESPONSES, {"response_format": {"type": "json_object"}}, "did you mean"),
    (RESPONSES, {"include": ["message.output_text.logprob"]}, 'did you mean "message.output_text.logprobs"?'),
    (RESPONSES, {"tools": [{**FLAT, "name": ""}]}, "tools[0] has no name"),
    (RESPONSES, {"tools": [{**FLAT, "parameters": {"type": "array"}}]}, "tools[0].parameters.type is 'array'"),
    (MESSAGES, {"stop": ["a"]}, 'did you mean "stop_sequences"?'),
    (MESSAGES, {"max_completion_tokens": 5}, 'did you mean "max_tokens"?'),
    (MESSAGES, {"presence_penalty": 1}, "presence_penalty is not supported here"),
    (MESSAGES, {"seed": 1}, "seed is not supported here"),
    (MESSAGES, {"tools": [{"name": "f g", "input_schema": {}}]}, "tools[0].name is 'f g'"),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type is 'array'"),
    (MESSAGES, {"tools": [{"name": "f", "input_schem": {}}]}, 'did you mean "input_schema"?'),
    (MESSAGES, {"messages": [{"role": "tool", "content": "a"}]}, "expected: user, assistant or system"),
    (MESSAGES, {"output_config": {"format": {"type": "xml"}}}, "output_config.format is"),
    (OLLAMA_CHAT, {"messages": [{"role": "user", "contnet": "a"}]}, 'did you mean "content"?'),
    (OLLAMA_CHAT, {"messages": [{"role": "bot", "content": "a"}]}, "expected: system, user, assistant or tool"),
    (OLLAMA_CHAT, {"max_tokens": 5}, 'did you mean "options.num_predict"?'),
    (OLLAMA_CHAT, {"options": {"num_predic": 5}}, 'did you mean "num_predict"?'),
]  # fmt: skip


@pytest.mark.parametrize("path, fields, says", WOULD_CHANGE, ids=[f"{path} {says}" for path, _, says in WOULD_CHANGE])
def test_what_would_change_the_answer_is_refused_in_the_protocols_words(
    server: Running, path: str, fields: dict[str, Any], says: str
) -> None:
    reply = ask(server, path, **fields)
    told = reply.json()["error"]
    message = told if isinstance(told, str) else told["message"]
    assert reply.status_code == 400 and says in message, reply.text


def test_the_length_is_named_as_the_protocol_names_it(server: Running) -> None:
    for path, own, others, fields in (
        (RESPONSES, "max_output_tokens", "max_tokens", {"max_output_tokens": 0}),
        (MESSAGES, "max_tokens", "num_predict", {"max_tokens": 0}),
        (OLLAMA_CHAT, "options.num_predict", "max_tokens", {"options": {"num_predict": 0}}),
    ):
        text = ask(server, path, **fields).text
        assert own in text and others not in text.replace(own, ""), text


def test_any_number_of_names_is_told_in_bounded_space(server: Running) -> None:
    names = {f"extra_{i}_" + "k" * 5000: 1 for i in range(100)}
    names |= {"a\n\r\x1b: b": 1, "é, f": 1}
    told = ask(server, CHAT, **names).headers["x-millrace-ignored"]
    assert len(told) < 8000 and "38 more" in told
    assert told.isascii() and told.isprintable()


def test_a_schema_holds_anthropics_answers(server: Running) -> None:
    """Only refused because this model has no end-of-text token."""
    for fields in ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},):
        reply = ask(server, MESSAGES, **fields)
        assert reply.status_code == 400 and "output_config.format" in reply.text


def test_any_number_of_fields_is_read_in_bounded_time() -> None:
    """Names like many of ours, but none near enough; in one object, in many, and in tools."""
    letters = "temperaur"
    names = ["".join(letters[(i // 9**k) % 9] for k in range(11)) for i in range(1, 90_000, 7)]
    start_s = time.process_time()
    for body in (
        {"messages": [], **dict.fromkeys(names, 1)},
        {"messages": [{"role": "user", "content": "", name: 1} for name in names]},
    ):
        with pytest.raises(RequestError, match="unknown fields"):
            read_request(json.dumps(body).encode(), ChatRequest)
    usual = {"messages": [{"role": "user", "content": "", "cache": 1, "timestamp": 1}] * 20_000}
    _, unknown = read_request(json.dumps(usual).encode(), ChatRequest)
    assert set(unknown) == {"messages.cache", "messages.timestamp"}
    assert time.process_time() - start_s < 10, "seconds of a processor, where it was minutes"
