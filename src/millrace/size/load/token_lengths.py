"""How long prompts and answers are, in tokens: from words, characters, parts of a prompt, or calls in a row."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from millrace.errors import ConfigError, nearest
from millrace.report.format_numbers import exact
from millrace.size.load.peak_load import tokens
from millrace.size.performance.models import ModelShape
from millrace.size.question.settings import LENGTHS, RequestSettings

UNITS = {"token": "tokens", "word": "words", "character": "characters", "char": "characters"}
PARTS = ("system", "documents", "history", "question")
_LENGTH = re.compile(r"(?:(\d+)\s*x\s*)?(\d[\d,_]*(?:\.\d+)?)\s*([a-zA-Z]*)")
_CALL = re.compile(r"\s*([\w-]+)\s*(?::\s*(\d+)\s*/\s*(\d+)\s*)?")
_MOST, _MOST_CALLS = 1 << 24, 16
# What a call before the last writes where nobody says: a verdict, and a query for the search.
_WRITES = {"guard": 10, "rag": 50}


@dataclass(frozen=True, slots=True)
class Call:
    """Of the model, for one request. how: where its lengths come from"""

    name: str
    n_input: float
    n_output: float
    how: str = ""

    @property
    def lengths(self) -> tuple[float, float]:
        return self.n_input, self.n_output


@dataclass(frozen=True, slots=True)
class Work:
    """The calls of a request, in a row: each waits for the whole answer of the one before; only the last streams."""

    calls: tuple[Call, ...]
    how: tuple[str, ...]

    @property
    def answer(self) -> Call:
        return self.calls[-1]

    @property
    def n_input(self) -> float:
        return sum(call.n_input for call in self.calls)

    @property
    def n_output(self) -> float:
        return sum(call.n_output for call in self.calls)

    def check(self, model: ModelShape) -> None:
        """raises ConfigError where a call is longer than the model's context"""
        self.check_context(model.max_context, model.name, "choose a model with a longer context")

    def check_context(self, n_tokens: int, whose: str, otherwise: str) -> None:
        """raises ConfigError where a call is longer than that"""
        for call in self.calls:
            if (n := call.n_input + call.n_output) > n_tokens:
                raise ConfigError(
                    f"{call.name}: {call.n_input:,.0f} tokens in and {call.n_output:,.0f} out are {n:,.0f}",
                    f"at most the context of {whose}, {n_tokens:,}", f"shorten them, or {otherwise}",
                )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Lengths:
    """Whole tokens of a request, in and out; of calls in a row those of the last. before: the calls before it"""

    n_input: int
    n_output: int
    before: tuple["Lengths", ...] = ()

    def __post_init__(self) -> None:
        if not (1 <= self.n_input <= 1 << 24 and 1 <= self.n_output <= 1 << 24):
            raise ConfigError(
                f"requests of {self.n_input} tokens in and {self.n_output} out", f"1 to {1 << 24} each", "correct them"
            )

    @classmethod
    def of(cls, work: Work) -> "Lengths":
        """raises ConfigError"""
        *before, last = [cls(round(call.n_input), round(call.n_output)) for call in work.calls]
        return replace(last, before=tuple(before))

    @property
    def calls(self) -> tuple["Lengths", ...]:
        return (*self.before, replace(self, before=())) if self.before else (self,)

    @property
    def both(self) -> int:
        """Of the longest call."""
        return max(self.n_input + self.n_output, *(one.both for one in self.before), 0)


def length(text: str, name: str, words_a_token: float) -> tuple[float, str]:
    """Tokens of "3500 words" or "5 x 400 words", and how they were counted. raises ConfigError, where no unit stands"""
    found = _LENGTH.fullmatch(text.strip())
    expected = f'a number with its unit: "{name} 3500 tokens", "... words" or "... characters"'
    if not found:
        raise ConfigError(f'{name} is "{text}"', expected, "write it so")
    times, number, unit = int(found[1] or 1), float(found[2].replace(",", "").replace("_", "")), found[3].casefold()
    if not unit:
        raise ConfigError(f"{name} is {number:,.10g} of what?", expected, "say the unit; 3,500 words are 4,667 tokens")
    known = UNITS.get(unit.removesuffix("s"))
    if known is None:
        raise ConfigError(f'{name} is in "{unit}"', nearest(unit, UNITS.values()), "say it in one of them")
    n = times * tokens(number, known, words_a_token)
    if not 1 <= n <= _MOST:
        raise ConfigError(f"{name} is {exact(n)} tokens", f"1 to {_MOST:,}", "correct it")
    return n, _told(name, times * number, known, n, words_a_token)


def _told(name: str, n: float, unit: str, n_tokens: float, words_a_token: float) -> str:
    if unit == "tokens":
        return f"{name}: {n_tokens:,.0f} tokens"
    at = f"{words_a_token:g} words a token" if unit == "words" else f"{n / n_tokens:g} characters a token"
    return f"{name}: {n:,.0f} {unit} are {n_tokens:,.0f} tokens, at {at}"


def work(asked: RequestSettings, recorded: tuple[float, float] | None = None) -> Work:
    """recorded: mean lengths of a trace, where nothing else is said. raises ConfigError, also for what is said twice"""
    n_in, how_in = _input(asked, recorded)
    n_out, how_out = _one("output", asked, recorded)
    how = (*how_in, *how_out)
    if asked.pipeline is None:
        return Work((Call("request", n_in, n_out),), how)
    calls = _calls(asked.pipeline, Call("answer", n_in, n_out), _question(asked, n_in))
    return Work(calls, (*how, *(f"{call.name}: {call.n_input:,.0f} tokens in, {call.n_output:,.0f} out, {call.how}"
                                for call in calls[:-1])))  # fmt: skip


def _input(asked: RequestSettings, recorded: tuple[float, float] | None) -> tuple[float, Sequence[str]]:
    parts = [(name, text) for name in PARTS if (text := getattr(asked, name)) is not None]
    by_itself = asked.pipeline is not None and [name for name, _ in parts] == ["question"]  # what other calls read
    is_known = by_itself and (asked.preset is not None or recorded is not None)
    if not parts or is_known or asked.isl is not None or asked.input is not None:
        if [name for name, _ in parts] not in ([], ["question"]) or (parts and asked.pipeline is None):
            raise _twice("the prompt", [*_given(asked, "isl", "input"), *(name for name, _ in parts)])
        n, how = _one("input", asked, recorded)
        return n, (*how, *(length(text, name, asked.words_a_token)[1] for name, text in parts))
    found = [length(text, name, asked.words_a_token) for name, text in parts]
    n = sum(n for n, _ in found)
    return n, (*(how for _, how in found), f"input: {n:,.0f} tokens together")


def _one(
    name: str, asked: RequestSettings, recorded: tuple[float, float] | None
) -> tuple[float, Sequence[str]]:  # fmt: skip
    """The prompt's, or the answer's."""
    flag, place = ("isl", 0) if name == "input" else ("osl", 1)
    n, text = getattr(asked, flag), getattr(asked, name)
    if n is not None and text is not None:
        raise _twice(f"the {name}", _given(asked, flag, name))
    if n is not None:
        return float(n), (f"{name}: {n:,} tokens",)
    if text is not None:
        tokens_of, how = length(text, name, asked.words_a_token)
        return tokens_of, (how,)
    if asked.preset is not None:
        preset = LENGTHS[asked.preset]
        usual = preset.tokens[place]
        return float(usual), (f"{name}: {usual:,} tokens, by the preset {asked.preset} ({preset.whose})",)
    if recorded is not None:
        return recorded[place], (f"{name}: {recorded[place]:,.0f} tokens, the mean of the trace",)
    raise ConfigError(
        f"the length of the {name} is not said", f"--{flag} in tokens, --{name} with a unit, or --preset rag",
        f'say it: --{flag} 500, or --{name} "375 words"',
    )  # fmt: skip


def _question(asked: RequestSettings, n_input: float) -> tuple[float, str]:
    if asked.question is None:
        return n_input, "the whole prompt"
    return length(asked.question, "question", asked.words_a_token)[0], "the question"


def _calls(text: str, answer: Call, question: tuple[float, str]) -> tuple[Call, ...]:
    names = text.split(">")
    if not 1 <= len(names) <= _MOST_CALLS:
        raise ConfigError(f"a pipeline of {len(names)} calls", f"1 to {_MOST_CALLS}", "leave some out")
    return (*(_call(name, text, question) for name in names[:-1]), _last(names[-1], text, answer))


def _call(text: str, whole: str, question: tuple[float, str]) -> Call:
    name, n_in, n_out = _parsed(text, whole)
    if n_in and n_out:
        return Call(name, n_in, n_out, "as said")
    if name not in _WRITES:
        raise ConfigError(
            f'the lengths of "{name}" in the pipeline are not known',
            f"{name}:TOKENS_IN/TOKENS_OUT; {' and '.join(_WRITES)} have usual ones",
            f"write {name}:500/50",
        )
    n, whose = question
    return Call(name, n, _WRITES[name], f"assumed: it reads {whose}")


def _last(text: str, whole: str, answer: Call) -> Call:
    name, n_in, n_out = _parsed(text, whole)
    return Call(name, n_in or answer.n_input, n_out or answer.n_output)


def _parsed(text: str, whole: str) -> tuple[str, int, int]:
    found = _CALL.fullmatch(text)
    if not found or any(n is not None and not 1 <= int(n) <= _MOST for n in found.groups()[1:]):
        raise ConfigError(f'a call "{text.strip():.60}" in the pipeline "{whole:.200}"', "guard:300/10>rag>answer",
                          "write names, with tokens in and out behind a colon")  # fmt: skip
    return found[1], int(found[2] or 0), int(found[3] or 0)


def _given(asked: RequestSettings, *names: str) -> list[str]:
    return [name for name in names if getattr(asked, name) is not None]


def _twice(what: str, names: Sequence[str]) -> ConfigError:
    return ConfigError(f"{what} is said twice: by {' and '.join(names)}", "one of them", "leave the others out")
