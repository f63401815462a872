"""Questions from JSONL files: what they ask, to the token, and what is wrong with others."""

import json
import math
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.tokenizer.tokenizer import Tokenizer
from millrace.compile.resolve_model import BUNDLED
from millrace.errors import ConfigError, MachineError
from millrace.evaluate.likelihood import Likelihood
from millrace.evaluate.multiple_choice import PreparedQuestion, answer
from millrace.evaluate.questions import Questions, read_questions
from millrace.evaluate.resumable_results import PER_BYTE, RIGHT, ChosenAnswer, ResultsInputs, ResumableResults, read
from tests.support.engines import build

CHOICES = ["ran, ö", "slept all day by the old mill"]
CHOICE = {"prompt": "The dog", "choices": CHOICES, "answer": 1}
ASKED = {"prompt": "1 + 1 =", "answer": "2"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Checkpoint.open(BUNDLED / "tiny").tokenizer


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "mine.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def posed(questions: Questions, tokenizer: Tokenizer, room: int = 512) -> list[PreparedQuestion]:
    return [one for group in questions.groups(tokenizer, room) for one in group.posed()]


@pytest.mark.parametrize(
    ("more", "prompt", "behind"),
    [
        ({}, "The dog", " "), ({"prompt": "The dog \n"}, "The dog", " \n "), ({"delimiter": ""}, "The dog", ""),
        ({"delimiter": ": "}, "The dog", ": "),
        ({"prompt": None, "question": "Who?"}, "Question: Who?\nAnswer:", " "),
    ],
)  # fmt: skip
def test_a_choice_is_what_stands_behind_the_prompt(
    more: dict[str, Any], prompt: str, behind: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    (one,) = posed(read_questions(written(tmp_path, {**CHOICE, **more})), tokenizer)
    assert one.question.context == tokenizer.encode(prompt, add_special_tokens=False) and one.answer == 1
    for ending, text in zip(one.question.endings, CHOICES, strict=True):
        whole = tokenizer.encode(f"{prompt}{behind}{text}", add_special_tokens=False)
        assert [*one.question.context, *ending] == whole
    assert one.n_bytes == [7, 29] and not one.cut


def test_the_digest_depends_on_the_lines_alone(tmp_path: Path) -> None:
    """Results are resumed by it: it stays what it is whatever classes are called."""
    assert read_questions(written(tmp_path, ASKED, ASKED)).digest == "cb46af48cdcfcfb0008ee25f8de42c5f"
    assert read_questions(written(tmp_path, CHOICE)).digest == "a2b16bb39810d09bda91f751601d889e"


def test_a_mark_before_the_first_line_is_no_text(tmp_path: Path) -> None:
    path = written(tmp_path, CHOICE, {**CHOICE, "answer": 0})
    plain = read_questions(path).lines
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_questions(path).lines == plain and len(plain) == 2


def test_groups_limit_and_names(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lines = [{**CHOICE, "group": "ab"[i % 2], "id": i} for i in range(5)]
    path = written(tmp_path, *lines)
    path.write_text("\n \n" + path.read_text().replace("\n", "\r\n"))
    groups = read_questions(path).groups(tokenizer, 512)
    assert [(g.name, g.n, [p.id for p in g.posed()]) for g in groups] == [
        ("a", 3, ["0", "2", "4"]),
        ("b", 2, ["1", "3"]),
    ]
    few = read_questions(path, limit=1)
    assert [one.id for one in posed(few, tokenizer)] == ["0", "1"] and few.digest != read_questions(path).digest
    (alone,) = read_questions(written(tmp_path, CHOICE)).groups(tokenizer, 512)
    assert alone.name == "mine"


def test_a_prompt_that_is_too_long_loses_its_beginning(tmp_path: Path, tokenizer: Tokenizer) -> None:
    questions = read_questions(written(tmp_path, {**CHOICE, "prompt": "a little dog " * 30}))
    (whole,), (short,) = posed(questions, tokenizer), posed(questions, tokenizer, 40)
    longest = max(map(len, whole.question.endings))
    assert short.cut and list(short.question.context) == list(whole.question.context)[-(40 - longest + 1) :]
    with pytest.raises(ConfigError, match=r"mine.jsonl:1 has a choice that is longer than the context of 5 tokens"):
        posed(questions, tokenizer, 5)


def test_a_prompt_of_nothing(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"mine.jsonl:1 has a prompt of white space alone"):
        posed(read_questions(written(tmp_path, {**CHOICE, "prompt": " \n"})), tokenizer)


def test_answers_beside_likelihoods_of_transformers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """In float64, of each choice as a text of its own: the likeliest, and the likeliest per byte."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED / "tiny", dtype=torch.float64)
    prompts = ("Once upon a time there was a", "Lily the dog was very", "A. yes\nB. no\nAnswer:")
    choices = ["happy", "little fox called Lily", "B", "big and sad dog who lived in the forest"]
    lines = [{"prompt": prompt, "choices": choices, "answer": i} for i, prompt in enumerate(prompts)]
    engine = build(BUNDLED / "tiny", tmp_path / "e", "fp32").executor(n_pages=8, threads=1)
    kept = ResumableResults(tmp_path / "kept", ResultsInputs("m", "e", "fp32", "t", "d"), ChosenAnswer)
    questions = read_questions(written(tmp_path, *lines))
    answer(engine, questions.groups(tokenizer, 256), kept, lambda *_: None)
    both = []
    for i, prompt in enumerate(prompts):
        expected = []
        n = len(tokenizer.encode(prompt, add_special_tokens=False))
        for choice in choices:
            ids = tokenizer.encode(f"{prompt} {choice}", add_special_tokens=False)
            with torch.no_grad():
                rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            expected.append(float(sum(rows[at - 1, ids[at]] for at in range(n, len(ids)))))
        got = kept.records["mine", i]
        per_byte = [p / len(c) for p, c in zip(expected, choices, strict=True)]
        assert got.logprobs == pytest.approx(expected, abs=2e-4)
        assert (got.chosen, got.per_byte) == (expected.index(max(expected)), per_byte.index(max(per_byte)))
        assert got.verdicts[RIGHT].right == (got.chosen == i) and got.verdicts[PER_BYTE].right == (got.per_byte == i)
        both.append(got.chosen == got.per_byte)
    assert not all(both), "some are answered in two ways"
    kept.close()
    engine.close()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_likelihoods_that_are_not_finite(
    bad: float, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No choice is scored, and nothing is written that could not be read again."""
    monkeypatch.setattr(
        "millrace.evaluate.multiple_choice.likelihoods",
        lambda _, asked: iter(
            [(0, [Likelihood(-1.0, True)] * 2), (1, [Likelihood(-1.0, True), Likelihood(bad, False)])]
        ),
    )
    questions, path = read_questions(written(tmp_path, CHOICE, CHOICE)), tmp_path / "kept"
    nobody: Any = None
    said = "logits are not finite: there is nothing to measure"
    with (
        closing(ResumableResults(path, ResultsInputs("m", "e", "fp32", "t", "d"), ChosenAnswer)) as kept,
        pytest.raises(MachineError, match=said),
    ):
        answer(nobody, questions.groups(tokenizer, 256), kept, lambda *_: None)
    assert list(read(path, ChosenAnswer).records) == [("mine", 0)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({**CHOICE, "answer": 2}, "the answer is 2, and there are 2 choices"),
        ({**CHOICE, "answer": "B"}, "Expected `int`"),
        ({**CHOICE, "answer": -1}, ">= 0"), ({**CHOICE, "choices": ["one"]}, "length >= 2"),
        ({**CHOICE, "choices": ["a", ""]}, "length >= 1"), ({**CHOICE, "choices": ["a"] * 65}, "length <= 64"),
        ({**CHOICE, "label": 1}, "unknown field `label`"), ({**CHOICE, "question": "x"}, "in more than one way"),
        ({"choices": ["a", "b"], "answer": 0}, "it asks nothing"),
        ({**CHOICE, "match": "exact"}, "unknown field `match`"),
        ({**ASKED, "match": "fuzzy"}, "Invalid enum value 'fuzzy'"), ({**ASKED, "max_tokens": 10**6}, "<= 4096"),
        ({**ASKED, "answer": []}, "length >= 1"), ({**ASKED, "answer": 2}, "Expected `str"),
        ({"prompt": "x"}, "`answer`"),
        ({**ASKED, "messages": [{"role": "user", "content": "x"}]}, "in more than one way"),
        ({**ASKED, "stop": ["x"] * 17}, "length <= 16"), ({**ASKED, "prompt": "\ud800"}, "malformed"),
        ([1, 2], "Expected `object`"), (math.nan, "malformed"),
    ],
    ids=lambda value: None if isinstance(value, str) else json.dumps(value)[:60],
)  # fmt: skip
def test_lines_that_are_something_else(tmp_path: Path, line: Any, said: str) -> None:
    path = written(tmp_path, CHOICE if isinstance(line, dict) and "choices" in line else ASKED, line)
    with pytest.raises(ConfigError, match=said) as refused:
        read_questions(path)
    assert refused.value.what.startswith(f"{path}:2 ")


def test_files_that_are_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"mine.jsonl:2 is of another kind"):
        read_questions(written(tmp_path, CHOICE, ASKED))
    with pytest.raises(ConfigError, match="has no questions"):
        read_questions(written(tmp_path))
    with pytest.raises(ConfigError, match="cannot read"):
        read_questions(tmp_path / "none.jsonl")
    (tmp_path / "mine.jsonl").write_bytes(b'{"prompt": "\xff\xfe", "answer": "x"}\n')
    with pytest.raises(ConfigError, match=r"(?i)mine.jsonl:1 is no question.*utf-8"):
        read_questions(tmp_path / "mine.jsonl")
    (tmp_path / "mine.jsonl").write_bytes(b'{"prompt": ' + b"[" * 500_000 + b"\n")
    with pytest.raises(ConfigError, match=r"mine.jsonl:1 is no question.*recursion"):
        read_questions(tmp_path / "mine.jsonl")
    path = written(tmp_path, ASKED, ASKED)
    for name, said in (
        ("_MAX_BYTES", "more than"),
        ("_MAX_LINE_BYTES", r"mine.jsonl:1 has"),
        ("_MAX_LINES", "1 quest"),
    ):
        with monkeypatch.context() as smaller, pytest.raises(ConfigError, match=said):
            smaller.setattr(f"millrace.evaluate.questions.{name}", 1)
            read_questions(path)
