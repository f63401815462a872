"""Patterns match what Python's own match, and what explodes there takes no time here, or is refused."""

import os
import re
import time
from pathlib import Path

import numpy as np
import pytest

from millrace.evaluate.safe_regex import Pattern


def test_as_python_matches() -> None:
    draw, n_matched = np.random.default_rng(4), 0
    parts = [
        "a",
        "b",
        "é",
        "[ab]",
        "[^a]",
        "(a|b)",
        "(ab|é)",
        "a?",
        "b*",
        "é+",
        "a{2,3}",
        ".",
        "(.|\n)*",
        r"\d",
        r"\n",
        "/",
        '"',
    ]
    for _ in range(300):
        expression = "".join(draw.choice(parts, draw.integers(0, 5)))
        pattern = Pattern(expression, "here")
        for _ in range(6):
            text = "".join(draw.choice([*'abé1\n/" '], draw.integers(0, 6)))
            matched = re.fullmatch(expression, text) is not None
            assert pattern.matches(text) == matched, (expression, text)
            n_matched += matched
    assert n_matched > 100


@pytest.mark.parametrize(
    "expression", ["(a+)+b", "(a|a)*b", "(a|aa)*b", "(.*a){12}c", "a{0,300}a{300}b", "[ab]*a[ab]{30}c"]
)
def test_what_explodes_elsewhere(expression: str) -> None:
    """Of 2,000 letters the first takes Python longer than the world is old."""
    began = time.perf_counter()
    pattern = Pattern(expression, "here")
    for text in ("a" * 2000, "ab" * 1000, "a" * 300 + "b" * 1700):
        assert pattern.matches(text) in (False, None), expression
    assert time.perf_counter() - began < 5


def test_a_text_that_is_no_unicode() -> None:
    assert not Pattern("a", "here").matches("\ud800")


def test_what_takes_too_much_on_one_text_is_told_of_others() -> None:
    """The letter 101 from the end decides; 10,000 at random go through more ways to match than there may be."""
    pattern, draw = Pattern("(a|b)*a(a|b){100}", "here"), np.random.default_rng(1)
    short, long = (["".join(draw.choice(["a", "b"], n)) for _ in range(3)] for n in (500, 10_000))
    told = {text: text[-101] == "a" for text in ("a" * 101, "b" + "a" * 100, *short)}
    assert set(told.values()) == {True, False}
    for text in long:
        assert pattern.matches(text) is None
        assert {each: pattern.matches(each) for each in told} == told


def test_a_file_of_expressions_takes_little_memory() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    Pattern("a", "here")
    began, found = resident(), [Pattern(f"a{i}b*", "here") for i in range(400)]
    assert resident() - began < 3 << 20, "compiled they take 6 MiB, and each with a vocabulary 15"
    assert [i for i, one in enumerate(found) if one.matches("a17bb")] == [17]
