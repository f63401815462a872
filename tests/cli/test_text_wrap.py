"""Streamed text breaks between words, however it was cut into parts."""

import random

import pytest
from rich.cells import cell_len

from millrace.cli.text_wrap import WordWrap


def wrapped(text: str, columns: int, seed: int) -> str:
    rng, wrap, shown, at = random.Random(seed), WordWrap(lambda: columns), "", 0
    while at < len(text):
        n = rng.randint(1, 7)
        shown += wrap.push(text[at : at + n])
        at += n
    return shown + wrap.flush()


@pytest.mark.parametrize("seed", range(20))
def test_no_line_is_too_long_and_no_word_is_broken(seed: int) -> None:
    rng = random.Random(seed)
    columns = rng.randint(12, 60)
    words = ["x" * rng.randint(1, 12) for _ in range(200)]
    text = "".join(word + rng.choice([" ", " ", " ", "\n", "  "]) for word in words)
    shown = wrapped(text, columns, seed)
    assert shown.split() == words
    assert all(len(line.rstrip()) <= columns for line in shown.splitlines())
    assert shown == wrapped(text, columns, seed + 1), "whatever the parts"


def test_line_ends_and_indents_stay() -> None:
    code = "def f(x):\n    return x\n\n\n- a list\n"
    assert wrapped(code, 80, 1) == code


def test_characters_of_two_columns() -> None:
    shown = wrapped("\u732b" * 30 + " cat " + "\uac00" * 9, 11, 1)
    assert all(cell_len(line.rstrip()) <= 11 for line in shown.splitlines())
    assert shown.replace("\n", "").replace(" ", "") == "\u732b" * 30 + "cat" + "\uac00" * 9


def test_what_is_longer_than_a_line_goes_through_and_is_not_waited_for() -> None:
    wrap = WordWrap(lambda: 20)
    assert wrap.push("a ") + wrap.push("y" * 100) == "a \n" + "y" * 100


def test_a_word_waits_for_its_end() -> None:
    wrap = WordWrap(lambda: 20)
    assert [wrap.push(part) for part in ("un", "brok", "en ", "line")] == ["", "", "unbroken ", ""]
    assert wrap.flush() == "line"
