"""Request structs: OpenAI's requests with vLLM's extras.

A field is in a struct, or in one of the tables of `unsupported_fields.py`; any other follows `unknown_fields.py`.
Ranges are checked once, by SamplingParams; this file has only names and types.
"""

import json
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, defstruct

from millrace.runtime.kv.pages import DEFAULT_PRIORITY, MAX_CACHE_PRIORITY
from millrace.runtime.request.prefix_cache_options import MAX_SALT_CHARACTERS, MAX_TTL_S
from millrace.runtime.request.queue_options import MAX_PRIORITY, MAX_WAIT_S
from millrace.runtime.request.sampling_params import (
    MAX_BIASED_TOKENS,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    MIN_POSITIVE,
)
from millrace.serve.llm.reasoning import FIELDS as THINKING
from millrace.serve.llm.reasoning import Effort, EnableThinking, ReasoningOptions, Think, ThinkingType, undecided_fields
from millrace.serve.llm.tools import FUNCTION, usable_tools
from millrace.serve.llm.unsupported_fields import (
    CHAT_NOT_YET,
    COMPLETION_NOT_YET,
    HARMLESS,
    IGNORED,
    LLAMA_NOT_YET,
    VLLM_NOT_YET,
)

OPENAI_TOOLS = ("function", None)


class Body(Struct):
    """Base class of request bodies.

    NOT_YET: fields that would change the answer, with the values that ask for what happens anyway; others are refused
    IGNORED_FIELDS: fields that are accepted with any value and change nothing
    UNUSED: fields of the struct itself that change nothing
    NAMES: field names of `SamplingParams` and the chat's requests, mapped to this protocol's names
    ANSWERS: the request is for an answer, which fields of other protocols could change
    WITHIN: fields that `ignored_within` looks into
    """

    NOT_YET: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    IGNORED_FIELDS: ClassVar[frozenset[str]] = frozenset()
    UNUSED: ClassVar[frozenset[str]] = frozenset()
    NAMES: ClassVar[Mapping[str, str]] = {}
    ANSWERS: ClassVar[bool] = False
    WITHIN: ClassVar[tuple[str, ...]] = ()

    def ignored_within(self) -> list[str]:
        """Remove what changes nothing from fields that are objects or lists, and return its paths.

        raises RequestError for a name that was probably meant to be a known one
        """
        return []


# gc=False: what comes from JSON holds no cycles, and hundreds of thousands of messages would keep the collector busy
class TextPart(Struct, forbid_unknown_fields=True, gc=False):
    text: str
    type: Literal["text"]


class CalledFunction(Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False, frozen=True):
    """The function of a tool call. arguments: JSON text"""

    name: str
    arguments: str = ""


class CalledCustom(Struct, forbid_unknown_fields=True, gc=False):
    """A call of a tool without a schema, made by another server's model."""

    name: str
    input: str = ""


_NO_FUNCTION = CalledFunction("")


class ToolCall(Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A tool call of an assistant's message, as the client received it. A custom call becomes a function call."""

    function: CalledFunction = _NO_FUNCTION
    id: str | None = None
    type: Literal["function", "custom"] = "function"
    index: int | None = None  # which some clients keep from a stream
    custom: CalledCustom | None = None

    def __post_init__(self) -> None:
        if self.type == "custom" and self.custom is not None:
            arguments = json.dumps({"input": self.custom.input}, ensure_ascii=False)
            self.function, self.type, self.custom = CalledFunction(self.custom.name, arguments), "function", None
        if self.function is _NO_FUNCTION:
            raise ValueError(f"Object missing required field `{self.type}`")


class Message(Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """One message of a conversation. The role `developer` is passed to the chat template as `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | UnsetType | None = UNSET
    name: str | None = None
    tool_calls: list[ToolCall] | None = None  # of the assistant
    tool_call_id: str | None = None  # of a tool's result: which call it answers
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's newer name of it
    prefix: bool | None = None  # of the last message: the answer continues it; Mistral's and DeepSeek's name
    partial: bool | None = None  # and Qwen's
    # what clients send back with an answer of ours, or of another server: empty, or refused
    refusal: str | None = None
    function_call: Any = None
    audio: Any = None
    annotations: list[Any] | None = None


def described(description: str, default: object = None, low: float | None = None, high: float | None = None) -> Meta:
    """Return the documentation of a field. `x-default`: what happens if it is left out"""
    extra = {"x-default": default, "minimum": low, "maximum": high}
    return Meta(
        description=description, extra_json_schema={key: value for key, value in extra.items() if value is not None}
    )


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: Annotated[bool | None, described("send a last event with the usage", False)] = None
    continuous_usage_stats: Annotated[
        bool | None, described("with include_usage: report the usage in every event", False)
    ] = None
    include_obfuscation: Annotated[bool | None, described("accepted; nothing is padded")] = None


class TermsFields(Body, kw_only=True):
    """Cache and queue options of a request, in every protocol that returns answers."""

    cache_salt: Annotated[
        str | None,
        described(
            f"KV pages are shared only between requests with the same salt; at most {MAX_SALT_CHARACTERS} characters"
        ),
    ] = None
    cache_priority: Annotated[
        int | None,
        described(
            "eviction priority of the prompt's KV pages; lower is evicted first",
            DEFAULT_PRIORITY, 0, MAX_CACHE_PRIORITY,
        ),
    ] = None  # fmt: skip
    cache_ttl_s: Annotated[
        float | None,
        described(
            "seconds until cache_priority or cache_pin expires; default: never for a priority, one hour for a pin",
            high=MAX_TTL_S,
        ),
    ] = None
    cache_pin: Annotated[bool | None, described("never evict the prompt's KV pages while the pin lasts", False)] = None
    priority: Annotated[
        int | None, described("queue priority; lower values are scheduled first", 0, -MAX_PRIORITY, MAX_PRIORITY)
    ] = None
    queue_timeout_s: Annotated[
        float | None, described("maximum seconds in the queue; then the request fails with 429 or 503", high=MAX_WAIT_S)
    ] = None


class SamplingFields(TermsFields, kw_only=True):
    """Fields of chats and completions. If left out, the model's generation_config decides, then the default."""

    IGNORED_FIELDS: ClassVar = HARMLESS | IGNORED
    ANSWERS: ClassVar = True

    model: Annotated[str | None, described("one of /v1/models; may be left out")] = None
    n: Annotated[int | None, described("answers per prompt", 1, 1, MAX_CHOICES)] = None
    max_tokens: Annotated[
        int | None,
        described("maximum output tokens per answer; default: the rest of the context for a chat, otherwise 16", low=1),
    ] = None
    min_tokens: Annotated[int | None, described("minimum output tokens before the answer may end", 0, 0)] = None
    temperature: Annotated[float | None, described("0 is greedy", 1.0, 0, 100)] = None
    top_p: Annotated[
        float | None,
        described("sample from the most likely tokens with this cumulative probability", 1.0, MIN_POSITIVE, 1),
    ] = None
    top_k: Annotated[int | None, described("sample from this many most likely tokens; 0 or -1: all", 0, -1)] = None
    min_p: Annotated[
        float | None, described("minimum probability of a token, relative to the most likely one", 0.0, 0, 1)
    ] = None
    presence_penalty: Annotated[
        float | None, described("subtracted from the logit of each token that is already in the answer", 0.0, -2, 2)
    ] = None
    frequency_penalty: Annotated[
        float | None, described("subtracted for each occurrence of a token in the answer", 0.0, -2, 2)
    ] = None
    repetition_penalty: Annotated[
        float | None,
        described(
            "divides positive logits of tokens in prompt and answer, multiplies negative ones; 1 is off",
            1.0,
            MIN_POSITIVE,
            100,
        ),
    ] = None
    repeat_last_n: Annotated[
        int | None, described("number of last tokens that penalties consider; -1: all, 0: penalties are off", -1, -1)
    ] = None
    seed: Annotated[
        int | None,
        described(
            "random seed; the same seed gives the same answer; -1 or left out: drawn, and returned with the answer",
            low=-(2**63),
            high=2**64 - 1,
        ),
    ] = None
    stop: Annotated[
        str | list[str] | None,
        described(
            f"texts that end the answer and are left out; {MAX_STOP_STRINGS} of {MAX_STOP_CHARACTERS} characters"
        ),
    ] = None
    stop_token_ids: Annotated[list[int] | None, described(f"tokens that end the answer; at most {MAX_STOP_TOKENS}")] = (
        None
    )
    include_stop_str_in_output: Annotated[bool | None, described("include the stop string in the answer", False)] = None
    skip_special_tokens: Annotated[bool | None, described("leave tokens such as </s> out of the text", True)] = None
    ignore_eos: Annotated[bool | None, described("continue after the end-of-text token", False)] = None
    logit_bias: Annotated[
        dict[int, float] | list[Any] | None,
        described(f"token id to a number added to its logit, -100 to 100; at most {MAX_BIASED_TOKENS}"),
    ] = None
    response_format: Annotated[
        dict[str, Any] | None,
        described(
            '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": ...}}'
        ),
    ] = None
    structured_outputs: Annotated[
        dict[str, Any] | None,
        described("constraint on each answer: an object with one of json, regex, choice, grammar or json_object"),
    ] = None
    guided_json: Annotated[str | dict[str, Any] | None, described("the answer is JSON of this schema")] = None
    guided_regex: Annotated[str | None, described("the whole answer matches this regular expression")] = None
    guided_choice: Annotated[list[str] | None, described("the answer is one of these texts")] = None
    guided_grammar: Annotated[str | None, described("the answer follows this grammar, in Lark's syntax or as GBNF")] = (
        None
    )
    receipt: Annotated[
        bool | None,
        described("return a receipt for `millrace verify`; one prompt, not streamed", False),
    ] = None
    stream: Annotated[bool | None, described("server-sent events instead of one answer", False)] = None
    stream_options: Annotated[StreamOptions | None, described("options of a streamed answer")] = None


class ChatRequest(SamplingFields, kw_only=True):
    IGNORED_FIELDS: ClassVar = SamplingFields.IGNORED_FIELDS - {*THINKING}
    WITHIN: ClassVar = ("tools", *THINKING)
    NOT_YET: ClassVar = {**CHAT_NOT_YET, **VLLM_NOT_YET, **LLAMA_NOT_YET}

    messages: Annotated[list[Message], described("the conversation so far")]
    max_completion_tokens: Annotated[
        int | None, described("newer name of max_tokens; takes precedence over it", low=1)
    ] = None
    logprobs: Annotated[bool | None, described("log probabilities of the chosen tokens", False)] = None
    top_logprobs: Annotated[int | None, described("alternatives per token; needs logprobs", 0, 0, MAX_LOGPROBS)] = None
    tools: Annotated[
        list[dict[str, Any]] | None,
        described(
            'functions that may be called: {"type": "function", "function": {"name", "description", "parameters"}}'
        ),
    ] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        described('"none", "auto", "required" or {"type": "function", "function": {"name": ...}}', "auto"),
    ] = None
    parallel_tool_calls: Annotated[bool | None, described("an answer may have several calls", True)] = None
    add_generation_prompt: Annotated[
        bool | None, described("end the prompt with the beginning of the assistant's message", True)
    ] = None
    continue_final_message: Annotated[
        bool | None, described("continue the last message instead of starting a new answer (prefill)", False)
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, described("further variables for the chat template, such as enable_thinking")
    ] = None
    add_special_tokens: Annotated[
        bool | None, described("add special tokens such as <s> before the rendered template", False)
    ] = None
    enable_thinking: EnableThinking = None
    think: Think = None
    thinking: ThinkingType = None
    reasoning: ReasoningOptions = None
    reasoning_effort: Effort = None

    def ignored_within(self) -> list[str]:
        self.tools, ignored = usable_tools(self.tools, OPENAI_TOOLS, ("type", "function"), FUNCTION)
        return ignored + undecided_fields(self)


class CompletionRequest(SamplingFields, kw_only=True):
    NOT_YET: ClassVar = {**COMPLETION_NOT_YET, **VLLM_NOT_YET, **LLAMA_NOT_YET}

    prompt: Annotated[
        str | list[str | int | list[int]] | None,
        described("a text, token ids, or a list of texts or of token-id lists"),
    ] = None
    prompt_embeds: Annotated[
        str | list[list[float]] | None,
        described("embeddings used instead of a prompt: base64 of a safetensors file, or rows of numbers"),
    ] = None
    logprobs: Annotated[
        int | None, described("alternatives per token; 0: only the chosen one", low=0, high=MAX_LOGPROBS)
    ] = None
    echo: Annotated[
        bool | None,
        described(
            "return the prompt before the answer, with its log probabilities; with max_tokens 0 only the prompt", False
        ),
    ] = None
    best_of: Annotated[int | None, described("must equal n", low=1, high=MAX_CHOICES)] = None
    add_special_tokens: Annotated[bool | None, described("add special tokens such as <s> before the prompt", True)] = (
        None
    )
    return_token_ids: Annotated[bool | None, described("return token ids of prompt and answer", False)] = None
    resume_token_ids: Annotated[
        list[int | list[int]] | None,
        described("output tokens that the client already has, one list per choice; generation continues after them"),
    ] = None


class TokenizeRequest(Body, kw_only=True):
    """Request to tokenise either `prompt` or `messages`."""

    NOT_YET: ClassVar = {"chat_template": ()}
    WITHIN: ClassVar = ("tools", *THINKING)

    model: Annotated[str | None, described("one of /v1/models; may be left out")] = None
    prompt: Annotated[str | None, described("a text, of any length")] = None
    messages: Annotated[list[Message] | None, described("a conversation, as for a chat")] = None
    add_special_tokens: Annotated[bool | None, described("default: true for a prompt, false for messages")] = None
    add_generation_prompt: Annotated[
        bool | None, described("end with the beginning of the assistant's message", True)
    ] = None
    continue_final_message: Annotated[bool | None, described("end where the last message ends", False)] = None
    tools: Annotated[list[dict[str, Any]] | None, described("as for a chat")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, described("further variables for the chat template")] = None
    enable_thinking: EnableThinking = None
    think: Think = None
    thinking: ThinkingType = None
    reasoning: ReasoningOptions = None
    reasoning_effort: Effort = None
    return_token_strs: Annotated[bool | None, described("the text of each token, too", False)] = None

    def ignored_within(self) -> list[str]:
        self.tools, ignored = usable_tools(self.tools, OPENAI_TOOLS, ("type", "function"), FUNCTION)
        return ignored + undecided_fields(self)


class DetokenizeRequest(Body, kw_only=True):
    model: Annotated[str | None, described("one of /v1/models; may be left out")] = None
    tokens: Annotated[list[int], described("ids, no more than the context has")]


def other_names(kind: type[Body]) -> frozenset[str]:
    """Return the accepted field names of a request that are no members of its struct."""
    return frozenset(kind.NOT_YET) | kind.IGNORED_FIELDS


@cache
def wire(kind: type[Body]) -> type[Struct]:
    """Return the struct that a body is decoded to: `kind` plus its other fields, which hold any value, or UNSET."""
    return defstruct(
        f"{kind.__name__}Body",
        [(name, Any, UNSET) for name in sorted(other_names(kind))],
        bases=(kind,),
        kw_only=True,
        forbid_unknown_fields=True,
    )
