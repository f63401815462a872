"""`millrace eval`: what it counts, what it goes on with, and two models side by side."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.resolve_model import BUNDLED, find_engine
from millrace.compile.settings import BuildSettings
from millrace.env import read_env
from millrace.evaluate import kl_agreement
from millrace.evaluate.divergence import log_probabilities
from millrace.evaluate.mmlu import Mmlu, read_subjects
from millrace.evaluate.resumable_results import ChosenAnswer, ResumableResults, read
from millrace.evaluate.safe_regex import Pattern
from millrace.evaluate.text_windows import windows
from tests.cli.conftest import Millrace
from tests.support.checkpoints import random_checkpoint

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
    told, results = json.loads(done.out), read(out, ChosenAnswer)
    _, engine = find_engine("tiny", BuildSettings(max_context=512, tune=0), read_env())
    executor = engine.executor(n_pages=8, threads=1)
    tokenizer, n_right = Checkpoint.open(BUNDLED / "tiny").tokenizer, 0
    for group in Mmlu(read_subjects(data)).groups(tokenizer, 512):
        for posed in group.posed():
            one, got = posed.question, results.records[group.name, posed.number]
            row = log_probabilities(executor, np.array([*one.context, 3], np.int32), len(one.context) - 1)[0]
            expected = [float(row[ending[0]]) for ending in one.endings]
            assert got.logprobs == pytest.approx(expected, abs=1e-4) and got.chosen == int(np.argmax(expected))
            n_right += got.chosen == posed.answer
    executor.close()
    assert (told["questions"], told["right"], told["share"]) == (8, n_right, n_right / 8)
    assert told["subjects"]["sums"]["questions"] == 5 and results.about.task == "mmlu, lm-eval, 5 shots"


@pytest.mark.parametrize(("family", "more"), [("mistral", {"sliding_window": 64}), ("lfm2", {})])
def test_models_with_windows_and_states(
    millrace: Millrace, data: Path, text: Path, tmp_path: Path, family: str, more: dict[str, Any]
) -> None:
    """Whose caches the plan gives fewer pages than full attention would take."""
    path, out = random_checkpoint(tmp_path / family, family, seed=1, **more), tmp_path / "results.jsonl"
    usual = ("--precision", "fp32", "--no-evaluate", *SHORT)
    done = millrace("eval", path, "--data", data, "--out", out, "--shots", "1", "--json", *usual)
    assert done.code == 0, done.err
    _, engine = find_engine(str(path), BuildSettings(max_context=512, tune=0, precision="fp32"), read_env())
    with closing(engine.executor(n_pages=8, threads=1)) as executor:
        for group in Mmlu(read_subjects(data), shots=1).groups(Checkpoint.open(path).tokenizer, 512):
            for posed in group.posed():
                one, got = posed.question, read(out, ChosenAnswer).records[group.name, posed.number]
                for ending, logprob in zip(one.endings, got.logprobs, strict=True):
                    rows = log_probabilities(
                        executor, np.array([*one.context, *ending], np.int32), len(one.context) - 1
                    )
                    assert logprob == pytest.approx(float(rows[range(len(ending)), ending].sum()), abs=1e-3)
        cut = windows(Checkpoint.open(path).tokenizer, text.read_text(), 400)
        rows = np.concatenate([log_probabilities(executor, ids, 200)[range(199), ids[201:]] for ids in cut.ids])
    asked = ("--task", "wikitext", "--data", text, "--definition", "llama-perplexity", "--window", "400")
    done = millrace("eval", path, *asked, "--json", *usual)
    assert done.code == 0, done.err
    expected = np.exp(-rows.astype(np.float64).mean())
    assert json.loads(done.out)["perplexity"]["value"] == pytest.approx(expected, rel=1e-3)


def test_fewer_examples_than_the_task_says_are_refused(millrace: Millrace, data: Path) -> None:
    dev = data / "dev" / "sums_dev.csv"
    dev.write_text("".join(f"{line}\n" for line in dev.read_text().splitlines()[:3]))
    millrace("eval", "tiny", "--data", data, *SHORT).assert_mistake("sums 3", "--shots 3")
    assert millrace("eval", "tiny", "--data", data, "--shots", "3", "--json", *SHORT).code == 0


def test_a_run_goes_on_where_it_was(millrace: Millrace, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    command = ("eval", "tiny", "--data", data, "--out", out, "--json", *SHORT)
    whole = millrace(*command)
    lines = out.read_bytes().splitlines(keepends=True)
    kept = [*lines[:3], lines[4], lines[3]]  # an order that new answers would not have
    out.write_bytes(b"".join(kept) + lines[5][:9])
    again = millrace(*command)
    assert again.code == 0 and again.out == whole.out
    assert out.read_bytes().startswith(b"".join(kept)) and len(read(out, ChosenAnswer).records) == 8
    assert len(out.read_bytes().splitlines()) == 9


def test_a_second_model_that_is_not_there_is_said_before_questions(
    millrace: Millrace, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "results.jsonl"
    refused = millrace("eval", "tiny", "--data", data, "--against", "nosuch", "--out", out, *SHORT)
    assert refused.code == 2 and 'no model "nosuch"' in refused.err and not out.exists()


def test_two_models_side_by_side(millrace: Millrace, data: Path, tmp_path: Path) -> None:
    first = tmp_path / "first.jsonl"
    assert millrace("eval", "tiny", "--data", data, "--out", first, *SHORT).code == 0
    same = millrace("eval", "tiny", "--data", data, "--against", first, *SHORT)
    assert same.code == 0 and "+0.00%" in same.out and "0 became right, 0 wrong; 0 chose otherwise" in same.out
    flipped = first.read_bytes().splitlines(keepends=True)
    one = read(first, ChosenAnswer).records["sums", 0]
    wrong = (one.answer + 1) % 4
    with closing(ResumableResults(first, read(first, ChosenAnswer).about, ChosenAnswer)) as more:
        more.add(replace(one, chosen=wrong))  # the last word counts
    told = json.loads(millrace("eval", "tiny", "--data", data, "--against", first, "--json", *SHORT).out)["against"]
    assert (told["gained"], told["lost"], told["changed"]) == (int(one.right), 0, int(one.chosen != wrong))
    out = tmp_path / "fewer.jsonl"
    fewer = millrace("eval", "tiny", "--data", data, "--against", first, "--limit", "2", "--out", out, *SHORT)
    assert fewer.code == 2 and "are of other questions" in fewer.err and not out.exists(), "before any is answered"
    first.write_bytes(b"".join(flipped[:-1]))
    part = millrace("eval", "tiny", "--data", data, "--against", first, "--out", out, *SHORT)
    assert part.code == 2 and "7 answered" in part.err and "8 answered" in part.err and not out.exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--task", "mmul"), "--task"), (("--definition", "original-ish"), "--definition"),
        (("--definition", "gptq"), "--definition is 'gptq'"), (("--window", "64"), "--task mmlu does not take it"),
        (("--subject", "sum"), 'did you mean "sums"?'), (("--shots", "6"), "--shots"), (("--limit", "0"), "--limit"),
    ],
)  # fmt: skip
def test_mistakes(millrace: Millrace, data: Path, given: tuple[str, ...], said: str) -> None:
    done = millrace("eval", "tiny", "--data", data, *given, *SHORT)
    assert done.code == 2 and said in done.err and len(done.err.splitlines()) <= 3


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text").write_text(" = The mill = \n \n The wheel turned , and Lily the dog was very happy . \n" * 30)
    return tmp_path / "text"


def test_perplexity_of_a_text(millrace: Millrace, text: Path) -> None:
    """Beside the sum over the engine's own log probabilities; the number stands beside all that decides it."""
    command = (
        "eval",
        "tiny",
        "--task",
        "wikitext",
        "--data",
        text,
        "--definition",
        "llama-perplexity",
        "--window",
        "64",
    )
    told = json.loads(millrace(*command, "--json", *SHORT).out)
    _, engine = find_engine("tiny", BuildSettings(max_context=512, tune=0), read_env())
    cut = windows(Checkpoint.open(BUNDLED / "tiny").tokenizer, text.read_text(), 64)
    with closing(engine.executor(n_pages=8, threads=1)) as executor:
        rows = np.concatenate([log_probabilities(executor, ids, 32)[range(31), ids[33:]] for ids in cut.ids])
    assert told["perplexity"]["value"] == pytest.approx(np.exp(-rows.astype(np.float64).mean()), rel=1e-6)
    assert (told["tokens"], told["windows"], told["window"]) == (len(rows), len(cut.ids), 64)
    shown = millrace(*command, "--limit", "2", *SHORT)
    assert shown.code == 0 and f"62 predicted, in 2 of {len(cut.ids)} windows" in shown.out
    for said in ("as llama-perplexity defines it", "64 tokens", "BOS", "at each window", " ± ", "default bf16"):
        assert said in shown.out
    other = millrace(*command[:-4], *SHORT)
    assert "as gptq defines it" in other.out and "512 tokens" in other.out and "once, before the text" in other.out


def test_how_far_from_a_reference(millrace: Millrace, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own float type, unless another is named; and nothing is read again."""
    vocab_size = json.loads((BUNDLED / "tiny" / "config.json").read_text())["vocab_size"]
    command = ("eval", "tiny", "--task", "kl", "--data", text, "--window", "64", *SHORT)
    same = millrace(*command)
    assert same.code == 2 and "are the same engine (default bf16)" in same.err and "--against MODEL" in same.err
    rough = (*command, "--precision", "w4a8", "--no-evaluate")
    told = json.loads(millrace(*rough, "--json").out)
    assert told["against"] == {"model": "tiny", "precision": "default bf16"} and told["tokens"] == 31 * told["windows"]
    assert 1e-4 < told["kl"]["value"] < 1 and 0.5 < told["same_likeliest"]["value"] <= 1
    assert told["ratio"]["value"] == pytest.approx(told["perplexity"]["value"] / told["reference_perplexity"]["value"])
    with monkeypatch.context() as smaller:
        smaller.setattr(kl_agreement, "_MAX_BYTES", told["tokens"] // told["windows"] * 8 * vocab_size - 1)
        refused = millrace(*rough)
    assert refused.code == 2 and "a window of 64 tokens takes" in refused.err and "--window 62" in refused.err
    shown = millrace(*rough)
    assert f"mean KL           {told['kl']['value']:.6f} ± {told['kl']['error']:.6f} nats a token" in shown.out
    _, engine = find_engine("tiny", BuildSettings(max_context=512, tune=0), read_env())
    built = millrace("eval", engine.folder, "--task", "kl", "--data", text)
    assert built.code == 2 and "is built already, in one precision" in built.err


def test_questions_of_ones_own(millrace: Millrace, tmp_path: Path) -> None:
    choices, asked, out = tmp_path / "choices.jsonl", tmp_path / "asked.jsonl", tmp_path / "results.jsonl"
    line = {"prompt": "Once upon a", "choices": ["time", "horse in a mill"], "answer": 0}
    choices.write_text("".join(json.dumps({**line, "answer": i % 2}) + "\n" for i in range(4)))
    told = json.loads(millrace("eval", "tiny", "--task", choices, "--out", out, "--json", *SHORT).out)
    assert (told["questions"], told["right"], told["share"]) == (4, 2, 0.5) and told["per_byte"]["right"] == 2
    shown = millrace("eval", "tiny", "--task", choices, "--against", out, *SHORT)
    assert "difference per byte  +0.00%" in shown.out and "right per byte" in shown.out
    messages = [{"role": "user", "content": "Tell me a story."}]
    answered = json.loads(millrace("generate", "tiny", "Once upon a time", "--max-tokens", "9", "--temperature", "0",
                                   "--json", *SHORT).out)["choices"][0]["text"]  # fmt: skip
    lines = [
        {"prompt": "Once upon a time", "answer": answered, "max_tokens": 9},
        {"messages": messages, "answer": "[^7]*", "match": "regex", "max_tokens": 9},
        {"messages": messages, "answer": "7", "match": "number", "max_tokens": 9, "group": "numbers"},
    ]
    asked.write_text("\n".join(map(json.dumps, lines)))
    told = json.loads(millrace("eval", "tiny", "--task", asked, "--json", *SHORT).out)
    assert told["subjects"] == {"asked": {"questions": 2, "right": 2}, "numbers": {"questions": 1, "right": 0}}
    assert told["task"] == "asked, generated" and "per_byte" not in told and told["gave_up"] == 0


def test_answers_that_no_expression_can_tell(
    millrace: Millrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "asked.jsonl"
    line = {"prompt": "Once upon a time", "answer": "[^7]*", "match": "regex", "max_tokens": 9}
    asked.write_text(json.dumps({**line, "match": "contains", "answer": " "}) + "\n" + json.dumps(line))
    monkeypatch.setattr(Pattern, "matches", lambda self, text: None)
    told = json.loads(millrace("eval", "tiny", "--task", asked, "--json", *SHORT).out)
    assert (told["questions"], told["right"], told["gave_up"]) == (2, 1, 1)
    shown = millrace("eval", "tiny", "--task", asked, *SHORT)
    assert shown.code == 0 and "1 answers, which a regular expression takes too much on, count as wrong" in shown.out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--task", "wikitext"), "--task wikitext has no --data"), (("--task", "mmlu"), "--task mmlu has no --data"),
        (("--task", "kl", "--data", "x", "--definition", "gptq"), "--definition is given, and --task kl"),
        (("--task", "wikitext", "--data", "x", "--against", "tiny"), "--against is given, and --task wikitext"),
        (("--task", "wikitext", "--data", "x", "--definition", "original"), "--definition is 'original'"),
        (("--task", "wikitext", "--data", "/none"), "cannot read --data /none"),
        (("--task", "none.jsonl"), "cannot read none"),
        (("--task", "my.jsonl", "--data", "x"), "--data is given, and --task FILE.jsonl"),
        (("--task", "my.jsonl", "--subject", "x"), "--subject is given"),
        (("--task", "kl", "--shots", "0"), "--shots is given"),
    ],
)  # fmt: skip
def test_options_that_a_task_does_not_take(millrace: Millrace, given: tuple[str, ...], said: str) -> None:
    done = millrace("eval", "tiny", *given, *SHORT)
    assert done.code == 2 and said in done.err and len(done.err.splitlines()) == 3


def test_a_reference_of_ones_own_reads_the_same_tokens(millrace: Millrace, text: Path, tmp_path: Path) -> None:
    one, two, other = (
        random_checkpoint(tmp_path / name, family, seed=i, max_position_embeddings=128)
        for i, (name, family) in enumerate((("one", "llama"), ("two", "llama"), ("other", "qwen2")))
    )
    command = ("eval", one, "--task", "kl", "--data", text, "--window", "32", "--limit", "3", "--tune", "0", "--json")
    told = json.loads(millrace(*command, "--against", two).out)
    assert told["against"]["model"] == "two" and told["kl"]["value"] > 0.01 and told["tokens"] == 45
    refused = millrace(*command, "--against", other)
    assert refused.code == 2 and "one and other have other vocabularies, or read the text as other" in refused.err
