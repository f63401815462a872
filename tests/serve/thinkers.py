"""A model that thinks aloud: it writes what a test has it say, where its mask allows that, and then its end.

And what clients make of its answers, by whatever protocol.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from millrace.checkpoint.tokenizer.tokenizer import Tokenizer
from millrace.checkpoint.tokenizer.tokenizer_files import open_tokenizer
from millrace.engine.executor import ExecutorLimits, SampleError, StepInputs
from millrace.kernels.sample.ref import unpacked
from millrace.serve.settings import ServerSettings
from tests.runtime.fakes import FakeExecutor, limits
from tests.serve.support import Fake, Running, post, running, tokenizer
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
THOUGHT = '{"a": 1}? <tool_call>,\n\nor "a" is 5. 東京'
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
    n_forced = 0  # tokens that the mask did not allow
    prompt = ""  # of the last answer

    def __init__(self, limits: ExecutorLimits, before_run: Any, words: Tokenizer) -> None:
        super().__init__(limits, before_run)
        self.words, self.encoded = words, cache(lambda text: words.encode(text, False))

    def _draw(self, step: StepInputs, row: np.void, history: NDArray[np.int64]) -> int:
        words, turn = self.words, self.encoded("<|im_start|>")[0]
        begun = int(np.flatnonzero(history == turn)[-1]) + 1 if turn in history else 0
        n_said = len(history) - begun - len(self.encoded(f"assistant\n{self.opened}"))
        if n_said == 0:
            self.prompt, self.n_forced = words.decode(history.tolist(), skip_special_tokens=False), 0
        answer = [*self.encoded(self.says), words.eos_token_id]
        wanted = answer[min(max(n_said, 0), len(answer) - 1)]
        assert wanted is not None
        if not row["mask"]:
            return wanted
        allowed = np.flatnonzero(unpacked(step.filled_masks()[row["mask"] - 1], self.limits.vocab_size))
        if wanted in allowed:
            return wanted
        self.n_forced += 1
        return (
            int(allowed[np.searchsorted(allowed, wanted) % len(allowed)])
            if len(allowed)
            else SampleError.NOTHING_ALLOWED
        )


@dataclass(frozen=True)
class Thinker:
    """opened: what its template writes behind the assistant's name; index: of its kind"""

    served: Running
    executor: Saying
    opened: str
    index: int

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
DAY = ("writes <think>", "is given special <think>")  # the others at night
SPELLED: dict[str, tuple[str, bool | None]] = {"spells <think>": ("", None), "is given it spelled": ("<think>\n", None)}


def thinker_of(name: str) -> Iterator[Thinker]:
    opened, special = (KINDS | SPELLED)[name]
    words = tokenizer() if special is None else vocabulary(special)
    of = limits(vocab_size=words.vocab_size, max_context=1024, max_step_tokens=512, n_pages=1024)
    made: list[Saying] = []

    def executor(limits: ExecutorLimits, before_run: Any) -> Saying:
        made.append(Saying(limits, before_run, words))
        return made[0]

    template = TEMPLATE.replace("OPENED", json.dumps(opened))
    fake = Fake(limits=of, template=template, ends=True, words=words, executor=executor)
    with running(fake, ServerSettings(port=0)) as served:
        yield Thinker(served, made[0], opened, [*KINDS, *SPELLED].index(name))


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


Ask = Callable[[Thinker, str, dict[str, Any]], Answer]
ALL = (CHAT, RESPONSES, MESSAGES, OLLAMA)
STOPPED = {CHAT: "stop", RESPONSES: "completed", MESSAGES: "end_turn", OLLAMA: "stop"}
CALLED = {**STOPPED, CHAT: "tool_calls", MESSAGES: "tool_use"}
CUT_OFF = {CHAT: "length", RESPONSES: "incomplete", MESSAGES: "max_tokens", OLLAMA: "length"}
