"""`millrace generate`: what goes where, and that the same question gets the same answer."""

import io
import json
import re
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Millrace

GREEDY = ("--temperature", "0", "--max-tokens", "12")


def test_text_to_stdout_and_times_to_stderr(millrace: Millrace, built_tiny: Path) -> None:
    result = millrace("generate", built_tiny, "-p", "Once upon a time", *GREEDY, "--seed", "5")
    assert result.code == 0 and result.out.strip()
    line = r"prefill \d+ tokens in [\d.]+ s \([\d,]+ tokens/s\); decode 11 tokens in .*; ended by length; seed 5\n"
    assert re.fullmatch(line, result.err), result.err


def test_json_says_the_same(millrace: Millrace, built_tiny: Path) -> None:
    shown = millrace("generate", built_tiny, "-p", "Once upon a time", *GREEDY)
    told = json.loads(millrace("generate", built_tiny, "-p", "Once upon a time", *GREEDY, "--json").out)
    assert told["choices"][0]["text"] == shown.out.removesuffix("\n")
    assert told["model"] == "tiny" and told["prompt"] == "Once upon a time"
    assert told["decode"]["tokens"] == 11 and told["prefill"]["tokens_per_s"] > 0
    assert len(told["choices"][0]["token_ids"]) == 12


def test_the_seed_that_is_told_gives_the_answer_again(millrace: Millrace, built_tiny: Path) -> None:
    ask = ("generate", built_tiny, "-p", "Once", "--max-tokens", "20", "--temperature", "1", "--json")
    first = json.loads(millrace(*ask).out)
    again = json.loads(millrace(*ask, "--seed", str(first["seed"])).out)
    assert again["choices"] == first["choices"]


def test_the_prompt_from_stdin(millrace: Millrace, built_tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = millrace("generate", built_tiny, "-p", "Once upon", *GREEDY).out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Once upon\n")))
    assert millrace("generate", built_tiny, "-p", "-", *GREEDY).out == expected


def test_several_answers(millrace: Millrace, built_tiny: Path) -> None:
    ask = ("generate", built_tiny, "-p", "Once", "-n", "3", "--max-tokens", "8", "--seed", "1")
    shown, told = millrace(*ask), json.loads(millrace(*ask, "--json").out)
    assert re.findall(r"^--- (\d)$", shown.out, re.MULTILINE) == ["1", "2", "3"]
    assert [c["text"] in shown.out for c in told["choices"]] == [True] * 3


def test_chat_goes_through_the_template(millrace: Millrace, built_tiny: Path) -> None:
    plain = json.loads(millrace("generate", built_tiny, "-p", "Hello!", *GREEDY, "--json").out)
    chat = json.loads(millrace("generate", built_tiny, "-p", "Hello!", "--chat", *GREEDY, "--json").out)
    assert chat["prefill"]["tokens"] > plain["prefill"]["tokens"]


@pytest.mark.parametrize("flags", [["--threads", "1"], ["--isa", "scalar"], ["--kv-memory", "5M"]])
def test_how_it_runs_does_not_change_the_answer(millrace: Millrace, built_tiny: Path, flags: list[str]) -> None:
    ask = ("generate", built_tiny, "-p", "Once upon a time", *GREEDY)
    assert millrace(*ask, *flags).out == millrace(*ask).out
