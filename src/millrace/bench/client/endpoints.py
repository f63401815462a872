"""The endpoints of OpenAI's protocol, and Triton's `generate`: what is sent to each, and what its answers say.

An event is read as it arrives: only what a benchmark needs is decoded, and checked; servers differ in the rest.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from millrace.bench.client.request_record import Answer, Failure, Question

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]


class _Usage(msgspec.Struct):
    """Names of chat and completions, and of responses."""

    prompt_tokens: _Tokens | None = None
    completion_tokens: _Tokens | None = None
    input_tokens: _Tokens | None = None
    output_tokens: _Tokens | None = None


class _Said(msgspec.Struct):
    """A delta or a message. Thoughts are tokens that were computed and sent: they count."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    delta: _Said | None = None
    message: _Said | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Part(msgspec.Struct):
    text: str | None = None


class _Item(msgspec.Struct):
    content: list[_Part] | None = None


class _Response(msgspec.Struct):
    status: str | None = None
    usage: _Usage | None = None
    error: Any = None
    output: list[_Item] | None = None


class _Completion(msgspec.Struct):
    """An event or a whole body of chat and completions."""

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
    """An event or a whole body. A text is one tensor of one element, which Triton unwraps, or a list of several."""

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
class Endpoint:
    """on_event, on_body: take JSON into the answer; give the new text, None where there are no tokens in it.

    raises msgspec.DecodeError, of which ValidationError is one, for what is not this endpoint's
    """

    name: str
    path: str
    fields: Callable[[Question], dict[str, object]]
    on_event: Callable[[Answer, bytes], str | None]
    on_body: Callable[[Answer, bytes], str | None]
    streams: bool = True
    stream_suffix: str = ""  # of the path, where streams have one of their own

    def request(self, model: str, question: Question, streamed: bool, each_usage: bool) -> bytes:
        """The body. each_usage: ask for the usage in every event, which vLLM, SGLang and millrace know"""
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


def _limit(name: str, question: Question) -> dict[str, object]:
    return {} if question.max_tokens is None else {name: question.max_tokens}


def _messages(question: Question) -> list[dict[str, str]]:
    return [{"role": m.role, "content": m.content} for m in question.messages]


def _take_usage(answer: Answer, usage: _Usage | None) -> None:
    if usage is None:
        return
    n_prompt = usage.input_tokens if usage.prompt_tokens is None else usage.prompt_tokens
    n_output = usage.output_tokens if usage.completion_tokens is None else usage.completion_tokens
    answer.n_prompt = answer.n_prompt if n_prompt is None else n_prompt
    if n_output is not None and n_output < (answer.n_told or 0):
        answer.fail(Failure.MALFORMED, f"its usage went from {answer.n_told} output tokens back to {n_output}")
    answer.n_told = answer.n_told if n_output is None else n_output


def _take_completion(answer: Answer, data: bytes) -> str | None:
    event = _completion.decode(data)
    if event.error is not None:
        answer.fail(Failure.SERVER_ERROR, str(event.error))
    _take_usage(answer, event.usage)
    found = None
    for choice in event.choices:
        answer.finish_reason = choice.finish_reason or answer.finish_reason
        said = choice.delta or choice.message
        text = choice.text if said is None else _text_of(said)
        if text is not None and (text or (said is not None and said.tool_calls)):
            found = (found or "") + text
    if found is not None and event.usage is not None and answer.n_told is not None:
        answer.chunk_tokens.append(answer.n_told)
    return found


def _text_of(said: _Said) -> str:
    return (said.reasoning_content or said.reasoning or "") + (said.content or "")


def _take_response_event(answer: Answer, data: bytes) -> str | None:
    event = _response_event.decode(data)
    if event.type in _DELTAS:
        return event.delta if isinstance(event.delta, str) and event.delta else None
    if event.type == "error" or event.error is not None:
        answer.fail(Failure.SERVER_ERROR, str(event.error or event.message))
    elif event.response is not None and event.type in ("response.completed", "response.incomplete", "response.failed"):
        _take_response(answer, event.response)
    return None


def _take_response(answer: Answer, response: _Response) -> None:
    _take_usage(answer, response.usage)
    answer.finish_reason = response.status
    if response.status == "failed":
        answer.fail(Failure.SERVER_ERROR, str(response.error))


def _take_whole_response(answer: Answer, data: bytes) -> str | None:
    response = _response.decode(data)
    _take_response(answer, response)
    return "".join(part.text or "" for item in response.output or () for part in item.content or ()) or None


def _take_embeddings(answer: Answer, data: bytes) -> str | None:
    found = _embeddings.decode(data)
    if not found.data:
        answer.fail(Failure.MALFORMED, "the answer holds no embedding")
    _take_usage(answer, found.usage)
    answer.finish_reason, answer.n_told = "stop", 0
    return None


def _take_generated(answer: Answer, data: bytes) -> str | None:
    """Nothing says how many tokens a text has, nor which event is the last: the end of HTTP's body ends the answer."""
    found = _generated.decode(data)
    if found.error is not None:
        answer.fail(Failure.SERVER_ERROR, str(found.error))
    answer.finish_reason = "end of the body"
    text = found.text_output
    return ("".join(text) if isinstance(text, list) else text) or None


CHAT = Endpoint(
    "chat", "/v1/chat/completions",
    lambda q: {"messages": _messages(q), **_limit("max_tokens", q)}, _take_completion, _take_completion,
)  # fmt: skip
COMPLETIONS = Endpoint(
    "completions", "/v1/completions",
    lambda q: {"prompt": q.text, **_limit("max_tokens", q)}, _take_completion, _take_completion,
)  # fmt: skip
RESPONSES = Endpoint(
    "responses", "/v1/responses",
    lambda q: {"input": _messages(q), **_limit("max_output_tokens", q)}, _take_response_event, _take_whole_response,
)  # fmt: skip
EMBEDDINGS = Endpoint(
    "embeddings", "/v1/embeddings", lambda q: {"input": q.text}, _take_embeddings, _take_embeddings, streams=False
)
GENERATE = Endpoint(
    "generate", "/v2/models/{model}/generate", lambda q: {"text_input": q.text, **_limit("max_tokens", q)},
    _take_generated, _take_generated, stream_suffix="_stream",
)  # fmt: skip
PAGE = Endpoint("page", "", lambda q: {}, lambda a, data: None, lambda a, data: data.decode(errors="replace"), False)
ENDPOINTS = {e.name: e for e in (CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS, GENERATE)}
