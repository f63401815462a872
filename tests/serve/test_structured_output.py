"""The fields that hold an answer to a form: how they are said, and what is wrong with some."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from millrace.errors import RequestError
from millrace.runtime.structured_output import grammar_limits
from millrace.runtime.structured_output.grammar import GrammarCompiler
from millrace.serve.llm.request_decoding import chat_params, completion_params, decode
from millrace.serve.llm.request_types import ChatRequest, CompletionRequest
from millrace.serve.settings import ServerSettings
from tests.serve.support import Fake, Running, post, running, serving_with

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def asked(**fields: Any) -> Any:
    chat = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    held = chat_params(decode(json.dumps(chat).encode(), ChatRequest)).structured_outputs
    of_text = completion_params(decode(json.dumps({"prompt": "Hi", **fields}).encode(), CompletionRequest))
    assert of_text.structured_outputs == held, "both endpoints take them"
    return held


def form(**described: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": described}


@pytest.mark.parametrize(
    "fields, kind",
    [
        ({"response_format": {"type": "json_object"}}, "json_object"),
        ({"response_format": form(name="a", schema=SCHEMA, strict=True)}, "json"),
        ({"response_format": form(schema=SCHEMA, strict=None, description="what it is")}, "json"),
        ({"guided_json": SCHEMA}, "json"),
        ({"guided_json": '{"type": "object"}'}, "json"),
        ({"guided_regex": "a+"}, "regex"),
        ({"guided_choice": ["a", "b"]}, "choice"),
        ({"guided_grammar": 'start: "a"'}, "grammar"),
        ({"structured_outputs": {"regex": "a+"}}, "regex"),
        ({"structured_outputs": {"json_object": True}}, "json_object"),
        ({"structured_outputs": {"regex": "a", "json": None}, "response_format": {"type": "text"}}, "regex"),
    ],
    ids=str,
)
def test_each_way_to_say_it(fields: dict[str, Any], kind: str) -> None:
    held = asked(**fields)
    assert held.kind == kind and held.field_name in fields and held.text()


@pytest.mark.parametrize("fields", [{}, {"response_format": None}, {"response_format": {"type": "text"}}], ids=str)
def test_text_is_held_to_nothing(fields: dict[str, Any]) -> None:
    assert asked(**fields) is None


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {}}, "response_format", "response_format.type is None"),
    ({"response_format": "json"}, "response_format", "response_format is of type string"),
    ({"response_format": {"type": "xml"}}, "response_format", "response_format.type is 'xml'"),
    ({"response_format": {"type": ["text"]}}, "response_format", "response_format.type is ['text']"),
    ({"response_format": {"type": "json_object", "shema": {}}}, "response_format", "has no 'shema'"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema is missing"),
    ({"response_format": {"type": "text", "json_schema": {}}}, "response_format", 'stands beside the type "text"'),
    ({"response_format": form()}, "response_format", "json_schema.schema is missing"),
    ({"response_format": form(schema=[1])}, "response_format", "json_schema.schema is of type list"),
    ({"response_format": form(schema=SCHEMA, strict=1)}, "response_format", "json_schema.strict is of type int"),
    ({"response_format": form(schema=SCHEMA, nmae="a")}, "response_format", 'did you mean "name"?'),
    ({"structured_outputs": {}}, "structured_outputs", "it says nothing"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "it says json and regex"),
    ({"structured_outputs": {"json_shema": {}}}, "structured_outputs", "has no 'json_shema'"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "has no 'structural_tag'"),
    ({"guided_regex": 3}, "guided_regex", "guided_regex is of type integer"),
    ({"guided_choice": ["a", 1]}, "guided_choice", "guided_choice[1] is of type integer"),
    ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex", "guided_json and guided_regex are both set"),
    (
        {"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice",
        "response_format and guided_choice are both set",
    ),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "ignore_eos is True beside guided_regex"),
    ({"guided_regex": "a", "min_tokens": 2, "max_tokens": 9}, "min_tokens", "min_tokens is 2 beside guided_regex"),
]  # fmt: skip


@pytest.mark.parametrize("fields, param, says", BAD, ids=[says for _, _, says in BAD])
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(RequestError) as error:
        asked(**fields)
    assert error.value.param == param and says in str(error.value), str(error.value)


# Its first masks are small, and each token of an answer makes the next one larger: as many states as the limit below
# are there after some ten tokens. Of another path each way, as what was compiled is kept.
EXPLODES = "(.*[a-h].{%d}.*b.{300}){20}"
HI = [{"role": "user", "content": "Hi"}]
WAYS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": HI, "guided_regex": EXPLODES % 301}, "guided_regex"),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "structured_outputs": {"regex": EXPLODES % 302}},
     "structured_outputs"),
]  # fmt: skip


@pytest.fixture(scope="module")
def holding() -> Iterator[Running]:
    with running(Fake(ends=True), ServerSettings(port=0)) as started:
        yield started


@pytest.fixture
def few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_limits, "LEXER_STATES", 300)


@pytest.mark.parametrize("path, body, param", WAYS, ids=[path for path, _, _ in WAYS])
def test_what_explodes_in_the_middle_is_the_clients_mistake(
    holding: Running, few_states: None, path: str, body: dict[str, Any], param: str
) -> None:
    """Whoever is in its batch gets the answer that it gets alone."""
    plain = {"prompt": "Hello", "max_tokens": 60, "seed": 5}
    alone = post(holding.url, "/v1/completions", plain).json()["choices"]
    with ThreadPoolExecutor(1) as other:
        beside = other.submit(post, holding.url, "/v1/completions", plain)
        reply = post(holding.url, path, {**body, "max_tokens": 200, "seed": 1})
        assert beside.result().json()["choices"] == alone
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["type"] == "invalid_request_error" and error["param"] == param, error
    assert (
        f"{param}: its regex cannot be enforced any more" in error["message"] and "too many states" in error["message"]
    )
    assert len(error["message"]) < 600 and "\n" not in error["message"]
    assert holding.wait_until_idle().healthy


ENDLESS = {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}
TWICE = {"type": "object", "minProperties": 2, "additionalProperties": True}
UNMET: list[tuple[dict[str, Any], str]] = [
    ({"guided_json": ENDLESS}, "cannot be met by any text that ends"),
    ({"guided_grammar": 'start: "a" start'}, "cannot be met by any text that ends"),
    ({"response_format": form(schema=TWICE)}, '"minProperties": 2'),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": TWICE}}], "tool_choice": "required"},
        '"minProperties": 2',
    ),
]


@pytest.mark.parametrize("fields, says", UNMET, ids=[next(iter(fields)) for fields, _ in UNMET])
def test_what_no_answer_could_meet_is_a_400(holding: Running, fields: dict[str, Any], says: str) -> None:
    reply = post(holding.url, "/v1/chat/completions", {"messages": HI, "max_tokens": 9, **fields})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == next(iter(fields)) and says in error["message"], error


def test_in_a_stream_it_is_an_event(holding: Running, few_states: None) -> None:
    body = {"messages": HI, "guided_regex": EXPLODES % 303, "max_tokens": 200, "seed": 1, "stream": True}
    reply = post(holding.url, "/v1/chat/completions", body)
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    assert reply.status_code == 200 and any("content" in e["choices"][0]["delta"] for e in events[:-1])
    error = events[-1]["error"]
    assert (
        error["param"] == "guided_regex" and error["code"] == "invalid_value" and "too many states" in error["message"]
    )
    assert reply.text.endswith("data: [DONE]\n\n")


def schema(n: int) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^{EXPLODES % n}$"}


def test_a_response_that_explodes_has_failed_with_the_reason(holding: Running, few_states: None) -> None:
    """Streamed, and in the background; the field is named as it was sent."""
    form = {"format": {"type": "json_schema", "name": "a", "schema": schema(305)}}
    body = {"input": "Hi", "text": form, "max_output_tokens": 200, "seed": 1}
    text = post(holding.url, "/v1/responses", {**body, "stream": True}).text
    *_, last = (json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: "))
    assert last["type"] == "response.failed"
    own = post(holding.url, "/v1/responses", {**body, "background": True}).json()["id"]
    holding.wait_until_idle()
    found = httpx.get(f"{holding.url}/v1/responses/{own}").json()
    whole = post(holding.url, "/v1/responses", body)
    assert whole.status_code == 400 and whole.json()["error"]["param"] == "text.format"
    for error in (last["response"]["error"], found["error"], whole.json()["error"]):
        assert error["code"] == "invalid_value" and "too many states" in error["message"]
        assert error["message"].startswith("text.format: its json cannot be enforced any more")


def test_ollamas_clients_are_told_too(holding: Running, few_states: None) -> None:
    body = {"messages": HI, "format": schema(306), "options": {"num_predict": 200, "seed": 1}}
    whole = post(holding.url, "/api/chat", {**body, "stream": False})
    streamed = post(holding.url, "/api/chat", body)
    assert whole.status_code == 400 and streamed.status_code == 200
    for error in (whole.json()["error"], json.loads(streamed.text.splitlines()[-1])["error"]):
        assert error.startswith("format: its json cannot be enforced any more") and "too many states" in error


def test_another_failure_of_such_an_answer_is_the_servers(few_states: None) -> None:
    def fails(step: Any) -> None:
        if step.masks is not None:
            raise RuntimeError("the machine hums")

    body = {"messages": HI, "guided_regex": EXPLODES % 304, "max_tokens": 200}
    with serving_with(Fake(before_run=fails, ends=True)) as own:
        reply = post(own.url, "/v1/chat/completions", body)
        assert reply.status_code == 500 and "the machine hums" in reply.json()["error"]["message"]


def test_the_vocabulary_is_prepared_before_the_server_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the event loop, which says meanwhile that it is not ready."""
    prepare, threads, may_go_on = GrammarCompiler.prepare, list[str](), threading.Event()

    def held_up(self: GrammarCompiler) -> None:
        threads.append(threading.current_thread().name)
        assert may_go_on.wait(20)
        prepare(self)

    monkeypatch.setattr(GrammarCompiler, "prepare", held_up)
    with ThreadPoolExecutor(1) as opener:
        context = serving_with(Fake(ends=True))
        opened = opener.submit(context.__enter__)
        while not threads:
            assert not opened.done()
        may_go_on.set()
        own = opened.result()
        try:
            assert own.model.engine.loop.grammars._vocabulary is not None and threads[0].startswith("millrace-grammar")
            assert httpx.get(own.url + "/v1/health/ready").status_code == 200
        finally:
            context.__exit__(None, None, None)
