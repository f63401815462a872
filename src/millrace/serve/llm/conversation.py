"""Conversations to answer, independent of the protocol; messages have OpenAI's shape."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from millrace.errors import RequestError
from millrace.runtime.request.request import DEFAULT_OPTIONS, RequestOptions
from millrace.runtime.request.sampling_params import SamplingParams
from millrace.serve.llm.reasoning import Thinking, thinking_of
from millrace.serve.llm.request_types import Message
from millrace.serve.llm.tools import Tools


@dataclass(frozen=True, slots=True)
class Rendering:
    """Options of rendering a chat template.

    extra: further template variables, such as enable_thinking; they override `thinking`
    add_special_tokens: add them in front of the rendered text
    continued: the last message is the beginning of the answer; opens: the prompt ends where an answer begins
    """

    extra: Mapping[str, object] = field(default_factory=dict)
    opens: bool = True
    continued: bool = False
    add_special_tokens: bool = False
    thinking: Thinking | None = None


DEFAULT_RENDERING = Rendering()


class RenderingFields(Protocol):
    """A request with these fields, and those of `reasoning.py`."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None
    add_special_tokens: bool | None

    @property
    def messages(self) -> Sequence[Message] | None: ...


def rendering_of(request: RenderingFields) -> Rendering:
    """Return the rendering options of a request. raises RequestError if they contradict each other"""
    opens, prefixed = request.add_generation_prompt, prefixed_by(request.messages or ())
    continued = request.continue_final_message
    if prefixed and continued is False:
        raise RequestError(
            f"{prefixed} is true, and continue_final_message is false", "one of them", "leave one out",
            "continue_final_message",
        )  # fmt: skip
    continued = bool(continued or prefixed)
    if continued and opens:
        raise RequestError(
            f"{prefixed or 'continue_final_message'} and add_generation_prompt are both true",
            "one of them: an answer begins once", "leave add_generation_prompt out", "continue_final_message",
        )  # fmt: skip
    extra = request.chat_template_kwargs or {}
    opens = opens is not False and not continued
    return Rendering(extra, opens, continued, bool(request.add_special_tokens), thinking_of(request))


def prefixed_by(messages: Sequence[Message]) -> str:
    """Return the path of the field that makes the last message the beginning of the answer; "" if there is none.

    Mistral's and DeepSeek's clients call it `prefix`, Qwen's `partial`.
    raises RequestError if it is set in another message
    """
    for i, message in enumerate(messages):
        name = "prefix" if message.prefix else "partial" if message.partial else ""
        if name and (i + 1 < len(messages) or message.role != "assistant"):
            raise RequestError(
                f"messages[{i}].{name} is true",
                "the last message, and the assistant's",
                f"leave {name} out",
                "messages",
            )
        if name:
            return f"messages[{i}].{name}"
    return ""


def continue_last_assistant_message(rendering: Rendering, messages: Sequence[Message]) -> Rendering:
    """If the last message is the assistant's, continue it (prefill), as Anthropic and Ollama do."""
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant" or last.tool_calls or not isinstance(last.content, str):
        return rendering
    return replace(rendering, opens=False, continued=True)


@dataclass(slots=True, kw_only=True)
class Conversation:
    """One conversation, its tools and its parameters.

    messages: released once they are encoded
    whole_bytes: JSON bytes of a log probability in an answer that is not streamed; None: it is streamed
    capped: max_tokens beyond the context means the rest of the context; otherwise it is an error
    """

    messages: Sequence[Message]
    params: SamplingParams
    options: RequestOptions = DEFAULT_OPTIONS
    tools: Tools | None = None
    rendering: Rendering = DEFAULT_RENDERING
    whole_bytes: int | None = None
    capped: bool = False

    @property
    def answer_prefix(self) -> str:
        """Return the beginning of the answer that the last message holds, or ""."""
        content = self.messages[-1].content if self.rendering.continued and self.messages else None
        return content if isinstance(content, str) else "".join(part.text for part in content or ())
