"""Prompt and answer lengths in tokens: from words, characters, parts of a prompt, presets, or sequential calls."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from millrace.errors import ConfigError, nearest
from millrace.report.format_numbers import format_exact
from millrace.size.load.peak_load import tokens
from millrace.size.performance.models import ModelShape
from millrace.size.question.settings import LENGTHS, RequestSettings

UNITS = {"token": "tokens", "word": "words", "character": "characters", "char": "characters"}
PARTS = ("system", "documents", "history", "question")
_LENGTH = re.compile(r"(?:(\d+)\s*x\s*)?(\d[\d,_]*(?:\.\d+)?)\s*([a-zA-Z]*)")
_CALL = re.compile(r"\s*([\w-]+)\s*(?::\s*(\d+)\s*/\s*(\d+)\s*)?")
_MAX_TOKENS, _MAX_CALLS = 1 << 24, 16
# Default output tokens of calls before the last: a verdict, and a search query.
_WRITES = {"guard": 10, "rag": 50}


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One model call of a request. how: origin of its lengths"""

    name: str
    n_input: float
    n_output: float
    how: str = ""

    @property
    def lengths(self) -> tuple[float, float]:
        return self.n_input, self.n_output


@dataclass(frozen=True, slots=True)
class RequestWork:
    """The sequential calls of a request: each waits for the whole answer of the previous one; only the last streams."""

    calls: tuple[ModelCall, ...]
    how: tuple[str, ...]

    @property
    def answer(self) -> ModelCall:
        return self.calls[-1]

    @property
    def n_input(self) -> float:
        return sum(call.n_input for call in self.calls)

    @property
    def n_output(self) -> float:
        return sum(call.n_output for call in self.calls)

    def check(self, model: ModelShape) -> None:
        """Refuse calls that are longer than the model's context. raises ConfigError"""
        self.check_context(model.max_context, model.name, "choose a model with a longer context")

    def check_context(self, n_tokens: int, owner: str, remedy: str) -> None:
        """Refuse calls of more than n_tokens. owner, remedy: for the error. raises ConfigError"""
        for call in self.calls:
            if (n := call.n_input + call.n_output) > n_tokens:
                raise ConfigError(
                    f"{call.name}: {call.n_input:,.0f} tokens in and {call.n_output:,.0f} out are {n:,.0f}",
                    f"at most the context of {owner}, {n_tokens:,}", f"shorten them, or {remedy}",
                )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Lengths:
    """Whole input and output tokens of a request, or of the last of several calls. before: the earlier calls"""

    n_input: int
    n_output: int
    before: tuple["Lengths", ...] = ()

    def __post_init__(self) -> None:
        if not (1 <= self.n_input <= 1 << 24 and 1 <= self.n_output <= 1 << 24):
            raise ConfigError(
                f"requests of {self.n_input} tokens in and {self.n_output} out", f"1 to {1 << 24} each", "correct them"
            )

    @classmethod
    def from_work(cls, work: RequestWork) -> "Lengths":
        """Round the lengths of all calls. raises ConfigError"""
        *before, last = [cls(round(call.n_input), round(call.n_output)) for call in work.calls]
        return replace(last, before=tuple(before))

    @property
    def calls(self) -> tuple["Lengths", ...]:
        return (*self.before, replace(self, before=())) if self.before else (self,)

    @property
    def total_tokens(self) -> int:
        """Return input plus output tokens of the longest call."""
        return max(self.n_input + self.n_output, *(call.total_tokens for call in self.before), 0)


def parse_length(text: str, name: str, words_a_token: float) -> tuple[float, str]:
    """Parse "3500 words" or "5 x 400 words" as tokens, with the derivation. raises ConfigError if the unit is
    missing"""
    match = _LENGTH.fullmatch(text.strip())
    expected = f'a number with its unit: "{name} 3500 tokens", "... words" or "... characters"'
    if not match:
        raise ConfigError(f'{name} is "{text}"', expected, "write it so")
    times, number, unit = int(match[1] or 1), float(match[2].replace(",", "").replace("_", "")), match[3].casefold()
    if not unit:
        raise ConfigError(f"{name} is {number:,.10g} of what?", expected, "say the unit; 3,500 words are 4,667 tokens")
    unit_name = UNITS.get(unit.removesuffix("s"))
    if unit_name is None:
        raise ConfigError(f'{name} is in "{unit}"', nearest(unit, UNITS.values()), "say it in one of them")
    n = times * tokens(number, unit_name, words_a_token)
    if not 1 <= n <= _MAX_TOKENS:
        raise ConfigError(f"{name} is {format_exact(n)} tokens", f"1 to {_MAX_TOKENS:,}", "correct it")
    return n, _length_text(name, times * number, unit_name, n, words_a_token)


def _length_text(name: str, n: float, unit: str, n_tokens: float, words_a_token: float) -> str:
    if unit == "tokens":
        return f"{name}: {n_tokens:,.0f} tokens"
    at = f"{words_a_token:g} words a token" if unit == "words" else f"{n / n_tokens:g} characters a token"
    return f"{name}: {n:,.0f} {unit} are {n_tokens:,.0f} tokens, at {at}"


def request_work(request: RequestSettings, recorded: tuple[float, float] | None = None) -> RequestWork:
    """Determine the calls of a request. recorded: mean lengths of a trace, the default

    raises ConfigError if a length is missing or given twice
    """
    n_in, how_in = _input(request, recorded)
    n_out, how_out = _length_setting("output", request, recorded)
    how = (*how_in, *how_out)
    if request.pipeline is None:
        return RequestWork((ModelCall("request", n_in, n_out),), how)
    calls = _calls(request.pipeline, ModelCall("answer", n_in, n_out), _question(request, n_in))
    return RequestWork(
        calls,
        (
            *how,
            *(
                f"{call.name}: {call.n_input:,.0f} tokens in, {call.n_output:,.0f} out, {call.how}"
                for call in calls[:-1]
            ),
        ),
    )


def _input(request: RequestSettings, recorded: tuple[float, float] | None) -> tuple[float, Sequence[str]]:
    parts = [(name, text) for name in PARTS if (text := getattr(request, name)) is not None]
    by_itself = request.pipeline is not None and [name for name, _ in parts] == ["question"]  # what other calls read
    is_known = by_itself and (request.preset is not None or recorded is not None)
    if not parts or is_known or request.isl is not None or request.input is not None:
        if [name for name, _ in parts] not in ([], ["question"]) or (parts and request.pipeline is None):
            raise _twice("the prompt", [*_set_names(request, "isl", "input"), *(name for name, _ in parts)])
        n, how = _length_setting("input", request, recorded)
        return n, (*how, *(parse_length(text, name, request.words_a_token)[1] for name, text in parts))
    lengths = [parse_length(text, name, request.words_a_token) for name, text in parts]
    n = sum(n for n, _ in lengths)
    return n, (*(how for _, how in lengths), f"input: {n:,.0f} tokens together")


def _length_setting(
    name: str, request: RequestSettings, recorded: tuple[float, float] | None
) -> tuple[float, Sequence[str]]:  # fmt: skip
    """Return the length of the prompt ("input") or the answer ("output"), with its derivation."""
    flag, place = ("isl", 0) if name == "input" else ("osl", 1)
    n, text = getattr(request, flag), getattr(request, name)
    if n is not None and text is not None:
        raise _twice(f"the {name}", _set_names(request, flag, name))
    if n is not None:
        return float(n), (f"{name}: {n:,} tokens",)
    if text is not None:
        tokens_of, how = parse_length(text, name, request.words_a_token)
        return tokens_of, (how,)
    if request.preset is not None:
        preset = LENGTHS[request.preset]
        usual = preset.tokens[place]
        return float(usual), (f"{name}: {usual:,} tokens, by the preset {request.preset} ({preset.whose})",)
    if recorded is not None:
        return recorded[place], (f"{name}: {recorded[place]:,.0f} tokens, the mean of the trace",)
    raise ConfigError(
        f"the length of the {name} is not said", f"--{flag} in tokens, --{name} with a unit, or --preset rag",
        f'say it: --{flag} 500, or --{name} "375 words"',
    )  # fmt: skip


def _question(request: RequestSettings, n_input: float) -> tuple[float, str]:
    if request.question is None:
        return n_input, "the whole prompt"
    return parse_length(request.question, "question", request.words_a_token)[0], "the question"


def _calls(text: str, answer: ModelCall, question: tuple[float, str]) -> tuple[ModelCall, ...]:
    names = text.split(">")
    if not 1 <= len(names) <= _MAX_CALLS:
        raise ConfigError(f"a pipeline of {len(names)} calls", f"1 to {_MAX_CALLS}", "leave some out")
    return (*(_call(name, text, question) for name in names[:-1]), _last(names[-1], text, answer))


def _call(text: str, pipeline: str, question: tuple[float, str]) -> ModelCall:
    name, n_in, n_out = _parse_call(text, pipeline)
    if n_in and n_out:
        return ModelCall(name, n_in, n_out, "as said")
    if name not in _WRITES:
        raise ConfigError(
            f'the lengths of "{name}" in the pipeline are not known',
            f"{name}:TOKENS_IN/TOKENS_OUT; {' and '.join(_WRITES)} have usual ones",
            f"write {name}:500/50",
        )
    n, whose = question
    return ModelCall(name, n, _WRITES[name], f"assumed: it reads {whose}")


def _last(text: str, pipeline: str, answer: ModelCall) -> ModelCall:
    name, n_in, n_out = _parse_call(text, pipeline)
    return ModelCall(name, n_in or answer.n_input, n_out or answer.n_output)


def _parse_call(text: str, pipeline: str) -> tuple[str, int, int]:
    match = _CALL.fullmatch(text)
    if not match or any(n is not None and not 1 <= int(n) <= _MAX_TOKENS for n in match.groups()[1:]):
        raise ConfigError(f'a call "{text.strip():.60}" in the pipeline "{pipeline:.200}"', "guard:300/10>rag>answer",
                          "write names, with tokens in and out behind a colon")  # fmt: skip
    return match[1], int(match[2] or 0), int(match[3] or 0)


def _set_names(request: RequestSettings, *names: str) -> list[str]:
    return [name for name in names if getattr(request, name) is not None]


def _twice(label: str, names: Sequence[str]) -> ConfigError:
    return ConfigError(f"{label} is said twice: by {' and '.join(names)}", "one of them", "leave the others out")
