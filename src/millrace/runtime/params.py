"""What a caller may ask of a generation, and what comes back: the shapes that users of vLLM and TensorRT-LLM know."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum

from millrace.errors import RequestError, alike, nearest
from millrace.runtime.vllm_names import SAMPLING

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024  # of one stop string: the search keeps a table as long, and an answer holds back as much
MAX_STOP_TOKENS = MAX_BIASED_TOKENS = 1024  # vLLM's bound of a biased request
MAX_LOGPROBS = 20
MAX_CHOICES = 128
SEED_BITS = 53  # of a drawn seed: what JavaScript's numbers hold exactly, so that every client can send it back
LEAST = 1e-9  # of what must be above 0: in float32 it still is
COMPLETION_TOKENS = 16  # of a text to be continued, where max_tokens is not said; a chat has the rest of the context


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-text, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context is used up
    ABORT = "abort"  # the client went away or the server is stopping
    ERROR = "error"  # this one request failed; others go on


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. None means "not said": then the model's generation_config decides, then the default.

    temperature 0 is greedy; top_k 0 (or -1, vLLM's word for it) is off; a missing seed is drawn and told.
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
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # how many alternatives beside the chosen token; 0 = the chosen one only
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt: each given all before it
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True  # False: RequestOutput has token_ids without their text

    def __new__(cls, *unnamed: object, **given: object) -> "SamplingParams":
        """Looks at the names: the TypeError of a dataclass would not say what was meant."""
        if unnamed:
            raise RequestError(
                f"SamplingParams has the value {_short(unnamed[0])} without its name", "names", "write temperature=0.7"
            )
        known = {f.name for f in fields(cls)}
        for name in given:
            if name not in known:
                meant = alike(name, known)
                mend = f"write {meant}=" if meant else "leave it out; help(SamplingParams) says what there is"
                mend = f"use {SAMPLING[name]}" if name in SAMPLING else mend
                raise RequestError(f'SamplingParams has no parameter "{name}"', nearest(name, known), mend, param=name)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, empty in (("stop", ()), ("stop_token_ids", ()), ("logit_bias", {}), ("n", 1), ("min_tokens", 0)):
            if getattr(self, name) is None:  # as other libraries say "none of these"
                object.__setattr__(self, name, empty)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))  # OpenAI allows a bare string
        for name, kind, wanted in _KINDS:
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise RequestError(f"{name} is {_short(value)}", wanted, f"change {name}, or leave it out", param=name)
        _check_int("n", self.n, 1, MAX_CHOICES)
        _check_int("max_tokens", self.max_tokens, 1, None)
        _check_int("min_tokens", self.min_tokens, 0, None)
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, LEAST, 1.0)
        _check_int("top_k", self.top_k, -1, None)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, LEAST, 100.0)
        _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _check_stop(self.stop)
        _check_number("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKENS)
        _check_number("logit_bias", len(self.logit_bias), MAX_BIASED_TOKENS)
        for token, bias in self.logit_bias.items():
            _check_int("logit_bias", token, 0, None)
            _check_float("logit_bias", bias, -100.0, 100.0)


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
    """Bounded in number and length. The message never repeats the list, which may be megabytes."""
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


def _check_number(name: str, n: int, most: int) -> None:
    if n > most:
        raise RequestError(f"{name} has {n} tokens", f"at most {most}", f"shorten {name}", param=name)


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
    """A number may have thousands of digits; Python refuses to print it beyond a limit of its own."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, str | int | float | None):
        return repr(value)
    return f"of type {type(value).__name__}"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One chosen token, its log probability, and the likeliest alternatives, best first; it may not be among them."""

    token_id: int
    logprob: float
    rank: int  # 1 = the likeliest of the vocabulary
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one choice of a request: tokens, a finish, or log probabilities of the prompt's tokens."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or stop string that ended it; None for end-of-text
    error: str | None = None  # with FinishReason.ERROR: what happened, for the caller
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # of the next tokens of the prompt; the first has none

    @property
    def n_tokens(self) -> int:
        """Tokens of which it says something."""
        return len(self.token_ids) + len(self.prompt_logprobs or ())


@dataclass(frozen=True, slots=True)
class Logprob:
    """What is known of one token at one place, in vLLM's shape."""

    logprob: float
    rank: int  # 1 = the likeliest of the vocabulary
    decoded_token: str  # the token alone; half a character is U+FFFD


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None  # a dict per token: the chosen one first, then the likeliest
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None  # with FinishReason.ERROR or ABORT: what happened


@dataclass(slots=True)
class RequestOutput:
    """`outputs[0].text` is the answer; `seed` is the one that was used, so that it can be asked again."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    seed: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # as asked; None for the first token
