"""Questions answered with greedily generated text, which is matched against the right answers."""

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from itertools import islice

import msgspec

from millrace.checkpoint.tokenizer.tokenizer import Tokenizer
from millrace.compile.settings import Progress
from millrace.errors import ConfigError
from millrace.evaluate.paired_comparison import Verdict
from millrace.evaluate.questions import GenerationLine, Numbered, Questions
from millrace.evaluate.resumable_results import RIGHT, Key, ResumableResults
from millrace.evaluate.safe_regex import Pattern

_AT_ONCE = 512  # prompts submitted at a time
# A sign counts only if nothing precedes it: 10-3 and 2024-05 have none. Commas only between thousands.
_NUMBER = re.compile(r"(?:(?<![\w.)])[-+\N{MINUS SIGN}])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")
Judge = Callable[[str], bool | None]  # None: undecided, and the answer counts as wrong
Render = Callable[[Sequence[Mapping[str, object]]], list[int]]  # renders a conversation with the model's chat template


@dataclass(frozen=True, slots=True)
class GenerationTask:
    """A question as tokens. cut: whether the prompt's beginning was dropped"""

    key: Key
    ids: Sequence[int]
    max_tokens: int
    stop: Sequence[str]
    judge: Judge
    cut: bool
    id: str


# (index, answer) as each finishes; closed if no more are needed
Generates = Callable[[Sequence[GenerationTask]], Generator[tuple[int, str], None, None]]


class GeneratedAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A generated answer. cut, id: as in `ChosenAnswer`; gave_up: whether matching was undecided"""

    group: str
    number: int
    text: str
    right: bool
    cut: bool = False
    id: str = ""
    gave_up: bool = False

    @property
    def key(self) -> Key:
        return self.group, self.number

    @property
    def verdicts(self) -> Mapping[str, Verdict]:
        return {RIGHT: Verdict(self.text, self.right)}


def judges(questions: Questions) -> list[Judge]:
    """Return a judge for each line. raises ConfigError if an answer is invalid for its kind of match"""
    return [_judge(one) for one in questions.lines]


def asks(
    questions: Questions, judged: Sequence[Judge], tokenizer: Tokenizer, render: Render, room: int
) -> Iterator[GenerationTask]:
    """Yield tasks. room: tokens of the context. raises ConfigError if an answer may be longer than that"""
    for one, judge in zip(questions.lines, judged, strict=True):
        line = one.line
        assert isinstance(line, GenerationLine)
        if line.max_tokens >= room:
            raise ConfigError(
                f"{one.where} asks for {line.max_tokens} tokens of a context of {room}", f"at most {room - 1}",
                "lower its max_tokens, or build for a longer --max-context",
            )  # fmt: skip
        if line.messages is None:
            ids = tokenizer.encode(line.text or "")
        else:
            ids = render([{"role": m.role, "content": m.content} for m in line.messages])
        most, key = room - line.max_tokens, (one.group, one.number)
        yield GenerationTask(key, ids[-most:], line.max_tokens, line.stop, judge, len(ids) > most, one.id)


def answer(
    generates: Generates,
    tasks: Iterable[GenerationTask],
    n: int,
    results: ResumableResults[GeneratedAnswer],
    progress: Progress,
) -> None:
    """Answer the tasks that `results` lacks, and store each answer at once. n: number of all tasks"""
    left = (ask for ask in tasks if ask.key not in results.records)
    progress("answering", len(results.records), n)
    while some := list(islice(left, _AT_ONCE)):
        with closing(generates(some)) as arrived:
            for i, text in arrived:
                ask, right = some[i], some[i].judge(text)
                results.add(GeneratedAnswer(*ask.key, text, bool(right), ask.cut, ask.id, right is None))
                progress("answering", len(results.records), n)


def _judge(numbered: Numbered) -> Judge:
    assert isinstance(numbered.line, GenerationLine)
    answers = numbered.line.answers
    match numbered.line.match:
        case "exact":
            return partial(_is_exactly, [answer.strip() for answer in answers])
        case "contains":
            if not all(answers):
                raise _cannot(numbered, "is empty, which every text contains", "a text")
            return partial(_contains, answers)
        case "number":
            return partial(_ends_with_number, [_as_number(numbered, answer) for answer in answers])
        case "regex":
            return partial(_matches, [Pattern(answer, numbered.where) for answer in answers])


def _is_exactly(answers: Sequence[str], text: str) -> bool:
    return text.strip() in answers


def _contains(answers: Sequence[str], text: str) -> bool:
    return any(answer in text for answer in answers)


def _matches(patterns: Sequence[Pattern], text: str) -> bool | None:
    result = [pattern.matches(text.strip()) for pattern in patterns]
    return None if None in result and True not in result else True in result


def _ends_with_number(answers: Sequence[Decimal], text: str) -> bool:
    """Whether the last number in the text is one of the answers, whatever follows it; $1,234.50 is 1234.5."""
    result = _NUMBER.findall(text)
    return bool(result) and _value(result[-1]) in answers


def _as_number(numbered: Numbered, answer: str) -> Decimal:
    result = _NUMBER.fullmatch(answer.strip())
    if result is None:
        raise _cannot(numbered, f"is {answer!r:.60}", "a number, like -1,234.5")
    return _value(result[0])


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", "").replace("\N{MINUS SIGN}", "-"))


def _cannot(numbered: Numbered, what: str, expected: str) -> ConfigError:
    return ConfigError(f"{numbered.where}: the answer {what}", expected, "correct the line")
