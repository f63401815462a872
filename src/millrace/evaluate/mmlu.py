"""MMLU (Hendrycks et al., 2021, arXiv 2009.03300): 57 subjects, four choices, two definitions that are often confused.

`lm-eval`: lm-evaluation-harness, tasks/mmlu/default. No BOS; a prompt that is too long loses its beginning; the
answer's token results from encoding the prompt and " A" together.
`original`: evaluate.py of hendrycks/test. The subject has a leading space, so there are two; the prompt begins with a
BOS if the tokenizer adds one; a prompt that is too long loses examples.
Both report the share of all questions, not the mean over subjects. Nothing is downloaded: a folder has dev/ and test/.
"""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from millrace.checkpoint.tokenizer.tokenizer import Tokenizer
from millrace.errors import ConfigError, nearest
from millrace.evaluate.likelihood import LikelihoodQuestion
from millrace.evaluate.multiple_choice import Group, PreparedQuestion, cut_at_the_left, digest
from millrace.evaluate.sizes import MAX_SHOTS
from millrace.settings import read_bounded

LM_EVAL, ORIGINAL = "lm-eval", "original"
DEFINITIONS = (LM_EVAL, ORIGINAL)
LETTERS = "ABCD"
_COLUMNS = ("question", "choice0", "choice1", "choice2", "choice3", "answer")
_MAX_BYTES, _MAX_SUBJECTS = 16 << 20, 1000
_EXPECTED = f"CSV with the header {','.join(_COLUMNS)}, or six columns without one, as they are published"


@dataclass(frozen=True, slots=True)
class Item:
    """A question; answer: 0 to 3."""

    question: str
    choices: tuple[str, str, str, str]
    answer: int


@dataclass(frozen=True, slots=True)
class Subject:
    """A subject. dev: the examples that precede each question"""

    name: str
    dev: tuple[Item, ...]
    test: tuple[Item, ...]

    @property
    def title(self) -> str:
        return self.name.replace("_", " ")


@dataclass(frozen=True, slots=True)
class Mmlu:
    """The task: questions, their format, and the number of examples before each."""

    subjects: tuple[Subject, ...]
    definition: str = LM_EVAL
    shots: int = MAX_SHOTS

    @property
    def name(self) -> str:
        return f"mmlu, {self.definition}, {self.shots} shots"

    @property
    def digest(self) -> str:
        return digest(self.subjects)

    @property
    def n(self) -> int:
        """Return the number of questions of all subjects."""
        return sum(len(subject.test) for subject in self.subjects)

    def check_examples(self) -> None:
        """Raise ConfigError if a subject has fewer examples than the number of shots."""
        few = [subject for subject in self.subjects if len(subject.dev) < self.shots]
        if few:
            least = min(few, key=lambda subject: len(subject.dev))
            raise ConfigError(
                f"{len(few)} of {len(self.subjects)} subjects have fewer than {self.shots} examples in dev/, "
                f"{least.name} {len(least.dev)}",
                f"{self.shots} of each", f"complete them, or --shots {len(least.dev)}",
            )  # fmt: skip

    def groups(self, tokenizer: Tokenizer, room: int) -> list[Group]:
        """Return a group per subject; its questions begin with the same examples. room: maximum tokens of a prompt"""
        return [
            Group(subject.name, len(subject.test), partial(self._posed, subject, tokenizer, room))
            for subject in self.subjects
        ]

    def _posed(self, subject: Subject, tokenizer: Tokenizer, room: int) -> Iterator[PreparedQuestion]:
        head = f"The following are multiple choice questions (with answers) about {subject.title}.\n\n"
        if self.definition == ORIGINAL:
            head = head.replace("about ", "about  ", 1)
        examples = [f"{_text(item, self.definition)} {LETTERS[item.answer]}\n\n" for item in subject.dev[: self.shots]]
        for i, item in enumerate(subject.test):
            text = _text(item, self.definition)
            if self.definition == LM_EVAL:
                question, cut = cut_at_the_left(_joint(tokenizer, head + "".join(examples), text), room)
            else:
                question, cut = _with_fewer_examples(tokenizer, head, examples, text, room)
            yield PreparedQuestion(i, question, item.answer, cut)


def read_subjects(folder: Path, names: Sequence[str] = (), limit: int | None = None) -> tuple[Subject, ...]:
    """Read all subjects of test/, or the named ones, by name. limit: maximum questions of each, from the first

    raises ConfigError if it is not such a folder
    """
    result, examples = _files(folder, "test"), _files(folder, "dev")
    for name in names:
        if name not in result:
            raise ConfigError(f"{folder} has no subject {name!r:.60}", nearest(name, result), "correct --subject")
    chosen = sorted(set(names) or result)
    for name in chosen:
        if name not in examples:
            raise ConfigError(f"{folder}/dev has no examples of {name}", f"{name}_dev.csv", "complete the folder")
    return tuple(Subject(n, tuple(_items(examples[n])), tuple(islice(_items(result[n]), limit))) for n in chosen)


def _text(item: Item, definition: str) -> str:
    question = item.question.strip() if definition == LM_EVAL else item.question
    return question + "".join(f"\n{a}. {c}" for a, c in zip(LETTERS, item.choices, strict=True)) + "\nAnswer:"


def _joint(tokenizer: Tokenizer, before: str, posed: str) -> LikelihoodQuestion:
    """Encode context and answer together; the answer is the tokens after the context's.

    Answers are encoded with the question only, because the context ends with it.
    """
    ids, n = (
        tokenizer.encode(before + posed, add_special_tokens=False),
        len(tokenizer.encode(posed, add_special_tokens=False)),
    )
    return LikelihoodQuestion(ids, [tokenizer.encode(f"{posed} {a}", add_special_tokens=False)[n:] for a in LETTERS])


def _with_fewer_examples(
    tokenizer: Tokenizer, head: str, examples: Sequence[str], posed: str, room: int
) -> tuple[LikelihoodQuestion, bool]:
    endings = _answers(tokenizer)
    for n in range(len(examples), -1, -1):
        ids = tokenizer.encode(head + "".join(examples[:n]) + posed)
        if len(ids) < room:
            return LikelihoodQuestion(ids, endings), n < len(examples)
    return LikelihoodQuestion(ids[-(room - 1) :], endings), True


def _answers(tokenizer: Tokenizer) -> list[list[int]]:
    """Return the last token of " A" to " D": the letter, however the tokenizer handles the space."""
    return [tokenizer.encode(f"Answer: {a}", add_special_tokens=False)[-1:] for a in LETTERS]


def _files(folder: Path, split: str) -> Mapping[str, Path]:
    inside = folder / split
    if not inside.is_dir():
        raise ConfigError(
            f"{folder} has no folder {split}",
            "dev/ and test/ with a CSV file a subject",
            "name the folder that holds both",
        )
    ending = f"_{split}.csv"
    result = {path.name.removesuffix(ending): path for path in sorted(inside.iterdir()) if path.name.endswith(ending)}
    if not 0 < len(result) <= _MAX_SUBJECTS:
        raise ConfigError(
            f"{inside} has {len(result)} files SUBJECT{ending}",
            f"1 to {_MAX_SUBJECTS:,} of them",
            "complete the folder",
        )
    return result


def _items(path: Path) -> Iterator[Item]:
    try:
        data = read_bounded(path, _MAX_BYTES)
        text = data.decode("utf-8-sig")  # some programs write a byte order mark
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}", "a CSV file", "check the folder") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: byte at {error.start}", "UTF-8", "convert it with iconv") from None
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{path} has more than {_MAX_BYTES >> 20} MiB", _EXPECTED, "give MMLU's own files")
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    n = 0
    try:
        for i, row in enumerate(rows):
            if i == 0 and tuple(row) == _COLUMNS:
                continue
            n += 1
            yield _item(path, rows.line_num, row)
    except csv.Error as error:
        raise ConfigError(f"{path}:{rows.line_num}: {error}", _EXPECTED, "correct the file") from None
    if not n:
        raise ConfigError(f"{path} has no questions", _EXPECTED, "complete the file")


def _item(path: Path, line: int, row: Sequence[str]) -> Item:
    if len(row) != len(_COLUMNS):
        raise ConfigError(f"{path}:{line} has {len(row)} columns", _EXPECTED, "correct the file")
    question, a, b, c, d, answer = row
    if answer in LETTERS and len(answer) == 1:
        return Item(question, (a, b, c, d), LETTERS.index(answer))
    if answer not in ("0", "1", "2", "3"):
        raise ConfigError(f"{path}:{line} has the answer {answer!r:.60}", "0 to 3, or A to D", "correct the file")
    return Item(question, (a, b, c, d), int(answer))
