"""A user's questions from a JSONL file: multiple choice, or generated answers that are matched.

A line with `choices` is answered by the likeliest of them, like lm-eval's output type multiple_choice: prompt and
choice are tokenized together, the choice is the tokens after the prompt's, and no BOS is added. Any other line is
answered with generated text. All lines of a file are of one kind.
"""

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from millrace.checkpoint.tokenizer.tokenizer import Tokenizer
from millrace.errors import ConfigError
from millrace.evaluate.likelihood import LikelihoodQuestion
from millrace.evaluate.multiple_choice import Group, PreparedQuestion, cut_at_the_left, digest
from millrace.settings import read_bounded

_MAX_BYTES, _MAX_LINE_BYTES, _MAX_LINES = 64 << 20, 1 << 20, 100_000
MAX_ANSWER_TOKENS = 4096
Text = Annotated[str, Meta(min_length=1)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
_CHOICE = '{"prompt" or "question": "...", "choices": ["...", "..."], "answer": 0}'
_PROMPT_FORMAT = '{"prompt" or "question": "..." or "messages": [...], "answer": "..."}'


class QuestionLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """prompt: used unchanged; question: formatted as "Question: ...\\nAnswer:"; group: a name to report separately"""

    prompt: Text | None = None
    question: Text | None = None
    id: Name | int | None = None
    group: Name | None = None

    @property
    def text(self) -> str | None:
        return self.prompt if self.question is None else f"Question: {self.question}\nAnswer:"

    @property
    def alternatives(self) -> Sequence[object]:
        """Return the alternative keys for the question; exactly one is set."""
        return self.prompt, self.question


class ChoiceLine(QuestionLine, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A multiple-choice line. answer: index of the right choice; delimiter: between prompt and choice"""

    choices: Annotated[list[Text], Meta(min_length=2, max_length=64)]
    answer: Annotated[int, Meta(ge=0)]
    delimiter: Annotated[str, Meta(max_length=16)] = " "

    def check(self) -> None:
        """Check the line. raises ValueError"""
        if self.answer >= len(self.choices):
            raise ValueError(f"the answer is {self.answer}, and there are {len(self.choices)} choices, from 0")


class QuestionMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Name
    content: str


class GenerationLine(QuestionLine, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A line with a generated answer. answer: the right one or several; match: how to compare; stop: stop texts"""

    answer: Annotated[str, Meta(max_length=10_000)] | Annotated[list[str], Meta(min_length=1, max_length=64)]
    match: Literal["exact", "contains", "regex", "number"] = "exact"
    messages: Annotated[list[QuestionMessage], Meta(min_length=1, max_length=1000)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_ANSWER_TOKENS)] = 256
    stop: Annotated[list[Annotated[str, Meta(min_length=1, max_length=1000)]], Meta(max_length=16)] = []

    @property
    def alternatives(self) -> Sequence[object]:
        return self.prompt, self.question, self.messages

    @property
    def answers(self) -> list[str]:
        return [self.answer] if isinstance(self.answer, str) else self.answer


@dataclass(frozen=True, slots=True)
class Numbered:
    """A line with its group. where: file and line, for errors"""

    where: str
    group: str
    number: int  # index in its group
    line: QuestionLine

    @property
    def id(self) -> str:
        return "" if self.line.id is None else str(self.line.id)


@dataclass(frozen=True, slots=True)
class Questions:
    """The questions of a file. lines: of one kind, each with its group and index in it"""

    name: str
    lines: Sequence[Numbered]

    @property
    def is_choice(self) -> bool:
        return isinstance(self.lines[0].line, ChoiceLine)

    @property
    def digest(self) -> str:
        return digest([(one.group, msgspec.to_builtins(one.line)) for one in self.lines])

    def groups(self, tokenizer: Tokenizer, room: int) -> Sequence[Group]:
        """Return groups of multiple-choice questions. room: tokens of the context"""
        result: dict[str, list[Numbered]] = {}
        for one in self.lines:
            result.setdefault(one.group, []).append(one)
        return [Group(name, len(some), partial(_posed, some, tokenizer, room)) for name, some in result.items()]


def read_questions(path: Path, limit: int | None = None) -> Questions:
    """Read questions. limit: maximum per group, from the first. raises ConfigError with the number of a bad line"""
    result, kind, counts = list[Numbered](), None, dict[str, int]()
    for number, data in _lines(path):
        where = f"{path}:{number}"
        line = _read(where, data)
        if kind not in (None, type(line)):
            raise _wrong(
                where, "is of another kind than the lines before it", "one kind in a file: all have choices, or none"
            )
        kind = type(line)
        group = line.group or path.stem
        counts[group] = counts.get(group, 0) + 1
        if limit is None or counts[group] <= limit:
            result.append(Numbered(where, group, counts[group] - 1, line))
    if not result:
        raise ConfigError(f"{path} has no questions", f"lines like {_CHOICE} or {_PROMPT_FORMAT}", "write some")
    return Questions(path.stem, result)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield non-blank lines with their numbers, from 1."""
    try:
        data = read_bounded(path, _MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}", "a JSONL file", "check --task") from error
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{path} has more than {_MAX_BYTES >> 20} MiB", "a smaller file", "give a part of it")
    lines = ((i, line) for i, line in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1) if line.strip())
    for n, (i, line) in enumerate(lines):
        if n == _MAX_LINES:
            raise ConfigError(f"{path} has more than {_MAX_LINES:,} questions", "fewer", "give a part of it")
        if len(line) > _MAX_LINE_BYTES:
            raise _wrong(f"{path}:{i}", f"has more than {_MAX_LINE_BYTES >> 20} MiB", "a shorter question")
        yield i, line


def _read(where: str, data: bytes) -> ChoiceLine | GenerationLine:
    expected = f"{_CHOICE} or {_PROMPT_FORMAT}"
    try:
        keys = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        kind: type[ChoiceLine] | type[GenerationLine] = ChoiceLine if "choices" in keys else GenerationLine
        expected = _CHOICE if kind is ChoiceLine else _PROMPT_FORMAT
        line = msgspec.json.decode(data, type=kind)
        if sum(alternatives is not None for alternatives in line.alternatives) != 1:
            raise ValueError("it asks nothing, or in more than one way")
        if isinstance(line, ChoiceLine):
            line.check()
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _wrong(where, f"is no question: {error}", expected) from None
    return line


def _wrong(where: str, what: str, expected: str) -> ConfigError:
    return ConfigError(f"{where} {what}", expected, "correct the line; docs/evaluation.md has the format")


def _posed(lines: Sequence[Numbered], tokenizer: Tokenizer, room: int) -> Iterator[PreparedQuestion]:
    for one in lines:
        line = one.line
        assert isinstance(line, ChoiceLine)
        if not (line.text or "").strip():
            raise _wrong(
                one.where, "has a prompt of white space alone", "a text, behind which choices are likely or not"
            )
        question = merge(tokenizer, line.text or "", [line.delimiter + choice for choice in line.choices])
        if not all(map(len, question.endings)):
            what = "has a choice that this model's tokenizer makes one token of with the end of the prompt"
            raise _wrong(one.where, what, "choices of tokens of their own")
        if max(map(len, question.endings)) > room:
            raise _wrong(one.where, f"has a choice that is longer than the context of {room} tokens", "a shorter one")
        question, was_cut = cut_at_the_left(question, room)
        n_bytes = [len(choice.encode()) for choice in line.choices]
        yield PreparedQuestion(one.number, question, line.answer, was_cut, n_bytes, one.id)


def merge(tokenizer: Tokenizer, prompt: str, endings: Sequence[str]) -> LikelihoodQuestion:
    """Join prompt and endings; white space at the prompt's end moves to the endings, as tokenizers expect."""
    context = prompt.rstrip()
    space = prompt[len(context) :]
    ids = tokenizer.encode(context, add_special_tokens=False)
    encoded = [tokenizer.encode(f"{context}{space}{ending}", add_special_tokens=False) for ending in endings]
    return LikelihoodQuestion(ids, [each[len(ids) :] for each in encoded])
