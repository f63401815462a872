"""What clients may ask: OpenAI's requests with vLLM's extras.

A field is in a struct, in `HARMLESS`, `IGNORED` or `NOT_YET`; any other is refused, naming the nearest.
Ranges are checked once, by SamplingParams; here are only names and types.
"""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, defstruct

from millrace.runtime.cache_options import MAX_SALT_CHARACTERS, MAX_TTL_S
from millrace.runtime.pages import DEFAULT_PRIORITY
from millrace.runtime.params import (
    LEAST,
    MAX_BIASED_TOKENS,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
)


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


def _is(what: str, default: object = None, low: float | None = None, high: float | None = None) -> Meta:
    """What the documentation says of a field. `x-default`: what happens where it is left out"""
    known = {"x-default": default, "minimum": low, "maximum": high}
    return Meta(description=what, extra_json_schema={key: value for key, value in known.items() if value is not None})


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: Annotated[bool | None, _is("end with an event that carries the usage", False)] = None
    continuous_usage_stats: Annotated[bool | None, _is("with include_usage: in every event", False)] = None
    include_obfuscation: Annotated[bool | None, _is("accepted; nothing is padded")] = None


class SamplingFields(Struct, kw_only=True):
    """What chat and completions have in common. Left out: the model's generation_config decides, then the default."""

    model: Annotated[str | None, _is("one of /v1/models; may be left out")] = None
    n: Annotated[int | None, _is("answers per prompt", 1, 1, MAX_CHOICES)] = None
    max_tokens: Annotated[
        int | None, _is("tokens of one answer at most; left out: the rest of the context for a chat, else 16", low=1)
    ] = None
    min_tokens: Annotated[int | None, _is("no end before so many tokens", 0, 0)] = None
    temperature: Annotated[float | None, _is("0 is greedy", 1.0, 0, 100)] = None
    top_p: Annotated[float | None, _is("the likeliest tokens that together are so probable", 1.0, LEAST, 1)] = None
    top_k: Annotated[int | None, _is("so many of the likeliest tokens; 0 or -1 is off", 0, -1)] = None
    min_p: Annotated[float | None, _is("tokens at least so likely, relative to the likeliest", 0.0, 0, 1)] = None
    presence_penalty: Annotated[float | None, _is("for tokens that the answer has", 0.0, -2, 2)] = None
    frequency_penalty: Annotated[float | None, _is("for each time that it has them", 0.0, -2, 2)] = None
    repetition_penalty: Annotated[
        float | None, _is("divides the logits of tokens in prompt and answer; 1 is off", 1.0, LEAST, 100)
    ] = None
    seed: Annotated[
        int | None, _is("the same seed, the same answer; else one is drawn and told", low=-(2**63), high=2**64 - 1)
    ] = None
    stop: Annotated[
        str | list[str] | None,
        _is(f"texts that end the answer and are left out; {MAX_STOP_STRINGS} of {MAX_STOP_CHARACTERS} characters"),
    ] = None
    stop_token_ids: Annotated[list[int] | None, _is(f"tokens that end the answer; at most {MAX_STOP_TOKENS}")] = None
    include_stop_str_in_output: Annotated[bool | None, _is("leave what ended it in the answer", False)] = None
    skip_special_tokens: Annotated[bool | None, _is("leave tokens such as </s> out of the text", True)] = None
    ignore_eos: Annotated[bool | None, _is("go on after the model's end-of-text token", False)] = None
    logit_bias: Annotated[
        dict[int, float] | None,
        _is(f"token id to a number added to its logit, -100 to 100; at most {MAX_BIASED_TOKENS}"),
    ] = None
    cache_salt: Annotated[
        str | None, _is(f"only requests with the same one share KV pages; at most {MAX_SALT_CHARACTERS} characters")
    ] = None
    cache_priority: Annotated[
        int | None, _is("of the prompt's KV pages: when room is needed, lower ones go first", DEFAULT_PRIORITY, 0, 100)
    ] = None
    cache_ttl_s: Annotated[
        float | None, _is("seconds until cache_priority or cache_pin end; left out: never, or an hour", high=MAX_TTL_S)
    ] = None
    cache_pin: Annotated[bool | None, _is("keep the prompt's KV pages whatever comes", False)] = None
    stream: Annotated[bool | None, _is("server-sent events instead of one answer", False)] = None
    stream_options: Annotated[StreamOptions | None, _is("with stream")] = None


class ChatRequest(SamplingFields, kw_only=True):
    messages: Annotated[list[Message], _is("the conversation so far")]
    max_completion_tokens: Annotated[int | None, _is("today's name of max_tokens; of two, it counts", low=1)] = None
    logprobs: Annotated[bool | None, _is("log probabilities of the chosen tokens", False)] = None
    top_logprobs: Annotated[int | None, _is("alternatives per token; needs logprobs", 0, 0, MAX_LOGPROBS)] = None
    add_generation_prompt: Annotated[bool | None, _is("end the prompt where the assistant's turn begins", True)] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, _is("further variables for the chat template, such as enable_thinking")
    ] = None
    add_special_tokens: Annotated[bool | None, _is("in front of what the template wrote", False)] = None


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: Annotated[
        str | list[str | int | list[int]],
        _is("a text, token ids, or a list of texts or of token-id lists"),
    ]
    logprobs: Annotated[
        int | None, _is("alternatives per token; 0 is the chosen one only", low=0, high=MAX_LOGPROBS)
    ] = None
    echo: Annotated[
        bool | None, _is("begin with the prompt, and its log probabilities; with max_tokens 0 no more", False)
    ] = None
    best_of: Annotated[int | None, _is("only as many as n", low=1, high=MAX_CHOICES)] = None
    add_special_tokens: Annotated[bool | None, _is("in front of a text, such as <s>", True)] = None


class EmbeddingRequest(Struct, kw_only=True):
    model: Annotated[str | None, _is("one of /v1/models; may be left out")] = None
    input: Annotated[
        str | list[str | int | list[int]],
        _is(
            "a text, token ids, or a list of texts or of token-id lists. Ids are the model's own: LangChain sends "
            "those of another tokenizer unless check_embedding_ctx_length is False"
        ),
    ]
    encoding_format: Annotated[
        str | None, _is('"float", or "base64" of the little-endian float32 of each vector', "float")
    ] = None
    dimensions: Annotated[int | None, _is("only as many as the model's vectors have", low=1)] = None
    truncate_prompt_tokens: Annotated[
        int | None, _is("read so many of a longer text's first tokens; -1: as many as the model takes", low=-1)
    ] = None
    add_special_tokens: Annotated[bool | None, _is("around a text, such as [CLS] and [SEP]", True)] = None


class TokenizeRequest(Struct, kw_only=True):
    """Either `prompt` or `messages`."""

    model: Annotated[str | None, _is("one of /v1/models; may be left out")] = None
    prompt: Annotated[str | None, _is("a text, of any length")] = None
    messages: Annotated[list[Message] | None, _is("a conversation, as for a chat")] = None
    add_special_tokens: Annotated[bool | None, _is("left out: true for a prompt, false for messages")] = None
    add_generation_prompt: Annotated[bool | None, _is("end where the assistant's turn begins", True)] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, _is("further variables for the chat template")] = None
    return_token_strs: Annotated[bool | None, _is("the text of each token, too", False)] = None


class DetokenizeRequest(Struct, kw_only=True):
    model: Annotated[str | None, _is("one of /v1/models; may be left out")] = None
    tokens: Annotated[list[int], _is("ids, no more than the context has")]


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
        *("request_id", "kv_transfer_params", "mm_processor_kwargs", "rid", "cache_prompt", "id_slot"),
        *("timings_per_token", "return_progress"),
        *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "use_mmap", "use_mlock", "keep_alive"),
        *("provider", "route", "models", "transforms", "usage", "session_id", "trace", "tags"),
        *("caching", "drop_params", "num_retries", "timeout", "request_timeout", "fallbacks"),
        # of llama.cpp's samplers that are off
        *("mirostat_tau", "mirostat_eta", "xtc_threshold", "dynatemp_exponent"),
        *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
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
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens",
    "enable_thinking": "chat_template_kwargs",
    "best_of": "n",
    "system": "messages",
    "instructions": "messages",
    "input": "messages",
}
# Fields of the other endpoint.
ELSEWHERE: Mapping[str, str] = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}
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
# llama.cpp's and the programs' around it, which send each of them with every request; with the value of "off".
_LLAMA_NOT_YET: Mapping[str, tuple[object, ...]] = {
    "mirostat": (0,),
    "xtc_probability": (0,),
    "typical_p": (1,),
    "typ_p": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1, 0),
    "dynatemp_range": (0,),
    "dry_multiplier": (0,),
    "smoothing_factor": (0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "no_repeat_ngram_size": (0,),
    "penalize_nl": (False,),
    "repeat_last_n": (-1,),
    "n_keep": (0, -1),
    "num_keep": (0, -1),
    "n_discard": (0,),
    "n_indent": (0,),
    "n_probs": (0,),
    "min_keep": (0,),
    "t_max_predict_ms": (0,),
    "post_sampling_probs": (False,),
    "grammar": ("",),
    "json_schema": ({},),
    "lora": ([],),
    "num_beams": (1,),
}
NOT_YET: Mapping[type[Struct], Mapping[str, tuple[object, ...]]] = {
    ChatRequest: {**_CHAT_NOT_YET, **_VLLM_NOT_YET, **_LLAMA_NOT_YET},
    CompletionRequest: {**_COMPLETION_NOT_YET, **_VLLM_NOT_YET, **_LLAMA_NOT_YET},
    EmbeddingRequest: {
        "priority": (0,),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "normalize": (),
        "use_activation": (),
        "messages": (),
        "additional_data": (),
        "input_type": (),
    },
    TokenizeRequest: {"continue_final_message": (False,), "chat_template": (), "tools": ([],)},
    DetokenizeRequest: {},
}
# What to use in place of some, said behind "leave it out".
INSTEAD: Mapping[str, str] = {
    "prompt_logprobs": "; /v1/completions tells them with echo and logprobs, and max_tokens 0 for the prompt alone",
    "normalize": ": vectors have the length that the model's own files say, which is 1 for most",
    "guided_choice": "; or compare the choices by echo and logprobs on /v1/completions",
}
TAKES_HARMLESS: frozenset[type[Struct]] = frozenset({ChatRequest, CompletionRequest, EmbeddingRequest})


def other_names(kind: type[Struct]) -> frozenset[str]:
    """The fields of a request that are no members of its struct."""
    return frozenset(NOT_YET.get(kind, ())) | (HARMLESS | IGNORED if kind in TAKES_HARMLESS else frozenset())


@cache
def wire(kind: type[Struct]) -> type[Struct]:
    """What a body is decoded to, in one pass: the struct with its other fields, which hold any value, or UNSET."""
    return defstruct(
        f"{kind.__name__}Body",
        [(name, Any, UNSET) for name in sorted(other_names(kind))],
        bases=(kind,),
        kw_only=True,
        forbid_unknown_fields=True,
    )
