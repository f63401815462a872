"""Patterns match what Python's own match, and what explodes there takes no time here, or is refused."""

import re
import time

import numpy as np
import pytest

from millrace.errors import ConfigError
from millrace.evaluate.patterns import Pattern


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
        try:
            assert not pattern.matches(text), expression
        except ConfigError as refused:
            assert "takes too much" in refused.what
    assert time.perf_counter() - began < 5


def test_a_text_that_is_no_unicode() -> None:
    assert not Pattern("a", "here").matches("\ud800")
