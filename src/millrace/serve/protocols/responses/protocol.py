"""Request and response structs of OpenAI's Responses. source: the API reference of /v1/responses"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Raw, Struct, UnsetType

from millrace.errors import RequestError
from millrace.runtime.request.sampling_params import MAX_LOGPROBS
from millrace.serve.http.unknown_fields import closest_name, header_name
from millrace.serve.llm.reasoning import FIELDS as THINKING
from millrace.serve.llm.reasoning import Effort, EnableThinking, Think, ThinkingType, undecided_fields
from millrace.serve.llm.request_types import TermsFields, described
from millrace.serve.llm.response_types import TokenLogprob
from millrace.serve.llm.tools import FUNCTION, remove_unknown, usable_tools
from millrace.serve.llm.unsupported_fields import HARMLESS, IGNORED
from millrace.serve.protocols.responses.items import renderable_items

LOGPROBS = "message.output_text.logprobs"  # of `include`
# Other values of include concern OpenAI's built-in tools and images, which do not exist here.
UNUSED_INCLUDES: frozenset[str] = frozenset(
    [
        *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
        *("message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs"),
        "reasoning.encrypted_content",
    ]
)
FORMAT = ("type", "name", "schema", "strict", "description")
# Our fields, as clients know them here.
NAMES: Mapping[str, str] = {
    "max_tokens": "max_output_tokens", "messages": "input", "prompt": "input", "response_format": "text.format",
    "response_format.json_schema": "text.format", "logprobs": "top_logprobs", "system": "instructions",
}  # fmt: skip


class ResponsesRequest(TermsFields, kw_only=True):
    """A Responses request. metadata, user and store are returned as they were sent."""

    IGNORED_FIELDS: ClassVar = (HARMLESS | IGNORED | {"stream_options"}) - {"store", "metadata", "user", *THINKING}
    NAMES: ClassVar = NAMES
    ANSWERS: ClassVar = True
    WITHIN: ClassVar = ("input", "tools", "text", "include", *THINKING)
    NOT_YET: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "truncation": ("disabled", "auto"), "conversation": (), "prompt": (), "max_tool_calls": (),
    }  # fmt: skip

    model: Annotated[str | None, described("one of /v1/models; may be left out")] = None
    input: Annotated[str | list[dict[str, Any]], described("a text, or items: messages, calls and their outputs")]
    instructions: Annotated[str | None, described("a system message for this response alone")] = None
    previous_response_id: Annotated[str | None, described("id of a stored response to continue")] = None
    max_output_tokens: Annotated[
        int | None, described("maximum output tokens, capped to the rest of the context", low=1)
    ] = None
    temperature: Annotated[float | None, described("0 is greedy", 1.0, 0, 100)] = None
    top_p: Annotated[float | None, described("sample from the most likely tokens with this cumulative probability")] = (
        None
    )
    text: Annotated[
        dict[str, Any] | None, described('{"format": {"type": "text" | "json_object" | "json_schema"}}')
    ] = None
    tools: Annotated[
        list[dict[str, Any]] | None, described('{"type": "function", "name", "description", "parameters"} of each tool')
    ] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        described('"none", "auto", "required" or {"type": "function", "name": ...}', "auto"),
    ] = None
    parallel_tool_calls: Annotated[bool | None, described("an answer may have several calls", True)] = None
    reasoning: Annotated[
        dict[str, Any] | None, described('{"effort": "none"} disables reasoning; otherwise the chat template decides')
    ] = None
    include: Annotated[list[str] | None, described(f'"{LOGPROBS}": log probabilities of the text')] = None
    top_logprobs: Annotated[
        int | None, described(f'alternatives per token; needs "{LOGPROBS}" in include', 0, 0, MAX_LOGPROBS)
    ] = None
    enable_thinking: EnableThinking = None
    think: Think = None
    thinking: ThinkingType = None
    reasoning_effort: Effort = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, described("further variables for the chat template")] = None
    seed: Annotated[int | None, described("random seed; the same seed gives the same answer")] = None
    store: Annotated[bool | None, described("store the response so that it can be retrieved or continued", True)] = None
    background: Annotated[bool | None, described("return at once; the result is retrieved later", False)] = None
    stream: Annotated[bool | None, described("server-sent events instead of one answer", False)] = None
    metadata: Annotated[dict[str, str] | None, described("returned unchanged")] = None
    user: Annotated[str | None, described("returned unchanged")] = None

    def ignored_within(self) -> list[str]:
        self.tools, ignored = usable_tools(self.tools, ("function",), ("type", *FUNCTION))
        if not isinstance(self.input, str):
            self.input, left_out = renderable_items(self.input)
            ignored += left_out
        ignored += remove_unknown(self.text, ("format",), "text")
        ignored += remove_unknown((self.text or {}).get("format"), FORMAT, "text.format")
        supported = [name for name in self.include or () if name == LOGPROBS]
        for name in set(self.include or ()) - {LOGPROBS}:
            if name not in UNUSED_INCLUDES and (meant := closest_name(name, {LOGPROBS})) is not None:
                message, expected = f"include has no {name!r:.80}", f'did you mean "{meant}"?'
                raise RequestError(message, expected, "correct include", "include")
            ignored.append(header_name(f"include.{name}"))
        self.include = supported if self.include is not None else None
        return ignored + undecided_fields(self)


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []  # may be JSON already: msgspec.Raw


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(Struct, tag_field="type", tag="message"):
    id: str
    content: list[OutputText]
    status: str
    role: Literal["assistant"] = "assistant"


class CallItem(Struct, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: str


class ReasoningItem(Struct, tag_field="type", tag="reasoning"):
    id: str
    content: list[ReasoningText]
    status: str
    summary: list[Any] = []


Item = MessageItem | CallItem | ReasoningItem


class InputTokensDetails(Struct):
    cached_tokens: int


class OutputTokensDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Struct):
    code: str
    message: str


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseReply(Struct, kw_only=True):
    """A response. Raw: JSON as it was sent; decoded, it would be many times as large while the answer is computed."""

    id: str
    created_at: int
    model: str
    status: Status
    output: list[Item]
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int = 0
    text: Raw
    tools: Raw
    tool_choice: Raw
    parallel_tool_calls: bool
    reasoning: Raw
    store: bool
    background: bool
    metadata: Raw
    user: str | None = None
    truncation: Literal["disabled"] = "disabled"
    object: Literal["response"] = "response"


class ResponseEvent(Struct, kw_only=True):
    """One event of a stream; `type` decides which fields are set."""

    type: str
    sequence_number: int
    response: ResponseReply | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    item: Item | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: Sequence[TokenLogprob] | UnsetType = UNSET
    code: str | UnsetType = UNSET
    message: str | UnsetType = UNSET


class DeletedReply(Struct):
    id: str
    deleted: bool = True
    object: Literal["response.deleted"] = "response.deleted"
