"""Ollama's protocol, for desktop clients: /api/chat, generate, embed, tags, show, ps and version.

Streams are lines of JSON. source: Ollama's docs/api.md, 0.12
"""

import datetime
import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
from msgspec import UNSET, Struct
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from millrace import __version__
from millrace.errors import RequestError
from millrace.runtime.request.sampling_params import Delta, SamplingParams, capped, check_context
from millrace.runtime.request.structured_outputs import StructuredOutputsParams
from millrace.serve.backend import Backend, Models
from millrace.serve.http.errors import HttpProblem
from millrace.serve.http.http_request import RequestContext
from millrace.serve.http.openapi import Operation
from millrace.serve.http.routes import HttpEndpoint, PostHandler, Protocol, get
from millrace.serve.http.server_context import OFF_LOOP_BODY
from millrace.serve.llm.answer_blocks import BlockKind, Blocks
from millrace.serve.llm.conversation import DEFAULT_RENDERING, Conversation, Rendering, continue_last_assistant_message
from millrace.serve.llm.embeddings import EmbeddingBackend
from millrace.serve.llm.event_stream import EventStream, StreamFraming
from millrace.serve.llm.generation_stream import GenerationStream, start_chat_generation, submit_prompts
from millrace.serve.llm.language_model import TextBackend
from millrace.serve.llm.non_streaming import collect_answer
from millrace.serve.llm.reasoning import Thinking, reasoning_switch
from millrace.serve.llm.request_decoding import drop_large_fields, request_options
from millrace.serve.llm.request_types import Body, CalledFunction, Message, ToolCall
from millrace.serve.llm.response_types import json_reply
from millrace.serve.llm.tools import Tools, tools_of
from millrace.serve.protocols.ollama.embed import (
    EmbeddingsReply,
    EmbeddingsRequest,
    EmbedReply,
    EmbedRequest,
    embed,
    embeddings,
)
from millrace.serve.protocols.ollama.protocol import (
    DEFAULTS,
    OPTIONS,
    OllamaChatRequest,
    OllamaDetails,
    OllamaError,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaModel,
    OllamaModels,
    OllamaReply,
    OllamaRequest,
    OllamaShowReply,
    OllamaShowRequest,
    OllamaVersion,
    OutCall,
    OutFunction,
    OutOllamaMessage,
)

Options = Mapping[str, Any]


def write_error(problem: HttpProblem) -> bytes:
    return msgspec.json.encode(OllamaError(problem.message))


LINES = "application/x-ndjson"
_STREAM = StreamFraming(LINES.encode(), lambda problem: write_error(problem) + b"\n")


async def chat(backend: TextBackend, call: RequestContext, request: OllamaChatRequest) -> ASGIApp:
    """Return the response, or the stream; without messages, report the model as loaded. raises MillraceError"""
    conversation = await backend.off_loop(call.body_bytes > OFF_LOOP_BODY, lambda: _conversation(request, backend))
    if not conversation.messages:
        return _load_reply(
            call, request, OllamaReply(model=call.model, created_at=_now(), message=OutOllamaMessage(""))
        )
    drop_large_fields(request)
    generation = await start_chat_generation(backend, call, conversation)
    return await _ChatAnswer(generation, call, is_chat=True).response(backend, request.stream is not False)


async def generate(backend: TextBackend, call: RequestContext, request: OllamaGenerateRequest) -> ASGIApp:
    """Answer a prompt as a user message, or as it is with `raw`; without one, report the model as loaded.

    raises MillraceError
    """
    params, options = _params(request, backend), request_options(request)
    if not request.prompt:
        return _load_reply(call, request, OllamaReply(model=call.model, created_at=_now(), response=""))
    if request.raw:
        (ids,) = await backend.texts.encode([request.prompt], True, "prompt")
        drop_large_fields(request)
        params = capped(params, len(ids), backend.model.engine.limits.context_tokens)
        check_context(len(ids), params.max_tokens, backend.model.engine.limits.context_tokens, "prompt")
        generation = await submit_prompts(backend, [list(ids)], params, call, options)
    else:
        system = [Message("system", request.system)] if request.system else []
        messages = [*system, Message("user", request.prompt)]
        conversation = Conversation(
            messages=messages, params=params, rendering=_rendering(request.think), options=options, capped=True
        )  # fmt: skip
        del messages
        drop_large_fields(request)
        generation = await start_chat_generation(backend, call, conversation)
    return await _ChatAnswer(generation, call, is_chat=False).response(backend, request.stream is not False)


def _conversation(request: OllamaChatRequest, backend: TextBackend) -> Conversation:
    messages = with_call_ids([_message(i, message) for i, message in enumerate(request.messages)])
    return Conversation(
        messages=messages, params=_params(request, backend),
        tools=_tools(request.tools), rendering=continue_last_assistant_message(_rendering(request.think), messages),
        options=request_options(request),
        capped=True,
    )  # fmt: skip


def _load_reply(call: RequestContext, request: OllamaRequest, reply: OllamaReply) -> Response:
    """Answer a load or unload request of a client that chooses or releases a model; the model always stays loaded."""
    reply.done, reply.done_reason = True, "unload" if request.keep_alive in (0, "0", "0s") else "load"
    return Response(msgspec.json.encode(reply) + b"\n", media_type=LINES if request.stream is not False else None)


class _ChatAnswer:
    """One answer in progress. Tool calls are sent when they are complete, because their arguments are objects."""

    def __init__(self, generation: GenerationStream, call: RequestContext, is_chat: bool) -> None:
        self._generation, self._call, self._is_chat = generation, call, is_chat
        self._blocks = Blocks(generation.new_call_id)
        self._n_sent_calls = 0  # calls

    async def response(self, backend: TextBackend, streams: bool) -> ASGIApp:
        """Return the response, or the stream. raises GenerationFailedError"""
        if streams:
            return EventStream(self._generation, self._lines(), _STREAM)
        async with self._generation:
            (choice,) = await collect_answer(self._generation, backend)
            blocks = self._blocks = choice.blocks
            reply = self._line(blocks.text(BlockKind.TEXT), blocks.text(BlockKind.REASONING), choice.end)
        return json_reply(reply)

    async def _lines(self) -> AsyncIterator[bytes]:
        async for deltas in self._generation:
            for delta in deltas:
                parsed = self._generation.parse_delta(delta)
                self._blocks.push(parsed)
                if delta.finish_reason is not None:
                    for _ in self._blocks.close():
                        pass
                if parsed.content or parsed.reasoning or self._n_complete > self._n_sent_calls:
                    yield msgspec.json.encode(self._line(parsed.content, parsed.reasoning)) + b"\n"
                if delta.finish_reason is not None:
                    yield msgspec.json.encode(self._line("", "", delta)) + b"\n"

    @property
    def _n_complete(self) -> int:
        return sum(call.closed for call in self._blocks.calls())

    def _line(self, content: str, thinking: str, last: Delta | None = None) -> OllamaReply:
        reply = OllamaReply(model=self._call.model, created_at=_now())
        thoughts = thinking or UNSET
        if self._is_chat:
            calls = self._blocks.calls()[self._n_sent_calls : None if last is not None else self._n_complete]
            self._n_sent_calls += len(calls)
            tool_calls = [OutCall(OutFunction(c.name, c.arguments), c.call_id) for c in calls]
            reply.message = OutOllamaMessage(content, thinking=thoughts, tool_calls=tool_calls or UNSET)
        else:
            reply.response, reply.thinking = content, thoughts
        if last is not None:
            self._count(reply, last)
        return reply

    def _count(self, reply: OllamaReply, last: Delta) -> None:
        """Add the durations and counts to the last line."""
        reply.done, finish = True, self._generation.finish_of(last)
        reply.done_reason = "length" if finish == "length" else "stop"
        timings, usage = self._generation.handle.requests[0].timings, self._generation.usage
        begun = timings.first_scheduled_s or timings.queued_s
        first, end = timings.first_token_s or begun, timings.last_token_s or begun
        reply.total_duration = int((time.perf_counter() - self._call.arrived_s) * 1e9)
        reply.load_duration = 0
        reply.prompt_eval_count, reply.prompt_eval_duration = usage.prompt_tokens, int((first - begun) * 1e9)
        reply.eval_count, reply.eval_duration = usage.completion_tokens, int((end - first) * 1e9)


def tags(models: Models, scope: Scope) -> Response:
    """Return the language models and encoders in Ollama's shape."""
    able = [*models.of_kind(TextBackend), *models.of_kind(EmbeddingBackend)]
    return json_reply(OllamaModels([_model(b, name) for b in able for name in b.model.listed_names]))


async def show(backend: TextBackend, call: RequestContext, request: OllamaShowRequest) -> ASGIApp:
    template = backend.model.chat_template
    details, thinks = _details(backend), ["thinking"] if backend.speech.thoughts else []
    architecture = details.family
    info = {"general.architecture": architecture, f"{architecture}.context_length": backend.model.max_context}
    if isinstance(n := backend.model.metadata.get("parameters"), int):
        info["general.parameter_count"] = n
    return json_reply(
        OllamaShowReply(
            details, info, ["completion", *(["tools"] if template else []), *thinks],
            "" if template is None else template.source, _time(backend.model.created), _parameters(backend),
            license=str(backend.model.metadata.get("license", "")),
        )
    )  # fmt: skip


def _parameters(backend: TextBackend) -> str:
    """Return the model's own settings, as in a Modelfile."""
    theirs = {ours: name for name, ours in OPTIONS.items()}
    own = {} if backend.defaults_origin else backend.defaults
    return "\n".join(f"{theirs[name]} {value:g}" for name, value in own.items())


def version(models: Models, scope: Scope) -> Response:
    return json_reply(OllamaVersion(__version__))


def _params(request: OllamaRequest, backend: TextBackend) -> SamplingParams:
    """Return the sampling parameters; the model's own settings override Ollama's defaults. raises RequestError"""
    own = {} if backend.defaults_origin else backend.defaults
    fields: dict[str, Any] = {**DEFAULTS, **own}
    for name, value in (request.options or {}).items():  # what changes nothing was taken out of them
        if value is not None:
            fields[OPTIONS[name]] = value
    if fields.get("seed") == -1:  # Ollama's word for any
        del fields["seed"]
    if fields.get("max_tokens") in (-1, -2):  # to the end of the context, which is what happens
        del fields["max_tokens"]
    if isinstance(fields.get("stop"), list):
        fields["stop"] = tuple(fields["stop"])
    return SamplingParams(**fields, structured_outputs=_form(request.format))


def _form(response_format: str | Mapping[str, Any] | None) -> StructuredOutputsParams | None:
    if response_format is None or response_format == "":
        return None
    if isinstance(response_format, str):
        if response_format != "json":
            raise RequestError(
                f"format is {response_format!r:.60}", '"json", or a JSON schema', "correct format", "format"
            )
        return StructuredOutputsParams(json_object=True, field_name="format")
    return StructuredOutputsParams(json=response_format, field_name="format")


def _rendering(think: bool | str | None) -> Rendering:
    enabled = reasoning_switch("think", think)
    return DEFAULT_RENDERING if enabled is None else Rendering(thinking=Thinking(enabled, "think"))


def _message(i: int, message: OllamaMessage) -> Message:
    if message.images:
        raise RequestError(f"messages[{i}] has images", "text", "send text only", "messages")
    calls = [
        ToolCall(CalledFunction(call.function.name, json.dumps(call.function.arguments)), call.id)
        for call in message.tool_calls or ()
    ]
    content = message.content or (None if calls else "")
    return Message(
        message.role, content, name=message.tool_name or message.name, tool_calls=calls or None,
        tool_call_id=message.tool_call_id, reasoning_content=message.thinking,
    )  # fmt: skip


def with_call_ids(messages: list[Message]) -> list[Message]:
    """Give each tool call an id, and each result the id of its call, by name or in order.

    Ollama's clients send none, and some chat templates require them.
    """
    pending: list[ToolCall] = []
    n_calls = 0
    for message in messages:
        if message.tool_calls:
            pending = list(message.tool_calls)
        for call in message.tool_calls or ():
            n_calls += 1
            call.id = call.id or f"call{n_calls:05d}"
        if message.role == "tool" and pending:
            matching = [call for call in pending if message.tool_call_id in (None, call.id)]
            call = next((call for call in matching if call.function.name == message.name), (matching or pending)[0])
            message.tool_call_id = message.tool_call_id or call.id
            pending.remove(call)
    return messages


def _tools(tools: list[dict[str, Any]] | None) -> Tools | None:
    return tools_of(tools, None, None) if tools else None


def _model(backend: Backend, name: str) -> OllamaModel:
    digest = str(backend.model.metadata.get("engine", ""))
    n_bytes = backend.model.metadata.get("weights_bytes")
    size = n_bytes if isinstance(n_bytes, int) else 0
    return OllamaModel(name, name, _time(backend.model.created), digest, _details(backend), size)


def _details(backend: Backend) -> OllamaDetails:
    metadata = backend.model.metadata
    family = str(metadata.get("architecture", "")).partition("For")[0].lower()  # llama, of LlamaForCausalLM
    precision, n = metadata.get("precision"), metadata.get("parameters")
    kinds = dict.fromkeys(map(str, precision.values())) if isinstance(precision, Mapping) else []
    return OllamaDetails(family, [family], ", ".join(kinds), parameter_size=_count(n) if isinstance(n, int) else "")


def _count(n: int) -> str:
    """Format a number of parameters as Ollama does: 1.1B, 134.52M."""
    return f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.2f}M" if n >= 1e6 else f"{n / 1e3:.0f}K"


def _now() -> str:
    return _time(time.time())


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")


def _post_endpoint(
    path: str, handler: PostHandler, what: str, request: type[Body], reply: type[Struct], example: Mapping[str, object],
    backend: type[Backend] = TextBackend,
) -> HttpEndpoint:  # fmt: skip
    event = reply if "stream" in request.__struct_fields__ else None
    operation = Operation(
        "POST", path, what, True, request, reply, event, example=example, error=OllamaError, stream_type=LINES
    )  # fmt: skip
    return HttpEndpoint(operation, handler, backend, names=request.NAMES)


_BRIEFLY = {"options": {"num_predict": 64}}
_CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}], **_BRIEFLY}
_PROMPT = {"prompt": "Tell me a story.", **_BRIEFLY}
_TEXTS = {"input": ["The river runs past a mill.", "The wheel turns."]}
OLLAMA = Protocol(
    (
        _post_endpoint(
            "/api/chat", chat, "Answer a conversation, as Ollama's clients ask", OllamaChatRequest, OllamaReply, _CHAT
        ),
        _post_endpoint("/api/generate", generate, "Answer a prompt", OllamaGenerateRequest, OllamaReply, _PROMPT),
        _post_endpoint("/api/show", show, "What is known of a model", OllamaShowRequest, OllamaShowReply, {}),
        _post_endpoint(
            "/api/embed", embed, "A vector for each text", EmbedRequest, EmbedReply, _TEXTS, EmbeddingBackend
        ),
        _post_endpoint(
            "/api/embeddings",
            embeddings,
            "The vector of a text",
            EmbeddingsRequest,
            EmbeddingsReply,
            {"prompt": _TEXTS["input"][0]},
            EmbeddingBackend,
        ),
        get("/api/tags", tags, "The models", OllamaModels, protected=True),
        get("/api/ps", tags, "The models, which are all loaded", OllamaModels, protected=True),
        get("/api/version", version, "Release", OllamaVersion),
    ),
    write_error,
    any_type=True,
    below="/api",
    lists_at="/api/tags",
)
