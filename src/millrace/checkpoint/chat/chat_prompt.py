"""Renders conversations as prompts, with turns that the chat template accepts, and with native tool calls if it
supports them."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from millrace.checkpoint.chat.chat_template import DEFAULT, ChatTemplate
from millrace.checkpoint.tool_calls.formats import ToolFormat, tool_format
from millrace.checkpoint.tool_calls.prompt import with_tools

Message = Mapping[str, object]
_SHORT_ID = re.compile("[A-Za-z0-9]{9}")


class PromptRenderer:
    """Renders conversations with a model's chat templates. Closing the templates is up to their owner."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._formats: dict[str, ToolFormat] = {}

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] = (),
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt's text. Turns that the template refuses are merged; if it does not render a system message,
        that message is put in front of the user's first one.

        messages: normalized; tools: as OpenAI's clients describe them; other parameters and errors: see
        `ChatTemplate.render`
        """
        preamble, variables = "", dict(extra or {})
        if tools or any("tool_calls" in message or message["role"] == "tool" for message in messages):
            messages = [_with_text_arguments(message) for message in messages]
            form, shows_tools, shows_calls = self._form(bool(tools))
            if form.short_ids:
                messages = [_with_short_ids(message) for message in messages]
            messages = with_tools(messages, (), replace(form, native=shows_calls))
            if tools and shows_tools:
                variables["tools"] = list(tools)
            if tools and not (shows_tools and form.describes_tools):
                preamble = self._tools_text(tools, form)
        return self.template.render(
            messages, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message,
            extra=variables, preamble=preamble, merges=True,
        )  # fmt: skip

    def _form(self, has_tools: bool) -> tuple[ToolFormat, bool, bool]:
        """Return the call format, whether the template gets the tools, and whether it renders calls."""
        name = self.template.name_for(has_tools)
        form = self._format(name)
        if form.native:
            return form, True, True
        if name != DEFAULT:  # a template for tools, but the format of its calls is unknown
            shows_tools, shows_calls = self.template.renders_tools()
            if shows_tools:
                return replace(form, describes_tools=True), True, shows_calls
            form = self._format(DEFAULT)
        return form, form.native, form.native

    def _format(self, name: str) -> ToolFormat:
        if name not in self._formats:
            self._formats[name] = tool_format(self.template.sources[name])
        return self._formats[name]

    @staticmethod
    def _tools_text(tools: Sequence[Mapping[str, object]], form: ToolFormat) -> str:
        """Return a description of the tools for a model whose template does not describe them."""
        (message,) = with_tools((), tools, replace(form, describes_tools=False))
        return str(message["content"])


def _with_text_arguments(message: Message) -> Message:
    """Return the message with the arguments of calls as JSON text: Python clients also send objects."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [{**call, "function": _as_text(call["function"])} for call in calls]}


def _with_short_ids(message: Message) -> Message:
    """Return the message with call ids in the form that Mistral's templates accept: nine letters and digits."""
    changed = dict(message)
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        changed["tool_calls"] = [{**call, "id": _short_id(call["id"])} if "id" in call else call for call in calls]
    if isinstance(answered := message.get("tool_call_id"), str):
        changed["tool_call_id"] = _short_id(answered)
    return changed


def _short_id(call_id: object) -> str:
    text = str(call_id)
    if _SHORT_ID.fullmatch(text):
        return text
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()[:9]


def _as_text(function: Mapping[str, object]) -> Mapping[str, object]:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        return function
    return {**function, "arguments": json.dumps(arguments or {}, ensure_ascii=False)}
