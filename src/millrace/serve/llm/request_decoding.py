"""Decoding of request bodies into structs, and of their fields into SamplingParams.

Every field is used, reported to the client as ignored, or an error; the engine decides what the request leaves out.
"""

import gc
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import UNSET, Struct

from millrace.checkpoint.chat.chat_template import normalised
from millrace.errors import RequestError, nearest
from millrace.runtime.request.prefix_cache_options import DEFAULT_CACHE_OPTIONS, CacheOptions
from millrace.runtime.request.queue_options import DEFAULT_QUEUE_OPTIONS, QueueOptions
from millrace.runtime.request.request import DEFAULT_OPTIONS, RequestOptions
from millrace.runtime.request.sampling_params import MAX_LOGPROBS, SamplingParams
from millrace.serve.http.errors import HttpError, not_yet
from millrace.serve.http.json_scan import count_values
from millrace.serve.http.unknown_fields import MAX_NAMES, UnknownFields, check_neutral, roles_of, unknown_field
from millrace.serve.llm.request_types import (
    Body,
    ChatRequest,
    CompletionRequest,
    Message,
    SamplingFields,
    TermsFields,
    ToolCall,
    wire,
)
from millrace.serve.llm.structured_output import FIELDS, structured_outputs
from millrace.serve.llm.unsupported_fields import HARMLESS, PENALTIES, PENALTY_WINDOW, is_neutral

T = TypeVar("T", bound=Body)
TextsOrIds = str | list[str | int | list[int]]

MAX_VALUES, MAX_CONTAINERS = 2_000_000, 250_000  # of a body: decoding more would block the event loop too long

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*?)`(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
_WRONG = re.compile(r"(?P<what>.*?) - at (?P<key>`key` in )?`\$\.?(?P<path>.*)`", re.DOTALL)
_GOT = re.compile(r"Expected `(?P<expected>.*)`, got `(?P<got>.*)`")
_MISSING = re.compile(r"Object missing required field `(?P<field>.*?)`(?: - at `\$\.?(?P<path>.*)`)?")
# msgspec's type names, as clients in any language know them: for a value, and for what was expected
_TYPES = {
    "str": ("string", "a string"), "int": ("integer", "an integer"), "float": ("number", "a number"),
    "bool": ("boolean", "true or false"), "array": ("array", "an array"), "object": ("object", "an object"),
    "null": ("null", "null"),
}  # fmt: skip


def decode(body: bytes, kind: type[T]) -> T:
    """Decode a request. raises as `read_request`, and RequestError for any unknown field"""
    request, unknown = read_request(body, kind)
    if unknown:
        raise unknown_field(unknown[0], nearest(unknown[0], wire(kind).__struct_fields__, kind.__struct_fields__))
    return request


def read_request(body: bytes, kind: type[T]) -> tuple[T, tuple[str, ...]]:
    """Decode a request, and return it with the names of its unknown fields that change nothing.

    raises RequestError naming the field, HttpError if the body is not a JSON object
    """
    counted = count_values(body)
    if counted.values > MAX_VALUES or counted.containers > MAX_CONTAINERS:
        raise _no_json(
            f"it has {counted.values} values and {counted.containers} lists and objects, at most {MAX_VALUES} and "
            f"{MAX_CONTAINERS} are supported"
        )
    unknown: list[str] = []
    try:
        with _pause_collector():
            try:
                request = msgspec.json.decode(body, type=wire(kind))
            except msgspec.ValidationError as error:
                if not _UNKNOWN.fullmatch(str(error)):
                    raise
                request, unknown = _without_unknown(body, kind)
    except msgspec.ValidationError as error:
        raise _wrong_value(str(error), kind) from None
    except RecursionError:
        raise _no_json("it is nested too deeply") from None
    except ValueError as error:  # msgspec.DecodeError, UnicodeDecodeError, integers with thousands of digits
        raise _no_json(_no_utf8(body) or str(error)) from None
    for name, neutral in kind.NOT_YET.items():  # in this order: of two that clients send together, the cause
        if (value := getattr(request, name)) is UNSET:
            continue
        if name in PENALTY_WINDOW and not is_neutral(value, neutral) and not _penalises(request):
            unknown.append(name)
        else:
            check_neutral(name, value, neutral)
    assert isinstance(request, kind)
    return request, tuple(unknown)


def _without_unknown(body: bytes, kind: type[Body]) -> tuple[Struct, list[str]]:
    """Decode a request that has fields of unknown names, and return these. raises RequestError if they matter"""
    request = msgspec.json.decode(body)
    own = kind.__struct_fields__
    useful = set(own) - kind.UNUSED
    unknown = UnknownFields(wire(kind), own, useful, kind.NAMES, kind.ANSWERS).remove_from(request)
    return msgspec.convert(request, wire(kind), str_keys=True), unknown


def _penalises(request: object) -> bool:
    return any(getattr(request, name, None) not in (None, off) for name, off in PENALTIES.items())


@contextmanager
def _pause_collector() -> Iterator[None]:
    """Pause garbage collection: decoded JSON has no cycles, and scanning a million lists takes 10x the decoding."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def pop_ignored_fields(request: Body, kind: type[Body], unknown: Iterable[str] = ()) -> tuple[str, ...]:
    """Clear the fields of the request that change nothing, and return their names as reported to the client.

    The values of all other fields that `kind` does not have are cleared too: decoded, they are many times the body's
    size, and an answer may take minutes.

    unknown: names that were removed from the request already
    raises RequestError for a name within a field that was probably meant to be a known one
    """
    ignored = {n for n in (kind.IGNORED_FIELDS | kind.UNUSED) - HARMLESS if getattr(request, n) not in (UNSET, None)}
    within = request.ignored_within() if any(getattr(request, name) for name in kind.WITHIN) else ()
    client_names = sorted({*unknown, *within} - ignored)  # a client may write any number of names
    ignored |= {
        *client_names[:MAX_NAMES],
        *([f"{len(client_names) - MAX_NAMES} more"] if len(client_names) > MAX_NAMES else []),
    }
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:  # of two, today's name counts
        if request.max_tokens not in (None, request.max_completion_tokens):
            ignored.add("max_tokens")
        request.max_tokens = None
    for name in set(request.__struct_fields__) - set(kind.__struct_fields__):
        setattr(request, name, UNSET)
    return tuple(sorted(ignored))


def drop_large_fields(request: Body) -> None:
    """Clear texts, lists and objects: decoded, they may be many times the body, and an answer may take minutes."""
    for name in request.__struct_fields__:
        value = getattr(request, name)
        if isinstance(value, (str, list, dict)):
            setattr(request, name, type(value)())


def texts_or_ids(value: TextsOrIds, field: str) -> list[str] | list[list[int]]:
    """Return prompts, written in any of four ways, as texts or token-id lists. raises RequestError for a mixture"""
    if isinstance(value, str):
        return [value]
    texts = [p for p in value if isinstance(p, str)]
    lists = [p for p in value if isinstance(p, list)]
    ids = [p for p in value if isinstance(p, int)]
    if len(texts) == len(value) > 0:
        return texts
    if len(lists) == len(value) > 0:
        return lists
    if len(ids) == len(value) > 0:
        return [ids]
    message = f"{field} mixes texts, token ids or lists" if value else f"{field} is an empty list"
    raise RequestError(
        message, "a text, token ids, a list of texts or a list of token-id lists", "send one kind", param=field
    )


def check_messages(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Return messages as the chat template takes them. raises RequestError for unsupported content"""
    for i, message in enumerate(messages):
        for name in ("function_call", "audio", "refusal"):
            if getattr(message, name):
                raise not_yet(f"messages[{i}].{name}", "send messages of text and tool_calls only")
        if message.tool_calls and message.role != "assistant":
            raise RequestError(
                f"messages[{i}] has tool_calls, and the role {message.role}", "calls of the assistant",
                "correct the messages", "messages",
            )  # fmt: skip
    return normalised([_plain(message) for message in messages])


def _plain(message: Message) -> dict[str, object]:
    content = message.content
    return {
        "role": message.role,
        **({} if content is UNSET else {"content": msgspec.to_builtins(content)}),
        "name": message.name,
        "tool_calls": [_plain_call(call) for call in message.tool_calls] if message.tool_calls else None,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content or message.reasoning,
    }


def _plain_call(call: ToolCall) -> dict[str, object]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    plain: dict[str, object] = {"type": "function", "function": function}
    return plain if call.id is None else {"id": call.id, **plain}


def _wrong_value(message: str, kind: type[Body]) -> RequestError | HttpError:
    """Return the error that an error message of msgspec stands for."""
    if missing := _MISSING.fullmatch(message):
        field = f"{missing['path']}.{missing['field']}" if missing["path"] else missing["field"]
        return RequestError(f'"{field}" is missing', f'a request with "{field}"', "send it", param=_top(field))
    if not (wrong := _WRONG.fullmatch(message)):  # the body itself: "Expected `object`, got `array`"
        return _no_json(f"it is of type {_type_name(got['got'])}" if (got := _GOT.fullmatch(message)) else message)
    what, path = wrong["what"], wrong["path"]
    subject = f"a key of {path}" if wrong["key"] else path
    if got := _GOT.fullmatch(what):
        expected = " or ".join(_TYPES[kind][1] if kind in _TYPES else kind for kind in got["expected"].split(" | "))
        return RequestError(f"{subject} is of type {_type_name(got['got'])}", expected, f"correct {path}", _top(path))
    if what.startswith("Invalid enum value"):
        return _not_in_choices(subject, what.removeprefix("Invalid enum value "), kind)
    return RequestError(f"{subject}: {what}", "a value in range", f"correct {path}", _top(path))


def _type_name(kind: str) -> str:
    return _TYPES[kind][0] if kind in _TYPES else kind


def _not_in_choices(path: str, value: str, kind: type[Body]) -> RequestError:
    if path.endswith(".role"):
        *roles, last = roles_of(kind)
        fix = "tool is the role today, with a tool_call_id" if value == "'function'" else "correct the role"
        return RequestError(f"{path} is {value}", f"{', '.join(roles)} or {last}", fix, "messages")
    if path.endswith(".type") and "tool_calls" in path:
        return RequestError(f"{path} is {value}", '"function" or "custom"', "correct the messages", "messages")
    return RequestError(
        f"{path} is {value}", '"text"', "send text parts only; images and sound are not supported yet", "messages"
    )


def _top(path: str) -> str:
    return re.split(r"[.\[]", path, maxsplit=1)[0]


def _no_utf8(body: bytes) -> str:
    """Return where the body is not UTF-8, or ""; the decoder reports at most a position within a string."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start} is not utf-8"
    return ""


def _no_json(reason: str) -> HttpError:
    return HttpError(
        400,
        "invalid_json",
        f"the body is not a JSON object: {reason}",
        "a JSON object in UTF-8 (NaN and Infinity are no JSON)",
        "correct the body",
    )


def chat_params(request: ChatRequest) -> SamplingParams:
    """Return the sampling parameters of a chat. raises RequestError naming the field as the client wrote it"""
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    n_top = request.top_logprobs
    if n_top and not request.logprobs:
        raise RequestError(
            "top_logprobs is set, but logprobs is not", "both", "set logprobs to true", param="top_logprobs"
        )
    if n_top is not None and not 0 <= n_top <= MAX_LOGPROBS:
        raise RequestError(
            f"top_logprobs is {n_top}", f"an integer from 0 to {MAX_LOGPROBS}", "change top_logprobs", "top_logprobs"
        )
    try:
        return _params(request, max_tokens, (n_top or 0) if request.logprobs else None)
    except RequestError as error:
        if error.param == "max_tokens" and request.max_tokens is None:
            what, fix = (s.replace("max_tokens", "max_completion_tokens") for s in (error.what, error.fix))
            raise RequestError(what, error.expected, fix, "max_completion_tokens") from None
        raise


def completion_params(request: CompletionRequest) -> SamplingParams:
    """Return the sampling parameters of a completion. raises RequestError naming the field"""
    n = 1 if request.n is None else request.n
    if request.best_of is not None and request.best_of != n:
        raise RequestError(
            f"best_of is {request.best_of} and n is {n}", "best_of equal to n", "leave best_of out", param="best_of"
        )
    if request.max_tokens == 0 and request.min_tokens:
        raise RequestError(
            f"min_tokens is {request.min_tokens} and max_tokens is 0", "min_tokens up to max_tokens",
            "leave min_tokens out", param="min_tokens",
        )  # fmt: skip
    if not request.echo:
        return _params(request, request.max_tokens, request.logprobs)
    # the engine draws one token at least: of an echo alone, `completions` leaves it out
    params = _params(request, 1 if request.max_tokens == 0 else request.max_tokens, request.logprobs)
    return replace(params, prompt_logprobs=request.logprobs)


class CacheFields(Protocol):
    """A request with prefix-cache options."""

    cache_salt: str | None
    cache_priority: int | None
    cache_ttl_s: float | None
    cache_pin: bool | None


def requests_receipt(request: SamplingFields, n_prompts: int = 1) -> bool:
    """Return whether a request asks for a receipt. raises RequestError if it cannot have one"""
    if request.receipt and (request.stream or n_prompts > 1):
        responses = "stream" if request.stream else f"{n_prompts} prompts"
        raise RequestError(
            f"a receipt is wanted of {responses}",
            "of one prompt, in a whole answer",
            "leave receipt out, or ask so",
            "receipt",
        )
    return bool(request.receipt)


def request_options(request: TermsFields) -> RequestOptions:
    """Return the cache and queue options of a request. raises RequestError naming the field"""
    cache, queueing = cache_options(request), _queue_options(request)
    if cache is DEFAULT_CACHE_OPTIONS and queueing is DEFAULT_QUEUE_OPTIONS:
        return DEFAULT_OPTIONS
    return RequestOptions(cache=cache, queue_options=queueing)


def _queue_options(request: TermsFields) -> QueueOptions:
    if request.priority is None and request.queue_timeout_s is None:
        return DEFAULT_QUEUE_OPTIONS
    return QueueOptions(priority=request.priority or 0, queue_timeout_s=request.queue_timeout_s)


def cache_options(request: CacheFields) -> CacheOptions:
    """Return the prefix-cache options of a request. raises RequestError naming the field"""
    values = (request.cache_salt, request.cache_priority, request.cache_ttl_s, request.cache_pin)
    if values == (None, None, None, None):
        return DEFAULT_CACHE_OPTIONS
    salt, priority, ttl_s, pin = values
    return CacheOptions(salt=salt or "", priority=priority, ttl_s=ttl_s, pin=bool(pin))


def _bias(value: dict[int, float] | list[Any] | None) -> dict[int, float]:
    """Return the logit bias; an empty list, as llama.cpp's clients send, is none. raises RequestError for any other"""
    if isinstance(value, list) and value:
        expected = "an object of token ids and numbers"
        raise RequestError("logit_bias is of type array", expected, "correct logit_bias", "logit_bias")
    return value if isinstance(value, dict) else {}


def _params(request: SamplingFields, max_tokens: int | None, n_top: int | None) -> SamplingParams:
    if request.stream_options is not None and not request.stream:
        raise RequestError(
            "stream_options is set, but stream is not", "both", "set stream to true", param="stream_options"
        )
    return SamplingParams(
        n=1 if request.n is None else request.n,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens or 0,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=request.repetition_penalty,
        repeat_last_n=request.repeat_last_n,
        seed=None if request.seed == -1 else request.seed,  # vLLM's and llama.cpp's word for any
        stop=() if request.stop is None else request.stop if isinstance(request.stop, str) else tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logit_bias=_bias(request.logit_bias),
        logprobs=n_top,
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        structured_outputs=structured_outputs(request)
        if any(getattr(request, name) is not None for name in FIELDS)
        else None,
    )
