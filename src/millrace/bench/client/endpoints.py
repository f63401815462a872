"""Endpoints of OpenAI's protocol and Triton's `generate`: request bodies, and parsing of their answers.

Events are parsed as they arrive; only fields that a benchmark needs are decoded and checked.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from millrace.bench.client.request_record import BenchRecord, BenchRequest, Failure

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]


class _Usage(msgspec.Struct):
    """Token usage, with the field names of chat, completions and responses."""

    prompt_tokens: _Tokens | None = None
    completion_tokens: _Tokens | None = None
    input_tokens: _Tokens | None = None
    output_tokens: _Tokens | None = None


class _Message(msgspec.Struct):
    """A delta or a message. Reasoning tokens count as output."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    delta: _Message | None = None
    message: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None


class _ContentPart(msgspec.Struct):
    text: str | None = None


class _Item(msgspec.Struct):
    content: list[_ContentPart] | None = None


class _Response(msgspec.Struct):
    status: str | None = None
    usage: _Usage | None = None
    error: Any = None
    output: list[_Item] | None = None


class _Completion(msgspec.Struct):
    """An event or a body of chat and completions."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _ResponseEvent(msgspec.Struct):
    type: str = ""
    delta: Any = None
    response: _Response | None = None
    error: Any = None
    message: str | None = None


class _Embeddings(msgspec.Struct):
    data: list[Any]
    usage: _Usage | None = None
    error: Any = None


class _Generated(msgspec.Struct):
    """An event or a body of `generate`. A one-element text tensor is unwrapped by Triton, others are lists."""

    text_output: str | list[str] | None = None
    error: Any = None


_generated = msgspec.json.Decoder(_Generated)
_completion = msgspec.json.Decoder(_Completion)
_response_event = msgspec.json.Decoder(_ResponseEvent)
_response = msgspec.json.Decoder(_Response)
_embeddings = msgspec.json.Decoder(_Embeddings)
_DELTAS = frozenset(
    f"response.{name}.delta"
    for name in ("output_text", "refusal", "reasoning_text", "reasoning_summary_text", "function_call_arguments")
)


@dataclass(frozen=True, slots=True)
class BenchEndpoint:
    """An endpoint. on_event, on_body: parse JSON into the record and return the new text, None if it has no tokens;
    they raise msgspec.DecodeError (or its ValidationError) for malformed data
    """

    name: str
    path: str
    fields: Callable[[BenchRequest], dict[str, object]]
    on_event: Callable[[BenchRecord, bytes], str | None]
    on_body: Callable[[BenchRecord, bytes], str | None]
    streams: bool = True
    stream_suffix: str = ""  # appended to the path for streaming

    def request(self, model: str, question: BenchRequest, streamed: bool, each_usage: bool) -> bytes:
        """Return the request body. each_usage: request usage in every event (supported by vLLM, SGLang, millrace)"""
        body = self.fields(question)
        if model and "{model}" not in self.path:
            body = {"model": model, **body}
        if self.streams:
            body["stream"] = streamed
            if streamed and self.name in ("chat", "completions"):
                body["stream_options"] = {"include_usage": True} | (
                    {"continuous_usage_stats": True} if each_usage else {}
                )
        return msgspec.json.encode({**body, **question.extra})


def _limit(name: str, question: BenchRequest) -> dict[str, object]:
    return {} if question.max_tokens is None else {name: question.max_tokens}


def _messages(question: BenchRequest) -> list[dict[str, str]]:
    return [{"role": m.role, "content": m.content} for m in question.messages]


def _take_usage(answer: BenchRecord, usage: _Usage | None) -> None:
    if usage is None:
        return
    n_prompt = usage.input_tokens if usage.prompt_tokens is None else usage.prompt_tokens
    n_output = usage.output_tokens if usage.completion_tokens is None else usage.completion_tokens
    answer.n_prompt = answer.n_prompt if n_prompt is None else n_prompt
    if n_output is not None and n_output < (answer.n_reported or 0):
        answer.fail(Failure.MALFORMED, f"its usage went from {answer.n_reported} output tokens back to {n_output}")
    answer.n_reported = answer.n_reported if n_output is None else n_output


def _take_completion(answer: BenchRecord, data: bytes) -> str | None:
    event = _completion.decode(data)
    if event.error is not None:
        answer.fail(Failure.SERVER_ERROR, str(event.error))
    _take_usage(answer, event.usage)
    new_text = None
    for choice in event.choices:
        answer.finish_reason = choice.finish_reason or answer.finish_reason
        message = choice.delta or choice.message
        text = choice.text if message is None else _text_of(message)
        if text is not None and (text or (message is not None and message.tool_calls)):
            new_text = (new_text or "") + text
    if new_text is not None and event.usage is not None and answer.n_reported is not None:
        answer.chunk_tokens.append(answer.n_reported)
    return new_text


def _text_of(message: _Message) -> str:
    return (message.reasoning_content or message.reasoning or "") + (message.content or "")


def _take_response_event(answer: BenchRecord, data: bytes) -> str | None:
    event = _response_event.decode(data)
    if event.type in _DELTAS:
        return event.delta if isinstance(event.delta, str) and event.delta else None
    if event.type == "error" or event.error is not None:
        answer.fail(Failure.SERVER_ERROR, str(event.error or event.message))
    elif event.response is not None and event.type in ("response.completed", "response.incomplete", "response.failed"):
        _take_response(answer, event.response)
    return None


def _take_response(answer: BenchRecord, response: _Response) -> None:
    _take_usage(answer, response.usage)
    answer.finish_reason = response.status
    if response.status == "failed":
        answer.fail(Failure.SERVER_ERROR, str(response.error))


def _take_whole_response(answer: BenchRecord, data: bytes) -> str | None:
    response = _response.decode(data)
    _take_response(answer, response)
    return "".join(part.text or "" for item in response.output or () for part in item.content or ()) or None


def _take_embeddings(answer: BenchRecord, data: bytes) -> str | None:
    reply = _embeddings.decode(data)
    if not reply.data:
        answer.fail(Failure.MALFORMED, "the answer holds no embedding")
    _take_usage(answer, reply.usage)
    answer.finish_reason, answer.n_reported = "stop", 0
    return None


def _take_generated(answer: BenchRecord, data: bytes) -> str | None:
    """Parse an event of `generate`, which reports neither token counts nor the last event; the HTTP body ends it."""
    reply = _generated.decode(data)
    if reply.error is not None:
        answer.fail(Failure.SERVER_ERROR, str(reply.error))
    answer.finish_reason = "end of the body"
    text = reply.text_output
    return ("".join(text) if isinstance(text, list) else text) or None


CHAT = BenchEndpoint(
    "chat", "/v1/chat/completions",
    lambda q: {"messages": _messages(q), **_limit("max_tokens", q)}, _take_completion, _take_completion,
)  # fmt: skip
COMPLETIONS = BenchEndpoint(
    "completions", "/v1/completions",
    lambda q: {"prompt": q.text, **_limit("max_tokens", q)}, _take_completion, _take_completion,
)  # fmt: skip
RESPONSES = BenchEndpoint(
    "responses", "/v1/responses",
    lambda q: {"input": _messages(q), **_limit("max_output_tokens", q)}, _take_response_event, _take_whole_response,
)  # fmt: skip
EMBEDDINGS = BenchEndpoint(
    "embeddings", "/v1/embeddings", lambda q: {"input": q.text}, _take_embeddings, _take_embeddings, streams=False
)
GENERATE = BenchEndpoint(
    "generate", "/v2/models/{model}/generate", lambda q: {"text_input": q.text, **_limit("max_tokens", q)},
    _take_generated, _take_generated, stream_suffix="_stream",
)  # fmt: skip
PAGE = BenchEndpoint(
    "page", "", lambda q: {}, lambda a, data: None, lambda a, data: data.decode(errors="replace"), False
)
ENDPOINTS = {e.name: e for e in (CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS, GENERATE)}
