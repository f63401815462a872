"""Every mistake has one clear answer: a status, OpenAI's error object, and a message that names what was wrong."""

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import psutil  # type: ignore[import-untyped]
import pytest

from millrace.serve.llm.request_types import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, wire
from millrace.serve.llm.unsupported_fields import IGNORED
from millrace.serve.settings import ServerSettings
from tests.serve.support import MODEL, START, Fake, Running, connect, post, running, serving_with

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER: dict[str, object] = {"role": "user", "content": "hi"}


def chat(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "messages": [USER], "max_tokens": 2, **fields}


def text(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": "a", "max_tokens": 2, **fields}


def message(**fields: object) -> dict[str, object]:
    return chat(messages=[USER, {"role": "user", "content": "hi", **fields}])


FIELDS: list[tuple[str, dict[str, object], str | None, str]] = [  # path, body, param, the message names
    (CHAT, chat(max_tokens=0), "max_tokens", "max_tokens is 0; expected: an integer of at least 1"),
    (CHAT, chat(max_tokens=-1), "max_tokens", "max_tokens is -1"),
    (CHAT, {"messages": [USER], "max_completion_tokens": -1}, "max_completion_tokens", "max_completion_tokens is -1"),
    (CHAT, chat(max_tokens="many"), "max_tokens", "max_tokens is of type string; expected: an integer or null"),
    (CHAT, chat(max_tokens=10**30), "max_tokens", "maximum context length is 512"),
    (CHAT, chat(temperature=-0.1), "temperature", "temperature is -0.1; expected: a number from 0 to 100"),
    (CHAT, chat(temperature="hot"), "temperature", "temperature is of type string"),
    (CHAT, chat(temperature=True), "temperature", "temperature is of type boolean; expected: a number or null"),
    (CHAT, chat(top_p=0), "top_p", "top_p is 0"),
    (CHAT, chat(top_k=-2), "top_k", "top_k is -2"),
    (CHAT, chat(n=0), "n", "n is 0"),
    (CHAT, chat(n=1000), "n", "n is 1000"),
    (CHAT, chat(seed=2**80), "seed", "seed is"),
    (CHAT, chat(seed=1.5), "seed", "seed is of type number"),
    (CHAT, chat(stop=[""]), "stop", "non-empty strings"),
    (CHAT, chat(stop=["a"] * 17), "stop", "stop has 17 strings; expected: at most 16"),
    (CHAT, chat(stop="a" * 900_000, n=32), "stop", "stop[0] has 900000 characters"),
    (CHAT, chat(stop=[1]), "stop", "stop[0] is of type integer; expected: a string"),
    (CHAT, chat(stop_token_ids=[700]), "stop_token_ids", "from 0 to 699"),
    (CHAT, chat(logit_bias={"700": 1}), "logit_bias", "from 0 to 699"),
    (CHAT, chat(logit_bias={"x": 1}), "logit_bias", "a key of logit_bias is of type string"),
    (CHAT, chat(logit_bias={"7": 101}), "logit_bias", "from -100 to 100"),
    (CHAT, chat(logprobs=5), "logprobs", "logprobs is of type integer; expected: true or false or null"),
    (CHAT, chat(top_logprobs=2), "top_logprobs", "top_logprobs is set, but logprobs is not"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs", "from 0 to 20"),
    (CHAT, chat(stream_options={"include_usage": True}), "stream_options", "stream is not"),
    (CHAT, chat(stream=True, stream_options={"include_usages": True}), "stream_options.include_usages", "usage"),
    (CHAT, chat(max_new_tokens=3), "max_new_tokens", 'unknown field "max_new_tokens"; expected: did you mean "max_'),
    (CHAT, chat(temprature=3), "temprature", 'did you mean "temperature"?'),
    (CHAT, chat(tools=[{"type": "function"}]), "tools", "tools[0] has no function"),
    (CHAT, chat(tools=[{"type": "function", "function": {}}]), "tools", "tools[0] has no name"),
    (CHAT, chat(tools={}), "tools", "an array"),
    (CHAT, chat(functions=[{"name": "f"}]), "functions", "tools takes them"),
    (CHAT, chat(function_call="auto", functions=[{}]), "functions", "functions is not supported yet"),
    (CHAT, chat(reasoning_efort="low"), "reasoning_efort", 'did you mean "reasoning_effort"?'),
    (CHAT, chat(num_predict=3), "num_predict", 'did you mean "max_tokens"?'),
    (CHAT, chat(options={"num_predict": 3}), "options", "options is not supported yet"),
    (CHAT, chat(do_sample=False), "do_sample", "do_sample is not supported yet"),
    (CHAT, chat(tool_choice="required"), "tool_choice", "there are no tools"),
    (CHAT, chat(continue_final_message=True, add_generation_prompt=True), "continue_final_message", "both true"),
    (CHAT, chat(functions=[{}]), "functions", "not supported yet"),
    (CHAT, chat(response_format={"type": "json"}), "response_format", "response_format.type is 'json'"),
    (CHAT, chat(modalities=["text", "audio"]), "modalities", "not supported yet"),
    (CHAT, chat(audio={"voice": "x"}), "audio", "not supported yet"),
    (CHAT, chat(guided_json={}), "guided_json", "this model has no end-of-text token"),
    (CHAT, chat(json_schema={"type": "object"}), "json_schema", "structured_outputs takes it"),
    (CHAT, chat(use_beam_search=True), "use_beam_search", "not supported yet"),
    (CHAT, chat(prompt_logprobs=1), "prompt_logprobs", "with echo and logprobs"),
    (CHAT, chat(messages=[]), "messages", "there are no messages"),
    (CHAT, chat(messages="hi"), "messages", "messages is of type string; expected: an array"),
    (CHAT, chat(messages=None), "messages", "messages is of type null"),
    (CHAT, {"model": MODEL}, "messages", '"messages" is missing'),
    (CHAT, chat(messages=[{}]), "messages", '"messages[0].role" is missing'),
    (CHAT, chat(messages=[{"role": "user"}]), "messages", "messages[0] has no content"),
    (CHAT, message(role="function"), "messages", "tool is the role today"),
    (CHAT, message(contents="x"), "messages[1].contents", 'did you mean "content"?'),
    (CHAT, message(content=5), "messages", "messages[1].content is of type integer"),
    (CHAT, message(content=[{"type": "image_url", "image_url": {}}]), "messages", "images and sound"),
    (CHAT, message(content=[{"type": "text", "text": "a", "txet": ""}]), "messages[1].content[0].txet", '"text"'),
    (CHAT, message(tool_calls=[{"id": "x"}]), "messages", '"messages[1].tool_calls[0].function" is missing'),
    (CHAT, message(tool_calls=[{"function": {"name": 3}}]), "messages", "function.name is of type integer"),
    (CHAT, message(tool_calls=[{"function": {"name": "f", "argument": ""}}]),
     "messages[1].tool_calls[0].function.argument", '"arguments"'),
    (CHAT, message(tool_calls=[{"function": {"name": "f"}}], role="user"), "messages", "and the role user"),
    (CHAT, message(content="\udc00"), None, ""),
    (CHAT, chat(messages=[{"role": "user", "content": "word " * 700}]), "messages", "maximum context length is 512"),
    (TEXT, text(prompt=[]), "prompt", "an empty list"),
    (TEXT, text(prompt=""), "prompt", "no tokens"),
    (TEXT, text(prompt=[[]]), "prompt", "no tokens"),
    (TEXT, text(prompt=[""]), "prompt", "no tokens"),
    (TEXT, text(prompt=["a", ""]), "prompt", "no tokens"),
    (TEXT, text(prompt="", echo=True, stream=True), "prompt", "no tokens"),
    (TEXT, text(prompt=[1, "a"]), "prompt", "mixes"),
    (TEXT, text(prompt=[1.5]), "prompt", "prompt[0] is of type number"),
    (TEXT, text(prompt={"a": 1}), "prompt", "prompt is of type object"),
    (TEXT, text(prompt=[700]), "prompt", "prompt token 0 is 700"),
    (TEXT, text(prompt=[-1]), "prompt", "prompt token 0 is -1"),
    (TEXT, text(prompt=[2**70]), "prompt", "prompt"),
    (TEXT, text(prompt=["a"] * 300), "prompt", "at most 264"),
    (TEXT, text(prompt=[1] * 511), "max_tokens", "maximum context length is 512"),
    (TEXT, text(suffix="b"), "suffix", "not supported yet"),
    (TEXT, text(best_of=2), "best_of", "best_of equal to n"),
    (TEXT, text(max_tokens=0, logprobs=1), "max_tokens", "at least 1"),
    (TEXT, text(max_tokens=0, echo=True, min_tokens=2), "min_tokens", "min_tokens is 2 and max_tokens is 0"),
    (TEXT, text(max_tokens=0, min_tokens=2), "min_tokens", "min_tokens is 2 and max_tokens is 0"),
    (TEXT, text(prompt=[1] * 512, max_tokens=0, echo=True), "prompt", "an answer takes at least 1"),
    (TEXT, text(logprobs=True), "logprobs", "logprobs is of type boolean"),
    (TEXT, text(logprobs=21), "logprobs", "from 0 to 20"),
    (TEXT, text(min_tokens=3), "min_tokens", "at most max_tokens"),
    (TEXT, text(messages=[]), "messages", 'unknown field "messages"'),
    ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt", "either prompt or messages"),
    ("/tokenize", {"text": "a"}, "text", 'unknown field "text"'),
    ("/detokenize", {"tokens": [1, 700]}, "tokens", "tokens[1] is 700"),
    ("/detokenize", {"tokens": [1] * 513}, "tokens", "tokens has 513 ids; expected: at most 512"),
    ("/detokenize", {"tokens": "a"}, "tokens", "tokens is of type string; expected: an array"),
]  # fmt: skip


def check(reply: httpx.Response, status: int, names: str, param: str | None = None) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json" and reply.headers["x-request-id"]
    error: dict[str, Any] = reply.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"] and names in error["message"], error
    assert "Traceback" not in reply.text and len(reply.text) < 2000
    if param is not None:
        assert error["param"] == param, error
    return error


@pytest.mark.parametrize("path, body, param, names", FIELDS, ids=lambda v: None if isinstance(v, dict) else str(v)[:40])
def test_a_wrong_field_is_named(
    server: Running, path: str, body: dict[str, object], param: str | None, names: str
) -> None:
    content = json.dumps(body)  # not httpx's own: it would refuse a lone surrogate before the server can
    reply = httpx.post(server.url + path, content=content, headers={"content-type": "application/json"})
    check(reply, 400, names, param)


BODIES: list[tuple[bytes, str]] = [
    (b"", "not a JSON object"),
    (b"{", "not a JSON object"),
    (b"[]", "it is of type array"),
    (b'"text"', "it is of type string"),
    (b"null", "it is of type null"),
    (b'{"prompt": "\xff\xfe"}', "byte 12 is not utf-8"),
    (b'{"\xff": 1}', "utf-8"),
    (b'{"prompt": "a", "temperature": NaN}', "invalid character"),
    (b'{"prompt": "a", "temperature": Infinity}', "invalid character"),
    (b'{"prompt": "a", "temperature": 1e999}', "out of range"),
    (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", ""),
    (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "prompt[0][0] is of type array"),
    (b'{"prompt": "a", "tools": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    (b'{"prompt": "a"} x', "trailing"),
    (b'{"prompt": "a\x00"}', "invalid character"),
    (b'{"prompt": "\\ud800\\ud800"}', ""),
]


@pytest.mark.parametrize("body, names", BODIES, ids=[repr(body[:24]) for body, _ in BODIES])
def test_a_body_that_is_no_request(server: Running, body: bytes, names: str) -> None:
    reply = httpx.post(server.url + TEXT, content=body, headers={"content-type": "application/json"}, timeout=20)
    check(reply, 400, names)


def test_wrong_paths_methods_and_types(server: Running) -> None:
    check(
        httpx.get(server.url + "/v2/nothing%0Ahere"),
        404,
        "there is nothing at /v2/nothing%0Ahere; expected: one of those listed at /docs",
    )
    check(httpx.get(server.url + "/v1/completions/"), 404, "nothing")
    wrong = httpx.get(server.url + CHAT)
    check(wrong, 405, "does not know GET; expected: one of POST")
    assert wrong.headers["allow"] == "POST"
    check(httpx.delete(server.url + "/v1/models"), 405, "DELETE")
    check(httpx.post(server.url + TEXT, data={"prompt": "a"}), 415, "application/x-www-form-urlencoded")
    check(post(server.url, TEXT, text(model="gpt-9")), 404, 'the model "gpt-9" does not exist', "model")


PATHS = {"/chat/completions": CHAT, "/completions": TEXT, "/models": "/v1/models", "/v1/v1/completions": TEXT}


@pytest.mark.parametrize("path", PATHS)
def test_a_base_url_without_v1_is_told_the_path(server: Running, path: str) -> None:
    reply = httpx.get(server.url + path) if path == "/models" else post(server.url, path, chat())
    check(reply, 404, f'expected: "{PATHS[path]}"; to fix: end the base URL of the client with /v1')


@pytest.mark.parametrize("path, body", [(CHAT, chat()), (TEXT, text())])
def test_fields_of_other_servers_are_named(server: Running, path: str, body: dict[str, object]) -> None:
    plain = post(server.url, path, body | {"seed": 1, "user": "me"})
    assert plain.status_code == 200 and "x-millrace-ignored" not in plain.headers
    more = {"reasoning_effort": "low", "verbosity": "high", "num_ctx": 4096, "keep_alive": "5m", "think": None}
    reply = post(server.url, path, body | {"seed": 1} | more)
    assert (
        reply.status_code == 200
        and reply.headers["x-millrace-ignored"] == "keep_alive, num_ctx, reasoning_effort, verbosity"
    )
    assert reply.json()["choices"] == plain.json()["choices"]


def test_every_field_of_others_is_accepted_alone(server: Running) -> None:
    everything = {name: {"any": ["value"]} for name in IGNORED}
    for path, body in ((CHAT, chat()), (TEXT, text())):
        reply = post(server.url, path, body | everything)
        assert reply.status_code == 200 and reply.headers["x-millrace-ignored"].split(", ") == sorted(IGNORED)


def test_request_ids_are_kept_when_sane(server: Running) -> None:
    kept = post(server.url, TEXT, text(), **{"x-request-id": "my.id-1"})
    assert kept.headers["x-request-id"] == "my.id-1" and kept.json()["id"] == "cmpl-my.id-1"
    for wild in ("a b", "x" * 200, "é", ""):
        reply = httpx.post(server.url + TEXT, json=text(), headers={b"x-request-id": wild.encode()})
        assert reply.status_code == 200 and reply.headers["x-request-id"] not in (wild, "")


def chunks(n_mib: int) -> Iterator[bytes]:
    block = b"x" * 2**20
    yield b'{"prompt": "'
    for _ in range(n_mib):
        yield block


@pytest.mark.parametrize("announced", [True, False])
def test_100_mb_are_refused_at_once_and_not_held(server: Running, announced: bool) -> None:
    headers = {"content-type": "application/json"} | ({"content-length": str(100 * 2**20 + 12)} if announced else {})
    memory = psutil.Process().memory_info
    before, start_s = memory().rss, time.monotonic()
    reply = httpx.post(server.url + TEXT, content=chunks(100), headers=headers, timeout=20)
    error = check(reply, 413, "at most 1048576")
    assert error["code"] == "body_too_large"
    assert time.monotonic() - start_s < 5 and memory().rss - before < 20 * 2**20


def test_a_body_that_never_comes(server: Running) -> None:
    with serving_with(body_timeout_s=0.1) as other, connect(other) as raw:
        raw.sendall(START + b"content-length: 9\r\n\r\n{")
        said = raw.recv(65536)
        while b"}" not in said:
            said += raw.recv(65536)
        assert said.startswith(b"HTTP/1.1 408 ") and b"not complete after 0.1 s" in said


TEMPLATES = [
    ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", 422, "not done after 0.5 s"),
    ("{% for i in range(99999999999) %}x{% endfor %}", 422, "chat template is broken"),
    ("{{ raise_exception('no such roles') }}", 400, "no such roles"),
    ("{{ nothing.at.all }}", 422, "chat template is broken"),
    (None, 400, "this model has no chat template"),
]


@pytest.mark.parametrize("template, status, names", TEMPLATES)
def test_templates_that_fail(template: str | None, status: int, names: str) -> None:
    with running(Fake(template=template, template_timeout_s=0.5)) as server:
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(post, server.url, CHAT, chat())
            assert post(server.url, TEXT, text(prompt="mill " * 200)).status_code == 200  # does not wait for it
            check(asked.result(), status, names)
        assert httpx.get(server.url + "/v1/health/ready").status_code == 200


ODD: list[object] = [
    None, True, 0, -1, 1, 2**63, 2**64, -(2**70), 0.5, 1e308, "", "a", "\ud800", [], [1], ["a"], [[]], [None], {},
    {"a": 1}, {"1": 1}, {"type": "text"}, {"-1": 0.5}, [{"role": "user", "content": ""}],
]  # fmt: skip
KINDS: dict[str, type[msgspec.Struct]] = {
    CHAT: ChatRequest,
    TEXT: CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


@pytest.mark.parametrize("seed", range(4))
def test_no_mixture_of_odd_values_is_a_500(server: Running, seed: int) -> None:
    rng = random.Random(seed)
    statuses = set()
    with httpx.Client(headers={"content-type": "application/json"}, timeout=20) as client:
        for _ in range(150):
            path, kind = rng.choice(list(KINDS.items()))
            names = sorted(set(wire(kind).__struct_fields__) - {"stream"})
            body = {"prompt": "a", "max_tokens": 2} if path == TEXT else chat() if path == CHAT else {}
            body |= {name: rng.choice(ODD) for name in rng.sample(names, rng.randint(1, 2))}
            content = bytearray(json.dumps(body).encode())
            if rng.random() < 0.2:
                content[rng.randrange(len(content))] = rng.randrange(256)
            reply = client.post(server.url + path, content=bytes(content))
            statuses.add(reply.status_code)
            assert reply.status_code in (200, 400, 404), (content, reply.text)
            assert reply.status_code == 200 or reply.json()["error"]["message"], content
    assert {200, 400} <= statuses


@pytest.mark.parametrize(
    ("path", "field", "advice"),
    [
        (TEXT, "max_completion_tokens", 'did you mean "max_tokens"?'),
        (TEXT, "messages", "send it to /v1/chat/completions"),
        (CHAT, "prompt", "send it to /v1/completions"),
        (CHAT, "rng_seed", 'did you mean "seed"?'),
        (CHAT, "enable_thinking", "true or false"),
        (CHAT, "top_K", 'did you mean "top_k"?'),
        (CHAT, "temprature", 'did you mean "temperature"?'),
        (CHAT, "extra_body", "beside the others"),
    ],
)
def test_advice_points_at_what_is_served(server: Running, path: str, field: str, advice: str) -> None:
    body = {"prompt": "a"} if path == TEXT else {"messages": [USER]}
    reply = post(server.url, path, {**body, field: 1})
    assert reply.status_code == 400 and advice in reply.json()["error"]["message"], reply.text


@pytest.mark.parametrize("field", ["grammar", "logits_processors", "lora_request", "images"])
def test_advice_is_not_given_at_random(server: Running, field: str) -> None:
    """A field that is like none of ours is like none: least of all one that is not supported, or ignored."""
    message = post(server.url, CHAT, {"messages": [USER], field: 1}).json()["error"]["message"]
    assert "did you mean" not in message and "mirostat" not in message and "cache_prompt" not in message


def test_a_misspelt_role_is_not_a_tool(server: Running) -> None:
    def told(role: str) -> str:
        message: str = post(server.url, CHAT, {"messages": [{**USER, "role": role}]}).json()["error"]["message"]
        return message

    assert "correct the role" in told("usr") and "tool is the role today" in told("function")


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("/v1/assistants", "use /v1/responses"), ("/v1/moderations", "not served yet"),
        ("/embedding", "use /v1/embeddings"),
        ("/v1/chat/completions/chat/completions", '"/v1/chat/completions"'),
        ("/chat/completions", '"/v1/chat/completions"'),
    ],
)  # fmt: skip
def test_a_path_of_another_server_says_what_to_use(server: Running, path: str, advice: str) -> None:
    reply = post(server.url, path, {})
    assert reply.status_code == 404 and advice in reply.json()["error"]["message"]


def test_a_lone_body_of_the_largest_size_fits() -> None:
    """Whatever all bodies together may have."""
    with running(Fake(), ServerSettings(port=0, max_body_bytes=3 * 2**20, max_receiving_bytes=2**20)) as started:
        reply = post(started.url, CHAT, {"messages": [{**USER, "content": "a" * 2 * 2**20}]})
        assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_variables_for_the_template_are_bounded(server: Running) -> None:
    body = {"messages": [USER], "max_tokens": 1, "chat_template_kwargs": {"a": ["x" * 70] * 1000}}
    reply = post(server.url, CHAT, body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "chat_template_kwargs"


def test_long_names_are_shown_once_and_short(server: Running) -> None:
    """The error itself cleans and bounds what it shows."""
    long = "\x1b" + "k" * 5000 + "z"
    for body in (text(model=long), message(role=long)):
        reply = post(server.url, CHAT if "messages" in body else TEXT, body)
        shown = reply.json()["error"]["message"]
        assert reply.status_code in (400, 404) and "\\x1bkkk" in shown and " ... " in shown and "kkz" in shown
        assert len(reply.text) < 2000
