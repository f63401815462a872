"""Answers from arguments and from YAML: what is taken, and what is refused with the nearest name."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import ConfigError
from millrace.size.performance.operating_point import Limits
from millrace.size.question.question import NAMES, SizingQuestion, parse_limits, read_answers
from millrace.size.question.settings import LimitSettings


def test_no_name_is_used_twice() -> None:
    groups = set(NAMES.values())
    assert len(NAMES) == sum(len(fields(group)) for group in groups)


def test_a_file_of_answers(tmp_path: Path) -> None:
    path = tmp_path / "question.yaml"
    path.write_text(
        "model: llama-3-8b\ninput: 3500 words\nosl: 500\nttft-ms: 500\nrate: 1e2\nhardware: [H100, L40S]\n"
        "utilisation: 1\nwindow_s: 2\nprecision: fp8\n"
    )
    question = SizingQuestion.from_answers(read_answers(path))
    assert question.non_defaults == {
        "model": "llama-3-8b", "input": "3500 words", "osl": 500, "ttft_ms": 500.0, "rate": 100.0, "window_s": 2.0,
        "hardware": ("H100", "L40S"), "precision": ("fp8",),
    }  # fmt: skip
    path.write_text('{"daily": [1, 2.5, 3], "mode": "offline"}')
    assert SizingQuestion.from_answers(read_answers(path)).load.daily == "1,2.5,3"


@pytest.mark.parametrize("text, said", [
    ("modell: a", 'did you mean "model"'), ("ttft: 500", 'did you mean "ttft_ms"'), ("[1, 2]", "holds no answers"),
    ("", "holds no answers"), ("model: a\nmodel: b", "model stands twice"), ("a: [", "is no YAML"),
    ("model: &x a\ninput: *x", "references are not taken"), ("osl: 5.5", "osl is 5.5"), ("osl: many", "a whole number"),
    ("input: 3500", 'with its unit, such as "3500 words"'), ("rate: fast", "rate is 'fast'"),
    ("rate: -1", "--rate is -1"), ("isl: 0", "1 to 16777216\n"), ("users: 0", "0.001 to 1e+12\n"),
    ("rate: .nan", "--rate is nan"), ("hardware: 5", "names, at most"), ("mode: batch", "one of streaming"),
    ("ttft-ms: 5\nttft_ms: 6", "ttft_ms is answered twice"),
    ("model: !!python/object/apply:os.getcwd []", "is no YAML"),
    ("spare: true", "a whole number"), ("? [a, b]\n: c", "is no YAML"), ("\x00", "is no YAML"),
])  # fmt: skip
def test_what_is_no_answer_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "question.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as found:
        SizingQuestion.from_answers(read_answers(path))
    assert said in str(found.value)


def test_files_that_are_not_there_or_endless(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_answers(tmp_path / "none")
    (tmp_path / "long").write_text("#" * (1 << 20) + "\n")
    with pytest.raises(ConfigError, match="larger than"):
        read_answers(tmp_path / "long")


@pytest.mark.parametrize("asked, limits", [
    ({"ttft_ms": 500}, Limits(ttft_s=0.5)), ({"ttft_ms": 500, "reading": "read"}, Limits(0.5, 0.2)),
    ({"reading": "skim", "of": "p95"}, Limits(itl_s=0.09, statistic="p95")), ({"mode": "offline"}, Limits()),
    ({"mode": "sequential", "e2e_ms": 3000}, Limits(e2e_s=3.0)),
    ({"itl_ms": 50, "e2e_ms": 9e3}, Limits(None, 0.05, 9.0)),
])  # fmt: skip
def test_limits(asked: dict[str, Any], limits: Limits) -> None:
    assert parse_limits(LimitSettings(**asked)) == limits


@pytest.mark.parametrize("asked, said", [
    ({}, "no limit is said for streaming"), ({"mode": "sequential"}, "--e2e-ms 5000"),
    ({"mode": "sequential", "e2e_ms": 9, "ttft_ms": 5}, "ttft_ms is given, but a sequential caller"),
    ({"mode": "offline", "e2e_ms": 9}, "--mode offline has no latency limits"),
    ({"reading": "read", "itl_ms": 9}, "both given"),
])  # fmt: skip
def test_limits_that_contradict_the_mode(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as found:
        parse_limits(LimitSettings(**asked))
    assert said in str(found.value)
