"""Answers of `tiny` that are held to a form, by the server and from Python: valid, and the same in any company."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from millrace import LLM, SamplingParams, StructuredOutputsParams
from millrace.errors import RequestError
from millrace.runtime.structured_output.grammar import GrammarCompiler
from tests.e2e.live import MODEL, Live

HELLO: Any = [{"role": "user", "content": "Tell me of an animal."}]
ANY = {"type": "any"}


class Leg(BaseModel, extra="forbid"):
    side: Literal["left", "right"]
    length: int = Field(ge=0, le=120)


class Animal(BaseModel, extra="forbid"):
    name: str = Field(max_length=10)
    kind: Literal["bird", "fish", "other"]
    tame: bool | None
    legs: list[Leg] = Field(max_length=2)
    tags: list[Annotated[str, Field(max_length=5)]] = Field(max_length=2)


SCHEMA: dict[str, Any] = Animal.model_json_schema()
MAX_TOKENS = 600  # the longest of them, all escapes, spelt in single characters


def test_the_openai_client_parses_objects(tiny_client: openai.OpenAI) -> None:
    for seed in range(12):
        answer = tiny_client.chat.completions.parse(
            model=MODEL, messages=HELLO, response_format=Animal, seed=seed, max_tokens=MAX_TOKENS, temperature=1.2
        )
        choice = answer.choices[0]
        assert isinstance(choice.message.parsed, Animal) and choice.finish_reason == "stop"


def test_a_stream_of_several_answers_is_parsed_too(tiny_client: openai.OpenAI) -> None:
    asked: Any = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
    texts = ["", "", ""]
    stream = tiny_client.chat.completions.create(
        model=MODEL, messages=HELLO, response_format=asked, n=3, seed=4, max_tokens=MAX_TOKENS, stream=True
    )
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert len(set(texts)) == 3
    for text in texts:
        Animal.model_validate_json(text)


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "[A-Z][a-z]{2,8}( [0-9]{1,3})?"}, "[A-Z][a-z]{2,8}( [0-9]{1,3})?"),
    ({"guided_choice": ["north", "north east", "sü\"d\n", "日本"]}, "north|north east|sü\"d\n|日本"),
    ({"guided_grammar": 'start: "<" WORD ("," WORD)* ">"\nWORD: /[a-z]{1,4}/'}, "<[a-z]{1,4}(,[a-z]{1,4})*>"),
    ({"guided_grammar": 'root ::= "yes" | "no" " "? "way"'}, "yes|no ?way"),
    ({"structured_outputs": {"regex": "(ab|cd){3}"}}, "(ab|cd){3}"),
    ({"guided_json": {"type": "integer", "minimum": 7, "maximum": 1234}}, "[0-9]+"),
    ({"guided_json": {"enum": ["a", 1, None, "b c"]}}, '"a"|1|null|"b c"'),
    ({"guided_json": {"type": "string", "pattern": "^[0-9]{3}-[0-9]{2}$"}}, '"[0-9]{3}-[0-9]{2}"'),
]  # fmt: skip


@pytest.mark.parametrize("fields, pattern", FORMS, ids=[str(fields) for fields, _ in FORMS])
def test_each_form_is_held_to(tiny: Live, fields: dict[str, Any], pattern: str) -> None:
    """By completions of several prompts, which have their own seeds."""
    body = {
        "model": MODEL,
        "prompt": ["Once", "The mill"],
        "n": 2,
        "max_tokens": 64,
        "seed": 5,
        "logprobs": 2,
        **fields,
    }
    reply = tiny.post("/v1/completions", body)
    assert reply.status_code == 200, reply.text
    for choice in reply.json()["choices"]:
        if choice["finish_reason"] == "stop":
            assert re.fullmatch(pattern, choice["text"]), choice["text"]
        assert all(1 <= len(top) <= 3 for top in choice["logprobs"]["top_logprobs"])
    assert any(choice["finish_reason"] == "stop" for choice in reply.json()["choices"])


def test_any_object(tiny: Live) -> None:
    """It may be of any length, so it may be cut; what is whole is an object."""
    whole = 0
    for seed in range(6):
        body = {"messages": HELLO, "response_format": {"type": "json_object"}, "max_tokens": 200, "seed": seed}
        (choice,) = tiny.post("/v1/chat/completions", body).json()["choices"]
        text = choice["message"]["content"]
        assert text.startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(text), dict)
            whole += 1
    assert whole


def test_answers_are_the_same_in_a_batch_of_many_grammars(tiny: Live) -> None:
    bodies: list[dict[str, Any]] = [
        {"messages": HELLO, "max_tokens": 48, "seed": i, "logprobs": True, "top_logprobs": 2, **fields}
        for i, (fields, _) in enumerate([*FORMS, ({}, ""), ({"guided_json": SCHEMA}, "")])
    ]

    def answer(body: dict[str, Any]) -> Any:
        reply = tiny.post("/v1/chat/completions", body)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"]

    alone = [answer(body) for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as threads:
        assert list(threads.map(answer, bodies)) == alone


def test_grammars_are_compiled_beside_the_engine_and_the_event_loop(
    tiny: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one is being compiled, others are answered; and it is compiled once."""
    compile_one, threads, may_go_on = GrammarCompiler._compiled, list[str](), threading.Event()

    def held_up(self: GrammarCompiler, source: str) -> Any:
        threads.append(threading.current_thread().name)
        assert may_go_on.wait(20)
        return compile_one(self, source)

    monkeypatch.setattr(GrammarCompiler, "_compiled", held_up)
    body = {"messages": HELLO, "max_tokens": 4, "guided_regex": "never asked[ab]"}
    with ThreadPoolExecutor(1) as other:
        held = other.submit(tiny.post, "/v1/chat/completions", body)
        try:
            assert tiny.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 4}).status_code == 200
            assert httpx.get(tiny.url + "/v1/health/ready").status_code == 200
        finally:
            may_go_on.set()
        assert held.result().status_code == 200
    assert tiny.post("/v1/chat/completions", body).status_code == 200
    assert len(threads) == 1 and threads[0].startswith("millrace-grammar")


def chained(link: dict[str, Any], n: int = 1200) -> dict[str, Any]:
    """Some 37 KB: each schema refers to the next."""
    parts = {f"a{i}": json.loads(json.dumps(link).replace("NEXT", f"#/$defs/a{i + 1}")) for i in range(n)}
    return {"$ref": "#/$defs/a0", "$defs": {**parts, f"a{n}": {"type": "string"}}}


HOSTILE: dict[str, dict[str, Any]] = {
    "bounds beyond int64": {"type": "integer", "minimum": -1e30, "maximum": -1e20},
    "integers beyond int64": {"type": "integer", "minimum": -(2**70), "maximum": -(2**64)},
    "a chain of anyOf": chained({"anyOf": [{"$ref": "NEXT"}, {"type": "null"}]}),
    "a chain of items": chained({"type": "array", "items": {"$ref": "NEXT"}}),
    "3,000 keys": {"type": "object", "properties": {f"key{i}": {"type": "string"} for i in range(3000)}},
}


def in_every_protocol(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """BodyLimiter of the endpoints that take a schema, or a tool that has to be called."""
    form = {"name": "x", "schema": schema}
    parts = {name: schema[name] for name in ("$defs",) if name in schema}
    tool = {"type": "object", "properties": {"x": {k: v for k, v in schema.items() if k != "$defs"}}, **parts}
    function = {"type": "function", "function": {"name": "f", "parameters": tool}}
    return [
        ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": form}}),
        ("/v1/chat/completions", {"guided_json": schema}),
        ("/v1/chat/completions", {"guided_grammar": f"start: %json {json.dumps(schema)}"}),
        ("/v1/chat/completions", {"tools": [function], "tool_choice": "required"}),
        ("/v1/responses", {"input": "Hi", "text": {"format": {"type": "json_schema", **form}}}),
        ("/api/chat", {"format": schema, "stream": False}),
        ("/v1/messages", {"max_tokens": 4, "tools": [{"name": "f", "input_schema": tool}], "tool_choice": ANY}),
    ]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_an_error_of_its_request_in_every_protocol(tiny: Live, name: str) -> None:
    for path, fields in in_every_protocol(HOSTILE[name]):
        if "tools" in fields and len(json.dumps(fields)) > 2000:
            continue  # longer than the context of `tiny`
        messages = {} if "input" in fields else {"messages": HELLO}
        reply = tiny.post(path, {"model": MODEL, **messages, **fields})
        assert reply.status_code == 400, (path, reply.text)
        assert re.search(r"exactly|chain of more than|3000 properties", reply.text), (path, reply.text)
    assert tiny.post("/v1/chat/completions", {"messages": HELLO, "guided_regex": "[ab]"}).status_code == 200


def test_a_hostile_schema_is_an_error_of_its_request_in_python() -> None:
    with LLM("tiny", precision="w4a8", evaluate=False, tune=0) as llm:
        for schema in HOSTILE.values():
            with pytest.raises(RequestError, match=r"exactly|chain of more than|3000 properties"):
                llm.generate("A", SamplingParams(structured_outputs=StructuredOutputsParams(json=schema)))
        (output,) = llm.generate("A", SamplingParams(structured_outputs=StructuredOutputsParams(regex="[ab]")))
        assert output.outputs[0].text in ("a", "b")


def one_of(**field: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": field}, "required": ["a"], "additionalProperties": False}


ACCEPTED: list[tuple[dict[str, Any], str]] = [
    (one_of(type="string", format="password", maxLength=5), r'{"a": ".*"}'),
    (one_of(type="array", items={"type": "boolean"}, maxItems=2, uniqueItems=False), r'{"a": \[.*\]}'),
    ({**one_of(type="boolean"), "propertyNames": {"type": "string"}}, r'{"a": (true|false)}'),
    (one_of(type="integer", minimum=-(2**53), maximum=2**53 + 2), r'{"a": -?[0-9]{1,16}}'),
    (one_of(const=2**53 + 2), r'{"a": 9007199254740994}'),
]


@pytest.mark.parametrize("schema, pattern", ACCEPTED, ids=lambda part: str(part)[35:70])
def test_keywords_that_restrict_nothing_are_accepted(tiny: Live, schema: dict[str, Any], pattern: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked = {"messages": HELLO, "response_format": form, "max_tokens": 120, "n": 4, "seed": 7, "temperature": 0.9}
    reply = tiny.post("/v1/chat/completions", asked)
    assert reply.status_code == 200, reply.text
    for choice in reply.json()["choices"]:
        if choice["finish_reason"] == "stop":
            assert re.fullmatch(pattern, choice["message"]["content"]), choice


def test_bounds_that_are_no_float64_are_refused(tiny: Live) -> None:
    schema = one_of(type="integer", minimum=2**53 + 1, maximum=2**53 + 3)
    for path, fields in in_every_protocol(schema):
        messages = {} if "input" in fields else {"messages": HELLO}
        reply = tiny.post(path, {"model": MODEL, **messages, **fields})
        assert reply.status_code == 400 and "9007199254740993" in reply.text, (path, reply.text)


def test_what_cannot_be_held_to_is_the_clients_mistake(tiny: Live) -> None:
    for fields, says in (
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"guided_regex": "(a"}, "guided_regex: its regex cannot be enforced"),
    ):
        reply = tiny.post("/v1/chat/completions", {"messages": HELLO, **fields})
        assert reply.status_code == 400 and says in reply.json()["error"]["message"], reply.text
        assert reply.json()["error"]["param"] in fields


def test_python_has_the_names_of_vllm() -> None:
    held = StructuredOutputsParams(json=SCHEMA)
    with LLM("tiny", precision="w4a8", evaluate=False, tune=0) as llm:
        asked = SamplingParams(max_tokens=MAX_TOKENS, seed=1, n=2, temperature=1, structured_outputs=held)
        outputs = llm.generate(["An animal:", "A beast:"], asked)
        for output in outputs:
            for one in output.outputs:
                Animal.model_validate_json(one.text)
        (again,) = llm.generate("A beast:", asked)
        assert [o.token_ids for o in again.outputs] == [o.token_ids for o in outputs[1].outputs]
        (choice,) = llm.chat(HELLO, SamplingParams(structured_outputs={"choice": ["cat", "dog"]}))  # type: ignore[arg-type]
        assert choice.outputs[0].text in ("cat", "dog")
