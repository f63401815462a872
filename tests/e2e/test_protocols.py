"""One model behind four protocols, driven by their own clients: the same answers, streams that say what replies say."""

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from safetensors import safe_open

from millrace.compile.resolve_model import BUNDLED
from millrace.serve.settings import ServerSettings
from tests.e2e.live import MODEL, Live, live

ASK: Any = [{"role": "user", "content": "Tell me of a mill."}]
SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["a"],
    "additionalProperties": False,
}  # fmt: skip
N = 12


@pytest.fixture(scope="module")
def claude(tiny: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=tiny.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def llama(tiny: Live) -> Iterator[ollama.Client]:
    client = ollama.Client(host=tiny.url)
    yield client
    client._client.close()


def greedy(tiny: Live) -> str:
    body = {"messages": ASK, "max_tokens": N, "temperature": 0}
    return str(tiny.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"])


def test_the_same_question_has_the_same_answer(
    tiny: Live, tiny_client: openai.OpenAI, claude: anthropic.Anthropic, llama: ollama.Client
) -> None:
    answer = greedy(tiny)
    assert answer
    response = tiny_client.responses.create(model=MODEL, input=ASK, max_output_tokens=N, temperature=0)
    assert response.output_text == answer and response.status == "incomplete" and response.incomplete_details
    message = claude.messages.create(model=MODEL, messages=ASK, max_tokens=N, extra_body={"temperature": 0})
    assert message.content[0].type == "text" and message.content[0].text == answer
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == N
    chat = llama.chat(model=MODEL, messages=ASK, options={"num_predict": N, "temperature": 0})
    assert chat.message.content == answer and chat.done_reason == "length" and chat.eval_count == N
    text = llama.generate(
        model=f"{MODEL}:latest", prompt=ASK[0]["content"], options={"num_predict": N, "temperature": 0}
    )
    assert text.response == answer
    assert chat.prompt_eval_count == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    assert claude.messages.count_tokens(model=MODEL, messages=ASK).input_tokens == chat.prompt_eval_count


def test_streams_say_what_replies_say(
    tiny: Live, tiny_client: openai.OpenAI, claude: anthropic.Anthropic, llama: ollama.Client
) -> None:
    answer = greedy(tiny)
    with tiny_client.responses.stream(model=MODEL, input=ASK, max_output_tokens=N, temperature=0) as stream:
        kinds = [event.type for event in stream]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-1] == "response.incomplete" and "response.output_text.done" in kinds
    with claude.messages.stream(model=MODEL, messages=ASK, max_tokens=N, extra_body={"temperature": 0}) as said:
        assert said.get_final_text() == answer
        assert said.get_final_message().stop_reason == "max_tokens"
    parts = list(llama.chat(model=MODEL, messages=ASK, stream=True, options={"num_predict": N, "temperature": 0}))
    assert "".join(part.message.content or "" for part in parts) == answer and parts[-1].done
    assert [part.done for part in parts[:-1]] == [False] * (len(parts) - 1)


def events(tiny: Live, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = tiny.post(path, {**body, "stream": True}).text
    found = []
    for block in text.strip().split("\n\n"):
        name, _, data = block.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def test_events_of_a_response_are_whole(tiny: Live) -> None:
    """Numbered without a gap, each delta within its item, and their sum is the item."""
    asked = {"input": ASK, "max_output_tokens": N, "seed": 5}
    found = events(tiny, "/v1/responses", asked)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    deltas = "".join(e["delta"] for e in found if e["type"] == "response.output_text.delta")
    (done,) = [e for e in found if e["type"] == "response.output_item.done"]
    assert done["item"]["content"][0]["text"] == deltas
    last = found[-1]["response"]
    assert last["output"][0]["content"][0]["text"] == deltas and last["usage"]["output_tokens"] == N
    assert last["output"][0]["id"] == done["item"]["id"]


CALL_ME: Any = [{"role": "user", "content": "Use the tool."}]


def test_tools_by_every_protocol(tiny: Live, tiny_client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    function: Any = {"type": "function", "name": "pick", "description": "Picks.", "parameters": SCHEMA, "strict": True}
    response = tiny_client.responses.create(
        model=MODEL, input=CALL_ME, tools=[function], tool_choice="required", parallel_tool_calls=False,
        max_output_tokens=200,
    )  # fmt: skip
    (call,) = response.output
    assert call.type == "function_call" and call.name == "pick" and 0 <= json.loads(call.arguments)["a"] <= 9
    tool: Any = {"name": "pick", "description": "Picks.", "input_schema": SCHEMA}
    forced: Any = {"type": "tool", "name": "pick"}
    common: Any = {"model": MODEL, "messages": CALL_ME, "tools": [tool], "tool_choice": forced, "max_tokens": 200}
    message = claude.messages.create(**common)
    (use,) = message.content
    assert use.type == "tool_use" and message.stop_reason == "tool_use" and 0 <= use.input["a"] <= 9
    with claude.messages.stream(**common) as stream:
        final = stream.get_final_message()
    assert final.content[0].type == "tool_use" and set(final.content[0].input) == {"a"}
    # and back: the call with its result is a conversation that goes on
    result: Any = [{"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "7"}]}]
    talk: Any = [*CALL_ME, {"role": "assistant", "content": message.content}, {"role": "user", "content": result}]
    assert claude.messages.create(model=MODEL, messages=talk, tools=[tool], max_tokens=4).usage.output_tokens == 4
    back: Any = [*CALL_ME, call.to_dict(), {"type": "function_call_output", "call_id": call.call_id, "output": "7"}]
    assert tiny_client.responses.create(model=MODEL, input=back, tools=[function], max_output_tokens=4).output


def test_ollama_knows_tools_and_formats(llama: ollama.Client) -> None:
    held = llama.chat(model=MODEL, messages=ASK, format=SCHEMA, options={"num_predict": 60})
    assert 0 <= json.loads(held.message.content or "")["a"] <= 9
    tool: Any = {"type": "function", "function": {"name": "pick", "description": "Picks.", "parameters": SCHEMA}}
    called: Any = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "pick", "arguments": {"a": 1}}}],
    }
    talk: Any = [*CALL_ME, called, {"role": "tool", "content": "7", "tool_name": "pick"}]
    assert llama.chat(model=MODEL, messages=talk, tools=[tool], options={"num_predict": 3}).eval_count == 3
    assert [model.model for model in llama.list().models] == [MODEL]
    assert llama.show(MODEL).capabilities == ["completion", "tools"]
    raw = llama.generate(model=MODEL, prompt="Once upon a", raw=True, options={"num_predict": 3, "temperature": 0})
    assert raw.eval_count == 3


def test_what_ollamas_clients_show_of_a_model_is_true(tiny: Live, tiny_engine: Path, llama: ollama.Client) -> None:
    with safe_open(BUNDLED / "tiny" / "model.safetensors", "np") as file:
        n_parameters = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    (model,) = llama.list().models
    assert model.size == (tiny_engine / "weights.bin").stat().st_size
    for details in (model.details, llama.show(MODEL).details):
        assert details and details.family == "llama" and details.quantization_level == "w4a8, w8a8"
        assert details.parameter_size == f"{n_parameters / 1e6:.2f}M"
    info = llama.show(MODEL).modelinfo or {}
    assert info["general.parameter_count"] == n_parameters
    assert info["llama.context_length"] == tiny.opened.engine.manifest.max_context


def test_schemas_of_responses_are_kept_to(tiny_client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "pick", "schema": SCHEMA, "strict": True}}
    for seed in range(3):
        text = tiny_client.responses.create(
            model=MODEL, input="Pick.", text=form, max_output_tokens=60, extra_body={"seed": seed}
        ).output_text
        assert 0 <= json.loads(text)["a"] <= 9


def test_stored_responses_are_gone_on_from(tiny: Live, tiny_client: openai.OpenAI) -> None:
    first = tiny_client.responses.create(model=MODEL, input="Hello", max_output_tokens=6, temperature=0)
    again = tiny_client.responses.retrieve(first.id)
    assert again.output_text == first.output_text and again.id == first.id
    second = tiny_client.responses.create(
        model=MODEL, input="Go on", previous_response_id=first.id, max_output_tokens=6, temperature=0
    )
    talk = [
        {"role": "user", "content": "Hello"}, {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Go on"},
    ]  # fmt: skip
    whole = tiny.post("/v1/chat/completions", {"messages": talk, "max_tokens": 6, "temperature": 0}).json()
    assert second.output_text == whole["choices"][0]["message"]["content"]
    assert second.usage and second.usage.input_tokens == whole["usage"]["prompt_tokens"]
    tiny_client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="no response"):
        tiny_client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        tiny_client.responses.create(model=MODEL, input="x", previous_response_id=first.id)
    unstored = tiny_client.responses.create(model=MODEL, input="Hello", max_output_tokens=2, store=False)
    with pytest.raises(openai.NotFoundError):
        tiny_client.responses.retrieve(unstored.id)


def test_a_response_in_the_background_is_asked_for_and_cancelled(tiny: Live, tiny_client: openai.OpenAI) -> None:
    many: Any = {"model": MODEL, "input": "Hello", "background": True, "extra_body": {"seed": 1}}
    done = tiny_client.responses.create(**many, max_output_tokens=3)
    assert done.status == "in_progress"
    until = time.monotonic() + 20
    while (known := tiny_client.responses.retrieve(done.id)).status == "in_progress" and time.monotonic() < until:
        time.sleep(0.02)
    assert known.status in ("incomplete", "completed") and known.usage and known.usage.output_tokens
    long = tiny_client.responses.create(**many, max_output_tokens=400)
    assert tiny_client.responses.cancel(long.id).status in ("cancelled", "completed", "incomplete")
    tiny.wait_until_idle()
    while (known := tiny_client.responses.retrieve(long.id)).status == "in_progress" and time.monotonic() < until:
        time.sleep(0.02)
    assert known.status in ("cancelled", "completed", "incomplete")


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/responses", {"input": []}, "input has no messages"),
    ("/v1/responses", {"input": [{"type": "input_image"}]}, "input[0] is"),
    (
        "/v1/responses",
        {"input": "x", "tool_choice": {"type": "web_search"}, "tools": [{"type": "web_search"}]},
        "tools",
    ),
    ("/v1/responses", {"input": "x", "conversation": "c"}, "conversation is not supported yet"),
    ("/v1/responses", {"input": "x", "text": {"format": {"type": "xml"}}}, "xml"),
    ("/v1/responses", {"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ("/v1/messages", {"messages": ASK}, "max_tokens"),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 2}, "image"),
    (
        "/v1/messages",
        {
            "messages": ASK,
            "max_tokens": 2,
            "tool_choice": {"type": "any"},
            "tools": [{"type": "computer_20250124", "name": "computer"}],
        },
        "tool_choice",
    ),
    ("/v1/messages", {"messages": ASK, "max_tokens": 2, "tool_choice": {"type": "some"}}, "tool_choice is"),
    ("/api/chat", {"messages": ASK, "options": {"temprature": 1}}, "temprature"),
    ("/api/chat", {"messages": ASK, "options": {"temperature": -1}}, "temperature"),
    ("/api/chat", {"messages": ASK, "format": "xml"}, "xml"),
    ("/api/generate", {"prompt": "x", "images": ["a"]}, "images"),
]


@pytest.mark.parametrize("path, body, says", BAD)
def test_mistakes_are_told_in_the_protocols_own_words(tiny: Live, path: str, body: dict[str, Any], says: str) -> None:
    reply = tiny.post(path, body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    if path.startswith("/v1/messages"):
        assert reply.json()["type"] == "error" and error["type"] == "invalid_request_error"
    message = error if path.startswith("/api") else error["message"]
    assert says in message and "expected" in message


def test_unknown_models_too(tiny: Live) -> None:
    asked = {"model": "other", "messages": ASK, "max_tokens": 2, "stream": False}
    assert tiny.post("/v1/messages", asked).json()["error"]["type"] == "not_found_error"
    del asked["max_tokens"]
    assert "does not exist" in tiny.post("/api/chat", asked).json()["error"]
    assert httpx.get(tiny.url + "/api/version").json()["version"]


def test_what_desktop_clients_send_first(tiny: Live, llama: ollama.Client) -> None:
    """A model is chosen, or let go of: nothing is generated."""
    assert llama.generate(model=MODEL).done_reason == "load"
    assert llama.generate(model=MODEL, keep_alive=0).done_reason == "unload"
    assert llama.chat(model=MODEL, messages=[]).done_reason == "load"
    asked = json.dumps({"model": MODEL, "prompt": "a", "stream": False, "options": {"num_predict": 2}})
    called = {"content-type": "application/x-www-form-urlencoded"}
    form = httpx.post(tiny.url + "/api/generate", content=asked, headers=called)
    assert form.json()["eval_count"] == 2, "as `curl -d` sends it"


def test_a_call_that_is_cut_off_is_the_same_everywhere(tiny: Live, claude: anthropic.Anthropic) -> None:
    tool: Any = {"type": "function", "function": {"name": "pick", "parameters": SCHEMA}}
    for n in range(8, 40, 3):
        body = {
            "messages": CALL_ME,
            "tools": [tool],
            "tool_choice": "required",
            "max_tokens": n,
            "seed": 1,
            "temperature": 0,
        }
        whole = tiny.post("/v1/chat/completions", body).json()["choices"][0]
        text, arguments = "", ""
        for line in tiny.post("/v1/chat/completions", {**body, "stream": True}).text.splitlines():
            if line.startswith("data: {"):
                delta = json.loads(line[6:])["choices"][0]["delta"]
                text += delta.get("content") or ""
                arguments += "".join(call["function"]["arguments"] for call in delta.get("tool_calls", ()))
        calls = whole["message"].get("tool_calls", [])
        assert (whole["message"]["content"] or "") == text
        assert "".join(call["function"]["arguments"] for call in calls) == arguments
        assert not calls or text == "", "what follows a name is no text"


def test_keys_keep_what_is_theirs(tiny_engine: Path) -> None:
    with live(tiny_engine, ServerSettings(port=0, api_keys=("one", "two"))) as server:
        first, second = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        asked = {"input": "Hello", "max_output_tokens": 2}
        own = httpx.post(server.url + "/v1/responses", json=asked, headers={**first, "x-request-id": "mine"}).json()[
            "id"
        ]
        for path in (f"/v1/responses/{own}", "/v1/requests/mine/trace"):
            assert httpx.get(server.url + path, headers=first).status_code == 200
            assert httpx.get(server.url + path, headers=second).status_code == 404
        more = {**asked, "previous_response_id": own}
        assert httpx.post(server.url + "/v1/responses", json=more, headers=second).status_code == 404
        assert httpx.delete(server.url + f"/v1/responses/{own}", headers=second).status_code == 404
        assert httpx.delete(server.url + f"/v1/responses/{own}", headers={"x-api-key": "one"}).status_code == 200


def test_a_body_of_many_small_items_holds_up_nobody(tiny: Live) -> None:
    item = {"type": "function_call", "call_id": "", "name": "", "arguments": ""}
    began_s = time.monotonic()
    reply = tiny.post("/v1/responses", {"input": [item] * 100_000})
    assert reply.status_code in (400, 413, 422) and time.monotonic() - began_s < 60, "in proportion to their number"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": [[]] * 200_000}}}]
    reply = tiny.post("/v1/chat/completions", {"messages": ASK, "tools": tools, "tool_choice": "none"})
    assert reply.status_code == 400 and "tools takes" in reply.json()["error"]["message"]
