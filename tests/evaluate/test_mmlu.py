"""MMLU's prompts to the letter, its files, and what is wrong with others."""

from pathlib import Path

import pytest

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.tokenizer.tokenizer import Tokenizer
from millrace.compile.resolve_model import BUNDLED
from millrace.errors import ConfigError
from millrace.evaluate.mmlu import LM_EVAL, ORIGINAL, Mmlu, Subject, read_subjects
from millrace.evaluate.multiple_choice import PreparedQuestion

HEADER = "question,choice0,choice1,choice2,choice3,answer\n"
DEV = '" What is 1 + 1? ",1,2,3,4,1\n"Which, then?",a,b,c,d,3\n'
TEST = '"Where is ""it""?\nThere?",here,there,nowhere,where,0\n'
POSED = 'Where is "it"?\nThere?\nA. here\nB. there\nC. nowhere\nD. where\nAnswer:'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Checkpoint.open(BUNDLED / "tiny").tokenizer


def folder(path: Path, dev: str = HEADER + DEV, test: str = HEADER + TEST) -> Path:
    for split, text in (("dev", dev), ("test", test)):
        (path / split).mkdir(parents=True, exist_ok=True)
        (path / split / f"high_school_sums_{split}.csv").write_text(text)
    return path


def asked(subject: Subject, tokenizer: Tokenizer, definition: str, shots: int, room: int) -> PreparedQuestion:
    """The only question that there is."""
    (group,) = Mmlu((subject,), definition, shots).groups(tokenizer, room)
    (posed,) = group.posed()
    assert (group.name, group.n, posed.number, posed.answer) == (subject.name, 1, 0, subject.test[0].answer)
    return posed


@pytest.mark.parametrize(
    ("definition", "text"),
    [
        (LM_EVAL, "The following are multiple choice questions (with answers) about high school sums.\n\n"
                  "What is 1 + 1?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer: B\n\n"
                  "Which, then?\nA. a\nB. b\nC. c\nD. d\nAnswer: D\n\n" + POSED),
        (ORIGINAL, "The following are multiple choice questions (with answers) about  high school sums.\n\n"
                   " What is 1 + 1? \nA. 1\nB. 2\nC. 3\nD. 4\nAnswer: B\n\n"
                   "Which, then?\nA. a\nB. b\nC. c\nD. d\nAnswer: D\n\n" + POSED),
    ],
)  # fmt: skip
def test_the_prompt(tmp_path: Path, tokenizer: Tokenizer, definition: str, text: str) -> None:
    (subject,) = read_subjects(folder(tmp_path))
    posed = asked(subject, tokenizer, definition, 5, 8192)
    one, cut = posed.question, posed.cut
    assert tokenizer.decode(one.context) == text and not cut
    bos = definition == ORIGINAL
    assert one.context == tokenizer.encode(text, add_special_tokens=bos)
    for ending, letter in zip(one.endings, "ABCD", strict=True):
        assert tokenizer.decode([*one.context, *ending]) == f"{text} {letter}"


def test_fewer_shots(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (subject,) = read_subjects(folder(tmp_path))
    for shots, n in ((0, 1), (1, 2), (2, 3)):
        one = asked(subject, tokenizer, LM_EVAL, shots, 8192).question
        assert tokenizer.decode(one.context).count("\nAnswer:") == n


def test_prompts_that_are_too_long(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """One definition leaves out the beginning, token by token, the other whole examples, the last ones first."""
    (subject,) = read_subjects(folder(tmp_path))
    whole = asked(subject, tokenizer, LM_EVAL, 5, 8192).question
    n = len(whole.context)
    posed = asked(subject, tokenizer, LM_EVAL, 5, n)
    fits, cut = posed.question, posed.cut
    assert fits == whole and not cut
    posed = asked(subject, tokenizer, LM_EVAL, 5, n - 7)
    short, cut = posed.question, posed.cut
    assert cut and list(short.context) == list(whole.context)[7:]
    posed = asked(subject, tokenizer, ORIGINAL, 5, n - 7)
    one, cut = posed.question, posed.cut
    text = tokenizer.decode(one.context)
    assert cut and "about  high school sums" in text and "1 + 1" in text and "Which, then" not in text


def test_files_as_they_were_first_published(tmp_path: Path) -> None:
    """Without a header, with letters; a byte more or less is no matter."""
    (subject,) = read_subjects(folder(tmp_path, dev="q,1,2,3,4,B\n", test="q,1,2,3,4,D\r\nr,5,6,7,8,A\r\n"))
    assert [item.answer for item in subject.test] == [3, 0] and subject.dev[0].choices == ("1", "2", "3", "4")
    marked = "\ufeff" + HEADER + "q,1,2,3,4,2\n"  # as spreadsheets write UTF-8
    (subject,) = read_subjects(folder(tmp_path / "marked", test=marked))
    assert [item.question for item in subject.test] == ["q"]


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ("question,answer\n", r"_test.csv:1 has 2 columns"), (HEADER, "has no questions"), ("", "has no questions"),
        (HEADER + "q,1,2,3,4,4\n", ":2 has the answer '4'"), (HEADER + "q,1,2,3,4,AB\n", ":2 has the answer 'AB'"),
        (HEADER + "q,1,2,3,4,\n", ":2 has the answer ''"), (HEADER + TEST + '"q,1,2', ":4: unexpected end of data"),
    ],
)  # fmt: skip
def test_files_that_are_something_else(tmp_path: Path, test: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_subjects(folder(tmp_path, test=test))


def test_folders_that_are_something_else(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no folder test") as error:
        read_subjects(tmp_path)
    assert "--" not in str(error.value), "`compress` names the folder by another option than `eval`"
    whole = folder(tmp_path / "m")
    with pytest.raises(ConfigError, match=r"no subject 'high_school_sum'.*\n.*did you mean \"high_school_sums\""):
        read_subjects(whole, ["high_school_sum"])
    (whole / "dev" / "high_school_sums_dev.csv").unlink()
    with pytest.raises(ConfigError, match="has 0 files"):
        read_subjects(whole)
    (whole / "test" / "high_school_sums_test.csv").write_bytes("Fräge,1,2,3,4,0\n".encode("latin-1"))
    (whole / "dev" / "high_school_sums_dev.csv").write_text(HEADER + DEV)
    with pytest.raises(ConfigError, match="is not UTF-8"):
        read_subjects(whole)
