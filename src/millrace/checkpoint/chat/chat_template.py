"""Chat templates: render messages as the text format that the model was trained on.

A template is a Jinja2 program that comes with the checkpoint. It runs in Jinja2's sandbox, in a separate process
(`chat_worker.py`) with a memory limit, which is killed if it takes too long; the next rendering starts a new one. A
checkpoint may have several templates by name: "tool_use" is used for conversations with tools, otherwise "default".
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from millrace.errors import CheckpointError, RequestError
from millrace.machine.worker_process import (
    FrameProcess,
    WorkerDiedError,
    WorkerProcess,
    WorkerTimeoutError,
    unavailable,
)

_WORKER = Path(__file__).with_name("chat_worker.py")
_START_S = 30.0  # to start the interpreter and import Jinja2 on a busy machine
DEFAULT, TOOL_USE = "default", "tool_use"  # names of templates, as in transformers


@dataclass(frozen=True, slots=True)
class ChatLimits:
    """Limits of one rendering."""

    timeout_s: float = 5.0
    memory_bytes: int = 512 * 2**20  # address space of the process
    max_characters: int = 16 * 2**20


class ChatTemplate:
    """The templates of a model. Thread-safe: renderings are serialized. The process starts with the first rendering."""

    def __init__(
        self, source: str | Mapping[str, str], variables: Mapping[str, str], limits: ChatLimits | None = None
    ) -> None:
        """Create from one template, or from several by name, one of them "default".

        variables: the named special tokens, `{"bos_token": "<s>", ...}`
        """
        self.sources = {DEFAULT: source} if isinstance(source, str) else dict(source)
        self._variables = dict(variables)
        self._limits = limits or ChatLimits()
        self._worker = WorkerProcess(_WORKER, partial(_greet, self.sources, self._variables, self._limits))

    @property
    def source(self) -> str:
        """Return the template for conversations without tools."""
        return self.sources[DEFAULT]

    def name_for(self, has_tools: bool) -> str:
        """Return the name of the template to use, chosen like in transformers."""
        return TOOL_USE if has_tools and TOOL_USE in self.sources else DEFAULT

    def source_for(self, has_tools: bool) -> str:
        return self.sources[self.name_for(has_tools)]

    def separate_copy(self) -> "ChatTemplate":
        """Return the same template with a separate process, for callers that must not wait for other renderings."""
        return ChatTemplate(self.sources, self._variables, self._limits)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, object] | None = None,
        preamble: str = "",
        merges: bool = False,
    ) -> str:
        """Render the prompt's text. It includes special tokens, so encode it with `add_special_tokens=False`.

        messages: `{"role", "content", ...}`, content a string, null, or a list of `{"type": "text", "text": ...}`. Each
        content is passed in a form that the template renders: as a list, or as its texts joined by newlines
        continue_final_message: end the prompt where the last message's content ends, so that the model continues it
        extra: more variables for the template (`enable_thinking`, `tools`, ...)
        preamble: the server's own text before the conversation; it joins the user's first message if the template
        renders no system message
        merges: whether adjacent messages of one role, and system messages, may be merged if the template refuses them
        raises RequestError (param "messages") if the template refuses or cannot render them, CheckpointError if it is
        broken or exceeds a limit of time, memory or size
        """
        checked = [_checked(i, message) for i, message in enumerate(messages)]
        if continue_final_message and checked:
            checked[-1] = _marked(checked[-1])
        extra = dict(extra or {})
        if not checked:
            raise _refused("there are no messages", "at least one message")
        reply = self._exchange(
            {
                "template": self.name_for(extra.get("tools") is not None),
                "messages": checked,
                "add_generation_prompt": add_generation_prompt,
                "extra": extra,
                "preamble": preamble,
                "merges": merges,
                "max_characters": self._limits.max_characters,
            }
        )
        match reply:
            case {"text": str(text)}:
                return _up_to_mark(text) if continue_final_message else text
            case {"error": "messages", "what": what}:
                raise _refused(
                    f"the model's chat template refuses these messages: {what}", "messages that it can render"
                )
            case {"error": "template", "what": what}:
                raise _broken(f"the chat template is broken: {what}")
        raise _broken(f"the chat template was stopped at its limits: {reply.get('what')}")

    def renders_tools(self) -> tuple[bool, bool]:
        """Return whether the template for tools describes them, and whether it renders calls and results.

        raises CheckpointError like `render`
        """
        reply = self._exchange({"template": self.name_for(True), "probe": True})
        return bool(reply.get("tools")), bool(reply.get("calls"))

    def _exchange(self, request: dict[str, object]) -> dict[str, object]:
        try:
            payload = json.dumps(request | {"timeout_s": self._limits.timeout_s}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise _refused(f"messages or template variables are not JSON: {error}", "JSON values") from error
        with _translated_errors(self._limits, self._limits.timeout_s):
            return cast(dict[str, object], json.loads(self._worker.exchange(payload, self._limits.timeout_s)))

    def close(self) -> None:
        """Stop the process, even during a rendering; a later rendering starts it again."""
        self._worker.stop()


def normalised(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Convert messages from OpenAI's clients to what templates expect: `developer` becomes `system`, nulls are removed.

    raises RequestError (param "messages") for a system or user message whose content is missing, null or not text
    """
    plain = [_checked(i, message) for i, message in enumerate(messages)]
    for i, message in enumerate(plain):
        if message["role"] == "developer":
            message["role"] = "system"
        if "content" not in messages[i] and message["role"] in ("system", "user"):
            raise _refused(f"messages[{i}] has no content", "a string or a list of text parts")
    return plain


def _greet(sources: Mapping[str, str], variables: Mapping[str, str], limits: ChatLimits, process: FrameProcess) -> None:
    """Send a new process its memory limit, then the templates. raises CheckpointError if one is broken"""
    process.exchange(json.dumps({"memory_bytes": limits.memory_bytes}).encode(), _START_S)
    load = {"templates": dict(sources), "first": DEFAULT, "variables": dict(variables)}
    with _translated_errors(limits, limits.timeout_s):
        reply = json.loads(process.exchange(json.dumps(load).encode(), limits.timeout_s))
    if reply.get("error"):
        raise _broken(f"the chat template is broken: {reply.get('what')}")


@contextmanager
def _translated_errors(limits: ChatLimits, timeout_s: float) -> Iterator[None]:
    """Translate errors of the process. raises CheckpointError; MachineError if something else killed it"""
    try:
        yield
    except WorkerTimeoutError:
        raise _broken(
            f"the chat template was stopped: not done after {timeout_s:g} s (does it loop for ever?)"
        ) from None
    except WorkerDiedError as error:
        if error.is_from_outside:
            raise unavailable("the process that renders the chat template was killed") from None
        limit = limits.memory_bytes // 2**20
        raise _broken(
            f"the process that renders the chat template ended (does it need more than {limit} MB?)"
        ) from None


def _checked(index: int, message: Mapping[str, object]) -> dict[str, object]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise _refused(f"{where} is {str(message)[:100]}", 'an object with a "role" and a "content"')
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise _refused(f"{where}.content has the part {str(part)[:100]}", '{"type": "text", "text": "..."}')
    elif content is not None and not isinstance(content, str):
        raise _refused(f"{where}.content is {str(content)[:100]}", "a string or a list of text parts")
    for call in _listed(message.get("tool_calls"), f"{where}.tool_calls"):
        function = call.get("function") if isinstance(call, Mapping) else None
        fields = function if isinstance(function, Mapping) else {}
        if not isinstance(fields.get("name"), str) or not isinstance(fields.get("arguments"), str | Mapping | None):
            expected = '{"type": "function", "function": {"name": ..., "arguments": ...}}'
            raise _refused(f"{where}.tool_calls has {str(call)[:100]}", expected)
    # OpenAI's clients send null for absent values, and many templates would print it (transformers does the same). The
    # exception is a message with only calls: templates check whether its content is null.
    calls = message.get("tool_calls")
    return {key: value for key, value in message.items() if value is not None or (key == "content" and calls)}


def _listed(value: object, where: str) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise _refused(f"{where} is {str(value)[:100]}", "a list of calls")
    return value or []


_MARK = "\u2063millrace: continue here\u2063"  # does not occur in messages


def _marked(message: dict[str, object]) -> dict[str, object]:
    """Return the message with a mark at the end of its content. raises RequestError if it has no text"""
    content = message.get("content")
    if isinstance(content, list) and content:
        return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + _MARK}]}
    if not isinstance(content, str):
        raise _refused("the last message has no content to be continued", "one with a text")
    return {**message, "content": content + _MARK}


def _up_to_mark(text: str) -> str:
    before, mark, _ = text.rpartition(_MARK)
    if not mark:
        raise _refused("the chat template leaves out the last message, which is to be continued", "another last one")
    return before


def _refused(what: str, expected: str) -> RequestError:
    return RequestError(what, expected, "change the messages", param="messages")


def _broken(what: str) -> CheckpointError:
    return CheckpointError(
        what,
        "a chat template that renders in time and memory",
        "correct chat_template.jinja or chat_template in tokenizer_config.json, or use plain completions",
    )
