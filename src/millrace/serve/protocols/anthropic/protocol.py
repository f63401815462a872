"""Request and response structs of Anthropic's protocol. source: the Messages API's reference, 2023-06-01"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Struct, UnsetType

from millrace.serve.http.unknown_fields import header_name
from millrace.serve.llm.request_types import TermsFields, described
from millrace.serve.llm.tools import remove_unknown, usable_tools

VERSION = b"anthropic-version"  # the header by which its clients are known where a path is OpenAI's, too
TOOL = ("name", "description", "input_schema", "type", "cache_control", "strict")
# Our fields, as Anthropic's clients know them.
NAMES: Mapping[str, str] = {
    "stop": "stop_sequences", "prompt": "messages", "response_format": "output_config.format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use", "chat_template_kwargs": "thinking",
}  # fmt: skip


class InMessage(Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


def _left_out(messages: Sequence[InMessage]) -> list[str]:
    """Remove calls and results of Anthropic's hosted tools (`server_tool_use`, `web_search_tool_result`).

    Return their types as reported to the client.
    """
    kinds = set[str]()
    for message in messages:
        if isinstance(message.content, str):
            continue
        foreign = [kind for block in message.content if (kind := _foreign(block)) is not None]
        if foreign:
            kinds.update(foreign)
            message.content = [block for block in message.content if _foreign(block) is None]
    return [header_name(f"messages.{kind}") for kind in kinds]


def _foreign(block: Mapping[str, Any]) -> str | None:
    kind = block.get("type")
    return kind if isinstance(kind, str) and kind.endswith(("_tool_use", "_tool_result")) else None


class CountRequest(TermsFields, kw_only=True):
    """Fields that determine a conversation's prompt. Queue options change no count, but clients may send them, too."""

    IGNORED_FIELDS: ClassVar = frozenset(
        [
            "metadata",
            "service_tier",
            "context_management",
            "container",
            "inference_geo",
            "betas",
            "cache_control",
            "speed",
            "user_profile_id",
            "diagnostics",
        ]
    )
    NOT_YET: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "mcp_servers": ([],),
    }  # fmt: skip

    NAMES: ClassVar = NAMES
    WITHIN: ClassVar = ("messages", "tools", "thinking", "output_config", "tool_choice")

    model: Annotated[str | None, described("one of /v1/models; may be left out")] = None
    messages: Annotated[list[InMessage], described("messages of user and assistant")]
    system: Annotated[str | list[dict[str, Any]] | None, described("system prompt")] = None
    tools: Annotated[list[dict[str, Any]] | None, described('{"name", "description", "input_schema"} of each tool')] = (
        None
    )
    tool_choice: Annotated[
        dict[str, Any] | None, described('{"type": "auto" | "any" | "tool" | "none", "name": ...}')
    ] = None
    thinking: Annotated[
        dict[str, Any] | None, described('{"type": "enabled" | "disabled"}, for templates with enable_thinking')
    ] = None
    output_config: Annotated[
        dict[str, Any] | None, described('{"format": {"type": "json_schema", "schema": ...}}; effort has no effect')
    ] = None
    output_format: Annotated[dict[str, Any] | None, described("older name of output_config.format")] = None

    def ignored_within(self) -> list[str]:
        self.tools, ignored = usable_tools(self.tools, ("custom", None), TOOL)
        ignored += _left_out(self.messages)
        ignored += remove_unknown(self.thinking, ("type",), "thinking")
        ignored += remove_unknown(self.output_config, ("format",), "output_config")
        ignored += remove_unknown(self.tool_choice, ("type", "name", "disable_parallel_tool_use"), "tool_choice")
        return ignored


class MessagesRequest(CountRequest, kw_only=True):
    ANSWERS: ClassVar = True

    max_tokens: Annotated[int, described("maximum output tokens, capped to the rest of the context", low=1)]
    temperature: Annotated[float | None, described("0 is greedy", 1.0, 0, 100)] = None
    top_p: Annotated[float | None, described("sample from the most likely tokens with this cumulative probability")] = (
        None
    )
    top_k: Annotated[int | None, described("sample from this many most likely tokens")] = None
    stop_sequences: Annotated[list[str] | None, described("texts that end the answer and are left out")] = None
    stream: Annotated[bool | None, described("server-sent events instead of one answer", False)] = None


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class OutUsage(Struct):
    """Token usage. input_tokens: without those found in the prefix cache"""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class OutBlock(Struct):
    """A block of one type: text; thinking, with an empty signature; tool_use."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: dict[str, Any] | UnsetType = UNSET


class OutMessage(Struct):
    id: str
    model: str
    content: list[OutBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: OutUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class MessageEvent(Struct):
    """One event of a stream; `type` decides which fields are set."""

    type: str
    message: OutMessage | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: OutBlock | UnsetType = UNSET
    delta: dict[str, Any] | UnsetType = UNSET
    usage: dict[str, int] | UnsetType = UNSET


class AnthropicModel(Struct):
    """One model. created_at: RFC 3339"""

    id: str
    display_name: str
    created_at: str
    type: Literal["model"] = "model"


class AnthropicModels(Struct):
    """All models; there are no further pages."""

    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


class CountReply(Struct):
    input_tokens: int


class AnthropicError(Struct):
    type: str
    message: str


class AnthropicErrorReply(Struct):
    error: AnthropicError
    type: Literal["error"] = "error"
