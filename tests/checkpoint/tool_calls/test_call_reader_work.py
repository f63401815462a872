"""The work of reading an answer grows with its length and no faster, whatever it says and however it is cut."""

import random
import time

import pytest

from millrace.checkpoint.tool_calls import answer_parser as module
from millrace.checkpoint.tool_calls.answer_parser import AnswerParser, ParsedDelta
from millrace.checkpoint.tool_calls.families import DEEPSEEK, HERMES, LLAMA, MISTRAL, Reasoning, ToolFormat

N, TIMES, MOST = 3000, 4, 8  # characters; so many times as many; may take so many times as long
FLOOR_S = 0.005  # a shorter time says nothing
OPEN = "<tool_call>"
# What goes before, and what is repeated. Each of them was read again with every piece, or again from each beginning.
ANSWERS: list[tuple[str, ToolFormat, bool, str, str]] = [
    ("an open key", HERMES, False, OPEN + '{"', "a"),
    ("an open key of a bare object", LLAMA, False, '{"', "a"),
    ("an open name", HERMES, False, OPEN + '{"name": "', "a"),
    ("open arguments", HERMES, False, OPEN + '{"name": "f", "arguments": {"a": "', "a"),
    ("beginnings", HERMES, False, "", OPEN),
    ("beginnings that are false", HERMES, False, "", OPEN + "x"),
    ("beginnings in an open key", HERMES, False, OPEN + '{"x ', OPEN),
    ("values that are none", HERMES, False, "", OPEN + '{"x":'),
    ("objects that never close", HERMES, False, "", OPEN + '{"x":{'),
    ("calls in a list that never closes", HERMES, False, OPEN + '{"x":[', OPEN + '{"name":"f"}'),
    ("names without a call", MISTRAL, False, "", "[TOOL_CALLS]" + "a" * 500),
    ("white space behind a name", DEEPSEEK, False, "", "<｜tool▁calls▁begin｜>f" + " " * 500),
    ("white space behind text", HERMES, False, "x", " "),
    ("white space before all", HERMES, True, "", "\n"),
    ("white space in thoughts", HERMES, True, "<think>x", " "),
    ("white space behind thoughts", HERMES, True, "<think>x</think>", "\n"),
    ("white space behind a mark", HERMES, False, OPEN, "\n"),
    ("white space in an object", HERMES, False, OPEN + "{", " "),
    ("white space before a bare object", LLAMA, False, "", "\n"),
    ("thoughts that do not end", HERMES, True, "<think>", "a"),
    ("ends of thoughts that are none", HERMES, True, "<think>", "</thin"),
    ("white space and half a mark", HERMES, False, "", " " * 50 + "<tool_cal"),
]


def answer(before: str, repeated: str, n: int) -> str:
    return before + repeated * -(-n // len(repeated))


def read(form: ToolFormat, thinks: bool, pieces: list[str]) -> ParsedDelta:
    one = AnswerParser(form, Reasoning() if thinks else None, tools=("f",))
    parts = [*map(one.push, pieces), one.flush()]
    calls = tuple((p.index, p.name, p.arguments) for part in parts for p in part.calls)
    return ParsedDelta("".join(p.content for p in parts), "".join(p.reasoning for p in parts) + repr(_whole(calls)))


def _whole(parts: tuple[tuple[int, str | None, str], ...]) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    for index, name, arguments in parts:
        if name is not None:
            calls.append((name, ""))
        calls[index] = calls[index][0], calls[index][1] + arguments
    return calls


def took_s(form: ToolFormat, thinks: bool, text: str) -> float:
    began_s = time.thread_time()
    read(form, thinks, list(text))
    return time.thread_time() - began_s


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name, form, thinks, before, repeated", ANSWERS, ids=[case[0] for case in ANSWERS])
def test_four_times_the_text_takes_four_times_the_work(
    name: str, form: ToolFormat, thinks: bool, before: str, repeated: str
) -> None:
    """In pieces of one character, generously; the second and third try are for a machine that was busy."""
    short, long = (answer(before, repeated, n) for n in (N, TIMES * N))
    assert read(form, thinks, list(short)) == read(form, thinks, [short]), "however it is cut"
    ratios = []
    for _ in range(3):
        ratios.append(took_s(form, thinks, long) / max(took_s(form, thinks, short), FLOOR_S))
        if ratios[-1] <= MOST:
            return
    raise AssertionError(f"{name}: {TIMES} times the text took {ratios} times as long")


@pytest.mark.parametrize("seed", range(20))
def test_what_was_read_too_often_has_no_more_calls(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays text from the same character on, however it is cut."""
    rng = random.Random(seed)
    call, false = OPEN + '{"name": "f", "arguments": {}}</tool_call>', OPEN + '{"x": 1}'  # none: it has no name
    text = false * rng.randint(1, 5) + call
    monkeypatch.setattr(module, "MAX_REREAD", 3 * len('{"x": 1}'))
    pieces, at = list[str](), 0
    while at < len(text):
        pieces.append(text[at : at + rng.choice([1, 2, 7, 40])])
        at += len(pieces[-1])
    n_false = text.count('{"x"')
    expected = ParsedDelta(false * n_false, repr([("f", "{}")])) if n_false < 3 else ParsedDelta(text, repr([]))
    assert read(HERMES, False, pieces) == read(HERMES, False, [text]) == expected
