"""Sampling parameters of a request, as given and as resolved, and the deltas that come back.

`SamplingParams` holds what the caller set, under vLLM's and TensorRT-LLM's names. `ResolvedParams` has a value for
every parameter (from the request, then the model's generation_config, then the default), checked against this engine.
"""

import math
import operator
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import TypeVar

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from millrace.checkpoint.config.generation_config import GenerationDefaults
from millrace.engine.executor import SAMPLING, ExecutorLimits, IntArray, StepOutputs
from millrace.errors import ContextError, RequestError, close_matches, nearest
from millrace.runtime.request.structured_outputs import StructuredOutputsParams, parse_structured_outputs

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024  # of one stop string: the search table and the text held back are as long
MAX_STOP_TOKENS = MAX_BIASED_TOKENS = 1024  # vLLM's bound on a request's logit bias
MAX_LOGPROBS = 20
MAX_CHOICES = 128
SEED_BITS = 53  # of a drawn seed: exact in JavaScript's numbers, so that every client can send it back
MIN_POSITIVE = 1e-9  # bound of values that must be above 0, also in float32
COMPLETION_TOKENS = 16  # default max_tokens of a completion; a chat has the rest of the context


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-text, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context is used up
    ABORT = "abort"  # the client went away or the server is stopping
    ERROR = "error"  # this request failed; others continue


# Sampling parameters that vLLM has (the last three: transformers), and what replaces them here.
_OTHER_LIBRARIES: Mapping[str, str] = {
    "best_of": "n=, and choose among the answers by cumulative_logprob",
    "use_beam_search": "n= with a temperature: there is no beam search",
    "beam_width": "n= with a temperature: there is no beam search",
    "length_penalty": "n= with a temperature: there is no beam search",
    "early_stopping": "n= with a temperature: there is no beam search",
    "flat_logprobs": "logprobs=, which gives a dict a token",
    "spaces_between_special_tokens": "skip_special_tokens=False, and nothing is put between them",
    "truncate_prompt_tokens": 'a prompt {"prompt_token_ids": ids[-n:]}',
    "allowed_token_ids": "logit_bias={id: -100}, for what must not come",
    "bad_words": "logit_bias={id: -100}, for tokens that must not come",
    "logits_processors": "logit_bias=, min_p= or the penalties: code of yours is not run between tokens",
    "guided_decoding": "structured_outputs=, which has today's names for it",
    "output_kind": "LLM.astream, for an answer as it grows",
    "extra_args": "the parameters by their names",
    "max_new_tokens": "max_tokens=",
    "do_sample": "temperature=0, for the likeliest tokens",
    "num_return_sequences": "n=",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters. None means unset: then the model's generation_config applies, then the default.

    temperature 0 is greedy; top_k 0 (or -1, as in vLLM) is off; an unset seed is drawn and reported.
    raises RequestError naming the field; wire names follow OpenAI's and vLLM's protocol.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    repeat_last_n: int | None = None  # tokens to which penalties apply; None or -1: all, 0: penalties are off
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # number of alternatives besides the chosen token; 0: the chosen one only
    prompt_logprobs: int | None = None  # the same for each prompt token, given those before it
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True  # False: RequestOutput has token_ids without text
    structured_outputs: StructuredOutputsParams | None = None  # also as a dict

    def __new__(cls, *unnamed: object, **values: object) -> "SamplingParams":
        """Check the names, because a dataclass's TypeError does not explain what to use instead."""
        if unnamed:
            raise RequestError(
                f"SamplingParams has the value {_short(unnamed[0])} without its name", "names", "write temperature=0.7"
            )
        names = {f.name for f in fields(cls)}
        for name in values:
            if name not in names:
                meant = close_matches(name, names)
                fix = f"write {meant}=" if meant else "leave it out; help(SamplingParams) says what there is"
                fix = f"use {_OTHER_LIBRARIES[name]}" if name in _OTHER_LIBRARIES else fix
                raise RequestError(f'SamplingParams has no parameter "{name}"', nearest(name, names), fix, param=name)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, empty in (("stop", ()), ("stop_token_ids", ()), ("logit_bias", {}), ("n", 1), ("min_tokens", 0)):
            if getattr(self, name) is None:  # other libraries' spelling of "none"
                object.__setattr__(self, name, empty)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))  # OpenAI allows a bare string
        for name, kind, expected in _KINDS:
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise RequestError(
                    f"{name} is {_short(value)}", expected, f"change {name}, or leave it out", param=name
                )
        _check_int("n", self.n, 1, MAX_CHOICES)
        _check_int("max_tokens", self.max_tokens, 1, None)
        _check_int("min_tokens", self.min_tokens, 0, None)
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, MIN_POSITIVE, 1.0)
        _check_int("repeat_last_n", self.repeat_last_n, -1, None)
        _check_int("top_k", self.top_k, -1, None)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, MIN_POSITIVE, 100.0)
        _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _check_stop(self.stop)
        _check_number("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKENS)
        _check_number("logit_bias", len(self.logit_bias), MAX_BIASED_TOKENS)
        for token, bias in self.logit_bias.items():
            _check_int("logit_bias", token, 0, None)
            _check_float("logit_bias", bias, -100.0, 100.0)
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", parse_structured_outputs(self.structured_outputs))
            self._check_end()

    def _check_end(self) -> None:
        """Check that nothing but its form ends a structured answer."""
        assert self.structured_outputs is not None
        for name in ("ignore_eos", "min_tokens"):
            if value := getattr(self, name):
                field_name = self.structured_outputs.field_name
                expected = f"one of them: {field_name} says where an answer ends"
                raise RequestError(
                    f"{name} is {value!r} beside {field_name}", expected, f"leave {name} out", param=name
                )


_KINDS: tuple[tuple[str, type, str], ...] = (
    ("stop", Sequence, "a string, or a list of strings"),
    ("stop_token_ids", Sequence, "a list of token ids"),
    ("logit_bias", Mapping, "an object of token ids and numbers"),
    ("ignore_eos", bool, "true or false"),
    ("include_stop_str_in_output", bool, "true or false"),
    ("skip_special_tokens", bool, "true or false"),
    ("detokenize", bool, "true or false"),
)


def _check_stop(stop: Sequence[str]) -> None:
    """Check number and length of stop strings. The message never repeats the list, which may be megabytes."""
    what = ""
    if len(stop) > MAX_STOP_STRINGS:
        what = f"stop has {len(stop)} strings"
    else:
        for i, one in enumerate(stop):
            if not isinstance(one, str):
                what = f"stop[{i}] is of type {type(one).__name__}"
            elif not 1 <= len(one) <= MAX_STOP_CHARACTERS:
                what = f"stop[{i}] has {len(one)} characters"
    if what:
        expected = f"at most {MAX_STOP_STRINGS} non-empty strings of at most {MAX_STOP_CHARACTERS} characters"
        raise RequestError(what, expected, "shorten stop, or leave it out", param="stop")


def _check_number(name: str, n: int, limit: int) -> None:
    if n > limit:
        raise RequestError(f"{name} has {n} tokens", f"at most {limit}", f"shorten {name}", param=name)


def _check_int(name: str, value: int | None, low: int, high: int | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        span = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
        raise RequestError(f"{name} is {_short(value)}", span, f"change {name}, or leave it out", param=name)


def _check_float(name: str, value: float | None, low: float, high: float) -> None:
    if value is None:
        return
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not fits or not low <= value <= high:
        span = f"a number from {low:g} to {high:g}"
        raise RequestError(f"{name} is {_short(value)}", span, f"change {name}, or leave it out", param=name)


def _short(value: object) -> str:
    """Format a value for a message. A number may have more digits than Python agrees to print."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, str | int | float | None):
        return repr(value)
    return f"of type {type(value).__name__}"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A chosen token, its log probability, and the most likely alternatives, best first; they may not include it."""

    token_id: int
    logprob: float
    rank: int  # 1: the most likely of the vocabulary
    top: tuple[tuple[int, float], ...] = ()

    @classmethod
    def from_row(cls, outputs: StepOutputs, row: int, n_top: int) -> "TokenLogprobs":
        """Read sampling row `row`, with its `n_top` best alternatives, or all that its mask allows."""
        best = zip(outputs.top_ids[row, :n_top].tolist(), outputs.top_logprobs[row, :n_top].tolist(), strict=True)
        top = tuple((token, logprob) for token, logprob in best if token >= 0)
        return cls(int(outputs.tokens[row]), float(outputs.logprobs[row]), int(outputs.ranks[row]), top)


class Delta(Struct, frozen=True):  # one a token: made in a tenth of a frozen dataclass's time
    """What a step adds to one choice of a request: tokens, a finish, or log probabilities of prompt tokens."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or stop string that ended the answer; None for end-of-text
    error: str | None = None  # with FinishReason.ERROR: what happened, for the caller
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # of the next prompt tokens; the first one has none
    fault: RequestError | None = None  # with `error`: the request's own fault, naming a field

    @property
    def n_tokens(self) -> int:
        """Number of tokens in this delta."""
        return len(self.token_ids) + len(self.prompt_logprobs or ())


SEED_MASK = 2**64 - 1

_T = TypeVar("_T", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedParams:
    """Every parameter of one request with its final value."""

    n: int
    max_tokens: int
    min_tokens: int
    seed: int  # as requested or drawn
    n_top: int | None  # alternatives per token; None: no log probabilities
    prompt_top: int | None  # the same for prompt tokens
    eos_token_ids: frozenset[int]  # empty with ignore_eos
    stop_token_ids: frozenset[int]
    include_stop: bool  # keep the text of the stop token or stop string
    bias_ids: IntArray  # (B,)
    bias_values: NDArray[np.float32]  # (B,)
    needs_history: bool  # a penalty needs the previous tokens
    penalty_window: int | None  # number of these; None: all
    row: NDArray[np.void]  # (1,) of SAMPLING: the executor's parameters for every draw


def check_context(n_prompt: int, max_tokens: int | None, context: int, param: str = "prompt") -> None:
    """Check that a prompt and its answer fit the context. raises ContextError; RequestError for an empty prompt

    max_tokens None: an answer of at least one token
    """
    if not n_prompt:
        raise RequestError("the prompt has no tokens", "at least 1", "send some text", param)
    if n_prompt + (max_tokens or 1) > context:
        about = param if n_prompt >= context else "max_tokens"
        raise context_exceeded(context, str(n_prompt), max_tokens, about)


def context_exceeded(context: int, n_prompt: str, max_tokens: int | None, param: str) -> ContextError:
    """Return the error in the wording that tells clients to shorten a conversation. n_prompt: as in the message"""
    of_answer = f"max_tokens of {max_tokens} was asked for" if max_tokens else "an answer takes at least 1"
    shorter = "shorten the prompt, or build with a larger --max-context where the model allows that"
    if param == "max_tokens":
        shorter = f"ask for max_tokens of at most {context - int(n_prompt)}, or {shorter}"
    return ContextError(
        f"This model's maximum context length is {context} tokens, but the prompt has {n_prompt} tokens "
        f"and {of_answer}",
        f"at most {context} tokens together",
        shorter,
        param,
    )


def check_prompt(token_ids: Sequence[int] | IntArray, limits: ExecutorLimits) -> IntArray:
    """Return a copy of the prompt as an array (N,). raises RequestError if it is empty, not token ids, or too long"""
    where = "prompt"
    check_context(len(token_ids), None, limits.context_tokens)  # before the conversion: 100 MB are refused early
    try:
        wide = np.asarray(token_ids)
    except ValueError:  # lists of different lengths
        wide = np.empty((0, 0))
    if wide.ndim != 1 or wide.dtype.kind not in "iu":
        raise RequestError("the prompt is not a list of token ids", "integers", "send token ids or text", param=where)
    outside = np.flatnonzero((wide < 0) | (wide >= limits.vocab_size))
    if outside.size:
        at = int(outside[0])
        raise RequestError(
            f"prompt token {at} is {int(wide[at])}",
            f"a token id from 0 to {limits.vocab_size - 1}",
            "tokenise the text with this model's own tokenizer",
            param=where,
        )
    prompt = wide.astype(np.int32)
    prompt.setflags(write=False)
    return prompt


def with_length(params: SamplingParams, n_prompt: int, context: int) -> SamplingParams:
    """Return `params` of a completion with max_tokens: by default a few tokens, not minutes of them.

    Fewer if the context ends before, more if `min_tokens` requires them.
    """
    if params.max_tokens is not None:
        return params
    unsaid = min(max(COMPLETION_TOKENS, params.min_tokens), context - n_prompt)
    return replace(params, max_tokens=max(unsaid, 1))  # a prompt that leaves no room is refused later


def capped(params: SamplingParams, n_prompt: int, context: int) -> SamplingParams:
    """Return `params` with at most as many tokens as `context` leaves after a prompt of `n_prompt` tokens.

    For clients that send one fixed limit to every model. A prompt that leaves no room is refused later.
    """
    room = context - n_prompt
    if params.max_tokens is None or not 0 < room < params.max_tokens:
        return params if room > 0 else replace(params, max_tokens=None)
    return replace(params, max_tokens=room)


def resolve(
    params: SamplingParams, defaults: GenerationDefaults, limits: ExecutorLimits, n_prompt: int
) -> ResolvedParams:
    """Determine every parameter for a prompt of `n_prompt` tokens.

    raises RequestError if the lengths do not fit the context, or an id is outside the vocabulary.
    """
    context = limits.context_tokens
    check_context(n_prompt, params.max_tokens, context)
    max_tokens = context - n_prompt if params.max_tokens is None else params.max_tokens
    if params.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens is {params.min_tokens}", f"at most max_tokens, {max_tokens}", "lower min_tokens", "min_tokens"
        )
    bias = sorted(params.logit_bias.items())
    bias_ids = _vocabulary_ids("logit_bias", [i for i, _ in bias], limits.vocab_size)
    seed = secrets.randbits(SEED_BITS) if params.seed is None else params.seed
    counts = params.logprobs, params.prompt_logprobs
    n_top, prompt_top = (None if n is None else min(n, limits.vocab_size) for n in counts)
    if prompt_top is not None and limits.max_rows <= limits.max_sequences:
        raise RequestError(
            "prompt_logprobs is set, but this engine has no room for the logits of a prompt",
            f"an engine with more than {limits.max_sequences} rows of logits", "build it again", "prompt_logprobs",
        )  # fmt: skip
    row = _row(params, defaults, limits.vocab_size)
    row["seed"], row["n_top"], row["bias_count"] = seed & SEED_MASK, -1 if n_top is None else n_top, len(bias_ids)
    window = None if params.repeat_last_n == -1 else params.repeat_last_n
    penalties = (row["presence_penalty"][0], row["frequency_penalty"][0], row["repetition_penalty"][0] - 1)
    return ResolvedParams(
        n=params.n,
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        seed=seed,
        n_top=n_top,
        prompt_top=prompt_top,
        eos_token_ids=frozenset() if params.ignore_eos else frozenset(defaults.eos_token_ids),
        stop_token_ids=frozenset(_vocabulary_ids("stop_token_ids", params.stop_token_ids, limits.vocab_size)),
        include_stop=params.include_stop_str_in_output,
        bias_ids=np.array(bias_ids, dtype=np.int32),
        bias_values=np.array([v for _, v in bias], dtype=np.float32),
        needs_history=any(penalties),
        penalty_window=window,
        row=row,
    )


def _row(params: SamplingParams, defaults: GenerationDefaults, vocab_size: int) -> NDArray[np.void]:
    """Return the executor's sampling parameters (1,) of SAMPLING."""
    row = np.zeros(1, dtype=SAMPLING)
    top_k = _first(params.top_k, defaults.top_k, 0)
    row["target"] = -1
    row["top_k"] = top_k if 0 < top_k < vocab_size else 0  # -1 and the whole vocabulary are off
    row["temperature"] = _first(params.temperature, defaults.temperature, 1.0)
    row["top_p"] = _first(params.top_p, defaults.top_p, 1.0)
    row["min_p"] = _first(params.min_p, defaults.min_p, 0.0)
    off = params.repeat_last_n == 0
    row["presence_penalty"] = 0 if off else params.presence_penalty
    row["frequency_penalty"] = 0 if off else params.frequency_penalty
    row["repetition_penalty"] = 1 if off else _first(params.repetition_penalty, defaults.repetition_penalty, 1.0)
    return row


def _vocabulary_ids(name: str, ids: Sequence[int], vocab_size: int) -> list[int]:
    try:
        token_ids = [operator.index(i) for i in ids]
    except TypeError:
        token_ids = [-1]
    wrong = [i for i in token_ids if not 0 <= i < vocab_size]
    if wrong:
        raise RequestError(
            f"{name} holds {list(ids)[:8]!r}", f"token ids from 0 to {vocab_size - 1}", f"correct {name}", param=name
        )
    return token_ids


def _first(request: _T | None, model: _T | None, default: _T) -> _T:
    if request is not None:
        return request
    return default if model is None else model
