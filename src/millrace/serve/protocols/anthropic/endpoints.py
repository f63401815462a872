"""Anthropic's protocol: POST /v1/messages, whole or as a stream of events, and /v1/messages/count_tokens.

source: the Messages API's reference, version 2023-06-01
"""

import json
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping

import msgspec
from starlette.types import ASGIApp

from millrace.errors import RequestError
from millrace.runtime.request.sampling_params import Delta, SamplingParams
from millrace.runtime.request.structured_outputs import StructuredOutputsParams
from millrace.serve.http.errors import HttpProblem
from millrace.serve.http.http_request import EVENT_STREAM, RequestContext
from millrace.serve.http.openapi import Operation
from millrace.serve.http.routes import HttpEndpoint, Protocol
from millrace.serve.http.server_context import OFF_LOOP_BODY
from millrace.serve.llm.answer_blocks import AnswerBlock, BlockEvent, BlockKind, Blocks
from millrace.serve.llm.conversation import DEFAULT_RENDERING, Conversation, Rendering, continue_last_assistant_message
from millrace.serve.llm.event_stream import EventStream, StreamFraming, encode_named_event
from millrace.serve.llm.generation_stream import GenerationStream, start_chat_generation
from millrace.serve.llm.language_model import TextBackend
from millrace.serve.llm.non_streaming import collect_answer
from millrace.serve.llm.reasoning import Thinking
from millrace.serve.llm.request_decoding import drop_large_fields, request_options
from millrace.serve.llm.request_types import CalledFunction, Message, ToolCall
from millrace.serve.llm.response_types import json_reply
from millrace.serve.llm.tools import ANTHROPIC as TOOL_SHAPE
from millrace.serve.llm.tools import Tools, tools_of
from millrace.serve.protocols.anthropic.protocol import (
    VERSION,
    AnthropicError,
    AnthropicErrorReply,
    CountReply,
    CountRequest,
    InMessage,
    MessageEvent,
    MessagesRequest,
    OutBlock,
    OutMessage,
    OutUsage,
    StopReason,
)

_ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def write_error(problem: HttpProblem) -> bytes:
    """Encode an error in Anthropic's format."""
    kind = _ERROR_TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "api_error")
    return msgspec.json.encode(AnthropicErrorReply(AnthropicError(kind, problem.message)))


_STREAM = StreamFraming(EVENT_STREAM, lambda problem: b"event: error\ndata: " + write_error(problem) + b"\n\n")


async def messages(backend: TextBackend, call: RequestContext, request: MessagesRequest) -> ASGIApp:
    """Return the response, or the stream. raises MillraceError"""
    params = _params(request)
    conversation = await backend.off_loop(call.body_bytes > OFF_LOOP_BODY, lambda: conversation_of(request, params))
    drop_large_fields(request)
    generation = await start_chat_generation(backend, call, conversation)
    answer = _MessageAnswer(generation, call.model)
    if request.stream:
        return EventStream(generation, answer.stream(), _STREAM)
    async with generation:
        (choice,) = await collect_answer(generation, backend)
        answer.blocks = choice.blocks
        return json_reply(answer.message(choice.end))


async def count_tokens(backend: TextBackend, call: RequestContext, request: CountRequest) -> ASGIApp:
    """Count the tokens of the prompt that these messages would have. raises MillraceError"""
    conversation = await backend.off_loop(
        call.body_bytes > OFF_LOOP_BODY, lambda: conversation_of(request, SamplingParams())
    )
    drop_large_fields(request)
    specs = conversation.tools.specs if conversation.tools else ()
    ids = await backend.texts.encode_chat(
        conversation.messages, conversation.rendering, tools=specs, body_bytes=call.body_bytes, bounded=False
    )
    return json_reply(CountReply(len(ids)))


def _params(request: MessagesRequest) -> SamplingParams:
    return SamplingParams(
        max_tokens=request.max_tokens, temperature=request.temperature, top_p=request.top_p, top_k=request.top_k,
        stop=tuple(request.stop_sequences or ()), structured_outputs=_form(request),
    )  # fmt: skip


def _form(request: MessagesRequest) -> StructuredOutputsParams | None:
    """Return the constraint of `output_config.format`, or of its older name `output_format`."""
    output_format = (request.output_config or {}).get("format") or request.output_format
    match output_format:
        case None:
            return None
        case {"type": "json_schema", "schema": dict(schema)}:
            return StructuredOutputsParams(json=schema, field_name="output_config.format")
    expected = '{"type": "json_schema", "schema": ...}'
    raise RequestError(
        f"output_config.format is {output_format!r:.80}", expected, "correct output_config", "output_config"
    )


def conversation_of(request: CountRequest, params: SamplingParams) -> Conversation:
    """Convert a request into a conversation with OpenAI's message shape. raises RequestError naming the field"""
    messages: list[Message] = []
    if request.system:
        messages.append(Message("system", _text(request.system, "system")))
    for i, message in enumerate(request.messages):
        messages += _messages(message, f"messages[{i}].content")
    return Conversation(
        messages=messages, params=params, tools=_tools(request), options=request_options(request),
        rendering=continue_last_assistant_message(_rendering(request.thinking), messages), capped=True,
    )  # fmt: skip


def _rendering(thinking: Mapping[str, object] | None) -> Rendering:
    if thinking is None:
        return DEFAULT_RENDERING
    kind = thinking.get("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise RequestError(
            f"thinking.type is {kind!r:.60}", '"enabled", "adaptive" or "disabled"', "correct thinking", "thinking"
        )
    return Rendering(thinking=Thinking(kind != "disabled", "thinking"))


def _tools(request: CountRequest) -> Tools | None:
    tools: list[dict[str, object]] = []
    for tool in request.tools or ():
        function = {"name": tool.get("name"), "description": tool.get("description"), "strict": tool.get("strict")}
        function["parameters"] = tool.get("input_schema")
        tools.append(
            {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}
        )
    choice, parallel = _choice(request.tool_choice)
    return tools_of(tools, choice, parallel, TOOL_SHAPE)


def _choice(choice: Mapping[str, object] | None) -> tuple[object, bool]:
    if choice is None:
        return None, True
    parallel = not choice.get("disable_parallel_tool_use")
    match choice:
        case {"type": "auto" | "none" as kind}:
            return kind, parallel
        case {"type": "any"}:
            return "required", parallel
        case {"type": "tool", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}, parallel
    raise RequestError(f"tool_choice is {choice!r:.80}", TOOL_SHAPE.choices, "correct tool_choice", "tool_choice")


def _messages(message: InMessage, path: str) -> Iterator[Message]:
    """Yield the messages of one message; tool results become separate messages before the rest of the text."""
    if isinstance(message.content, str):
        yield Message(message.role, message.content)
        return
    texts, thoughts, calls = list[str](), list[str](), list[ToolCall]()
    for i, block in enumerate(message.content):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "thinking", "thinking": str(text)}:
                thoughts.append(text)
            case {"type": "redacted_thinking"}:
                pass  # written by another model, for itself
            case {"type": "tool_use", "id": str(call_id), "name": str(name), "input": dict(arguments)}:
                calls.append(ToolCall(CalledFunction(name, json.dumps(arguments)), call_id))
            case {"type": "tool_result", "tool_use_id": str(call_id)}:
                content = block.get("content")
                text = "" if content is None else _text(content, f"{path}[{i}].content")
                yield Message("tool", text, tool_call_id=call_id)
            case _:
                raise _no_block(f"{path}[{i}]", block)
    if calls and message.role != "assistant":
        raise RequestError(f"{path} has a tool_use", "one of the assistant", "correct the messages", "messages")
    if texts or calls or thoughts:
        yield Message(
            message.role, "\n".join(texts) if texts or not calls else None, tool_calls=calls or None,
            reasoning_content="\n".join(thoughts) or None,
        )  # fmt: skip


def _text(content: object, path: str) -> str:
    """Return a text, or the text of blocks. raises RequestError for other blocks"""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _no_block(path, content)
    texts = []
    for i, block in enumerate(content):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise _no_block(f"{path}[{i}]", block)
    return "\n".join(texts)


def _no_block(path: str, block: object) -> RequestError:
    param = path.partition("[")[0]
    if isinstance(block, dict) and block.get("type") in ("image", "document", "search_result", "container_upload"):
        return RequestError(f"{path} is of the type {block['type']}", "text", "send text only", param)
    expected = "a block of the type text, thinking, tool_use or tool_result, with its fields"
    return RequestError(f"{path} is {block!r:.100}", expected, "correct it", param)


class _MessageAnswer:
    """One message in progress."""

    def __init__(self, generation: GenerationStream, model: str) -> None:
        self._generation, self._model, self._id = generation, model, f"msg_{uuid.uuid4().hex}"
        self.blocks = Blocks(generation.new_call_id)

    def message(self, last: Delta) -> OutMessage:
        content = [_out(block) for block in self.blocks.all]
        reason, sequence = self._stop(last)
        return OutMessage(self._id, self._model, content, reason, sequence, self._usage())

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield blocks of events. raises GenerationFailedError"""
        head = b""
        async for deltas in self._generation:
            if not head:  # goes out with the first token: before, the cache was not asked
                empty = OutMessage(self._id, self._model, [], None, None, self._usage(0))
                head = _events([MessageEvent("message_start", empty), MessageEvent("ping")])
                yield head
            for delta in deltas:
                happened = list(self.blocks.add(self._generation.parse_delta(delta)))
                yield _events(_event(*one) for one in happened)
                if delta.finish_reason is not None:
                    yield _events([*(_event(*one) for one in self.blocks.close()), *self._end(delta)])

    def _end(self, last: Delta) -> list[MessageEvent]:
        reason, sequence = self._stop(last)
        counted = msgspec.to_builtins(self._usage())
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return [MessageEvent("message_delta", delta=delta, usage=counted), MessageEvent("message_stop")]

    def _stop(self, last: Delta) -> tuple[StopReason, str | None]:
        finish = self._generation.finish_of(last)
        if finish == "stop" and isinstance(last.stop_reason, str):
            return "stop_sequence", last.stop_reason
        return _STOPS[finish], None

    def _usage(self, n_generated: int | None = None) -> OutUsage:
        handle = self._generation.handle
        n = self._generation.n_generated if n_generated is None else n_generated
        return OutUsage(handle.n_prompt - handle.n_cached, n, handle.n_cached)


_STOPS: Mapping[str, StopReason] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _out(block: AnswerBlock) -> OutBlock:
    match block.kind:
        case BlockKind.TEXT:
            return OutBlock("text", text=block.text)
        case BlockKind.REASONING:
            return OutBlock("thinking", thinking=block.text, signature="")
        case BlockKind.CALL:
            return OutBlock("tool_use", id=block.call_id, name=block.name, input=block.arguments)


def _event(turn: BlockEvent, block: AnswerBlock, text: str) -> MessageEvent:
    match turn, block.kind:
        case BlockEvent.CLOSED, _:
            return MessageEvent("content_block_stop", index=block.index)
        case BlockEvent.OPENED, BlockKind.CALL:
            return _block_start(block, OutBlock("tool_use", id=block.call_id, name=block.name, input={}))
        case BlockEvent.OPENED, BlockKind.REASONING:
            return _block_start(block, OutBlock("thinking", thinking="", signature=""))
        case BlockEvent.OPENED, _:
            return _block_start(block, OutBlock("text", text=""))
        case _, BlockKind.CALL:
            delta = {"type": "input_json_delta", "partial_json": text}
        case _, BlockKind.REASONING:
            delta = {"type": "thinking_delta", "thinking": text}
        case _:
            delta = {"type": "text_delta", "text": text}
    return MessageEvent("content_block_delta", index=block.index, delta=delta)


def _block_start(block: AnswerBlock, content: OutBlock) -> MessageEvent:
    return MessageEvent("content_block_start", index=block.index, content_block=content)


def _events(replies: Iterable[MessageEvent]) -> bytes:
    return b"".join(encode_named_event(reply.type, reply) for reply in replies)


_EXAMPLE = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 64}
_COUNTED = {"messages": _EXAMPLE["messages"]}
ANTHROPIC = Protocol(
    (
        HttpEndpoint(
            Operation(
                "POST", "/v1/messages", "Answer a conversation, as Anthropic's clients ask", True, MessagesRequest,
                OutMessage, MessageEvent, example=_EXAMPLE, error=AnthropicErrorReply,
            ),
            messages, TextBackend, names=MessagesRequest.NAMES,
        ),
        HttpEndpoint(
            Operation(
                "POST", "/v1/messages/count_tokens", "Tokens of a conversation's prompt", True, CountRequest,
                CountReply, example=_COUNTED, error=AnthropicErrorReply,
            ),
            count_tokens, TextBackend, names=CountRequest.NAMES,
        ),
    ),
    write_error,
    below="/v1/messages",
    header=VERSION,
)  # fmt: skip
