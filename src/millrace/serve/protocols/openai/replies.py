"""What goes back to OpenAI's clients from chat and completions. Also the source of the OpenAPI document.

UNSET leaves a key out; None writes null.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from millrace.serve.llm.response_types import ChatFinish, ChatLogprobs, CompletionLogprobs, SeedEcho, Usage

# ------------------------------------------------------------------ chat


class FunctionReply(Struct):
    name: str
    arguments: str  # JSON, as the model wrote it


class ToolCallReply(Struct):
    id: str
    function: FunctionReply
    type: Literal["function"] = "function"


class AssistantMessage(Struct):
    """The assistant's message. content: null if the answer has only tool calls"""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallReply] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish
    stop_reason: int | str | None = None  # vLLM's: the stop token or stop string that ended it


class ChatReply(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    millrace: SeedEcho
    object: Literal["chat.completion"] = "chat.completion"


class FunctionDelta(Struct):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """A part of a tool call: the first has its id and name, all further ones only arguments."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish | None = None
    stop_reason: int | str | UnsetType | None = UNSET  # vLLM's, with finish_reason


class ChatChunk(Struct):
    """One event of a chat stream. If requested, `usage` is present, and null until the last event."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET
    millrace: SeedEcho | UnsetType = UNSET  # in the first event


# ------------------------------------------------------------------ completions


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None  # null: more is to come (streams only)
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # in a stream with its first piece


class CompletionReply(Struct):
    """A complete answer; in a stream, every event is one of these, with the new text."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | UnsetType | None = UNSET
    millrace: SeedEcho | UnsetType = UNSET


# ------------------------------------------------------------------ tokens, as vLLM has them


class TokenizeReply(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeReply(Struct):
    prompt: str
