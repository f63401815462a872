"""Models that think aloud, by every protocol: apart from the answer, whole and streamed, before forms and calls.

The model writes what a test has it say, where its mask allows that, and then its end.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anthropic
import numpy as np
import ollama
import openai
import pytest
import tokenizers
from numpy.typing import NDArray

from millrace.checkpoint.tokenizer import Tokenizer
from millrace.checkpoint.tokenizer_files import open_tokenizer
from millrace.engine.executor import NOTHING_ALLOWED, ExecutorLimits, StepInputs
from millrace.kernels.sample.ref import unpacked
from millrace.serve.settings import ServerSettings
from tests.runtime.fakes import FakeExecutor, limits
from tests.serve.support import MODEL, Fake, Running, post, running, tokenizer
from tests.support.vocabularies import save_byte_level

CHAT, RESPONSES, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
# Qwen 3's way to write: thoughts of earlier turns where they are given, and a closed thought where none is wanted.
TEMPLATE = """{%- if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
    {{- m.content or '' }}
    {%- for call in m.tool_calls or [] %}{{ '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
    {%- endfor %}{{ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}{{ OPENED }}{% endif %}
{%- endif %}"""
THOUGHT = 'Is {"a": 1} it? No <tool_call>,\n\nbut "a" is 5. 東京'
TEXT = "It is five: 東.\n\nOr so."
SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["a"],
    "additionalProperties": False,
}  # fmt: skip
OBJECT = '{"a": 5}'
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 5}}\n</tool_call>'
ASK = [{"role": "user", "content": "What is it?"}]


class Saying(FakeExecutor):
    """says: the answer; opened: what the prompt has behind the assistant's name"""

    says, opened = "", ""
    words: Tokenizer
    n_forced = 0  # tokens that the mask did not allow
    prompt = ""  # of the last answer

    def _draw(self, step: StepInputs, row: np.void, history: NDArray[np.int64]) -> int:
        words, turn = self.words, self.words.encode("<|im_start|>", False)[0]
        begun = int(np.flatnonzero(history == turn)[-1]) + 1 if turn in history else 0
        n_said = len(history) - begun - len(words.encode(f"assistant\n{self.opened}", False))
        if n_said == 0:
            self.prompt, self.n_forced = words.decode(history.tolist(), skip_special_tokens=False), 0
        answer = [*words.encode(self.says, False), words.eos_token_id]
        wanted = answer[min(max(n_said, 0), len(answer) - 1)]
        assert wanted is not None
        if not row["mask"]:
            return wanted
        assert step.masks is not None
        allowed = np.flatnonzero(unpacked(step.masks[row["mask"] - 1], self.limits.vocab_size))
        if wanted in allowed:
            return wanted
        self.n_forced += 1
        return int(allowed[np.searchsorted(allowed, wanted) % len(allowed)]) if len(allowed) else NOTHING_ALLOWED


@dataclass(frozen=True)
class Thinker:
    """opened: what its template writes behind the assistant's name"""

    served: Running
    executor: Saying
    opened: str

    def says(self, answer: str, thought: str = THOUGHT, gap: str = "\n\n") -> None:
        """With a thought before it, as this model begins one."""
        self.executor.says = ("" if self.opened else "<think>\n") + f"{thought}\n</think>{gap}{answer}"
        self.executor.opened = self.opened

    @property
    def n_thought(self) -> int:
        """Tokens of its thought, with the marks that it wrote."""
        words, said = self.executor.words, self.executor.says
        return len(words.encode(said[: said.index("</think>") + len("</think>")], False))


def vocabulary(special: bool) -> Tokenizer:
    """With a token for each mark; special: which is left out of texts"""
    with TemporaryDirectory() as name:
        folder = Path(name)
        save_byte_level(folder)
        whole = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        marks = ["<think>", "</think>"]
        whole.add_special_tokens(marks) if special else whole.add_tokens(marks)
        whole.save(str(folder / "tokenizer.json"))
        return open_tokenizer(folder)


# name: what the prompt opens, and whether marks are special tokens; None: the end's is no token at all
KINDS: dict[str, tuple[str, bool | None]] = {
    "writes <think>": ("", False), "is given <think>": ("<think>\n", False),
    "writes special <think>": ("", True), "is given special <think>": ("<think>\n", True),
}  # fmt: skip
SPELLED: dict[str, tuple[str, bool | None]] = {"writes <think>": ("", None), "is given <think>": ("<think>\n", None)}


def thinker_of(kind: tuple[str, bool | None]) -> Iterator[Thinker]:
    opened, special = kind
    words = tokenizer() if special is None else vocabulary(special)
    of = limits(vocab_size=words.vocab_size, max_context=1024, max_step_tokens=512, n_pages=1024)
    made: list[Saying] = []

    def executor(limits: ExecutorLimits, before_run: Any) -> Saying:
        made.append(Saying(limits, before_run))
        made[0].words = words
        return made[0]

    template = TEMPLATE.replace("OPENED", json.dumps(opened))
    fake = Fake(limits=of, template=template, ends=True, words=words, executor=executor)
    with running(fake, ServerSettings(port=0)) as served:
        yield Thinker(served, made[0], opened)


@pytest.fixture(scope="module", params=list(KINDS.values()), ids=list(KINDS))
def thinker(request: pytest.FixtureRequest) -> Iterator[Thinker]:
    yield from thinker_of(request.param)


@pytest.fixture(scope="module", params=list(SPELLED.values()), ids=list(SPELLED))
def speller(request: pytest.FixtureRequest) -> Iterator[Thinker]:
    """Whose end of a thought is no token of its own."""
    yield from thinker_of(request.param)


@dataclass
class Answer:
    """What a client makes of one, by whatever protocol."""

    reasoning: str = ""
    content: str = ""
    calls: list[Any] = field(default_factory=list)
    order: list[str] = field(default_factory=list)  # of its parts
    ended: str = ""
    n_thought: int | None = field(default=None, compare=False)  # where a protocol counts them

    def add(self, kind: str, text: str) -> None:
        if text:
            self.order += [kind] if self.order[-1:] != [kind] else []
            setattr(self, kind, getattr(self, kind) + text)


def body(path: str, *, form: bool = False, tools: bool = False, must: bool = False, n: int = 400) -> dict[str, Any]:
    """form: of SCHEMA; must: a tool is called"""
    function = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
    tool: dict[str, Any] = {"type": "function", "function": function}
    choice: Any = "required"
    asked: dict[str, Any] = {"messages": ASK}
    schema: dict[str, Any] = {"name": "it", "schema": SCHEMA}
    if path == RESPONSES:
        asked, tool = {"input": ASK, "max_output_tokens": n}, {"type": "function", **function}
        asked |= {"text": {"format": {"type": "json_schema", **schema}}} if form else {}
    elif path == MESSAGES:
        tool, choice = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}, {"type": "any"}
        asked |= {"max_tokens": n}
    elif path == OLLAMA:
        asked |= {"options": {"num_predict": n}, **({"format": SCHEMA} if form else {})}
    else:
        asked |= {"max_tokens": n}
        asked |= {"response_format": {"type": "json_schema", "json_schema": schema}} if form else {}
    return asked | ({"tools": [tool]} if tools else {}) | ({"tool_choice": choice} if must else {})


def whole(thinker: Thinker, path: str, asked: dict[str, Any]) -> Answer:
    response = post(thinker.served.url, path, {"stream": False, **asked})
    assert response.status_code == 200, response.text
    reply = response.json()
    answer = Answer()
    match path:
        case "/v1/chat/completions":
            message = reply["choices"][0]["message"]
            answer.add("reasoning", message.get("reasoning_content", ""))
            answer.add("content", message["content"] or "")
            calls = [call["function"] for call in message.get("tool_calls", ())]
            answer.calls = [(call["name"], json.loads(call["arguments"])) for call in calls]
            answer.ended = reply["choices"][0]["finish_reason"]
            answer.n_thought = reply["usage"]["completion_tokens_details"]["reasoning_tokens"]
        case "/v1/responses":
            for item in reply["output"]:
                take_item(answer, item)
            answer.ended = reply["status"]
            answer.n_thought = reply["usage"]["output_tokens_details"]["reasoning_tokens"]
        case "/v1/messages":
            for block in reply["content"]:
                answer.add("reasoning", block.get("thinking", ""))
                answer.add("content", block.get("text", ""))
                answer.calls += [(block["name"], block["input"])] if block["type"] == "tool_use" else []
            answer.ended = reply["stop_reason"]
        case _:
            take_line(answer, reply)
    return answer


def streamed(thinker: Thinker, path: str, asked: dict[str, Any]) -> Answer:
    response = post(thinker.served.url, path, {**asked, "stream": True})
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if "{" in line]
    answer, calls = Answer(), list[list[str]]()
    for event in map(json.loads, lines):
        match path:
            case "/v1/chat/completions":
                choice = event["choices"][0]
                answer.add("reasoning", choice["delta"].get("reasoning_content", ""))
                answer.add("content", choice["delta"].get("content", ""))
                for part in choice["delta"].get("tool_calls", ()):
                    calls += [[part["function"]["name"], ""]] if "id" in part else []
                    calls[part["index"]][1] += part["function"]["arguments"]
                answer.ended = choice["finish_reason"] or ""
            case "/v1/responses":
                kinds = {"response.reasoning_text.delta": "reasoning", "response.output_text.delta": "content"}
                if kind := kinds.get(event["type"]):
                    answer.add(kind, event["delta"])
                if event["type"] == "response.output_item.done" and event["item"]["type"] == "function_call":
                    calls.append([event["item"]["name"], event["item"]["arguments"]])
                answer.ended = event.get("response", {}).get("status", "")
            case "/v1/messages":
                delta = event.get("delta", {})
                answer.add("reasoning", delta.get("thinking", ""))
                answer.add("content", delta.get("text", ""))
                if event.get("content_block", {}).get("type") == "tool_use":
                    calls.append([event["content_block"]["name"], ""])
                if "partial_json" in delta:
                    calls[-1][1] += delta["partial_json"]
                answer.ended = delta.get("stop_reason", answer.ended)
            case _:
                take_line(answer, event)
    answer.calls += [(name, json.loads(arguments)) for name, arguments in calls]
    return answer


def take_item(answer: Answer, item: dict[str, Any]) -> None:
    match item["type"]:
        case "reasoning":
            assert [part["type"] for part in item["content"]] == ["reasoning_text"] and item["summary"] == []
            answer.add("reasoning", item["content"][0]["text"])
        case "message":
            answer.add("content", item["content"][0]["text"])
        case "function_call":
            answer.calls.append((item["name"], json.loads(item["arguments"])))


def take_line(answer: Answer, line: dict[str, Any]) -> None:
    answer.add("reasoning", line["message"].get("thinking", ""))
    answer.add("content", line["message"]["content"])
    calls = [call["function"] for call in line["message"].get("tool_calls", ())]
    answer.calls += [(call["name"], call["arguments"]) for call in calls]
    answer.ended = line.get("done_reason", "")


ALL = (CHAT, RESPONSES, MESSAGES, OLLAMA)
STOPPED = {CHAT: "stop", RESPONSES: "completed", MESSAGES: "end_turn", OLLAMA: "stop"}
CALLED = {**STOPPED, CHAT: "tool_calls", MESSAGES: "tool_use"}
CUT_OFF = {CHAT: "length", RESPONSES: "incomplete", MESSAGES: "max_tokens", OLLAMA: "length"}


@pytest.mark.parametrize("ask", [whole, streamed])
@pytest.mark.parametrize("path", ALL)
class TestThoughts:
    """In each protocol, whole and streamed."""

    def test_stand_apart_from_the_answer(self, thinker: Thinker, path: str, ask: Any) -> None:
        thinker.says(TEXT)
        for tools in (False, True):
            answer = ask(thinker, path, body(path, tools=tools))
            assert answer == Answer(THOUGHT, TEXT, [], ["reasoning", "content"], STOPPED[path])
            assert answer.n_thought in (None, thinker.n_thought)

    def test_go_before_calls(self, thinker: Thinker, path: str, ask: Any) -> None:
        for text in ("", "Let me see."):
            thinker.says(f"{text}\n{CALL}" if text else CALL)
            answer = ask(thinker, path, body(path, tools=True))
            order = ["reasoning", "content"] if text else ["reasoning"]
            assert answer == Answer(THOUGHT, text, [("add", {"a": 5})], order, CALLED[path])

    def test_go_before_a_form(self, thinker: Thinker, path: str, ask: Any) -> None:
        """They are free, and the content alone is the object: as the model writes it, or as it has to."""
        if path == MESSAGES:  # whose requests have no form
            return
        for tools in (False, True):
            thinker.says(OBJECT, gap="")
            answer = ask(thinker, path, body(path, form=True, tools=tools))
            assert answer == Answer(THOUGHT, OBJECT, [], ["reasoning", "content"], STOPPED[path])
            assert thinker.executor.n_forced == 0, "nothing that it wanted to say was kept from it"
        thinker.says(f"Sure: {OBJECT}")
        answer = ask(thinker, path, body(path, form=True))
        assert (answer.reasoning, answer.ended) == (THOUGHT, STOPPED[path]) and thinker.executor.n_forced
        held = json.loads(answer.content)
        assert set(held) == {"a"} and held["a"] in range(10)

    def test_go_before_a_call_that_must_be(self, thinker: Thinker, path: str, ask: Any) -> None:
        if path == OLLAMA:  # whose requests have no tool_choice
            return
        thinker.says(CALL, gap="")
        answer = ask(thinker, path, body(path, tools=True, must=True))
        assert answer == Answer(THOUGHT, "", [("add", {"a": 5})], ["reasoning"], CALLED[path])
        assert thinker.executor.n_forced == 0
        thinker.says("I will not.")
        answer = ask(thinker, path, body(path, tools=True, must=True))
        assert (answer.reasoning, answer.content) == (THOUGHT, "")
        assert answer.calls and all(
            name == "add" and set(given) == {"a"} and given["a"] in range(10) for name, given in answer.calls
        )

    def test_a_form_or_a_call(self, thinker: Thinker, path: str, ask: Any) -> None:
        if path == MESSAGES:
            return
        thinker.says(CALL, gap="")
        answer = ask(thinker, path, body(path, form=True, tools=True))
        assert answer == Answer(THOUGHT, "", [("add", {"a": 5})], ["reasoning"], CALLED[path])

    def test_are_all_there_is_where_they_are_cut_off(self, thinker: Thinker, path: str, ask: Any) -> None:
        thinker.says(TEXT, thought="a" * 2000)
        for form in (False, path != MESSAGES):
            answer = ask(thinker, path, body(path, form=form, n=40))
            assert set(answer.reasoning) == {"a"} and answer.order == ["reasoning"]
            assert answer.n_thought in (None, 40)
            assert answer.ended == CUT_OFF[path] and not answer.calls

    def test_are_not_there_where_they_are_turned_off(self, thinker: Thinker, path: str, ask: Any) -> None:
        plainly: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
        others: dict[str, dict[str, Any]] = {MESSAGES: {"thinking": {"type": "disabled"}}, OLLAMA: {"think": False}}
        off = others.get(path, plainly)
        thinker.executor.says, thinker.executor.opened = TEXT, "<think>\n\n</think>\n\n"
        answer = ask(thinker, path, {**body(path), **off})
        assert answer == Answer("", TEXT, [], ["content"], STOPPED[path]) and not answer.n_thought
        assert thinker.executor.prompt.endswith("<think>\n\n</think>\n\n")


def test_events_of_a_thought_in_a_response(thinker: Thinker) -> None:
    thinker.says(TEXT)
    text = post(thinker.served.url, RESPONSES, {**body(RESPONSES), "stream": True}).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    kinds = [event["type"] for event in events]
    in_order = [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]

    def of(name: str) -> list[str]:
        part = ["output_item.added", "content_part.added", f"{name}.delta", f"{name}.done", "content_part.done"]
        return [f"response.{kind}" for kind in (*part, "output_item.done")]

    begin, end = ["response.created", "response.in_progress"], ["response.completed"]
    assert in_order == [*begin, *of("reasoning_text"), *of("output_text"), *end]
    about = [event for event in events if "reasoning_text" in event["type"]]
    done = next(event for event in events if event["type"] == "response.output_item.done")
    assert {(event["output_index"], event["content_index"]) for event in about} == {(0, 0)}
    assert {event["item_id"] for event in about} == {done["item"]["id"]} and done["item"]["type"] == "reasoning"
    assert about[-1]["text"] == THOUGHT == done["item"]["content"][0]["text"]
    assert events[-1]["response"]["output"][0] == done["item"]


def test_log_probabilities_of_a_response_are_of_its_text_alone(thinker: Thinker) -> None:
    thinker.says(f"{TEXT}\n{CALL}")
    asked = {**body(RESPONSES, tools=True), "include": ["message.output_text.logprobs"]}
    _, message, _ = post(thinker.served.url, RESPONSES, asked).json()["output"]
    told = b"".join(bytes(token["bytes"]) for token in message["content"][0]["logprobs"])
    assert told.decode().strip() == TEXT == message["content"][0]["text"]


def test_the_official_clients_read_them(thinker: Thinker) -> None:
    """And stream them."""
    url = thinker.served.url
    thinker.says(f"See.\n{CALL}")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none needed", max_retries=0) as client:
        asked = body(RESPONSES, tools=True)
        with client.responses.stream(model=MODEL, **asked) as events:
            final = events.get_final_response()
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
        assert final.output[0].content[0].text == THOUGHT  # type: ignore[union-attr, index]
        chat = client.chat.completions.create(model=MODEL, **body(CHAT, tools=True))
        assert chat.choices[0].message.reasoning_content == THOUGHT
    with anthropic.Anthropic(base_url=url, api_key="none needed", max_retries=0) as claude:
        with claude.messages.stream(model=MODEL, **body(MESSAGES, tools=True)) as said:
            message = said.get_final_message()
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        assert message.content[0].thinking == THOUGHT  # type: ignore[union-attr]
    with ollama.Client(url) as llama:
        parts = list(llama.chat(model=MODEL, **body(OLLAMA, tools=True), stream=True, think=True))
    assert "".join(part.message.thinking or "" for part in parts) == THOUGHT
    assert [call.function.name for part in parts for call in part.message.tool_calls or ()] == ["add"]


def test_what_was_thought_is_given_back_to_the_template(thinker: Thinker) -> None:
    """As each protocol's clients send it, and by the id of a response."""
    thinker.says(TEXT)
    url, more = thinker.served.url, [{"role": "user", "content": "Why?"}]
    chat = post(url, CHAT, body(CHAT)).json()["choices"][0]["message"]
    response = post(url, RESPONSES, body(RESPONSES)).json()
    message = post(url, MESSAGES, body(MESSAGES)).json()
    line = post(url, OLLAMA, {**body(OLLAMA), "stream": False}).json()["message"]
    next_turns: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": [*ASK, chat, *more]}),
        (RESPONSES, {"input": [*ASK, *response["output"], *more]}),
        (RESPONSES, {"input": "Why?", "previous_response_id": response["id"]}),
        (MESSAGES, {"messages": [*ASK, {"role": "assistant", "content": message["content"]}, *more]}),
        (OLLAMA, {"messages": [*ASK, line, *more], "stream": False}),
    ]
    for path, turn in next_turns:
        thinker.executor.prompt = ""
        reply = post(url, path, {**body(path), **turn})
        assert reply.status_code == 200, reply.text
        assert f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}<|im_end|>" in thinker.executor.prompt


@pytest.mark.parametrize("form", [False, True])
def test_a_thought_that_is_gone_on_with(thinker: Thinker, form: bool) -> None:
    """What the last message began is no part of the answer; what follows up to its end is thought."""
    answer = OBJECT if form else TEXT
    thinker.executor.says = f" a thought.</think>{answer}"
    for begun, thought, content in (
        ("<think>\nThis is", "a thought.", answer),
        ("<think>\nNo.</think>\n<think>This is", "a thought.", answer),
        *([] if form else [("<think>\nNo.</think>This is", "", f" a thought.</think>{TEXT}")]),
    ):
        thinker.executor.opened = begun
        for parts in (begun, [{"type": "text", "text": begun}]):
            asked = {**body(CHAT, form=form), "continue_final_message": True}
            asked["messages"] = [*ASK, {"role": "assistant", "content": parts}]
            found = streamed(thinker, CHAT, asked)
            assert thinker.executor.prompt.endswith(f"assistant\n{begun}")
            assert (found.reasoning.strip(), found.content.strip()) == (thought, content.strip())


def test_white_space_may_go_before_a_thought(thinker: Thinker) -> None:
    thinker.says(TEXT)
    thinker.executor.says = "\n" + thinker.executor.says
    n_before = 0 if thinker.opened else len(thinker.executor.words.encode("\n", False))
    for path in (CHAT, RESPONSES):
        answer = whole(thinker, path, body(path))
        assert (answer.reasoning, answer.content) == (THOUGHT, TEXT)
        assert answer.n_thought == thinker.n_thought - n_before


def test_marks_that_are_no_tokens(speller: Thinker) -> None:
    """Thoughts are read all the same. An answer that is held to a form begins with it, and is no thought."""
    speller.says(TEXT)
    words, said = speller.executor.words, speller.executor.says
    until = [len(words.decode(words.encode(said, False)[:n])) for n in range(len(said))]
    n_thought = next(n for n, end in enumerate(until) if end >= said.index("</think>") + len("</think>"))
    for path in ALL:
        for ask in (whole, streamed):
            answer = ask(speller, path, body(path))
            assert (answer.reasoning, answer.content) == (THOUGHT, TEXT)
            assert answer.n_thought in (None, n_thought)
    speller.says(OBJECT)
    for path in (CHAT, RESPONSES, OLLAMA):
        answer = streamed(speller, path, body(path, form=True))
        assert answer.reasoning == "" and re.fullmatch(r'\{"a": \d\}', answer.content)
    for path in (CHAT, RESPONSES, MESSAGES):
        answer = streamed(speller, path, body(path, tools=True, must=True))
        assert answer.reasoning == answer.content == "" and answer.calls
