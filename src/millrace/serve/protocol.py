"""What clients may ask: OpenAI's requests with vLLM's extras.

A field is in a struct, in `HARMLESS`, `IGNORED` or `NOT_YET`; any other is refused, naming the nearest.
Ranges are checked once, by SamplingParams; here are only names and types.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, defstruct


# gc=False: what comes from JSON holds no cycles, and hundreds of thousands of messages would keep the collector busy
class TextPart(Struct, forbid_unknown_fields=True, gc=False):
    text: str
    type: Literal["text"]


class Message(Struct, forbid_unknown_fields=True, gc=False):
    """`developer` is today's name of `system`, and is given to the chat template as such."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    # what clients send back with an answer of ours, or of another server: empty, or refused
    refusal: str | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None
    audio: Any = None
    annotations: list[Any] | None = None
    reasoning_content: str | None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: Annotated[bool | None, Meta(description="end with an event that carries the usage")] = None
    continuous_usage_stats: Annotated[bool | None, Meta(description="with include_usage: in every event")] = None
    include_obfuscation: Annotated[bool | None, Meta(description="accepted; nothing is padded")] = None


class SamplingFields(Struct, kw_only=True):
    """What chat and completions have in common. Left out: the model's generation_config decides, then the default."""

    model: Annotated[str | None, Meta(description="one of /v1/models; may be left out")] = None
    n: Annotated[int | None, Meta(description="answers per prompt")] = None
    max_tokens: Annotated[int | None, Meta(description="tokens of one answer at most; the rest of the context")] = None
    min_tokens: Annotated[int | None, Meta(description="no end before so many tokens")] = None
    temperature: Annotated[float | None, Meta(description="0 is greedy")] = None
    top_p: float | None = None
    top_k: Annotated[int | None, Meta(description="0 or -1 is off")] = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Annotated[int | None, Meta(description="the same seed, the same answer; else one is drawn and told")] = None
    stop: Annotated[str | list[str] | None, Meta(description="texts that end the answer; they are left out")] = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: Annotated[bool | None, Meta(description="go on after the model's end-of-text token")] = None
    logit_bias: Annotated[dict[int, float] | None, Meta(description="token id to a number added to its logit")] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class ChatRequest(SamplingFields, kw_only=True):
    messages: list[Message]
    max_completion_tokens: Annotated[int | None, Meta(description="today's name of max_tokens")] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Meta(description="alternatives per token; needs logprobs")] = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="further variables for the chat template, such as enable_thinking")
    ] = None
    add_special_tokens: Annotated[bool | None, Meta(description="in front of what the template wrote; false")] = None


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: Annotated[
        str | list[str | int | list[int]],
        Meta(description="a text, token ids, or a list of texts or of token-id lists"),
    ]
    logprobs: Annotated[int | None, Meta(description="alternatives per token; 0 is the chosen one only")] = None
    echo: Annotated[bool | None, Meta(description="begin the text with the prompt")] = None
    best_of: Annotated[int | None, Meta(description="only as many as n")] = None
    add_special_tokens: Annotated[bool | None, Meta(description="in front of a text, such as <s>; true")] = None


class TokenizeRequest(Struct, kw_only=True):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: Annotated[bool | None, Meta(description="true for a prompt, false for messages")] = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


# They say something about accounts, caches or billing of a hosted service; any value is taken and changes no answer.
HARMLESS: frozenset[str] = frozenset(
    [
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    ]
)
# Other servers know them: OpenAI's for reasoning models, vLLM's, SGLang's and llama.cpp's for caches and batches,
# Ollama's for memory, LiteLLM's and OpenRouter's for routing. Any value is taken, changes no answer here, and is named
# in the header `x-millrace-ignored` and in the log.
IGNORED: frozenset[str] = frozenset(
    [
        *("reasoning_effort", "verbosity", "reasoning", "include_reasoning", "separate_reasoning", "stream_reasoning"),
        *("think", "thinking", "prediction"),
        *("request_id", "cache_salt", "kv_transfer_params", "mm_processor_kwargs", "rid", "cache_prompt", "id_slot"),
        *("timings_per_token", "return_progress"),
        *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "use_mmap", "use_mlock", "keep_alive"),
        *("provider", "route", "models", "transforms", "usage", "session_id", "trace", "tags"),
        *("caching", "drop_params", "num_retries", "timeout", "request_timeout", "fallbacks"),
    ]
)
# What others call a field of ours.
OTHER_NAMES: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "num_predict": "max_tokens",
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
    "random_seed": "seed",
}
# They would change the answer. A value that asks for what happens anyway is taken; anything else is refused.
_CHAT_NOT_YET: Mapping[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "continue_final_message": (False,),
    "echo": (False,),
    "chat_template": (),
    "documents": ([],),
}
_COMPLETION_NOT_YET: Mapping[str, tuple[object, ...]] = {
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
}
_VLLM_NOT_YET: Mapping[str, tuple[object, ...]] = {
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "prompt_logprobs": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "priority": (0,),
    "options": ({},),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
}
NOT_YET: Mapping[type[Struct], Mapping[str, tuple[object, ...]]] = {
    ChatRequest: {**_CHAT_NOT_YET, **_VLLM_NOT_YET},
    CompletionRequest: {**_COMPLETION_NOT_YET, **_VLLM_NOT_YET},
    TokenizeRequest: {"continue_final_message": (False,), "chat_template": (), "tools": ([],)},
    DetokenizeRequest: {},
}
TAKES_HARMLESS: frozenset[type[Struct]] = frozenset({ChatRequest, CompletionRequest})


def other_names(kind: type[Struct]) -> frozenset[str]:
    """The fields of a request that are no members of its struct."""
    return frozenset(NOT_YET[kind]) | (HARMLESS | IGNORED if kind in TAKES_HARMLESS else frozenset())


# What a body is decoded to, in one pass: the struct with its other fields, which hold any value, or UNSET
WIRE: Mapping[type[Struct], type[Struct]] = {
    kind: defstruct(
        f"{kind.__name__}Body",
        [(name, Any, UNSET) for name in sorted(other_names(kind))],
        bases=(kind,),
        kw_only=True,
        forbid_unknown_fields=True,
    )
    for kind in NOT_YET
}
