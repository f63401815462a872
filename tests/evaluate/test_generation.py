"""Answers in a model's own words: which are right, which are asked again, and what a prompt loses."""

from collections.abc import Generator, Sequence
from contextlib import closing
from functools import partial
from operator import eq
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.tokenizer.tokenizer import Tokenizer
from millrace.compile.resolve_model import BUNDLED
from millrace.errors import ConfigError
from millrace.evaluate import generation
from millrace.evaluate.generation import GeneratedAnswer, GenerationTask, answer, asks, judges
from millrace.evaluate.questions import Questions, read_questions
from millrace.evaluate.resumable_results import RIGHT, ResultsInputs, ResumableResults
from millrace.evaluate.safe_regex import Pattern

Answers = Generator[tuple[int, str], None, None]
ABOUT = ResultsInputs("m", "engine", "fp32", "mine, generated", "data")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Checkpoint.open(BUNDLED / "tiny").tokenizer


def questions(folder: Path, *lines: dict[str, Any]) -> Questions:
    path = folder / "mine.jsonl"
    path.write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
    return read_questions(path)


def rendered(messages: Sequence[Any]) -> list[int]:
    return [*range(7, 7 + len(messages[0]["content"]))]


@pytest.mark.parametrize(
    ("match", "right", "text", "is_right"),
    [
        ("exact", " Paris\n", "\nParis ", True), ("exact", "Paris", "paris", False),
        ("exact", "Paris", "Paris.", False),
        ("exact", ["no", "Paris"], "Paris", True), ("exact", "", " ", True),
        ("contains", "mill", "the miller", True), ("contains", ["x", "il"], "mill", True),
        ("contains", "Mill", "mill", False),
        ("number", "42", "6 * 7 is 42.", True), ("number", "42", "42 is more than 41", False),
        ("number", "1234.5", "it costs $1,234.50!", True), ("number", ["7", "-3"], "x = -3", True),
        ("number", "3", "-3", False), ("number", "0.5", ".5", True), ("number", "5", "none", False),
        ("number", "10", "1e1", False), ("number", "2", "1 + 1 = 2,", True), ("number", "1" * 400, "1" * 400, True),
        ("number", "3", "1,2,3", True), ("number", "3", "10-3", True), ("number", "5", "in 2024-05", True),
        ("number", "+1,234,567", "1,234,567.0 m", True), ("number", "-3", "(-3)", True),
        ("number", "3456", "12,3456", True),
        ("number", "-3", "x = \N{MINUS SIGN}3", True), ("number", "3", "10\N{MINUS SIGN}3", True),
        ("number", "\N{MINUS SIGN}3", "-3.0", True), ("number", ".3", "1.2.3", True), ("number", "5", "1e5", True),
        ("regex", "[Pp]aris\\.?", " paris. \n", True), ("regex", "Paris", "It is Paris", False),
        ("regex", "(.|\\n)*Paris(.|\\n)*", "It\nis Paris, is it", True), ("regex", ["a", "(?i)B"], "b", True),
    ],
)  # fmt: skip
def test_what_is_right(match: str, right: str | list[str], text: str, is_right: bool, tmp_path: Path) -> None:
    (judge,) = judges(questions(tmp_path, {"prompt": "x", "answer": right, "match": match}))
    assert judge(text) is is_right


@pytest.mark.parametrize(
    ("match", "right", "said"),
    [
        ("number", "4 apples", "the answer is '4 apples'"), ("number", "NaN", "is 'NaN'"),
        ("number", "1e5", "is '1e5'"),
        ("contains", ["x", ""], "is empty"),
        ("regex", "(", "unclosed group"), ("regex", r"(a)\1", "backreferences are not supported"),
        ("regex", "a(?=b)", "look-around"), ("regex", "a" * 1001, "has 1,001 characters"),
    ],
)  # fmt: skip
def test_answers_that_cannot_be_matched(match: str, right: Any, said: str, tmp_path: Path) -> None:
    asked = questions(tmp_path, {"prompt": "x", "answer": "y"}, {"prompt": "x", "answer": right, "match": match})
    with pytest.raises(ConfigError, match=said) as refused:
        judges(asked)
    assert f"{tmp_path}/mine.jsonl:2" in refused.value.what


def test_prompts(tmp_path: Path, tokenizer: Tokenizer) -> None:
    message = {"role": "user", "content": "abcd"}
    asked = questions(
        tmp_path, {"prompt": "Once upon", "answer": "a", "max_tokens": 3, "stop": ["\n"], "id": "one"},
        {"question": "Who?", "answer": "a"}, {"messages": [message], "answer": "a", "max_tokens": 296},
        {"messages": [message], "answer": "a", "max_tokens": 297},
    )  # fmt: skip
    first, second, chat, cut = asks(asked, judges(asked), tokenizer, rendered, 300)
    assert first.ids == tokenizer.encode("Once upon") and first.ids[0] == tokenizer.bos_token_id
    assert (first.max_tokens, first.stop, first.id, first.key) == (3, ["\n"], "one", ("mine", 0))
    assert second.ids == tokenizer.encode("Question: Who?\nAnswer:")
    assert (chat.ids, chat.cut) == ([7, 8, 9, 10], False) and (cut.ids, cut.cut) == ([8, 9, 10], True)
    with pytest.raises(ConfigError, match=r"mine.jsonl:2 asks for 256 tokens of a context of 256"):
        list(asks(asked, judges(asked), tokenizer, rendered, 256))


def test_only_what_is_not_there_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "_AT_ONCE", 4)
    seen = list[int]()
    asked = [GenerationTask(("mine", i), [i], 4, (), partial(eq, f"is {i}"), i == 2, "") for i in range(10)]

    def generates(some: Sequence[GenerationTask]) -> Answers:
        assert len(some) <= 4
        for i in reversed(range(len(some))):
            number = int(some[i].ids[0])
            seen.append(number)
            if len(seen) == 6:
                raise KeyboardInterrupt
            yield i, f"is {number % 7}"

    path, told = tmp_path / "kept", list[tuple[int, int]]()
    with closing(ResumableResults(path, ABOUT, GeneratedAnswer)) as kept, pytest.raises(KeyboardInterrupt):
        answer(generates, iter(asked), 10, kept, lambda *_: None)
    with closing(ResumableResults(path, ABOUT, GeneratedAnswer)) as kept:
        assert len(kept.records) == 5
        answer(generates, iter(asked), 10, kept, lambda _, done, of: told.append((done, of)))
        results = kept.records
    assert sorted(seen) == sorted([*range(10), seen[5]]), "each once, but for the one that was under way"
    assert {key: one.right for key, one in results.items()} == {("mine", i): i < 7 for i in range(10)}
    assert results["mine", 2].cut and results["mine", 8].verdicts[RIGHT] == ("is 1", False)
    assert told[-1] == (10, 10) and told == sorted(told) and told[0][0] == 5


def test_answers_that_no_expression_can_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are wrong, are counted, and do not end the run; of several expressions, one that matches is enough."""
    monkeypatch.setattr(Pattern, "matches", lambda self, text: {"y": True, "n": False}.get(text))
    line = {"prompt": "x", "answer": "a", "match": "regex"}
    (judge,) = judges(questions(tmp_path, line))
    said, path = ("y", "?", "n"), tmp_path / "kept"
    asked = [GenerationTask(("mine", i), [i], 4, (), judge, False, "") for i in range(3)]

    def generates(some: Sequence[GenerationTask]) -> Answers:
        for i in range(len(some)):
            yield i, said[i]

    for _ in range(2):  # and as they are found again
        with closing(ResumableResults(path, ABOUT, GeneratedAnswer)) as kept:
            answer(generates, asked, 3, kept, lambda *_: None)
        found = kept.records
        assert [(found["mine", i].right, found["mine", i].gave_up) for i in range(3)] == [
            (True, False),
            (False, True),
            (False, False),
        ]
    told = iter([None, True, None, False, False, False])
    monkeypatch.setattr(Pattern, "matches", lambda self, text: next(told))
    (judge,) = judges(questions(tmp_path, {**line, "answer": ["a", "b"]}))
    assert [judge("x") for _ in range(3)] == [True, None, False]


def test_an_error_of_a_judge_ends_all_of_them(tmp_path: Path) -> None:
    ended = list[int]()

    def generates(some: Sequence[GenerationTask]) -> Answers:
        try:
            for i in range(len(some)):
                yield i, "x"
        finally:
            ended.append(i)

    def judge(text: str) -> bool:
        raise ConfigError("it", "takes", "too much")

    asked = [GenerationTask(("mine", i), [i], 4, (), partial(eq, "x") if i < 2 else judge, False, "") for i in range(5)]
    with closing(ResumableResults(tmp_path / "kept", ABOUT, GeneratedAnswer)) as kept:
        with pytest.raises(ConfigError) as refused:
            answer(generates, asked, 5, kept, lambda *_: None)
        assert ended == [2] and len(kept.records) == 2, "while the error is still held"
    assert refused.value.what == "it"
