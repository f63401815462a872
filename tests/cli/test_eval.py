"""`millrace eval`: what it counts, what it goes on with, and two models side by side."""

import json
from pathlib import Path

import numpy as np
import pytest

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.find import BUNDLED, find_engine
from millrace.compile.settings import BuildSettings
from millrace.env import read_env
from millrace.evaluate.divergence import log_probabilities
from millrace.evaluate.kept import read
from millrace.evaluate.mmlu import Mmlu, read_subjects
from tests.cli.conftest import Millrace

SHORT = ("--max-context", "512", "--tune", "0", "--threads", "1")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    draw = np.random.default_rng(3)
    for name, n in (("sums", 5), ("words", 3)):
        for split, m in (("dev", 5), ("test", n)):
            folder = tmp_path / "mmlu" / split
            folder.mkdir(parents=True, exist_ok=True)
            rows = [f"What is {draw.integers(99)} and {i}?,one,two,three,{i},{draw.integers(4)}" for i in range(m)]
            (folder / f"{name}_{split}.csv").write_text("\n".join(rows) + "\n")
    return tmp_path / "mmlu"


def test_each_choice_is_the_likeliest_answer(millrace: Millrace, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    done = millrace("eval", "tiny", "--data", data, "--out", out, "--json", *SHORT)
    assert done.code == 0
    told, results = json.loads(done.out), read(out)
    _, engine = find_engine("tiny", BuildSettings(max_context=512, tune=0), read_env())
    executor = engine.executor(n_pages=8, threads=1)
    tokenizer, n_right = Checkpoint.open(BUNDLED / "tiny").tokenizer, 0
    for group in Mmlu(read_subjects(data)).groups(tokenizer, 512):
        for posed in group.posed():
            one, got = posed.question, results.chosen[group.name, posed.number]
            row = log_probabilities(executor, np.array([*one.context, 3], np.int32), len(one.context) - 1)[0]
            expected = [float(row[ending[0]]) for ending in one.endings]
            assert got.logprobs == pytest.approx(expected, abs=1e-4) and got.chosen == int(np.argmax(expected))
            n_right += got.chosen == posed.answer
    executor.close()
    assert (told["questions"], told["right"], told["share"]) == (8, n_right, n_right / 8)
    assert told["subjects"]["sums"]["questions"] == 5 and results.about.task == "mmlu, lm-eval, 5 shots"


def test_a_run_goes_on_where_it_was(millrace: Millrace, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    command = ("eval", "tiny", "--data", data, "--out", out, "--json", *SHORT)
    whole = millrace(*command)
    lines = out.read_bytes().splitlines(keepends=True)
    kept = [*lines[:4], lines[4].replace(b'"chosen":', b'"chosen": ')]  # a mark that a new answer would not have
    out.write_bytes(b"".join(kept) + lines[5][:9])
    again = millrace(*command)
    assert again.code == 0 and again.out == whole.out
    assert out.read_bytes().startswith(b"".join(kept)) and len(read(out).chosen) == 8
    assert len(out.read_bytes().splitlines()) == 9


def test_two_models_side_by_side(millrace: Millrace, data: Path, tmp_path: Path) -> None:
    first = tmp_path / "first.jsonl"
    assert millrace("eval", "tiny", "--data", data, "--out", first, *SHORT).code == 0
    same = millrace("eval", "tiny", "--data", data, "--against", first, *SHORT)
    assert same.code == 0 and "+0.00%" in same.out and "0 became right, 0 wrong; 0 chose otherwise" in same.out
    flipped = first.read_bytes().splitlines(keepends=True)
    one = read(first).chosen["sums", 0]
    wrong = (one.answer + 1) % 4
    other = b'{"group":"sums","number":0,"answer":%d,"chosen":%d,"logprobs":[0,0,0,0],"cut":false}\n' % (
        one.answer,
        wrong,
    )
    first.write_bytes(b"".join([*flipped, other]))  # the last word counts
    told = json.loads(millrace("eval", "tiny", "--data", data, "--against", first, "--json", *SHORT).out)["against"]
    assert (told["gained"], told["lost"], told["changed"]) == (int(one.right), 0, int(one.chosen != wrong))
    fewer = millrace("eval", "tiny", "--data", data, "--against", first, "--limit", "2", *SHORT)
    assert fewer.code == 2 and "are of other questions" in fewer.err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--task", "mmul"), "--task"), (("--definition", "original-ish"), "--definition"),
        (("--subject", "sum"), 'did you mean "sums"?'), (("--shots", "6"), "--shots"), (("--limit", "0"), "--limit"),
    ],
)  # fmt: skip
def test_mistakes(millrace: Millrace, data: Path, given: tuple[str, ...], said: str) -> None:
    done = millrace("eval", "tiny", "--data", data, *given, *SHORT)
    assert done.code == 2 and said in done.err and len(done.err.splitlines()) <= 3
